//! `shardc audit`: published recipes without findings, one planted fault of each kind found where it is, and what cannot be
//! audited refused by name.

mod page;
mod transformers;
mod words;

use crate::lab::Lab;
use serde_json::Value as Json;
use shardc::audit::rules::Table;
use shardc_testing::{Tool, skip};
use std::path::Path;
use std::process::Command;

const RECIPES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/audit/megatron");

/// A dense decoder of two layers.
const DENSE: &str = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --group-query-attention \
    --num-query-groups 4 --kv-channels 8 --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope \
    --normalization RMSNorm --swiglu --disable-bias-linear --vocab-size 128 --make-vocab-size-divisible-by 1 \
    --micro-batch-size 1 --global-batch-size 8 --bf16 --use-distributed-optimizer";
const UNTIED: &str = "--untie-embeddings-and-output-weights";
const EXPERTS: &str =
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-grouped-gemm";
const LATENT: &str = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --seq-length 64 \
    --max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
    --vocab-size 128 --make-vocab-size-divisible-by 1 --micro-batch-size 1 --global-batch-size 8 --bf16 \
    --multi-latent-attention --qk-layernorm --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 \
    --v-head-dim 8 --untie-embeddings-and-output-weights";
const SINKS: &str = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 32 --num-attention-heads 8 --group-query-attention \
    --num-query-groups 4 --kv-channels 8 --seq-length 256 --max-position-embeddings 256 --position-embedding-type rope \
    --normalization RMSNorm --softmax-type learnable --quick-geglu --vocab-size 128 --make-vocab-size-divisible-by 1 \
    --micro-batch-size 1 --global-batch-size 8 --bf16 --untie-embeddings-and-output-weights";

/// What an audit of flags on so many ranks prints as JSON.
fn json(lab: &Lab, gpus: usize, flags: &[&str], more: &[&str]) -> Json {
    let gpus = gpus.to_string();
    let words: Vec<&str> = flags.iter().flat_map(|f| f.split_whitespace()).collect();
    let args =
        [&["audit", "megatron", "--gpus", &gpus, "--format", "json"], more, &["--"], &words[..]];
    let out = lab.shardc(&args.concat());
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    let found: Json =
        serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{flags:?}: {e}: {said}"));
    let findings = found["findings"].as_array().expect("a list").len();
    assert_eq!(out.status.code(), Some(i32::from(findings > 0)), "{said}");
    found
}

#[test]
fn published_recipes_have_no_finding_but_sinks_of_one_rank() {
    let lab = Lab::new("audit-recipes");
    let mut all: Vec<_> =
        std::fs::read_dir(RECIPES).expect("recipes").map(|e| e.expect("a file").path()).collect();
    all.sort();
    assert!(all.len() > 10);
    for (i, file) in all.into_iter().enumerate() {
        let out =
            lab.shardc(&["audit", "megatron", file.to_str().expect("a path"), "--format", "json"]);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        let found: Json = serde_json::from_slice(&out.stdout)
            .unwrap_or_else(|e| panic!("{}: {e}: {said}", file.display()));
        for p in found["parameters"].as_array().expect("rows") {
            assert_ne!(p["class"], "other", "{}: {p}", file.display());
        }
        if shardc_testing::taken(i, 4) {
            let text = lab.shardc(&["audit", "megatron", file.to_str().expect("a path")]).stdout;
            let text = String::from_utf8(text).expect("text");
            assert!(text.lines().all(|l| l.chars().count() <= 100), "{text}");
        }
        let findings = found["findings"].as_array().expect("a list");
        if file.ends_with("gpt_oss_20b.args") {
            assert_eq!(findings.len(), 1, "{findings:#?}");
            assert_eq!(findings[0]["kind"], "norm-left-out");
            assert_eq!(findings[0]["parameters"][0], "model.layers.0-23.self_attn.sinks");
            assert_eq!(findings[0]["axes"], "tp");
            continue;
        }
        assert!(findings.is_empty(), "{}: {findings:#?}", file.display());
    }
}

/// A planted fault: its kind in words, ranks, flags, rules of a fork, other flags of the command; what is found.
type Planted =
    (&'static str, usize, &'static [&'static str], &'static str, &'static [&'static str], Want);
