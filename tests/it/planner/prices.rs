//! Bands of prices, memory in other software, and constants from a user's own runs.

use super::lab;
use serde_json::Value as Json;
use shardc_cost::device::{Device, Provenance};

/// Bands are those of the class of model and machine; a class of which no run is known has none. One without NCCL is not
/// priced for its transport.
#[test]
fn bands_are_those_of_a_class_of_runs() {
    let lab = lab("plan-guess", "llama_gqa");
    let args = ["--gpus", "2", "--global-batch", "4", "--seq", "16", "--top", "2", "--budget", "3"];
    let bands = [
        ("h100-sxm", "m", Some("step ±9 %"), true),
        ("b200", "m", Some("step ±9 %"), true),
        ("tpu-v5p", "m", Some("step ±20 %"), false),
        ("h100-sxm", "moe", Some("step ±62 %"), true),
        ("mi300x", "moe", None, true),
    ];
    let moe = lab.config("qwen3_moe", serde_json::json!({}));
    for (device, model, band, nccl) in bands {
        let model = if model == "moe" { &moe } else { model };
        let said = lab.ok(&[&["plan", model, "--machine", device], &args[..]].concat()).stdout;
        let said = String::from_utf8_lossy(&said).into_owned();
        assert_eq!(said.contains("(guess)"), band.is_none(), "{said}");
        assert!(said.contains(band.unwrap_or("how far it is off is not known")), "{said}");
        assert_eq!(said.contains("priced as plans for --transport nccl"), nccl, "{said}");
        let json = ["plan", model, "--machine", device, "--format", "json"];
        let json = lab.ok(&[&json[..], &args].concat()).stdout;
        let json: Json = serde_json::from_slice(&json).expect("JSON");
        assert_eq!(json["plans"][0]["band"].is_null(), band.is_none(), "{json}");
    }
}

/// With a target whose memory is known, lines say what a rank needs there, and what it has no room for comes last.
#[test]
fn lines_say_what_the_target_needs() {
    let lab = lab("plan-target", "llama_mha");
    let args =
        ["--gpus", "4", "--global-batch", "8", "--seq", "16", "--top", "4", "--for", "megatron"];
    let base = [&["plan", "m", "--machine", "h100-sxm"][..], &args].concat();
    let said = String::from_utf8_lossy(&lab.ok(&base).stdout).into_owned();
    assert!(said.contains("in Megatron-LM") && !said.contains("(over)"), "{said}");
    let plans = |more: &[&str]| -> Vec<(u64, u64)> {
        let json = lab.ok(&[&base[..], &["--format", "json"], more].concat()).stdout;
        let json: Json = serde_json::from_slice(&json).expect("JSON");
        let of = |p: &Json, key: &str| p[key].as_u64().unwrap_or_else(|| panic!("{key}: {p}"));
        let all = json["plans"].as_array().expect("plans");
        all.iter().map(|p| (of(p, "target_bytes"), of(p, "peak_bytes"))).collect()
    };
    let all = plans(&[]);
    // Room for the plan of the first line, and not for it in the target: others that fit there are listed in its place, and
    // where nothing else is asked for it is said to be over.
    let (theirs, own) = all[0];
    assert!(theirs > own, "{theirs} {own}");
    let limit = format!("{}B", (theirs + own) / 2);
    let some = plans(&["--memory", &limit]);
    assert!(!some.is_empty() && some.iter().all(|p| p.0 <= (theirs + own) / 2), "{some:?} {limit}");
    let alone = ["--memory", &limit, "--fix", "pp=2,dp=2,zero=0,mb=4"];
    let said = lab.ok(&[&base[..], &alone].concat()).stdout;
    // Lines of prose are broken.
    let said = String::from_utf8_lossy(&said).replace("\n  ", " ");
    assert!(said.contains("(over)") && said.contains("none of them seems to fit in"), "{said}");
    // Targets without such a model say nothing.
    let json = ["plan", "m", "--machine", "h100-sxm", "--gpus", "2", "--global-batch", "4"];
    let more = ["--seq", "16", "--for", "deepspeed", "--decay", "all", "--format", "json"];
    let json = lab.ok(&[&json[..], &more].concat()).stdout;
    let json: Json = serde_json::from_slice(&json).expect("JSON");
    assert!(json["plans"][0]["target_bytes"].is_null(), "{json}");
}

