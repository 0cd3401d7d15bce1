//! `shardc diff`: what differs is what the plans say, and causes are what compiling says.

use crate::fixture::options;
use crate::lab::{FIXTURES, Lab};
use serde_json::Value as Json;
use shardc::compare::{Comparison, How, What, compare};
use shardc::report::collectives;
use shardc::stored::Stored;
use shardc_cost::device::Device;
use shardc_cost::plan::price;
use shardc_ir::plan::Plan;
use shardc_ir::types::DType;
use shardc_passes::options::Options;
use std::path::Path;

fn stored(fixture: &str, o: &Options) -> Stored {
    let path = Path::new(FIXTURES).join(fixture);
    shardc::compile(&path, o, &mut |_, _| {}).unwrap_or_else(|e| panic!("{e}")).stored
}

fn compared(a: &Stored, b: &Stored) -> Comparison {
    compare(a, b, None).unwrap_or_else(|e| panic!("{e}"))
}

fn peak(c: &Comparison) -> Option<&shardc::compare::Row> {
    c.rows.iter().find(|r| r.what == What::Memory { class: None, kind: None })
}

/// Calls and bytes of all ranks of the pipeline, by way of the report.
fn sent(p: &Plan) -> (f64, f64) {
    let all = p.classes.iter().flat_map(|c| collectives(p, c));
    all.fold((0.0, 0.0), |(n, b), c| (n + c.count as f64, b + c.bytes))
}

#[test]
fn a_plan_does_not_differ_from_itself() {
    for (fixture, mesh) in [("llama_gqa", &[("pp", 2), ("tp", 2)][..]), ("mixtral", &[("tp", 2)])] {
        let s = stored(fixture, &options(mesh, false, 1));
        let c = compared(&s, &s);
        assert_eq!((c.options.len(), c.rows.len(), c.no_causes), (0, 0, None), "{fixture}");
    }
}

/// Plans are the same if all that ranks run by is; a bound of memory is shown and makes nothing.
#[test]
fn what_is_not_compared_is_not_said_to_be_the_same() {
    let base = options(&[("tp", 2)], false, 4);
    let s = stored("llama_gqa", &base);
    assert!(compared(&s, &s).same);
    let mut seeded = s.clone();
    seeded.plan.settings.seed += 1;
    let c = compared(&s, &seeded);
    assert_eq!((c.same, c.options.len(), c.rows.len()), (false, 0, 0));
    let bounded = stored("llama_gqa", &Options { memory: Some(1 << 40), ..base });
    let c = compared(&s, &bounded);
    let [change] = &c.options[..] else { panic!("{:?}", c.options) };
    assert_eq!((&*change.option, change.bound, &change.refused_alone), ("memory", true, &None));
    assert_eq!((c.same, c.rows.len()), (false, 0));
}

/// Differences are those of the plans; a cause is what the plan with this option alone has.
#[test]
fn causes_are_what_plans_with_one_option_changed_say() {
    let h100 = Device::named("h100-sxm").expect("known");
    let base = options(&[("tp", 2)], false, 4);
    let both = Options { sp: true, dtype: DType::BF16, ..base.clone() };
    let [a, b] = [&base, &both].map(|o| stored("qwen3", o));
    let c = compare(&a, &b, Some(&h100)).unwrap_or_else(|e| panic!("{e}"));
    let names: Vec<&str> = c.options.iter().map(|o| &*o.option).collect();
    assert_eq!(names, ["dtype", "sp"]);
    let row = peak(&c).expect("they need different memory");
    assert_eq!(row.before.count, a.plan.peak_bytes() as f64);
    assert_eq!(row.after.count, b.plan.peak_bytes() as f64);
    let alone = [Options { sp: true, ..base.clone() }, Options { dtype: DType::BF16, ..base }];
    let alone = alone.map(|o| stored("qwen3", &o));
    for (s, option) in alone.iter().zip(["sp", "dtype"]) {
        let cause = row.causes.iter().find(|c| c.option == option).expect("it changes memory");
        let How::AloneTo { amount } = cause.how else { panic!("{cause:?}") };
        assert_eq!(amount.count, s.plan.peak_bytes() as f64, "{option}");
        // Of all exchanges of the plan with this option those that differ are named with it.
        for r in &c.rows {
            let What::Price { part: None } = r.what else { continue };
            let cause = r.causes.iter().find(|c| c.option == option).expect("it changes the price");
            let How::AloneTo { amount } = cause.how else { panic!("{cause:?}") };
            assert_eq!(amount.count, price(&s.plan, &h100, &[]).expect("a price").total);
        }
    }
    let of =
        |r: &shardc::compare::Row| (r.after.count - r.before.count, r.after.bytes - r.before.bytes);
    let exchanges = c.rows.iter().filter(|r| matches!(r.what, What::Exchange { .. })).map(of);
    let (calls, bytes) = exchanges.fold((0.0, 0.0), |(n, b), r| (n + r.0, b + r.1));
    let (before, after) = (sent(&a.plan), sent(&b.plan));
    assert_eq!(calls, after.0 - before.0);
    assert!((bytes - (after.1 - before.1)).abs() < 1e-6);
    assert!(c.rows.iter().all(|r| !r.causes.is_empty()), "{:?}", c.rows);
}

