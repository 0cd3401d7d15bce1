//! `shardc doctor`: what this machine has of what commands can use, and how to get the rest.

use rustix::fs::{Access, access};
use serde_json::json;
use shardc_codegen::{cache, nvrtc};
use shardc_ir::diag::{Diag, Result, bytes, count};
use shardc_plans::hub;
use shardc_process::terminal::{json_line, show};
use shardc_runtime::cuda::{Device, version};
use shardc_runtime::processor;
use std::path::PathBuf;
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
    let devices = || -> Result<String> {
        let names: Result<Vec<String>> = (0..Device::count()?).map(Device::name_of).collect();
        Ok(names?.join(", "))
    };
    vec![
        found("processor", "run: products and attention", Ok(processor().into())),
        found("C compiler", "run: kernels over rows are compiled; else interpreted", compiler()),
        found("CUDA driver", "run --device cuda", devices().map_err(said)),
        found(
            "NVRTC",
            "compile --device cuda: compiled kernels",
            nvrtc::is_here().map(|()| "found".into()).map_err(said),
        ),
        found("NCCL", "run --transport nccl", version().map(|n| n.to_string()).map_err(said)),
        found("MPI", "run --transport mpi", mpi()),
        found("srun", "launch-script --for slurm", on_path("srun", "it comes with Slurm")),
        found("mpirun", "launch-script --for mpirun", on_path("mpirun", "it comes with an MPI")),
        found(
            "torchrun",
            "launch-script --for torchrun",
            on_path("torchrun", "it comes with PyTorch"),
        ),
        found(
            "kernel cache",
            "compiled kernels, which may be deleted at any time; SHARDC_CACHE names another folder",
            folder(cache::place(), true),
        ),
        found(
            "model cache",
            "models by ORG/NAME, as `hf download` keeps them; HF_HUB_CACHE names another folder",
            folder(hub::cache(), false),
        ),
        found(
            "tokenizers",
            "run --data text:FILES with a model's tokenizer.json",
            match cfg!(feature = "tokenizers") {
                true => Ok("built in".to_string()),
                false => Err("cargo install --path ., without --no-default-features".into()),
            },
        ),
    ]
}

/// The MPI that is built in.
#[cfg(feature = "mpi")]
fn mpi() -> std::result::Result<String, String> {
    Ok(shardc_runtime::mpi::library())
}

#[cfg(not(feature = "mpi"))]
fn mpi() -> std::result::Result<String, String> {
    Err("cargo install --path . --features mpi".into())
}

/// Where a cache is, what it holds, and whether it can be written, where it is.
fn folder(place: Option<PathBuf>, written: bool) -> std::result::Result<String, String> {
    let Some(dir) = place else { return Err("HOME is not set".into()) };
    let at = dir.display();
    if !dir.is_dir() {
        let made = if written { ": it is made when it is needed" } else { "" };
        return Err(format!("{at} does not exist{made}"));
    }
    if written && access(&dir, Access::WRITE_OK).is_err() {
        return Err(format!("{at} cannot be written"));
    }
    let all = std::fs::read_dir(&dir).map_err(|e| format!("{at}: {e}"))?;
    let files: Vec<_> = all.filter_map(|e| e.ok()?.metadata().ok()).collect();
    let size: u64 = files.iter().filter(|m| m.is_file()).map(std::fs::Metadata::len).sum();
    let entries = count(files.len(), "entry", "entries");
    let size = if size > 0 { format!(", {}", bytes(size as usize)) } else { String::new() };
    Ok(format!("{at}: {entries}{size}"))
}

/// The first program of this name in the folders of PATH.
fn on_path(name: &str, from: &str) -> std::result::Result<String, String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut all = std::env::split_paths(&path).map(|dir| dir.join(name));
    let found = all.find(|p| p.is_file() && access(p, Access::EXEC_OK).is_ok());
    found.map(|p| p.display().to_string()).ok_or(format!("it is not on PATH; {from}"))
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
        show(json_line("doctor", json!({ "version": super::BUILD, "found": list })));
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
