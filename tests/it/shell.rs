//! What shells and manuals are told of the command line, and how loud it is.

use crate::lab::{FIXTURES, Lab};
use clap::CommandFactory as _;
use serde_json::Value as Json;
use shardc::commands::Cli;
use std::process::{Command, Output};

fn said(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

fn printed(out: &Output) -> String {
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// Names of commands with the long flags of each.
fn commands() -> Vec<(String, Vec<String>)> {
    let mut all = Cli::command();
    all.build();
    let flags = |c: &clap::Command| {
        c.get_arguments().filter_map(|a| a.get_long()).map(String::from).collect()
    };
    // A hidden one is for programs.
    let shown = all.get_subcommands().filter(|c| !c.is_hide_set());
    shown.map(|c| (c.get_name().to_string(), flags(c))).collect()
}

#[test]
fn completions_know_all_commands_and_flags() {
    let lab = Lab::new("shell-completions");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = printed(&lab.ok(&["completions", shell]));
        for (name, flags) in commands() {
            assert!(script.contains(&name), "{shell}: {name}");
            for flag in flags {
                assert!(script.contains(&flag), "{shell}: {name} {flag}");
            }
        }
        lab.write(shell, script);
    }
    let bash = |words: &[&str]| {
        let script = "source ./bash; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); \
                      _shardc shardc \"${@: -1}\" \"${@: -2:1}\"; echo \"${COMPREPLY[@]}\"";
        let mut c = Command::new("bash");
        let out = c.args(["-c", script, "shardc"]).args(words).current_dir(&lab.0).output();
        let out = out.expect("bash starts");
        assert!(out.status.success(), "{}", said(&out));
        printed(&out).split_whitespace().map(String::from).collect::<Vec<_>>()
    };
    assert_eq!(bash(&["shardc", "comp"]), ["compile", "completions"]);
    assert_eq!(bash(&["shardc", "run", "PLAN", "--metr"]), ["--metrics"]);
    assert_eq!(bash(&["shardc", "compile", "--zero-"]), ["--zero-accumulate"]);
    lab.shardc(&["completions", "tcsh"]);
    assert_eq!(lab.shardc(&["completions", "tcsh"]).status.code(), Some(2));
}

#[test]
fn every_command_has_a_manual_page_with_its_flags() {
    let lab = Lab::new("shell-man");
    let whole = printed(&lab.ok(&["man"]));
    assert!(whole.contains(".TH shardc 1"), "{whole}");
    for (name, flags) in commands() {
        assert!(whole.contains(&format!("shardc\\-{}(1)", name.replace('-', "\\-"))), "{name}");
        let page = printed(&lab.ok(&["man", &name]));
        assert!(page.contains(&format!(".TH shardc-{name} 1")), "{page}");
        for flag in flags {
            assert!(page.contains(&format!("\\-\\-{}", flag.replace('-', "\\-"))), "{name} {flag}");
        }
    }
    let error = lab.refuses(&["man", "zebra"], 2, "flag");
    assert!(error.contains("compile, "), "{error}");
}

#[test]
fn a_command_says_as_much_as_it_is_asked_to() {
    let lab = Lab::new("shell-volume");
    let model = format!("{FIXTURES}/gpt2");
    let with = |flags: &[&str]| {
        lab.ok(
            &[&["compile", &model, "--seq", "16", "--mesh", "zebra=2", "-o", "p"], flags].concat()
        )
    };
    let (quiet, normal, verbose) = (with(&["-q"]), with(&[]), with(&["--verbose"]));
    // Warnings are said however quiet it is. The result is the plan's folder; without one it is the report.
    assert!(said(&quiet).starts_with("warning[idle-axis]"), "{}", said(&quiet));
    assert!(!said(&quiet).contains("wrote p") && said(&normal).contains("wrote p"));
    assert!(!said(&normal).contains("took ") && said(&verbose).contains(" MiB of memory"));
    assert!(said(&verbose).contains("ms partition"), "{}", said(&verbose));
    assert_eq!(printed(&quiet), "");
    assert_eq!(printed(&normal), printed(&verbose));
    let alone = ["compile", &model, "--seq", "16"];
    let report = printed(&lab.ok(&[&alone[..], &["-q"]].concat()));
    assert!(!report.is_empty() && report == printed(&lab.ok(&alone)));
    // Anywhere in the line, of every command; not both.
    assert!(said(&lab.ok(&["-v", "inspect", "p"])).starts_with("took "));
    assert_eq!(said(&lab.ok(&["run", "p", "-q", "--steps", "1", "--kernels", "interpreted"])), "");
    assert_eq!(lab.shardc(&["doctor", "-q", "-v"]).status.code(), Some(2));
    assert!(said(&lab.shardc(&["inspect", "none", "-q"])).starts_with("error[plan]"));
}

/// Flags of other software are answered with ours, and their values.
#[test]
fn flags_of_other_software() {
    let lab = Lab::new("shell-elsewhere");
    for (args, flag, way) in [
        (&["compile", "m", "--tp", "4"][..], "--tp", "use --mesh tp=4"),
        (
            &["compile", "m", "--tensor-model-parallel-size=8"],
            "--tensor-model-parallel-size",
            "use --mesh tp=8",
        ),
        (
            &["compile", "m", "--pipeline_model_parallel_size", "2"],
            "--pipeline_model_parallel_size",
            "use --mesh pp=2",
        ),
        (&["compile", "m", "--bf16"], "--bf16", "use --dtype bf16"),
        (
            &["compile", "m", "--fsdp", "full_shard"],
            "--fsdp",
            "use --zero 3 (with --mesh dp=RANKS)",
        ),
        (
            &["plan", "m", "--gradient-checkpointing"],
            "--gradient-checkpointing",
            "--recompute selective|full",
        ),
        (
            &["run", "p", "--micro-batch-size", "2"],
            "--micro-batch-size",
            "compile with --microbatch 2",
        ),
        (&["run", "p", "--max-steps", "100"], "--max-steps", "use shardc run --steps 100"),
        (&["run", "p", "--learning-rate", "3e-4"], "--learning-rate", "use --lr 3e-4"),
        (&["compile", "m", "--lora-r", "16"], "--lora-r", "use --lora r=16,alpha=A"),
        (&["compile", "m", "--tp"], "--tp", "use --mesh tp=N"),
        (&["compile", "m", "--sample_packing"], "--sample_packing", "use --documents rows"),
        (&["run", "p", "--packing", "true"], "--packing", "compile with --documents rows"),
        (
            &["compile", "m", "--lora_dropout", "0.1"],
            "--lora_dropout",
            "use --lora r=R,dropout=0.1",
        ),
        (
            &["compile", "m", "--warmup_ratio", "0.1"],
            "--warmup_ratio",
            "use --warmup STEPS: 0.1 times",
        ),
        (&["run", "p", "--assistant_only_loss"], "--assistant_only_loss", "--loss-on assistant|"),
        (
            &["compile", "m", "--loraplus_lr_ratio", "16"],
            "--loraplus_lr_ratio",
            "use --optim '*.lora_B.*=RULE,lr*=16'",
        ),
    ] {
        let said = lab.refuses(args, 2, "usage");
        assert!(said.contains(&format!("there is no {flag} here")) && said.contains(way), "{said}");
    }
    // Flags that another command has, too.
    for (args, flag, way) in [
        (&["run", "p", "--mesh", "tp=2"][..], "--mesh", "shardc compile MODEL --mesh …"),
        (&["run", "p", "--lora", "r=8"], "--lora", "shardc compile MODEL --lora …"),
        (&["plan", "m", "--mesh", "tp=2"], "--mesh", "use --fix, as in --fix tp=8,dp=4"),
        (&["compile", "m", "--what-if", "nic=100"], "--what-if", "shardc plan has it"),
        (
            &["compile", "m", "--machine", "h100"],
            "--machine",
            "shardc price, shardc report have it",
        ),
        (&["run", "p", "--fp8"], "--fp8", "compile with --dtype bf16"),
        (&["run", "p", "--output_dir", "x"], "--output_dir", "use shardc run --save DIR"),
    ] {
        let said = lab.refuses(args, 2, "usage");
        assert!(said.contains(&format!("there is no {flag} here")) && said.contains(way), "{said}");
    }
    let below = lab.refuses(&["compile", "m", "--seed", "-1"], 2, "usage");
    assert!(below.contains("`-1` is not a value of --seed"), "{below}");
    // What would not work is not advised.
    let out = lab.shardc(&["generate", "m", "--zzz"]);
    assert!(!said(&out).contains("tip:") && out.status.code() == Some(2), "{}", said(&out));
    let page = lab.refuses(&["explain", "mesh"], 2, "flag");
    assert!(page.contains("shardc explain rule:mesh"), "{page}");
    let none = lab.refuses(&["explain", "concept:1f1b"], 2, "flag");
    assert!(none.contains("shardc explain PLAN collective:1"), "{none}");
    // What is no flag of theirs is answered as ever.
    let out = lab.shardc(&["compile", "m", "--mash", "tp=2"]);
    assert!(said(&out).contains("a similar argument exists: '--mesh'"), "{}", said(&out));
}

/// With `--format json` standard error has an object a line.
#[test]
fn messages_are_json_where_results_are() {
    let lab = Lab::new("shell-messages");
    let model = format!("{FIXTURES}/gpt2");
    let messages = |args: &[&str], status: i32| -> Vec<Json> {
        let out = lab.shardc(&[args, &["--format", "json"]].concat());
        assert_eq!(out.status.code(), Some(status), "{args:?}: {}", said(&out));
        let text = said(&out);
        text.lines()
            .map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}")))
            .collect()
    };
    let base = ["compile", &model, "--seq", "16", "-o", "p", "--mesh"];
    let warned = messages(&[&base[..], &["zebra=2"]].concat(), 0);
    assert_eq!((&warned[0]["level"], &warned[0]["code"]), (&"warning".into(), &"idle-axis".into()));
    assert_eq!(warned[0]["exit"], 0, "a warning ends nothing");
    let refused = messages(&[&base[..], &["tp=3"]].concat(), 2);
    let text = said(&lab.shardc(&[&base[..], &["tp=3"]].concat()));
    let error = &refused[0];
    assert_eq!((refused.len(), &error["level"], &error["exit"]), (1, &"error".into(), &2.into()));
    assert_eq!(error["rendered"], text.trim_end());
    let help = error["help"].as_array().expect("a list");
    assert!(!help.is_empty() && help.iter().all(|h| text.contains(h.as_str().expect("text"))));
    let usage = messages(&["compile", &model, "--mash", "tp=2"], 2);
    assert_eq!((&usage[0]["code"], &usage[0]["level"]), (&"usage".into(), &"error".into()));
    assert!(usage[0]["message"].as_str().is_some_and(|m| m.contains("'--mash'")), "{usage:?}");
    let usage = messages(&["compile"], 2);
    let what = "the following required arguments were not provided: <MODEL>";
    assert_eq!(usage[0]["message"], what, "{usage:?}");
    let noted = messages(&["run", "p", "--steps", "1", "--kernels", "interpreted", "-v"], 0);
    assert!(noted.iter().all(|m| m["level"] == "note" && m["message"].is_string()), "{noted:?}");
    assert!(noted.iter().any(|m| m["message"].as_str().is_some_and(|m| m.starts_with("took "))));
}
