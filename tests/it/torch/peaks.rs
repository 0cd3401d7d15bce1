//! The most memory that tensors of a program take: what the exporter says, against what is measured.

use super::*;
use crate::recurrences::MODELS as RECURRENT;
use serde_json::Value as Json;
use std::collections::BTreeMap;

/// How far measured and said may be apart, of the measured.
const APART: f64 = 0.03;
/// By how much the plan's peak may be passed where no call of a library is at the peak.
const OVER: f64 = 1.05;

/// Of so many ranks, in one launch.
fn as_said(ranks: usize, layouts: &[Layout], sample: usize) {
    if !has_torch() {
        return skip(Tool::Torch, &format!("peaks of programs of torch on {ranks} ranks"));
    }
    let lab = Lab::new(&format!("torch-peaks{ranks}"));
    let names: Vec<&str> = [ALL, EXPERTS, DENSE, SPARSE, &RECURRENT].concat();
    let mut cases = vec![];
    for (f, name) in names.iter().enumerate() {
        for (_, layout) in layouts.iter().enumerate().filter(|(l, _)| taken(f + 4 * l, sample)) {
            let o = Options { observe: false, ..with(layout) };
            let fx = Fixture::open(name);
            let Ok(compiled) = try_compile(&fx.model(&o), &o) else { continue };
            let mut json =
                written(&lab.path(""), cases.len(), &fx, &made(&compiled.plan, layout.0));
            json["name"] = format!("{name}, {}", layout.0).into();
            cases.push(json);
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    lab.write("list.json", serde_json::to_string(&cases).expect("plain data"));
    let mut c = Command::new(python());
    c.arg("-B").arg(root.join("tests/torch/peak.py"));
    c.arg(lab.path("list.json")).arg(ranks.to_string());
    let out = c.env("PYTHONPATH", root.join("python")).output().expect("Python starts");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    let lines = String::from_utf8_lossy(&out.stdout).into_owned();
    // Of ranks with one list of instructions that which takes most, as a ring's last.
    let mut most: BTreeMap<(String, u64), Json> = BTreeMap::new();
    for line in lines.lines() {
        let json: Json = serde_json::from_str(line).expect("JSON");
        let key = (json["name"].to_string(), json["program"].as_u64().expect("bytes"));
        let own = most.entry(key).or_insert(json.clone());
        if json["measured"].as_u64() > own["measured"].as_u64() {
            *own = json;
        }
    }
    let mut far = vec![];
    for json in most.values() {
        let number = |key: &str| json[key].as_f64().expect(key);
        let [measured, program, plan] = ["measured", "program", "plan"].map(number);
        let line = format!(
            "{}: measured {measured}, said {:+.1} %, the plan's {:.2} of it, at {}",
            json["name"],
            100.0 * (program / measured - 1.0),
            plan / measured,
            json["where"]
        );
        println!("{line}");
        // A call of the package may take more than the plan has, a line of a program may not.
        let place = json["where"].as_str().and_then(|w| w.split(" < ").nth(1)).expect("a place");
        let over = place.starts_with("program.py:") && measured > OVER * plan;
        if over || (program - measured).abs() > APART * measured {
            far.push(line);
        }
    }
    assert_eq!(lines.lines().count(), ranks * cases.len(), "{said}");
    assert!(far.is_empty(), "{far:#?}");
}

#[test]
fn peaks_are_as_exports_say() {
    let rows: [Layout; 3] = [
        ("one rank, all saved", |o| o.recompute = Recompute::None),
        ("one rank", |o| o.recompute = Recompute::Elementwise),
        ("microbatches, recomputed", |o| (o.microbatch, o.recompute) = (2, Recompute::Full)),
    ];
    as_said(1, &rows, 13);
}

#[test]
fn peaks_of_two_ranks() {
    as_said(2, TWO, 31);
}
