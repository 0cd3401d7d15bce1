//! The most memory that tensors of a program take: what the exporter says, against what is measured.

use super::*;
use serde_json::Value as Json;

/// How far measured and said may be apart, of the measured.
const APART: f64 = 0.03;

#[test]
fn peaks_are_as_exports_say() {
    if !has_torch() {
        return skip(Tool::Torch, "peaks of programs of torch");
    }
    let lab = Lab::new("torch-peaks");
    let names: Vec<&str> = [ALL, EXPERTS, DENSE, SPARSE].concat();
    let mut cases = vec![];
    for (f, name) in names.iter().enumerate() {
        let rows = [("one rank", false, 8), ("microbatches, recomputed", true, 2)];
        for (r, (what, recomputed, microbatch)) in rows.into_iter().enumerate() {
            if !taken(f + 4 * r, 9) {
                continue;
            }
            let recompute = if recomputed { Recompute::Full } else { Recompute::Elementwise };
            let o = Options { observe: false, recompute, ..options(&[], false, microbatch) };
            let fx = Fixture::open(name);
            let p = made(&compile(&fx.model(&o), &o).plan, name);
            let mut json = written(&lab.path(""), cases.len(), &fx, &p);
            json["name"] = format!("{name}, {what}").into();
            cases.push(json);
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    lab.write("list.json", serde_json::to_string(&cases).expect("plain data"));
    let mut c = Command::new(python());
    c.arg("-B").arg(root.join("tests/torch/peak.py")).arg(lab.path("list.json")).arg("1");
    let out = c.env("PYTHONPATH", root.join("python")).output().expect("Python starts");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    let lines = String::from_utf8_lossy(&out.stdout).into_owned();
    let mut far = vec![];
    for line in lines.lines() {
        let json: Json = serde_json::from_str(line).expect("JSON");
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
        if (program - measured).abs() > APART * measured {
            far.push(line);
        }
    }
    assert_eq!(lines.lines().count(), cases.len(), "{said}");
    assert!(far.is_empty(), "{far:#?}");
}
