//! `shardc audit`: published recipes without findings, one planted fault of each kind found where it is, and what cannot be
//! audited refused by name.

mod check;
mod faults;
mod foreign;
mod page;
mod plans;
mod refused;
mod transformers;
mod words;

use crate::lab::Lab;
use serde_json::Value as Json;
use shardc::audit::rules::Table;

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

const TP_SP: &str = "--tensor-model-parallel-size 2 --sequence-parallel";

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

#[test]
fn fewer_groups_than_ranks_have_no_finding() {
    let lab = Lab::new("audit-groups");
    let found =
        json(&lab, 8, &[DENSE, UNTIED, "--tensor-model-parallel-size 8 --sequence-parallel"], &[]);
    assert_eq!(found["findings"], Json::Array(vec![]));
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
