//! The examples of `examples/`: each compiles, is proved, runs, and has the losses of one rank.

use crate::lab::*;
use serde_json::Value as Json;
use std::path::{Path, PathBuf};

/// An example, its model, and what one rank is told of the batch.
const ALL: &[(&str, &str, &[&str])] = &[
    ("mlp-2d", "mlp.ir", &[]),
    ("mlp-2.5d", "mlp.ir", &[]),
    ("mlp-3d", "mlp.ir", &[]),
    ("toy", "toy.ir", &[]),
    ("gpipe", "tiny-llama", &["--global-batch", "8", "--seq", "64"]),
    ("ring", "tiny-llama", &["--global-batch", "8", "--seq", "64"]),
    ("window", "window.ir", &["--global-batch", "2"]),
    ("zero", "tiny-llama", &["--global-batch", "8", "--seq", "64"]),
    ("moe-5d", "tiny-moe", &["--global-batch", "8", "--seq", "64"]),
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples")
}

/// Loss and gradient norm of two steps.
fn trained(lab: &Lab, plan: &str) -> Vec<[f64; 2]> {
    let out = lab.ok(&["run", plan, "--steps", "2", "--threads", "1", "--format", "json"]).stdout;
    let lines = String::from_utf8(out).expect("text");
    let one = |l: &str| {
        let j: Json = serde_json::from_str(l).expect("JSON");
        ["loss", "grad_norm"].map(|k| j[k].as_f64().expect("a number"))
    };
    lines.lines().map(one).collect()
}

#[test]
fn each_has_the_losses_of_one_rank() {
    let lab = Lab::new("examples");
    for (name, model, batch) in ALL {
        let path = |file: &str| folder().join(file).display().to_string();
        let toml = path(&format!("{name}.toml"));
        lab.ok(&["compile", &toml, "-o", "ranks", "--prove", "yes"]);
        lab.ok(&[&["compile", &path(model), "-o", "one"][..], batch].concat());
        let (got, want) = (trained(&lab, "ranks"), trained(&lab, "one"));
        assert_eq!((got.len(), want.len()), (2, 2), "{name}");
        for (a, b) in got.iter().flatten().zip(want.iter().flatten()) {
            assert!((a - b).abs() <= 2e-4 * b.abs(), "{name}: {got:?}, on one rank {want:?}");
        }
        assert_ne!(want[0][0], want[1][0], "{name}: a step changes nothing");
    }
}

#[test]
fn all_are_listed_and_run() {
    let files = std::fs::read_dir(folder()).expect("examples").map(|e| e.expect("an entry").path());
    let mut there: Vec<String> = files
        .filter(|p| p.extension().is_some_and(|e| e == "toml"))
        .map(|p| p.file_stem().expect("a name").to_string_lossy().into_owned())
        .collect();
    there.sort();
    let mut run: Vec<&str> = ALL.iter().map(|x| x.0).collect();
    run.sort_unstable();
    assert_eq!(there, run);
    let page = std::fs::read_to_string(folder().join("README.md")).expect("a page");
    assert!(run.iter().all(|name| page.contains(&format!("({name}.toml)"))), "{page}");
}