/// ZeRO needs ranks to be of `dp_shard`: neither option does anything without the other, and that is said.
#[test]
fn options_that_work_together_are_named_together() {
    let a = stored("llama_gqa", &options(&[("dp_replicate", 2)], false, 4));
    let of_b = Options { zero: 1, ..options(&[("dp_shard", 2)], false, 4) };
    let b = stored("llama_gqa", &of_b);
    let c = compared(&a, &b);
    let row = peak(&c).expect("states are split");
    let how: Vec<_> = row.causes.iter().map(|c| (&*c.option, c.how)).collect();
    assert_eq!(how, [("mesh", How::Beside), ("zero", How::Beside)]);
    // What a mesh does not allow is not tried by itself.
    let a = stored("llama_gqa", &options(&[], false, 8));
    let b = stored("llama_gqa", &options(&[("tp", 2)], true, 8));
    let c = compared(&a, &b);
    let sp = c.options.iter().find(|o| o.option == "sp").expect("it differs");
    assert!(sp.refused_alone.as_ref().is_some_and(|w| w.contains("[sp-needs-tp]")), "{sp:?}");
    let row = peak(&c).expect("they need different memory");
    assert!(row.causes.iter().any(|c| c.option == "sp"), "{row:?}");
}

#[test]
fn models_are_compared_too() {
    let o = options(&[("tp", 2)], false, 8);
    let [a, b] = ["llama_gqa", "qwen3"].map(|f| stored(f, &o));
    let c = compared(&a, &b);
    assert_eq!(c.options.iter().map(|o| &*o.option).collect::<Vec<_>>(), ["model"]);
    assert!(c.rows.iter().all(|r| r.causes.iter().all(|c| c.how == How::Alone)), "{:?}", c.rows);
}

