//! `inspect --collectives` and `--instructions`: all that a step has is in them, once.

use crate::lab::Lab;
use serde_json::Value as Json;
use shardc::inspect::numbered;
use shardc::plan_dir;
use shardc::report::collectives;
use shardc_ir::plan::{Instr, Plan};
use std::collections::BTreeMap;

const LAYOUTS: [(&str, &[&str]); 6] = [
    ("llama_gqa", &["--mesh", "dp=2,tp=2", "--sp"]),
    ("llama_gqa", &["--mesh", "dp=2,tp=2", "--zero", "3", "--microbatch", "2"]),
    ("llama_gqa", &["--mesh", "pp=2,dp=2", "--schedule", "zb-h1", "--microbatch", "1"]),
    ("mixtral", &["--mesh", "dp=4,ep=2", "--dtype", "bf16", "--transport", "nccl"]),
    ("llama_deep", &["--mesh", "pp=4", "--microbatch", "1", "--transport", "nccl"]),
    ("gpt2", &["--mesh", "pp=2,cp=2", "--cp-mode", "ring", "--recompute", "full"]),
];

fn json(lab: &Lab, args: &[&str]) -> Json {
    let out = lab.ok(&[args, &["--format", "json"]].concat());
    serde_json::from_slice(&out.stdout).expect("JSON")
}

fn each(lab: &Lab, mut check: impl FnMut(&Lab, &Plan)) {
    for (fixture, args) in LAYOUTS {
        let model = lab.model(fixture);
        lab.ok(&[&["compile", &model, "--seq", "16", "-o", "p"], args].concat());
        check(lab, &plan_dir::read(&lab.path("p")).expect("a plan").plan);
    }
}

/// Bytes of a step over its rank classes, by kind and axis, transfers left out.
fn sent(plan: &Plan) -> BTreeMap<(String, String), f64> {
    let mut out: BTreeMap<_, f64> = BTreeMap::new();
    let all = plan.classes.iter().flat_map(|c| collectives(plan, c));
    for x in all.filter(|x| !["send", "recv"].contains(&x.kind)) {
        *out.entry((x.kind.to_string(), x.axis)).or_default() += x.bytes;
    }
    out
}

fn like(a: &BTreeMap<(String, String), f64>, b: &BTreeMap<(String, String), f64>) {
    assert!(a.keys().eq(b.keys()), "{a:?} {b:?}");
    assert!(
        a.values().zip(b.values()).all(|(x, y)| (x - y).abs() < 1e-6 * x.max(1.0)),
        "{a:?} {b:?}"
    );
}

fn text(j: &Json) -> String {
    j.as_str().expect("text").into()
}

#[test]
fn all_collectives_are_listed() {
    each(&Lab::new("list-collectives"), |lab, plan| {
        let list = json(lab, &["inspect", "p", "--collectives", "--node", "2"]);
        let all = list["collectives"].as_array().expect("a list");
        let numbers: Vec<u64> =
            all.iter().map(|c| c["number"].as_u64().expect("a number")).collect();
        assert_eq!(numbers, (1..=numbered(plan).len() as u64).collect::<Vec<_>>());
        let mut own: BTreeMap<_, f64> = BTreeMap::new();
        for c in all {
            let bytes = c["bytes"].as_f64().expect("bytes") * c["calls"].as_f64().expect("calls");
            *own.entry((text(&c["kind"]), text(&c["axis"]))).or_default() += bytes;
            let of = |name: &str| c[name].as_u64().expect("a count");
            assert_eq!(of("per_node") * of("nodes"), of("ranks"), "{c}");
            // Over an axis of the mesh, ranks are as far from each other as the inner axes have ranks.
            let axes = &plan.module.mesh.axes;
            if let Some(i) = axes.iter().position(|a| c["axis"] == *a.name) {
                let reach: usize = axes[i..].iter().map(|a| a.size).product();
                assert_eq!(of("nodes") == 1, reach <= 2, "{c}");
            }
        }
        like(&own, &sent(plan));
        // As many have work beside them as the page of kernels says.
        let beside =
            all.iter().filter(|c| c["meanwhile"].as_array().is_some_and(|m| !m.is_empty()));
        let page: usize = (0..plan.classes.len())
            .map(|c| {
                let out =
                    lab.ok(&["inspect", "p", "--phase", "kernels", "--class", &c.to_string()]);
                let said = String::from_utf8_lossy(&out.stdout).into_owned();
                let line =
                    said.lines().find(|l| l.contains("can be under way")).expect("the count");
                line.split(' ').next().and_then(|n| n.parse::<usize>().ok()).expect("a count")
            })
            .sum();
        assert_eq!(beside.count(), page);
        let shown = lab.ok(&["inspect", "p", "--collectives"]);
        assert!(String::from_utf8_lossy(&shown.stdout).contains("give --node"));
    });
    let lab = Lab::new("list-refused");
    let model = lab.model("llama_gqa");
    lab.ok(&["compile", &model, "--seq", "16", "-o", "p"]);
    lab.refuses(&["inspect", "p", "--collectives", "--node", "0"], 2, "flag");
    lab.refuses(&["inspect", "p", "--instructions", "--rank", "1"], 2, "unknown-rank");
    assert_eq!(lab.shardc(&["inspect", "p", "--instructions"]).status.code(), Some(2));
}

