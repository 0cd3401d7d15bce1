//! Passes one by one, from the command line.

use crate::lab::{FIXTURES, Lab};

fn text(out: &[u8]) -> String {
    String::from_utf8_lossy(out).into_owned()
}

/// What `--dump-all` writes before a pass, `opt` takes to what it writes after it, and `--from` to the plan.
#[test]
fn every_pass_begins_where_the_last_one_ended() {
    let lab = Lab::new("passes");
    let cases: [(&str, &[&str]); 4] = [
        ("llama_gqa", &["--mesh", "dp=2,tp=2", "--sp", "--zero", "3", "--seq", "8"]),
        (
            "gpt2",
            &[
                "--mesh",
                "pp=2,dp=2",
                "--schedule",
                "zb-h1",
                "--microbatch",
                "1",
                "--zero",
                "2",
                "--seq",
                "8",
            ],
        ),
        ("mixtral", &["--mesh", "dp=2,ep=2", "--seq", "8", "--dtype", "bf16"]),
        ("llama_mha", &["--mesh", "tp=4", "--tp-mode", "2d", "--tp-steps", "summa", "--seq", "8"]),
    ];
    for (i, (fixture, flags)) in cases.into_iter().enumerate() {
        let model = format!("{FIXTURES}/{fixture}");
        let (dump, plan) = (format!("dump{i}"), format!("plan{i}"));
        let whole = ["compile", &model, "--dump-all", &dump, "--verify-each", "-o", &plan];
        lab.ok(&[&whole[..], flags].concat());
        let program =
            |dir: &str| std::fs::read_to_string(lab.path(&format!("{dir}/programs/all.ir")));
        let made = program(&plan).expect("programs");
        let names: Vec<&str> = shardc_passes::pipeline::names().collect();
        let file = |n: usize| format!("{dump}/{:02}-{}.ir", n + 1, names[n]);
        for n in 1..names.len() {
            let (before, after) = (file(n - 1), file(n));
            let read = std::fs::read_to_string(lab.path(&after)).expect("a dump");
            // What a family knows of its weights is not in the text: only how they are laid out is.
            if !["annotate", "partition", "step"].contains(&names[n]) {
                let out = lab.ok(&[&["opt", &before, "--pass", names[n]][..], flags].concat());
                assert_eq!(text(&out.stdout), read, "{fixture}: {}", names[n]);
            }
            if names[n] == "partition" || names[n] == "step" || names[n] == "group" {
                let from = format!("from{i}-{n}");
                let flags = [&["--from", names[n], &before, "-o", &from][..], flags].concat();
                lab.ok(&[&["compile", &model, "--prove", "no"][..], &flags].concat());
                assert_eq!(program(&from).expect("programs"), made, "{fixture}: {}", names[n]);
            }
        }
    }
}

/// What is of another phase, unknown or nothing for a pass is refused, and nothing is written.
#[test]
fn passes_refuse_what_they_do_not_take() {
    let lab = Lab::new("passes-refuse");
    let model = format!("{FIXTURES}/llama_gqa");
    lab.ok(&["compile", &model, "--mesh", "tp=2", "--seq", "8", "--dump-all", "dump"]);
    let refused = |args: &[&str], code: &str| {
        lab.refuses(args, 2, code);
    };
    refused(&["opt", "dump/06-partition.ir", "--pass", "group"], "phase");
    refused(&["opt", "dump/06-partition.ir", "--pass", "grup"], "unknown-pass");
    refused(&["opt", "dump/99-none.ir", "--pass", "group"], "file");
    let from = ["compile", &model, "--mesh", "tp=2", "--seq", "8", "-o", "plan", "--from"];
    refused(&[&from[..], &["group", "dump/06-partition.ir"]].concat(), "phase");
    assert!(!lab.path("plan").exists());
    let ranked = std::fs::read_to_string(lab.path("dump/06-partition.ir")).expect("a dump");
    for (from, to, code) in [
        ("phase ranked", "phase cooked", "syntax"),
        (" once 0 ", " once 9 ", "arity"),
        ("fan_out[tp]", "fan_in[tp]", "unknown-op"),
        ("~tp", "", "result-type"),
    ] {
        assert!(ranked.contains(from), "{from}\n{ranked}");
        lab.write("bad.ir", ranked.replacen(from, to, 1));
        refused(&["opt", "bad.ir", "--pass", "differentiate"], code);
    }
}