/// Kind, a part of the parameter's name, axes.
type Want = (&'static str, &'static str, &'static str);

const TP_SP: &str = "--tensor-model-parallel-size 2 --sequence-parallel";
const FAULTS: [Planted; 15] = [
    (
        "norms under sequence parallelism",
        4,
        &[DENSE, UNTIED, TP_SP],
        "[[rule]]\nname = 'sequence-parallel-norms'\nof = ['norm']\nsays = 'norms are not marked'",
        &[],
        ("sum-missing", "input_layernorm", "tp"),
    ),
    (
        "sinks counted on one rank",
        4,
        &[SINKS, EXPERTS, TP_SP, "--expert-tensor-parallel-size 1"],
        "",
        &[],
        ("norm-left-out", "sinks", "tp"),
    ),
    (
        "experts left out of the norm",
        4,
        &[
            DENSE,
            UNTIED,
            EXPERTS,
            TP_SP,
            "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
        ],
        "",
        &["--at", "0.18.2", "--with", "te>=2.13"],
        ("norm-left-out", "experts", "tp"),
    ),
    (
        "a loss scaled twice over cp",
        4,
        &[DENSE, UNTIED, "--context-parallel-size 2"],
        "[[rule]]\nname = 'loss-again'\ntimes = 'cp'\nsays = 'loss_func multiplies by cp once more'",
        &[],
        ("scale", "embed_tokens", "cp"),
    ),
    (
        "a loss per token with cp",
        4,
        &[DENSE, UNTIED, "--context-parallel-size 2 --calculate-per-token-loss"],
        "",
        &["--at", "0.11.0"],
        ("scale", "embed_tokens", "cp"),
    ),
    (
        "tied embeddings with stages",
        2,
        &[DENSE, "--pipeline-model-parallel-size 2"],
        "[[rule]]\nname = 'tied-embeddings'\nof = ['embedding']\nsays = 'no group of first and last stage'",
        &[],
        ("sum-missing", "embed_tokens", "pp"),
    ),
    (
        "the gate of a shared expert",
        4,
        &[
            DENSE,
            UNTIED,
            EXPERTS,
            TP_SP,
            "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate",
        ],
        "[[rule]]\nname = 'shared-expert-gate'\nof = ['shared-gate']\nsays = 'the gate is not marked'",
        &[],
        ("sum-missing", "shared_expert_gate", "tp"),
    ),
    (
        "norms of queries and keys under tp",
        2,
        &[DENSE, UNTIED, "--qk-layernorm --tensor-model-parallel-size 2"],
        "[[rule]]\nname = 'head-norms'\nof = ['head-norm']\nsays = 'only with sequence parallelism'",
        &[],
        ("sum-missing", "q_norm", "tp"),
    ),
    (
        "losses of routers over cp",
        4,
        &[DENSE, UNTIED, EXPERTS, "--context-parallel-size 2 --moe-aux-loss-coeff 0.01"],
        "",
        &["--at", "0.15.3"],
        ("scale", "losses of routers", "cp"),
    ),
    (
        "losses of routers per token over tp and cp",
        4,
        &[
            DENSE,
            UNTIED,
            EXPERTS,
            TP_SP,
            "--context-parallel-size 2 --moe-aux-loss-coeff 0.01 --calculate-per-token-loss",
        ],
        "",
        &["--at", "0.18.2"],
        ("scale", "losses of routers", "cp tp"),
    ),
    (
        "experts divided by their own ranks of data parallelism",
        4,
        &[DENSE, UNTIED, EXPERTS, "--expert-model-parallel-size 2"],
        "[[rule]]\nname = 'data-parallel-mean'\nbut = ['expert']\nwhen = '!per-token'\ntimes = '1/dp/cp'\nsays = 'dense'\n\
         [[rule]]\nname = 'experts-mean'\nof = ['expert']\ntimes = '1/edp'\nsays = 'divided by edp'",
        &[],
        ("scale", "experts", "edp dp"),
    ),
    (
        "experts averaged in the collective",
        4,
        &[
            DENSE,
            UNTIED,
            EXPERTS,
            TP_SP,
            "--expert-tensor-parallel-size 1 --expert-model-parallel-size 2 --ddp-average-in-collective",
        ],
        "",
        &["--at", "0.11.0"],
        ("scale", "experts", "ep edp dp"),
    ),
    (
        "embeddings of layers that predict further tokens",
        2,
        &[DENSE, UNTIED, EXPERTS, "--pipeline-model-parallel-size 2 --mtp-num-layers 1"],
        "[[rule]]\nname = 'tied-embeddings'\nof = ['embedding']\nwhen = 'tied'\nsums = ['pp']\nsays = 'only of tied ones'",
        &[],
        ("sum-missing", "embed_tokens", "pp"),
    ),
    (
        "norms of latents",
        4,
        &[LATENT, TP_SP],
        "[[rule]]\nname = 'sequence-parallel-norms'\nof = ['norm', 'latent-q-norm']\nwhen = 'sp'\nsums = ['tp']\nsays = 'by name'",
        &[],
        ("sum-missing", "kv_a_layernorm", "tp"),
    ),
    (
        "experts over the ranks of dense parameters",
        4,
        &[DENSE, UNTIED, EXPERTS, TP_SP, "--expert-tensor-parallel-size 1"],
        "",
        &["--at", "0.18.2"],
        ("sum-missing", "experts", "tp"),
    ),
];

#[test]
fn a_planted_fault_of_each_kind_is_found_where_it_is() {
    let lab = Lab::new("audit-faults");
    for (i, (what, gpus, flags, rules, more, want)) in FAULTS.into_iter().enumerate() {
        let file = format!("{i}.toml");
        lab.write(&file, rules);
        let fork = ["--rules", &file];
        let more = if rules.is_empty() { more.to_vec() } else { [more, &fork].concat() };
        let found = json(&lab, gpus, flags, &more);
        let all = found["findings"].as_array().expect("a list");
        let (kind, param, axes) = want;
        let is = |f: &Json| {
            let named = f["parameters"]
                .as_array()
                .expect("names")
                .iter()
                .any(|p| p.as_str().expect("a name").contains(param));
            f["kind"] == kind && f["axes"] == axes && named
        };
        assert!(all.iter().any(is), "{what}: {all:#?}");
        // And nothing else is said of it: one fault, one finding.
        assert_eq!(all.len(), 1, "{what}: {all:#?}");
        // Without the fault there is none, but for sinks, which no version counts on all ranks.
        if !flags.contains(&SINKS) {
            let clean = json(&lab, gpus, flags, &[]);
            assert_eq!(clean["findings"], Json::Array(vec![]), "{what}");
        }
    }
}

#[test]
fn latent_attention_without_sequence_parallelism_has_parts_of_gradients() {
    let lab = Lab::new("audit-latent");
    let found = json(&lab, 2, &[LATENT, "--tensor-model-parallel-size 2"], &[]);
    let all = found["findings"].as_array().expect("a list");
    assert_eq!(all.len(), 1, "{all:#?}");
    assert_eq!((&all[0]["kind"], &all[0]["axes"]), (&"sum-missing".into(), &"tp".into()));
    assert_eq!(
        all[0]["parameters"],
        serde_json::json!(["model.layers.0-1.self_attn.kv_a_proj_with_mqa.weight"])
    );
    assert!(all[0]["rules"].to_string().contains("multi_latent_attention.py:971"), "{all:#?}");
    // Megatron-LM's own layers also sum the norm of queries again.
    let flags = "--tensor-model-parallel-size 2 --transformer-impl local";
    let found = json(&lab, 2, &[LATENT, flags], &[]);
    let kind = |f: &Json| format!("{} {}", f["kind"], f["parameters"][0]);
    let mut all: Vec<String> =
        found["findings"].as_array().expect("a list").iter().map(kind).collect();
    all.sort();
    assert_eq!(all.len(), 2, "{all:#?}");
    assert!(all[0].contains("sum-missing") && all[0].contains("kv_a_proj_with_mqa"), "{all:#?}");
    assert!(all[1].contains("sum-twice") && all[1].contains("q_a_layernorm"), "{all:#?}");
}

/// What is found: kinds and parameters.
type Found = &'static [(&'static str, &'static str)];

#[test]
fn configurations_and_versions_have_these_findings_alone() {
    let lab = Lab::new("audit-alone");
    let wide = "--expert-tensor-parallel-size 4 --context-parallel-size 2";
    let old = &["--at", "0.13.0"][..];
    let keys: Found = &[("sum-missing", "kv_a_proj_with_mqa")];
    let whole = LATENT.replace("--q-lora-rank 16", "");
    let own = "--tensor-model-parallel-size 2 --transformer-impl local --normalization LayerNorm";
    let all: [(usize, &[&str], &[&str], Found); 12] = [
        (4, &[DENSE, UNTIED, EXPERTS, "--expert-tensor-parallel-size 2"], &[], &[]),
        (8, &[DENSE, UNTIED, EXPERTS, TP_SP, wide], &[], &[]),
        (8, &[DENSE, UNTIED, EXPERTS, wide], &[], &[]),
        (8, &[whole.as_str(), "--tensor-model-parallel-size 2"], &[], keys),
        (8, &[whole.as_str(), TP_SP], &[], &[]),
        (4, &[LATENT, TP_SP], &["--at", "0.14"], &[]),
        (4, &[LATENT, TP_SP], old, keys),
        (4, &[LATENT, "--tensor-model-parallel-size 2"], old, keys),
        (4, &[LATENT, own, "--sequence-parallel"], &[], keys),
        // 0.16 is 0.16.0, which scales losses of routers by cp.
        (
            4,
            &[DENSE, UNTIED, EXPERTS, "--context-parallel-size 2 --moe-aux-loss-coeff 0.01"],
            &["--at", "0.16"],
            &[],
        ),
        // No layer has experts: nothing is split by this.
        (4, &[DENSE, "--expert-tensor-parallel-size 1 --tensor-model-parallel-size 2"], &[], &[]),
        (
            4,
            &[
                DENSE,
                UNTIED,
                EXPERTS,
                TP_SP,
                "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
            ],
            &["--at", "0.18.2", "--with", "te=2.14"],
            &[("norm-left-out", "experts")],
        ),
    ];
    for (gpus, flags, more, want) in all {
        let found = json(&lab, gpus, flags, more);
        let found = found["findings"].as_array().expect("a list");
        assert_eq!(found.len(), want.len(), "{flags:?} {more:?}: {found:#?}");
        for (f, (kind, param)) in found.iter().zip(want) {
            assert_eq!(f["kind"], *kind, "{flags:?}: {f}");
            assert!(f["parameters"].to_string().contains(param), "{flags:?}: {f}");
        }
    }
}

#[test]
fn fewer_groups_than_ranks_have_no_finding() {
    let lab = Lab::new("audit-groups");
    let found =
        json(&lab, 8, &[DENSE, UNTIED, "--tensor-model-parallel-size 8 --sequence-parallel"], &[]);
    assert_eq!(found["findings"], Json::Array(vec![]));
}

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
    ] {
        let given: Vec<&str> = flags.iter().flat_map(|f| f.split_whitespace()).collect();
        let args = ["audit", "megatron", "--gpus", "8", "--at", version, "--"];
        let said = lab.refuses(&[&args[..], &given[..]].concat(), 2, "audit");
        assert!(said.contains(word), "{version}: no {word}: {said}");
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

#[test]
fn every_rule_names_its_source() {
    let table = Table::megatron();
    for r in &table.rule {
        assert!(
            r.source.ends_with(".py") && r.commit.is_some() || r.source.contains(".py:"),
            "{}",
            r.name
        );
        assert!(r.until.is_none() || r.commit.is_some(), "{}: which commit ended it?", r.name);
        assert!(!r.says.is_empty(), "{}", r.name);
        let known = |c: &String| {
            c == "all" || c == "router-loss" || table.class.iter().any(|x| x.name == *c)
        };
        assert!(r.of.iter().chain(&r.but).all(known), "{}", r.name);
    }
}

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

#[test]
fn torchtitan_and_deepspeed_are_read_with_a_model() {
    let lab = Lab::new("audit-foreign");
    let model = format!("{}/qwen3_moe", crate::lab::FIXTURES);
    lab.write(
        "titan.toml",
        "[parallelism]\ntensor_parallel_degree = 2\nexpert_parallel_degree = 2\ndata_parallel_shard_degree = -1\n\
         own_knob = 3\n[training]\nlocal_batch_size = 2\nglobal_batch_size = 8\nseq_len = 16\n",
    );
    let titan = ["audit", "torchtitan", "titan.toml", "--model", &model, "--gpus", "4"];
    let text = String::from_utf8(lab.ok(&titan).stdout).expect("text");
    assert!(text.contains("parallelism.own_knob = 3: not modelled"), "{text}");
    assert!(text.contains("layout  dp=2 tp=2 ep=2 etp=1 sp"), "{text}");
    assert!(text.contains("input_layernorm") && text.contains("dp tp"), "{text}");
    let out = lab.ok(&[&titan[..], &["--format", "json"]].concat());
    let json: Json = serde_json::from_slice(&out.stdout).expect("JSON");
    let row = |name: &str| {
        let rows = json["parameters"].as_array().expect("rows");
        rows.iter()
            .find(|r| r["name"].as_str().expect("a name").contains(name))
            .expect("a row")
            .clone()
    };
    assert_eq!(
        (&row("q_norm")["sums"], &row("q_norm")["rule_sums"]),
        (&"dp tp".into(), &"dp tp".into())
    );
    let said = lab.refuses(
        &["audit", "torchtitan", "titan.toml", "--model", &model, "--gpus", "3"],
        2,
        "audit",
    );
    assert!(said.contains("ParallelDims"), "{said}");
    lab.refuses(&["audit", "torchtitan", "titan.toml", "--gpus", "4"], 2, "audit");
    lab.write("ds.json", r#"{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}"#);
    let dense = format!("{}/llama_gqa", crate::lab::FIXTURES);
    let text = lab.ok(&["audit", "deepspeed", "ds.json", "--model", &dense, "--gpus", "4"]).stdout;
    assert!(String::from_utf8(text).expect("text").contains("no finding"));
    // AutoTP sums gradients of norms of heads as the plan of transformers says, with all of ZeRO.
    lab.write("tp.json", r#"{"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3}}"#);
    for family in ["qwen3", "llama_gqa"] {
        let own = format!("{}/{family}", crate::lab::FIXTURES);
        let args = ["audit", "deepspeed", "tp.json", "--model", &own, "--gpus", "4"];
        let text = String::from_utf8(lab.ok(&args).stdout).expect("text");
        assert!(text.contains("no finding"), "{text}");
    }
    lab.write("sp.json", r#"{"train_batch_size": 8, "sequence_parallel_size": 2}"#);
    let args = ["audit", "deepspeed", "sp.json", "--model", &dense, "--gpus", "4"];
    assert!(String::from_utf8(lab.ok(&args).stdout).expect("text").contains("no finding"));
    lab.write("bad.json", r#"{"train_batch_size": 9, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}"#);
    let said = lab.refuses(
        &["audit", "deepspeed", "bad.json", "--model", &dense, "--gpus", "4"],
        2,
        "audit",
    );
    assert!(said.contains("_batch_assertion"), "{said}");
}

#[test]
fn values_that_other_software_refuses_are_refused_by_name() {
    let lab = Lab::new("audit-foreign-refused");
    let dense = format!("{}/llama_gqa", crate::lab::FIXTURES);
    let large = u64::MAX;
    for (text, word) in [
        (r#"{"train_batch_size": "auto"}"#.into(), "train_batch_size = \"auto\": a whole number"),
        (r#"{"zero_optimization": {"stage": 9}}"#.into(), "a number from 0 to 3"),
        (r#"{"zero_optimization": {"stage": "auto"}}"#.into(), "a number from 0 to 3"),
        (r#"{"zero_optimization": true}"#.into(), "a section in braces"),
        (r#"{"bf16": {"enabled": "auto"}}"#.into(), "true or false"),
        (r#"{"expert_parallel": {"autoep_size": 2}}"#.into(), "autoep_size of DeepSpeed is not audited"),
        (format!(r#"{{"train_micro_batch_size_per_gpu": {large}}}"#), "a whole number"),
        (
            r#"{"train_micro_batch_size_per_gpu": 16777216, "gradient_accumulation_steps": 16777216}"#
                .into(),
            "it is at most",
        ),
    ] {
        let text: String = text;
        lab.write("ds.json", &text);
        let args = ["audit", "deepspeed", "ds.json", "--model", &dense, "--gpus", "1048576"];
        let said = lab.refuses(&args, 2, "audit");
        let flat = said.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains(word), "{text}: no {word}: {said}");
    }
    lab.write(
        "ds.json",
        r#"{"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": true}, "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "mics_shard_size": 2}}"#,
    );
    let args = ["audit", "deepspeed", "ds.json", "--model", &dense, "--gpus", "2"];
    let text = String::from_utf8(lab.ok(&args).stdout).expect("text");
    assert!(text.starts_with("not modelled\n"), "{text}");
    for word in ["gradient_clipping = 1.0", "offload_optimizer", "mics_shard_size = 2"] {
        assert!(text.contains(word), "no {word}: {text}");
    }
    let mut config: Json =
        serde_json::from_slice(&std::fs::read(format!("{dense}/config.json")).expect("a fixture"))
            .expect("JSON");
    config["tie_word_embeddings"] = true.into();
    lab.write("config.json", config.to_string());
    for (text, word) in [
        ("pipeline_parallel_degree = 2", "weight tying"),
        ("tensor_parallel_degree = 16777216\ncontext_parallel_degree = 16777216", "ParallelDims"),
        ("tensor_parallel_degree = \"two\"", "a whole number"),
    ] {
        lab.write("titan.toml", format!("[parallelism]\n{text}\n"));
        let args = ["audit", "torchtitan", "titan.toml", "--model", "config.json", "--gpus", "2"];
        assert!(lab.refuses(&args, 2, "audit").contains(word), "{text}");
    }
}
