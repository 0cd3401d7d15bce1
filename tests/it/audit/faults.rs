//! One planted fault of each kind, found where it is; and configurations of which something is said, and nothing else.

use super::{DENSE, EXPERTS, LATENT, SINKS, TP_SP, UNTIED, json};
use crate::lab::Lab;
use serde_json::Value as Json;

/// A planted fault: its kind in words, ranks, flags, rules of a fork, other flags of the command; what is found.
type Planted =
    (&'static str, usize, &'static [&'static str], &'static str, &'static [&'static str], Want);
/// Kind, a part of the parameter's name, axes.
type Want = (&'static str, &'static str, &'static str);

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
    let heads = "--context-parallel-size 2 --cp-comm-type a2a";
    let all: [(usize, &[&str], &[&str], Found); 14] = [
        // Heads that ranks of cp exchange split no parameter; sinks are summed over cp though they are whole.
        (8, &[LATENT, TP_SP, heads], &[], &[]),
        (4, &[SINKS, EXPERTS, heads], &[], &[("sum-twice", "sinks")]),
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
