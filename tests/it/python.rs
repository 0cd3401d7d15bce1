//! The Python package, by its own tests (`python/tests`), with the command of this build.

use shardc_testing::{Tool, skip};
use std::path::Path;
use std::process::Command;

#[test]
fn the_python_package() {
    let name = std::env::var("SHARDC_PYTHON").unwrap_or("python3".into());
    let has = |what: &str| {
        Command::new(&name).args(["-c", what]).output().is_ok_and(|o| o.status.success())
    };
    if !has("import sys; assert sys.version_info >= (3, 9)") {
        return println!("skipped the Python package: no Python");
    }
    if !has("import torch, transformers, accelerate") {
        skip(Tool::Torch, "live modules as models of the Python package");
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut c = Command::new(&name);
    c.args(["-B", "-m", "unittest", "tests/test_shardc.py"]).current_dir(root.join("python"));
    let out = c.env("SHARDC_BINARY", env!("CARGO_BIN_EXE_shardc")).output().expect("Python starts");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    assert!(said.contains("\nOK"), "{said}");
}
