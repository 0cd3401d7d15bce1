//! `shardc doctor`: what this machine has of what commands can use, and how to get the rest.

use crate::terminal::show;
use serde_json::json;
use shardc_codegen::nvrtc;
use shardc_ir::diag::{Diag, Result};
use shardc_runtime::cuda::{Device, version};
use std::process::Command;

/// One thing that commands use.
struct Found {
    name: &'static str,
    /// What it is for.
    serves: &'static str,
    /// What there is of it, or why there is nothing and what to do.
    state: std::result::Result<String, String>,
}

/// Looks for everything.
fn look() -> Vec<Found> {
    let found = |name, serves, state| Found { name, serves, state };
    let said = |d: Diag| match d.help.first() {
        Some(help) => format!("{}; {help}", d.message),
        None => d.message,
    };
    let feature = |on: bool, name: &str| match on {
        true => Ok("built in".to_string()),
        false => Err(format!("cargo install --path . --features {name}")),
    };
    let devices = || -> Result<String> {
        let names: Result<Vec<String>> =
            (0..Device::count()?).map(|i| Device::open(i)?.name()).collect();
        Ok(names?.join(", "))
    };
    vec![
        found("C compiler", "run: kernels over rows are compiled; else interpreted", compiler()),
        found("CUDA driver", "run --device cuda", devices().map_err(said)),
        found(
            "NVRTC",
            "compile --device cuda: compiled kernels",
            nvrtc::is_here().map(|()| "found".into()).map_err(said),
        ),
        found("NCCL", "run --transport nccl", version().map(|n| n.to_string()).map_err(said)),
        found("MPI", "run --transport mpi", feature(cfg!(feature = "mpi"), "mpi")),
        found(
            "tokenizers",
            "run --data text:FILES with a model's tokenizer.json",
            feature(cfg!(feature = "tokenizers"), "tokenizers"),
        ),
    ]
}

/// `CC`, or `cc`, by the first line of what it says of itself.
fn compiler() -> std::result::Result<String, String> {
    let name = std::env::var("CC").ok().filter(|c| !c.is_empty()).unwrap_or_else(|| "cc".into());
    let missing = || format!("`{name}` does not start; install gcc or clang, or name one with CC");
    let mut words = name.split_whitespace();
    let mut c = Command::new(words.next().unwrap_or("cc"));
    let out = c.args(words).arg("--version").output().map_err(|_| missing())?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let line = text.lines().next().filter(|_| out.status.success()).ok_or_else(missing)?;
    Ok(line.trim().into())
}

/// Prints what is here and what is not; exit status 0, as nothing of it is needed to compile.
pub fn doctor(as_json: bool) -> Result<i32> {
    let all = look();
    if as_json {
        let one = |f: &Found| {
            let (found, missing) = (f.state.as_ref().ok(), f.state.as_ref().err());
            json!({ "name": f.name, "serves": f.serves, "found": found, "missing": missing })
        };
        let list: Vec<_> = all.iter().map(one).collect();
        show(format!("{}\n", json!({ "version": super::BUILD, "found": list })));
        return Ok(0);
    }
    let mut out = format!("shardc {}\n", super::BUILD);
    for f in &all {
        let (word, text) = match &f.state {
            Ok(text) => ("here", text),
            Err(text) => ("not here", text),
        };
        out += &format!("{:<12} {word:<9} {text}\n{:<22} for {}\n", f.name, "", f.serves);
    }
    show(out);
    Ok(0)
}
