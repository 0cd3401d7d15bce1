//! Exported files read by the packages that they are for, each where it is installed for the Python of the tests.

use super::{CASES, Case, check, compiled, python};
use crate::lab::Lab;
use shardc_testing::{Tool, skip};
use std::process::Command;

/// The Python, if a module is there.
fn has(module: &'static str) -> Option<String> {
    let found = python().filter(|name| {
        let import = format!("import {module}");
        let done = Command::new(name).args(["-c", &import]).env("DS_ACCELERATOR", "cpu").output();
        done.is_ok_and(|o| o.status.success())
    });
    if found.is_none() {
        skip(Tool::Target(module), "exported files by its own parser");
    }
    found
}

/// All cases that a target takes.
fn each(lab: &Lab, to: &str, cases: &[&Case], then: impl Fn(&str)) {
    let takes = |c: &&&Case| !c.2.iter().any(|l| l.0 == to);
    let mut count = 0;
    for (i, case) in cases.iter().filter(takes).enumerate() {
        let (plan, out) = (format!("{i}.plan"), format!("{i}.{to}"));
        compiled(lab, case, &plan);
        lab.ok(&["export", &plan, "--to", to, "-o", &out]);
        then(&out);
        count += 1;
    }
    assert!(count > 1, "{to}");
}

#[test]
fn torchtitan_reads_its_module() {
    let Some(python) = has("torchtitan") else { return };
    let lab = Lab::new("exports-torchtitan");
    let all: Vec<&Case> = CASES.iter().collect();
    each(&lab, "torchtitan", &all, |out| check(&lab, &python, &["torchtitan", out]));
}

#[test]
fn deepspeed_reads_its_config() {
    let Some(python) = has("deepspeed") else { return };
    let lab = Lab::new("exports-deepspeed");
    let alone: Case = ("llama_mha", &["--mesh", "dp=4", "--decay", "all"], &[]);
    let all: Vec<&Case> = CASES.iter().chain([&alone]).collect();
    each(&lab, "deepspeed", &all, |out| {
        check(&lab, &python, &["deepspeed", &format!("{out}/ds_config.json"), "4"]);
    });
}

/// Modules and layers that are computed again.
const AGAIN: [Case; 2] = [
    (
        "deepseek_v3",
        &[
            "--mesh",
            "dp=2,ep=2",
            "--recompute",
            "ops:elementwise,mla_up_proj,moe",
            "--dtype",
            "bf16",
        ],
        &[],
    ),
    ("llama_deep", &["--mesh", "pp=2", "--microbatch", "1", "--recompute", "layers:1"], &[]),
];

/// Its configs refuse what contradicts itself, as `TransformerConfig` does when Megatron-LM starts.
#[test]
fn megatron_core_takes_what_its_flags_set() {
    let Some(python) = has("megatron.core") else { return };
    let lab = Lab::new("exports-mcore");
    let all: Vec<&Case> = CASES.iter().chain(&AGAIN).collect();
    each(&lab, "megatron", &all, |out| {
        check(&lab, &python, &["mcore", &format!("{out}/megatron.args")]);
    });
}
