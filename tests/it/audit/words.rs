//! Words that users write: rules of a fork, and flags that Megatron-LM's own validation refuses together.

use super::{DENSE, EXPERTS, LATENT, UNTIED};
use crate::lab::Lab;
use shardc::audit::rules::Table;
use shardc::export::megatron::arguments;
use std::collections::BTreeSet;

/// What is said of a configuration with a fork's rules.
fn refused(lab: &Lab, rules: &str, more: &[&str], code: &str) -> String {
    lab.write("rules.toml", rules);
    let flags: Vec<&str> = DENSE.split_whitespace().collect();
    let args = ["audit", "megatron", "--gpus", "2", "--rules", "rules.toml"];
    let said = lab.refuses(&[&args[..], more, &["--"], &flags].concat(), 2, code);
    said.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn rules_of_a_fork_are_looked_up_word_by_word() {
    let lab = Lab::new("audit-rules");
    for (rule, word) in [
        ("nam = 'x'", "unknown field `nam`"),
        ("name = 'x'", "a name, and what it says, are wanted"),
        (
            "name = 'x'\nsays = 'y'\nof = ['norms']",
            "no class of parameters `norms` (nearest: norm)",
        ),
        ("name = 'x'\nsays = 'y'\nbut = ['lm_head']", "no class of parameters `lm_head`"),
        ("name = 'x'\nsays = 'y'\nsums = ['tpp']", "no axis `tpp` (nearest: "),
        ("name = 'x'\nsays = 'y'\nwhole = ['partial']", "no axis `partial`"),
        ("name = 'x'\nsays = 'y'\nagain = ['data']", "no axis `data`"),
        ("name = 'x'\nsays = 'y'\ncounts = 'last tp'", "`each AXES` or `first AXES` is wanted"),
        ("name = 'x'\nsays = 'y'\ncounts = 'each'", "`each AXES` or `first AXES` is wanted"),
        ("name = 'x'\nsays = 'y'\ntimes = '1/dpp'", "no number `dpp` (nearest: dp)"),
        ("name = 'x'\nsays = 'y'\ntimes = '1/0'", "no number `0`"),
        ("name = 'x'\nsays = 'y'\nsince = 'newest'", "`newest` is no version"),
        (
            "name = 'x'\nsays = 'y'\nwhen = '!per-tokens'",
            "no fact `per-tokens` (nearest: per-token)",
        ),
        ("name = 'x'\nsays = 'y'\nwhen = 'etp!=tpp'", "no number `tpp`"),
        ("name = 'x'\nsays = 'y'\nwhen = '--sequence-paralel'", "(nearest: --sequence-parallel)"),
    ] {
        let said = refused(&lab, &format!("[[rule]]\n{rule}"), &[], "file");
        assert!(said.contains(word), "{rule}: no {word}: {said}");
    }
    // All at once, each with its rule.
    let two = "[[rule]]\nname = 'a'\nsays = 'y'\nof = ['norms']\n[[rule]]\nname = 'b'\nsays = 'y'\nsums = ['x']";
    let said = refused(&lab, two, &[], "file");
    assert!(said.contains("a: no class") && said.contains("b: no axis"), "{said}");
    let said = refused(&lab, "[[rule]]\nname = 1", &[], "file");
    assert!(said.contains("rules.toml:2"), "{said}");
    // Facts and flags of its own are declared; what none asks for is still refused.
    let own = "facts = ['fused', '--my-norms']\n[[rule]]\nname = 'x'\nsays = 'y'\nwhen = 'fused --my-norms'";
    let said = refused(&lab, own, &["--with", "fusd"], "flag");
    assert!(said.contains("rules ask for fused"), "{said}");
    let flags: Vec<&str> = DENSE.split_whitespace().collect();
    let args = ["audit", "megatron", "--gpus", "2", "--rules", "rules.toml", "--with", "fused"];
    lab.ok(&[&args[..], &["--"], &flags].concat());
}

#[test]
fn a_flag_of_a_fork_has_rules_and_its_file_is_their_source() {
    let lab = Lab::new("audit-own-flag");
    lab.write(
        "mine.toml",
        "facts = ['--my-norms']\n[[rule]]\nname = 'sequence-parallel-norms'\nof = ['norm']\nwhen = 'sp !--my-norms'\nsums = ['tp']\n\
         says = 'unless --my-norms is given'",
    );
    for (own, status) in [("", 0), ("--my-norms", 1)] {
        let flags = [DENSE, UNTIED, super::TP_SP, own].join(" ");
        let words: Vec<&str> = flags.split_whitespace().collect();
        let args = ["audit", "megatron", "--gpus", "2", "--rules", "mine.toml", "--"];
        let out = lab.shardc(&[&args[..], &words].concat());
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        assert_eq!(out.status.code(), Some(status), "{own}: {said}");
    }
    lab.write("all.toml", "[[rule]]\nname = 'loss-again'\ntimes = 'dp'\nsays = 'once more'");
    let flags: Vec<&str> = DENSE.split_whitespace().collect();
    let args = ["audit", "megatron", "--gpus", "2", "--rules", "all.toml", "--"];
    let said = lab.shardc(&[&args[..], &flags].concat()).stdout;
    let said = String::from_utf8(said).expect("text");
    // No commit of Megatron-LM has it.
    assert!(said.contains("loss-again (all.toml): once more"), "{said}");
}

#[test]
fn what_its_validation_refuses_is_named_as_there() {
    let lab = Lab::new("audit-validation");
    let layout = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout";
    let cases: [(&[&str], &str); 24] = [
        (&[DENSE, "--overlap-param-gather"], "--overlap-param-gather needs --overlap-grad-reduce"),
        (&[DENSE, "--batch-size 3"], "--batch-size is no longer valid"),
        (&[DENSE, "--step-batch-size-schedule 0:16"], "--global-batch-size are not given together"),
        (&[DENSE, "--use-megatron-fsdp"], "needs --ckpt-format fsdp_dtensor"),
        (&[DENSE, "--ckpt-format fsdp_dtensor"], "needs --use-megatron-fsdp"),
        // Models and layouts of which nothing would be right.
        (&[DENSE, "--use-torch-fsdp2"], "--use-torch-fsdp2 is not audited"),
        (&[DENSE, "--hybrid-layer-pattern M*"], "--hybrid-layer-pattern is not audited"),
        (
            &[DENSE, "--context-parallel-size 2 --cp-comm-type a2a --num-query-groups 1"],
            "AttnFuncWithCPAndQKVOA2A",
        ),
        (&[DENSE, "--tp-comm-overlap"], "--tp-comm-overlap needs --sequence-parallel"),
        (&[DENSE, "--moe-ffn-hidden-size 32"], "needs --num-experts"),
        (
            &[DENSE, "--num-virtual-stages-per-pipeline-rank 2"],
            "--pipeline-model-parallel-size above 1",
        ),
        (&[DENSE, "--recompute-granularity full"], "needs --recompute-method"),
        (&[DENSE, "--train-iters 10 --train-samples 80"], "are not given together"),
        (&[DENSE, "--save here"], "--save needs --save-interval"),
        (&[DENSE, "--fp8-format e4m3 --fp4-format e2m1"], "--fp4-format and --fp8-format"),
        (
            &[DENSE, EXPERTS, "--moe-router-enable-expert-bias"],
            "--moe-router-score-function sigmoid",
        ),
        (&[LATENT, "--rotary-interleaved"], "does not work with --multi-latent-attention"),
        (&[DENSE, "--cp-comm-type a2a+p2p"], "--hierarchical-context-parallel-sizes"),
        (
            &[DENSE, "--ffn-hidden-size 129 --tensor-model-parallel-size 2"],
            "is divisible by its ranks (2)",
        ),
        (&[DENSE, layout, "Ett|L|"], "stages of the layout (3) are divisible by pp (2)"),
        (&[DENSE, layout, "Et|tx"], "layers are E, t, m and L"),
        (&[DENSE, layout, "Et|ttL"], "decoder layers of the layout (3) are num_layers (2)"),
        (&[DENSE, layout, "E(t|)*99999999999999999999L"], "is a layout of stages"),
        (
            &[DENSE, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2"],
            "0 layers between the first and the last stage",
        ),
    ];
    for (flags, word) in cases {
        let words: Vec<&str> = flags.iter().flat_map(|f| f.split_whitespace()).collect();
        let args = [&["audit", "megatron", "--gpus", "2", "--"], &words[..]].concat();
        let said = lab.refuses(&args, 2, "audit");
        let flat = said.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains(word), "{flags:?}: no {word}: {said}");
    }
    let flags = [DENSE, layout, "Et|tL"].join(" ");
    let words: Vec<&str> = flags.split_whitespace().collect();
    lab.ok(&[&["audit", "megatron", "--gpus", "2", "--"], &words[..]].concat());
}

#[test]
fn rules_ask_for_arguments_that_there_are() {
    let table = Table::megatron();
    let words = table.rule.iter().flat_map(|r| r.when.split_whitespace());
    let flags: BTreeSet<&str> = words
        .map(|w| w.trim_start_matches('!'))
        .filter(|w| w.starts_with("--"))
        .map(|w| w.split('=').next().unwrap_or(w))
        .collect();
    assert!(flags.len() > 50);
    for flag in flags {
        assert!(arguments::find(flag).is_some(), "no argument {flag}");
    }
}