#[test]
fn plans_of_texts_experts_and_pipelines_are_compared() {
    let lab = Lab::new("diff");
    let model = lab.model("mixtral");
    let compile = |args: &[&str], out: &str| {
        lab.ok(&[&["compile", &model, "--seq", "16", "-o", out], args].concat());
    };
    compile(&["--mesh", "dp=2"], "a.plan");
    compile(&["--mesh", "dp=2,ep=2", "--zero", "2"], "b.plan");
    compile(&["--mesh", "pp=2", "--schedule", "zb-h1", "--recompute", "full"], "c.plan");
    let json = |args: &[&str]| -> Json {
        let out = lab.ok(&[&["diff", "--format", "json"], args].concat());
        serde_json::from_slice(&out.stdout).expect("JSON")
    };
    for (x, y) in [("a.plan", "b.plan"), ("b.plan", "c.plan"), ("c.plan", "a.plan")] {
        let (there, back) = (json(&[x, y]), json(&[y, x]));
        assert_eq!(there["no_causes"], Json::Null);
        let rows = |j: &Json| j["rows"].as_array().expect("rows").clone();
        assert_eq!(rows(&there).len(), rows(&back).len());
        for r in rows(&there) {
            let units: &[&str] = match r["of"].as_str() {
                Some("memory") => &["bytes"],
                Some("exchange") => &["bytes", "calls"],
                Some("ops") => &["ops"],
                other => panic!("{other:?}"),
            };
            let causes = r["causes"].as_array().expect("causes").iter();
            let amounts = causes.filter_map(|c| c.get("amount"));
            for amount in amounts.chain([&r["before"], &r["after"]]) {
                let mut keys: Vec<&String> = amount.as_object().expect("units").keys().collect();
                keys.sort();
                assert_eq!(keys, units, "{r}");
            }
        }
        for (r, s) in rows(&there).iter().zip(&rows(&back)) {
            assert_eq!((&r["before"], &r["after"]), (&s["after"], &s["before"]));
        }
        let text = lab.ok(&["diff", x, y, "--machine", "h100-sxm"]);
        let text = String::from_utf8_lossy(&text.stdout).into_owned();
        let all = lab.ok(&["diff", x, y, "--machine", "h100-sxm", "-v"]);
        let all = String::from_utf8_lossy(&all.stdout).into_owned();
        let short = ["options\n", "\nprice of a step", "\nmemory of a rank", "\nsent in a step"];
        let long = ["\nexchanges of a step by scope", "\nprograms: ops of a layer"];
        for said in [&text, &all] {
            let at = short.map(|word| said.find(word).unwrap_or_else(|| panic!("{word}: {said}")));
            assert!(at.is_sorted(), "{said}");
        }
        for word in long {
            assert!(all.contains(word) && !text.contains(word), "{word}: {all}");
        }
        let hidden = text.lines().last().and_then(|l| l.split_once(" more row"));
        let hidden: usize = hidden.and_then(|l| l.0.parse().ok()).expect("how many more");
        let lines = |t: &str| t.lines().filter(|l| !l.is_empty()).count();
        assert!(hidden > 0 && lines(&all) >= lines(&text) + hidden - 1, "{hidden}: {all}");
    }
    compile(&["--mesh", "dp=2", "--memory", "64GiB"], "bounded.plan");
    for (other, said) in [
        ("a.plan", &["the options are the same", "the plans are the same"][..]),
        (
            "bounded.plan",
            &["--memory", "none -> 64.00 GiB", "a bound", "nothing that is compared differs"],
        ),
    ] {
        let text = lab.ok(&["diff", "a.plan", other]);
        let text = String::from_utf8_lossy(&text.stdout).into_owned();
        assert!(said.iter().all(|w| text.contains(w)), "{text}");
    }
    let text = std::fs::read_to_string(lab.path("a.plan/model.ir")).expect("the model");
    lab.write("m.ir", text);
    lab.ok(&["compile", "m.ir", "--mesh", "dp=2", "-o", "d.plan"]);
    lab.ok(&["compile", "m.ir", "--mesh", "dp=2", "--dtype", "bf16", "-o", "e.plan"]);
    let rows = json(&["d.plan", "e.plan"]);
    assert!(rows["rows"].as_array().is_some_and(|r| !r.is_empty()));
    assert_eq!(rows["options"][0]["option"], "dtype");
    lab.refuses(&["diff", "d.plan", "m.ir"], 2, "plan");
    lab.refuses(&["diff", "d.plan", "e.plan", "--machine", "abacus"], 2, "device");
    // As it was called before.
    let said = lab.ok(&["diff", "d.plan", "e.plan", "--device", "h100-sxm"]).stderr;
    assert!(String::from_utf8_lossy(&said).contains("is called --machine now"));
}

/// Of plans that differ in nothing but a number of a text, the lines that have it are shown.
#[test]
fn lines_of_texts_are_shown_where_nothing_else_differs() {
    let lab = Lab::new("diff-texts");
    let toy = std::fs::read_to_string(format!("{FIXTURES}/../../examples/toy.ir")).expect("toy.ir");
    assert_eq!(toy.matches("scale[0.025]").count(), 1, "{toy}");
    lab.write("a.ir", &toy);
    lab.write("b.ir", toy.replace("scale[0.025]", "scale[0.03]"));
    for name in ["a", "b"] {
        let (model, plan) = (format!("{name}.ir"), format!("{name}.plan"));
        lab.ok(&["compile", &model, "--mesh", "dp=2", "-o", &plan]);
    }
    let out = lab.ok(&["diff", "a.plan", "b.plan"]);
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    for line in [
        "its text or its config.json differs",
        "programs @forward",
        "scale[0.025] ",
        "scale[0.03] ",
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }
    let out = lab.ok(&["diff", "a.plan", "b.plan", "--format", "json"]);
    let out: Json = serde_json::from_slice(&out.stdout).expect("JSON");
    assert_eq!((&out["same"], out["rows"].as_array().map(Vec::len)), (&false.into(), Some(0)));
    let texts = out["texts"].as_array().expect("lines");
    for (of, function) in [("model", "@model"), ("programs", "@forward")] {
        let l = texts.iter().find(|l| l["of"] == of && l["function"] == function).expect(function);
        let [before, after] = ["before", "after"].map(|k| l[k].as_str().expect("a line"));
        assert!(before.contains("scale[0.025]"), "{l}");
        assert_eq!(before.replace("0.025", "0.03"), after);
    }
    lab.ok(&["compile", "a.ir", "--mesh", "tp=2", "-o", "c.plan"]);
    let sharded = ["--mesh", "tp=2", "--shard", "net1.weight=tp,-@p2", "-o", "d.plan"];
    lab.ok(&[&["compile", "a.ir"][..], &sharded].concat());
    let out = lab.ok(&["diff", "c.plan", "d.plan"]);
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(said.contains("none -> --shard 'net1.weight=tp,-@p2'"), "{said}");
}
