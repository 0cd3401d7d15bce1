//! `shardc measure --device cuda`: the file is written, says where it is from, and prices plans. What stands in for a
//! GPU takes any time: no number here says how fast something is.

use super::machine::{HERE, Machine};
use serde_json::Value as Json;
use shardc_cost::device::{Device, Precision, Provenance};
use std::path::Path;

fn read(file: &Path) -> (String, Device) {
    let text = std::fs::read_to_string(file).expect("the file");
    let device = Device::parse(&text).unwrap_or_else(|d| panic!("{d}\n{text}"));
    (text, device)
}

#[test]
fn a_measured_gpu_prices_plans() {
    let Some(m) = Machine::new("measured") else { return };
    let model = format!("{HERE}/tests/fixtures/llama_gqa");
    let compile = ["compile", &model, "--global-batch", "8", "--seq", "16", "--dtype", "bf16"];
    m.ok(&[&compile[..], &["-o", "plan"]].concat(), &[]);
    for products in ["own", "cublaslt"] {
        let file = format!("{products}.toml");
        // One process alone times one kernel after the other: each has its graph made when it is its turn.
        let easy = [("STANDIN_STRICT", "")];
        m.ok(&["measure", "--device", "cuda", "--products", products, "-o", &file], &easy);
        let (text, d) = read(&m.dir.join(&file));
        assert!(text.starts_with("# Measured by shardc: a GPU, products by "), "{text}");
        assert!(text.contains("cuBLASLt") == (products == "cublaslt"), "{text}");
        let measured = [d.fit.gemm, d.fit.hbm, d.fit.kernel];
        assert!(measured.iter().all(|c| c.from == Provenance::Measured && c.value > 0.0), "{text}");
        for name in ["fit.gemm", "fit.hbm", "kernel"] {
            assert!(d.source[name].starts_with("measured "), "{text}");
        }
        // Rates of products of both types are there, and those of products that no library takes.
        let own = d.epilogue.as_ref().expect("our own products");
        for p in [Precision::Bf16, Precision::F32] {
            assert!(d.peak[&p] > 0.0 && own.gemm[&p] > 0.0, "{text}");
        }
        assert!(d.is_gpu() && d.short.is_some() && d.tiles.is_some(), "{text}");
        // What one device cannot show is a known machine's, and is not said to be measured.
        let unmeasured = [d.fit.link, d.fit.nic, d.fit.hop, d.fit.step];
        assert!(unmeasured.iter().all(|c| c.from != Provenance::Measured), "{text}");
        for name in ["link", "nic", "domain"] {
            let said = &d.source[name];
            assert!(said.contains("not measured") || said.contains("a guess"), "{name}: {said}");
        }
        assert!(d.source["chip"].contains("the driver calls it "), "{text}");
        let said = m.ok(&["price", "plan", "--machine", &file, "--format", "json"], &[]);
        let said: Json = serde_json::from_str(&said).expect("JSON");
        assert!(said["step_s"].as_f64().is_some_and(|s| s > 0.0), "{said}");
    }
    // Likeness may be said.
    let like = Device::named("a100-40").expect("known");
    let easy = [("STANDIN_STRICT", "")];
    m.ok(&["measure", "--device", "cuda", "--like", "a100-40", "-o", "like.toml"], &easy);
    let (text, d) = read(&m.dir.join("like.toml"));
    assert_eq!((d.link, d.nic, &*d.name), (like.link, like.nic, "measured-a100-40"), "{text}");
}

/// Nothing is written where there is nothing to measure, and what is missing is said.
#[test]
fn without_a_gpu_nothing_is_measured() {
    let Some(m) = Machine::new("unmeasured") else { return };
    if m.libraries.is_none() {
        return println!("skipped: with a driver, nothing is missing");
    }
    let measure = ["measure", "--device", "cuda", "-o", "d.toml"];
    for (also, code) in
        [(("LD_LIBRARY_PATH", ""), "missing-library"), (("STANDIN_DEVICES", "0"), "no-device")]
    {
        let out = m.shardc(&measure, &[also]);
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(5), "{said}");
        assert!(said.contains(&format!("error[{code}]")), "{said}");
        assert!(!m.dir.join("d.toml").exists(), "a file of nothing");
    }
}
