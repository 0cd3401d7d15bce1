//! The printed check in a running program.

use super::{DENSE, UNTIED};
use crate::lab::Lab;
use shardc_testing::{Tool, skip};
use std::path::Path;
use std::process::Command;

#[test]
fn the_printed_check_holds_in_a_running_program_and_fails_where_it_should() {
    let lab = Lab::new("audit-check");
    let words: Vec<&str> = [DENSE, UNTIED, "--tensor-model-parallel-size 2"]
        .iter()
        .flat_map(|f| f.split_whitespace())
        .collect();
    let args = [&["audit", "megatron", "--gpus", "2", "--check", "--"], &words[..]].concat();
    let text = String::from_utf8(lab.ok(&args).stdout).expect("text");
    assert!(text.lines().count() <= 40 && text.contains("SHARDED = False"), "{text}");
    lab.write("check.py", text);
    // Of several ranks of data parallelism each has its own shard of summed gradients.
    let args = [&["audit", "megatron", "--gpus", "4", "--check", "--"], &words[..]].concat();
    let text = String::from_utf8(lab.ok(&args).stdout).expect("text");
    assert!(text.lines().count() <= 40 && text.contains("SHARDED = True"), "{text}");
    assert!(text.contains(r#""dp tp", "tp")"#) && !text.contains(r#""dp tp", "dp tp")"#), "{text}");
    let python = std::env::var("SHARDC_PYTHON").unwrap_or("python3".into());
    let has = Command::new(&python).args(["-c", "import torch"]).output();
    if !has.is_ok_and(|o| o.status.success()) {
        return skip(Tool::Torch, "a check of a running program");
    }
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/audit/running.py");
    let out =
        Command::new(python).arg(program).current_dir(&lab.0).output().expect("python starts");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    for word in [
        "right: holds",
        "layernorm.weight: the parameter is not the same over tp",
        "norm of one rank: the norm is",
    ] {
        assert!(said.contains(word), "no {word}: {said}");
    }
}
