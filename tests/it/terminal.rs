//! What commands print to a terminal has at most as many columns as that.

use crate::lab::{FIXTURES, Lab};
use std::process::Command;

const COLUMNS: usize = 80;

/// All that a command writes, results and messages, where lines have so many columns; it must end so.
fn shown(lab: &Lab, args: &[&str], status: i32) -> String {
    let mut c = Command::new(env!("CARGO_BIN_EXE_shardc"));
    c.current_dir(&lab.0).args(args).env("COLUMNS", COLUMNS.to_string());
    let out = c.output().expect("shardc starts");
    let text = [out.stdout, out.stderr].map(|t| String::from_utf8_lossy(&t).into_owned()).concat();
    assert_eq!(out.status.code(), Some(status), "{args:?}: {text}");
    text
}

/// A command is copied: wherever it stands, it is in one line. No word of the table of layouts is cut, and pages of rules
/// have lines of one width.
#[test]
fn nothing_is_cut_at_the_width_of_a_terminal() {
    let lab = Lab::new("terminal-cut");
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/configs/llama-3.1-8b.json");
    let large = ["plan", config, "--gpus", "16", "--machine", "h100-sxm", "--budget", "2"];
    let table = shown(&lab, &[&large[..], &["--top", "1", "--for", "megatron"]].concat(), 0);
    let words: Vec<&str> = table.split_whitespace().collect();
    for word in ["products", "attention", "executable:", "formula"] {
        assert!(words.contains(&word), "{word} is cut:\n{table}");
    }
    let model = format!("{FIXTURES}/llama_gqa");
    let out = "a-folder-whose-name-is-rather-long-and-that-is-written";
    let said = shown(&lab, &["compile", &model, "--seq", "16", "-o", out], 0);
    for command in [format!("shardc inspect {out} --summary"), format!("shardc run {out}")] {
        assert!(said.lines().any(|l| l.contains(&command)), "{said}");
    }
    let page = shown(&lab, &["explain", "rule:ring"], 0);
    let first = page.lines().find(|l| l.starts_with("With `--cp-mode ring`")).expect("a paragraph");
    let next = page.lines().skip_while(|l| *l != first).nth(1).expect("its second line");
    let word = next.split(' ').next().unwrap_or("");
    assert!(first.len() <= COLUMNS && first.len() + 1 + word.len() > COLUMNS, "{page}");
}

/// Lines that are wider, and wider than their longest word, which may be a path; but for commands: they are copied.
fn wide(text: &str) -> Vec<String> {
    let long = |l: &&str| {
        let words = l.split_whitespace().map(|w| w.chars().count());
        let indent = l.chars().take_while(|c| *c == ' ').count();
        l.chars().count() > COLUMNS.max(indent + words.max().unwrap_or(0))
    };
    let copied = |l: &&str| l.trim_start().starts_with("shardc ");
    text.lines().filter(long).filter(|l| !copied(l)).map(String::from).collect()
}

#[test]
fn lines_fit_a_terminal() {
    let lab = Lab::new("terminal");
    let model = |name: &str| format!("{FIXTURES}/{name}");
    let (llama, experts) = (model("llama_deep"), model("mixtral"));
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/configs/llama-3.1-8b.json");
    let compile = |model, out, rest: &[&'static str]| {
        [&["compile", model, "--seq", "16", "-o", out][..], rest].concat()
    };
    let audit = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/audit/megatron/gpt_oss_20b.args");
    let plans = ["plan", &llama, "--gpus", "4", "--machine", "h100-sxm", "--seq", "16"];
    let few = ["--global-batch", "8", "--budget", "6", "--top", "2"];
    let large = ["plan", config, "--gpus", "16", "--machine", "h100-sxm", "--budget", "2"];
    let all: Vec<(Vec<&str>, i32)> = vec![
        (compile(&llama, "p", &["--mesh", "pp=2,dp=2", "--microbatch", "1", "--zero", "1"]), 0),
        (compile(&experts, "e", &["--mesh", "dp=2,ep=2", "--transport", "nccl"]), 0),
        (compile(&llama, "none", &["--mesh", "tp=3"]), 2),
        (vec!["check", &llama, "--mesh", "tp=3"], 1),
        (vec!["check", &llama, "--mesh", "pp=2", "--microbatch", "1"], 0),
        ([&plans[..], &few, &["--explain", "1", "--max", "seq"]].concat(), 0),
        ([&large[..], &["--top", "1", "--for", "megatron"]].concat(), 0),
        (vec!["price", "p", "--machine", "h100-sxm", "--explain", "--launches"], 0),
        (vec!["price", "e", "--machine", "h100-sxm", "--explain"], 0),
        (vec!["inspect", "p", "--summary"], 0),
        (vec!["inspect", "e", "--summary"], 0),
        (vec!["inspect", "e", "--collectives", "--node", "2"], 0),
        (vec!["inspect", "p", "--ranks"], 0),
        (vec!["inspect", "p", "--timeline"], 0),
        (vec!["inspect", "p", "--rank", "0", "--instructions"], 0),
        (vec!["explain", "p", "collective:1"], 0),
        (vec!["explain", "p", "tensor:model.norm.weight"], 0),
        (vec!["explain", "p", "schedule"], 0),
        (vec!["explain", "p", "transfers"], 0),
        (vec!["explain", "p", "memory"], 0),
        (vec!["explain", "p", "price"], 0),
        (vec!["diff", "p", "e", "--machine", "h100-sxm"], 0),
        (vec!["verify", "p"], 0),
        (vec!["prove", "p", "--by", "both"], 0),
        (vec!["run", "p", "--steps", "2", "--kernels", "interpreted"], 0),
        (vec!["report", "p", "--machine", "h100-sxm", "-o", "p.html"], 0),
        (vec!["audit", "megatron", audit, "--machine", "h100-sxm"], 1),
        (vec!["doctor"], 0),
        (vec!["plan", &llama, "--gpus", "4", "--machine", "abacus"], 2),
    ];
    let mut found = vec![];
    for (args, status) in &all {
        let text = shown(&lab, args, *status);
        assert!(!text.trim().is_empty(), "{args:?}");
        found.extend(wide(&text).into_iter().map(|l| format!("{}: {l}", args.join(" "))));
    }
    assert!(found.is_empty(), "{} lines are too wide:\n{}", found.len(), found.join("\n"));
}
