//! What cannot be audited, refused by name, and flags that are listed.

use super::{DENSE, EXPERTS, SINKS, UNTIED};
use crate::lab::Lab;

#[test]
fn what_cannot_be_audited_is_refused_by_name() {
    let lab = Lab::new("audit-refused");
    let refused = |gpus: &str, flags: &[&str], words: &[&str]| {
        let given: Vec<&str> = flags.iter().flat_map(|f| f.split_whitespace()).collect();
        let args = [&["audit", "megatron", "--gpus", gpus, "--"], &given[..]].concat();
        let said = lab.refuses(&args, 2, "audit");
        words.iter().for_each(|w| assert!(said.contains(w), "{flags:?}: no {w}: {said}"));
    };
    refused(
        "6",
        &[DENSE, "--tensor-model-parallel-size 4"],
        &["validate_args: world size (6)", "(4)"],
    );
    refused("2", &[DENSE, "--fp16"], &["--fp16 and --bf16 are not given together"]);
    refused(
        "2",
        &[DENSE, "--tensor-model-parallel-size 2", EXPERTS],
        &["MoELayer.forward", "--sequence-parallel"],
    );
    refused("3", &[DENSE], &["num_microbatches_calculator"]);
    refused("2", &[DENSE, "--expert-model-parallel-size 2"], &["needs --num-experts"]);
    refused(
        "2",
        &[DENSE, "--calculate-per-token-loss --ddp-average-in-collective"],
        &["DistributedDataParallel"],
    );
    refused("1", &[DENSE, "--num-layers many"], &["`--num-layers many`: int is wanted"]);
    refused(
        "1",
        &[DENSE, "--num-layers $LAYERS"],
        &["write the value of $LAYERS: no script is executed"],
    );
    refused("1", &[DENSE, "--normalization GroupNorm"], &["one of LayerNorm, RMSNorm"]);
    refused("1", &[DENSE, "--position-embedding-type relative"], &["a model of no family"]);
    refused("1", &[DENSE, "--tensor-model-parallel-size -2"], &["a number from 0 to 16777216"]);
    let large = "--tensor-model-parallel-size 16777216 --pipeline-model-parallel-size 16777216 --context-parallel-size 16777216";
    refused("1", &[DENSE, large], &["validate_args: world size (1)"]);
    refused("1", &["--num-layers 2"], &["--micro-batch-size is not given"]);
    lab.write("empty.args", "# nothing\n");
    lab.refuses(&["audit", "megatron", "empty.args", "--gpus", "1"], 2, "audit");
    lab.refuses(&["audit", "megatron", "none.args", "--gpus", "1"], 2, "file");
    let hostile = "--nproc_per_node 18446744073709551615 --nnodes 2";
    let given: Vec<&str> = [DENSE, hostile].iter().flat_map(|f| f.split_whitespace()).collect();
    let args = [&["audit", "megatron", "--"], &given[..]].concat();
    assert!(lab.refuses(&args, 2, "audit").contains("from 1 to 1048576"));
    for (version, flags, word) in [
        ("0.15.3", [DENSE, "--tensor-model-parallel-size 8"], "num_query_groups is a multiple"),
        ("0.14.0", [SINKS, EXPERTS], "there is no --softmax-type"),
        ("0.11.0", [DENSE, "--num-experts 4 --mtp-num-layers 1"], "there is no --mtp-num-layers"),
        ("0.13.1", [DENSE, "--use-megatron-fsdp"], "before 0.14.0 there is no --use-megatron-fsdp"),
    ] {
        let given: Vec<&str> = flags.iter().flat_map(|f| f.split_whitespace()).collect();
        let args = ["audit", "megatron", "--gpus", "8", "--at", version, "--"];
        let said = lab.refuses(&[&args[..], &given[..]].concat(), 2, "audit");
        assert!(said.contains(word), "{version}: no {word}: {said}");
    }
    // What a later release refuses first.
    for (before, from, flags, word) in [
        ("0.17.1", "0.18.0", "--moe-ffn-hidden-size 32", "needs --num-experts"),
        (
            "0.11.0",
            "0.12.0",
            "--calculate-per-token-loss --ddp-average-in-collective",
            "are not given together",
        ),
    ] {
        let given: Vec<&str> = [DENSE, flags].iter().flat_map(|f| f.split_whitespace()).collect();
        let args =
            |at| [&["audit", "megatron", "--gpus", "2", "--at", at, "--"], &given[..]].concat();
        assert!(lab.refuses(&args(from), 2, "audit").contains(word), "{from}");
        let out = lab.shardc(&args(before));
        assert!(
            out.status.code().is_some_and(|c| c < 2),
            "{}",
            String::from_utf8_lossy(&out.stderr)
        );
    }
    let given: Vec<&str> = DENSE.split_whitespace().collect();
    let args = ["audit", "megatron", "--gpus", "1", "--with", "cuda>=13", "--"];
    let said = lab.refuses(&[&args[..], &given[..]].concat(), 2, "flag");
    assert!(said.contains("no rule") && said.contains("te>=2.13"), "{said}");
    for (version, word) in
        [("0.5.0", "begin with 0.11.0"), ("new", "is no version"), ("0.20", "end with 0.19.0")]
    {
        let given: Vec<&str> = DENSE.split_whitespace().collect();
        let args =
            [&["audit", "megatron", "--gpus", "1", "--at", version, "--"], &given[..]].concat();
        assert!(lab.refuses(&args, 2, "flag").contains(word), "{version}");
    }
}

#[test]
fn unknown_flags_are_listed_first() {
    let lab = Lab::new("audit-unknown");
    let given: Vec<&str> =
        [DENSE, UNTIED, "--my-own-flag 3 --tensor-model-paralel-size 2 --freeze-all-layers"]
            .iter()
            .flat_map(|f| f.split_whitespace())
            .collect();
    let args = [&["audit", "megatron", "--gpus", "1", "--"], &given[..]].concat();
    let text = String::from_utf8(lab.ok(&args).stdout).expect("text");
    assert!(text.starts_with("not modelled\n"), "{text}");
    for word in [
        "--my-own-flag 3: no argument of Megatron-LM at d98e8a64",
        "--tensor-model-parallel-size)",
        "--freeze-all-layers: not modelled",
    ] {
        assert!(text.contains(word), "{text}");
    }
    assert!(text.lines().all(|l| l.chars().count() <= 100), "{text}");
}