/// Runs that were priced with other constants give these back, as far as they determine them.
#[test]
fn constants_are_fitted_to_runs() {
    let lab = lab("fit", "llama_gqa");
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/cost/tests/data/fresh_2025_2026.csv");
    let text = std::fs::read_to_string(path).expect("a table");
    let mut lines = text.lines();
    let head: Vec<&str> = lines.next().expect("a head").split(',').collect();
    let at = |name: &str| head.iter().position(|c| *c == name).expect("a column");
    let own: Vec<Vec<String>> = lines
        .map(|l| l.split(',').map(String::from).collect::<Vec<_>>())
        .filter(|r| r.len() == head.len() && r[at("hw")] == "h100-sxm")
        .collect();
    assert!(own.len() >= 12, "{}", own.len());
    let write = |name: &str, rows: &[Vec<String>]| {
        let rows: String = rows.iter().map(|r| r.join(",") + "\n").collect();
        lab.write(name, format!("{}\n{rows}", head.join(",")));
    };
    write("runs.csv", &own);
    // A machine that is slower than is known of it.
    let mut slow = Device::named("h100-sxm").expect("known");
    (slow.fit.gemm.value, slow.fit.nic.value) = (0.58, 0.45);
    lab.write("slow.toml", toml::to_string(&slow).expect("plain data"));
    let prices = |device: &str| -> Vec<f64> {
        let out = lab.ok(&["price", "--rows", "runs.csv", "--machine", device]).stdout;
        let out = String::from_utf8_lossy(&out).into_owned();
        let of = |l: &str| l.rsplit(',').next().and_then(|s| s.parse().ok()).expect("seconds");
        out.lines().skip(1).map(of).collect()
    };
    let seconds = prices("slow.toml");
    let measured = |n: usize| -> Vec<Vec<String>> {
        let mut rows = own[..n].to_vec();
        rows.iter_mut().zip(&seconds).for_each(|(r, s)| r[at("step_s")] = s.to_string());
        rows
    };
    write("measured.csv", &measured(own.len()));
    let said = lab.ok(&["fit", "measured.csv", "-o", "my.toml"]).stderr;
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(said.contains("gemm") && said.contains("measured"), "{said}");
    let mine = std::fs::read_to_string(lab.path("my.toml")).expect("a machine");
    let mine = Device::parse(&mine).expect("a machine");
    let gemm = mine.fit.gemm;
    assert!((gemm.value - 0.58).abs() < 0.02 && gemm.from == Provenance::Measured, "{gemm:?}");
    assert!(gemm.range[0] <= 0.58 && gemm.range[1] >= 0.58, "{gemm:?}");
    for (a, b) in prices("my.toml").iter().zip(&seconds) {
        assert!((a / b - 1.0).abs() < 0.05, "{a} {b}");
    }
    // Steps inside a domain take a millionth of these runs, which say nothing of them.
    let step = mine.fit.step;
    assert_eq!((step, step.from), (slow.fit.step, Provenance::Prior));
    // Too few runs, runs of two machines, no seconds.
    write("few.csv", &measured(3));
    lab.refuses(&["fit", "few.csv", "-o", "n.toml"], 2, "rows");
    let mut two = measured(6);
    two[5][at("hw")] = "b200".into();
    write("two.csv", &two);
    let said = lab.refuses(&["fit", "two.csv", "-o", "n.toml"], 2, "rows");
    assert!(said.contains("`h100-sxm` and `b200`"), "{said}");
    let mut none = measured(6);
    none[2][at("step_s")] = "fast".into();
    write("none.csv", &none);
    lab.refuses(&["fit", "none.csv", "-o", "n.toml"], 2, "rows");
    assert!(!lab.path("n.toml").exists());
    lab.refuses(&["fit", "measured.csv", "-o", "runs.csv"], 2, "output");
}
