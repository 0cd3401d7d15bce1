//! What the command line says of proofs.

use crate::lab::{FIXTURES, Lab};
use serde_json::Value as Json;

fn said(out: &std::process::Output) -> String {
    String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr)
}

/// A plan knows whether it was proved when it was compiled; `inspect` and `run` say it.
#[test]
fn a_plan_says_what_came_of_its_proof() {
    let lab = Lab::new("reported");
    let model = &format!("{FIXTURES}/llama_gqa");
    let compile = |more: &[&str]| {
        let flags = ["compile", model, "--mesh", "dp=2,tp=2", "--seq", "8", "-o", "out"];
        said(&lab.ok(&[&flags[..], more].concat()))
    };
    for (how, words) in [
        (&[][..], "proved by terms: "),
        (&["--prove", "auto"], "proved by terms: "),
        (&["--prove", "yes"], "proved by terms: "),
        (&["--prove", "no"], "not proved: --prove no"),
    ] {
        assert!(compile(how).contains(words), "{how:?}");
        let summary = said(&lab.ok(&["inspect", "out", "--summary"]));
        assert!(summary.contains(&format!("proof  {words}")), "{how:?}: {summary}");
        let run = said(&lab.ok(&["run", "out", "--steps", "1"]));
        assert!(run.contains(&format!("plan {words}")), "{how:?}: {run}");
    }
    // What is recorded is proved again.
    compile(&[]);
    let verify = said(&lab.ok(&["verify", "out"]));
    assert!(verify.lines().any(|l| l.starts_with("proof ") && l.ends_with(" ok")), "{verify}");
    let path = lab.path("out/plan.json");
    let written = std::fs::read_to_string(&path).expect("plan.json");
    let (begin, rest) = written.split_once("\"obligations\": ").expect("a proof");
    let rest = rest.trim_start_matches(|c: char| c.is_ascii_digit());
    let written = format!("{begin}\"obligations\": 9999{rest}");
    std::fs::write(&path, written).expect("written");
    shardc::plan_dir::reseal(&lab.path("out")).expect("a plan");
    let out = lab.shardc(&["verify", "out"]);
    assert_eq!(out.status.code(), Some(1), "{}", said(&out));
    assert!(
        said(&out).contains("recorded: proved by terms: 9999 obligations; now: proved"),
        "{}",
        said(&out)
    );
    compile(&["--prove", "no"]);
    let text = lab.ok(&["inspect", "out", "--summary", "--format", "json"]).stdout;
    let json: Json = serde_json::from_slice(&text).expect("JSON");
    assert_eq!(json["proof"]["verdict"], "not-tried");
    let flags = ["compile", model, "--seq", "8", "--prove", "yes", "--format", "json"];
    let json: Json = serde_json::from_slice(&lab.ok(&flags).stdout).expect("JSON");
    assert!(json["proof"]["verdict"] == "proved" && json["prove_ms"].is_number(), "{json}");
}

/// 0 proved, 1 refuted, 4 not understood; a plan that was edited by hand is read as it is.
#[test]
fn statuses_of_proofs() {
    let lab = Lab::new("statuses");
    // A small model: all of it is evaluated, several times.
    let config = std::fs::read(format!("{FIXTURES}/llama_gqa/config.json")).expect("the fixture");
    let mut config: Json = serde_json::from_slice(&config).expect("JSON");
    for (key, n) in [("num_hidden_layers", 1), ("hidden_size", 16), ("head_dim", 4)] {
        config[key] = n.into();
    }
    lab.write("config.json", config.to_string());
    let model = "config.json";
    lab.ok(&["compile", model, "--mesh", "tp=2", "--seq", "4", "-o", "out"]);
    let status = |args: &[&str]| {
        let out = lab.shardc(&[&["prove", "out"], args].concat());
        (out.status.code(), said(&out))
    };
    assert_eq!(status(&[]).0, Some(0));
    assert_eq!(status(&["--text", "--by", "both"]).0, Some(0));
    let path = lab.path("out/programs/all.ir");
    let text = std::fs::read_to_string(&path).expect("programs");
    // Half of the scale of attention, in forward and backward alike: types and order stay right.
    let scale = text.split("attention[").nth(1).and_then(|t| t.split(';').next()).expect("a scale");
    let half = (scale.parse::<f64>().expect("a number") / 2.0).to_string();
    let edited = text
        .replace(&format!("attention[{scale};"), &format!("attention[{half};"))
        .replace(&format!("attention_grad[{scale};"), &format!("attention_grad[{half};"));
    assert_ne!(edited, text);
    std::fs::write(&path, edited).expect("written");
    for by in ["symbolic", "field", "both"] {
        let (code, words) = status(&["--text", "--by", by]);
        assert!(code == Some(1) && words.starts_with("refuted"), "{by}: {code:?} {words}");
    }
    // With hashes it is not a plan any more.
    assert_eq!(status(&[]).0, Some(2));
    lab.ok(&["compile", model, "--mode", "infer", "--seq", "4", "-o", "out"]);
    let (code, words) = status(&["--by", "field"]);
    assert!(code == Some(4) && words.contains("not understood"), "{code:?} {words}");
}
