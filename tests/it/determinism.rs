//! The same plan, byte for byte, whoever compiles it; the same numbers, bit for bit, from every
//! run.

use crate::fixture::*;
use shardc::flags::Flags;
use shardc::proof::Prove;
use shardc_ir::func::{Role, RoleKind};
use shardc_runtime::StepBatch;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

const MESH: &str = "dp=2,tp=4";

/// An empty folder of this test.
fn folder(name: &str) -> PathBuf {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("determinism").join(name);
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("a folder for the test");
    dir
}

/// All files of a folder by their path in it.
fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut out = BTreeMap::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(d) = open.pop() {
        for e in std::fs::read_dir(&d).expect("a folder").map(|e| e.expect("an entry")) {
            let path = e.path();
            if path.is_dir() {
                open.push(path);
            } else {
                let name = path.strip_prefix(dir).expect("inside").to_path_buf();
                out.insert(name, std::fs::read(&path).expect("a file"));
            }
        }
    }
    out
}

fn same(what: &str, a: &BTreeMap<PathBuf, Vec<u8>>, b: &BTreeMap<PathBuf, Vec<u8>>) {
    assert!(a.keys().eq(b.keys()), "{what}: other files");
    for (name, bytes) in a {
        assert!(*bytes == b[name], "{what}: {} differs", name.display());
    }
}

#[test]
fn plans_are_the_same_bytes() {
    let flags = Flags::default().with("mesh", MESH).with("sp", "").with("seq", SEQ);
    always_the_same("plans", "llama_gqa", flags, &["--mesh", MESH, "--sp", "--seq", "16"]);
}

#[test]
fn plans_of_pipelines_are_the_same_bytes() {
    let mesh = "pp=2,dp=2";
    let flags = Flags::default()
        .with("mesh", mesh)
        .with("zero", 3)
        .with("seq", SEQ)
        .with("microbatch", 1)
        .with("schedule", "search");
    let args = ["--mesh", mesh, "--zero", "3", "--seq", "16", "--microbatch", "1"];
    let args = [&args[..], &["--schedule", "search"]].concat();
    always_the_same("pipelines", "llama_deep", flags, &args);
}

#[test]
fn plans_of_rings_are_the_same_bytes() {
    let mesh = "cp=4,tp=2";
    let flags = Flags::default().with("mesh", mesh).with("cp-mode", "ring").with("seq", SEQ);
    let args = ["--mesh", mesh, "--cp-mode", "ring", "--seq", "16"];
    always_the_same("rings", "llama_gqa", flags, &args);
}

/// Five compilations in this process and two in others, with one and two threads.
fn always_the_same(name: &str, model: &str, flags: Flags, args: &[&str]) {
    let dir = folder(name);
    let model = Fixture::open(model).dir;
    let o = flags.options().unwrap_or_else(|e| panic!("{e}"));
    let mut first = None;
    for i in 0..5 {
        let out = dir.join(format!("in-process-{i}"));
        shardc::compile(&model, &o, &mut |_, _| {})
            .and_then(|mut done| done.prove(Prove::Auto).and_then(|()| done.write(&out)))
            .unwrap_or_else(|e| panic!("{e}"));
        let got = files(&out);
        assert!(
            got.contains_key(Path::new("programs/all.ir")) && got.len() >= 6,
            "{:?}",
            got.keys()
        );
        same(&format!("compilation {i}"), first.get_or_insert_with(|| got.clone()), &got);
    }
    for threads in ["1", "2"] {
        let out = dir.join(format!("threads-{threads}"));
        let done = Command::new(env!("CARGO_BIN_EXE_shardc"))
            .env("RAYON_NUM_THREADS", threads)
            .arg("compile")
            .arg(&model)
            .args(args)
            .arg("-o")
            .arg(&out)
            .output()
            .expect("shardc starts");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let first = first.as_ref().expect("five were made");
        same(&format!("RAYON_NUM_THREADS={threads}"), first, &files(&out));
    }
    let left: Vec<_> = std::fs::read_dir(&dir).expect("a folder").collect();
    assert_eq!(left.len(), 7, "something was left beside the plans: {left:?}");
}

/// Bits of the losses, gradient norms and final parameters of three steps.
fn bits(fx: &Fixture) -> Vec<Vec<u32>> {
    let o = options(&[("dp_replicate", 2), ("tp", 4)], true, 2);
    let model = fx.model(&o);
    let compiled = compile(&model, &o);
    let mut s = session(&model, &compiled);
    let mut out = vec![];
    for step in 1..=3 {
        let batch = StepBatch::tokens(&fx.input_ids, &fx.targets(), step == 1);
        let r = s.step(&batch, 1e-3, step).unwrap_or_else(|e| panic!("{e}"));
        out.extend(r.outputs.values().map(|a| a.data.iter().map(|x| x.to_bits()).collect()));
    }
    for w in &model.weights {
        let role = Role::new(RoleKind::Param, w.param.as_str());
        let a = s.tensor(&role).unwrap_or_else(|e| panic!("{e}"));
        out.push(a.data.iter().map(|x| x.to_bits()).collect());
    }
    out
}

#[test]
fn runs_are_the_same_bits() {
    let fx = Fixture::open("llama_gqa");
    let first = bits(&fx);
    assert!(first.len() > 30);
    assert!(first == bits(&fx), "two runs of one plan differ");
}