/// A rank's list has each of its calls and transfers, and one step of the optimizer, after all backward.
#[test]
fn all_instructions_are_listed() {
    each(&Lab::new("list-instructions"), |lab, plan| {
        let mut own: BTreeMap<_, f64> = BTreeMap::new();
        let mut transfers: BTreeMap<(u64, u64), i64> = BTreeMap::new();
        for (class, c) in plan.classes.iter().enumerate() {
            let rank = plan.peer(0, class);
            let list = json(lab, &["inspect", "p", "--rank", &rank.to_string(), "--instructions"]);
            let all = list["instructions"].as_array().expect("a list");
            let names: Vec<&str> =
                all.iter().map(|i| i["name"].as_str().expect("a name")).collect();
            let count = |starts: &str| names.iter().filter(|n| n.starts_with(starts)).count();
            let of = |is: fn(&Instr) -> bool| c.step.iter().filter(|i| is(i)).count();
            assert_eq!(count("Send"), of(|i| matches!(i, Instr::Send(_))));
            assert_eq!(count("Recv"), of(|i| matches!(i, Instr::Recv(_))));
            assert_eq!(count("PostRecv"), of(|i| matches!(i, Instr::PostRecv(_))));
            assert_eq!(count("WaitSent"), of(|i| matches!(i, Instr::Sent { .. })));
            let looped = of(|i| matches!(i, Instr::Call(c) if c.microbatch.is_some()));
            assert_eq!(count("Forward") + count("Backward"), looped);
            assert_eq!(count("Forward"), plan.settings.microbatches * c.stages.len());
            let steps: Vec<usize> =
                (0..names.len()).filter(|&i| names[i] == "OptimizerStep").collect();
            let last = names.iter().rposition(|n| n.starts_with("Backward")).expect("it trains");
            assert!(steps.len() == 1 && steps[0] > last, "{names:?}");
            for i in all {
                for x in i["exchanges"].as_array().into_iter().flatten() {
                    let kind = text(&x["kind"]).chars().fold(String::new(), |mut s, c| {
                        if c.is_uppercase() && !s.is_empty() {
                            s.push('_');
                        }
                        s.push(c.to_ascii_lowercase());
                        s
                    });
                    *own.entry((kind, text(&x["axis"]))).or_default() +=
                        x["bytes"].as_f64().expect("bytes");
                }
                let Some(peer) = i["peer"].as_u64() else { continue };
                match i["name"].as_str() {
                    Some(n) if n.starts_with("Send") => {
                        *transfers.entry((rank as u64, peer)).or_default() += 1;
                    }
                    Some(n) if n.starts_with("Recv") => {
                        *transfers.entry((peer, rank as u64)).or_default() -= 1;
                    }
                    _wait => {}
                }
            }
        }
        assert!(transfers.values().all(|n| *n == 0), "{transfers:?}");
        like(&own, &sent(plan));
    });
}
