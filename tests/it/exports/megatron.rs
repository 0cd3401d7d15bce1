//! Flags of Megatron-LM against its own argument parser: `export/src/megatron/arguments.json`, which
//! `tests/exports/arguments.py` made of its source, and rules of its `validate_args` and `TransformerConfig`.

use crate::lab::Lab;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::path::Path;

/// The table of arguments.
fn arguments() -> Json {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("export/src/megatron/arguments.json");
    let text = std::fs::read_to_string(path).expect("a table");
    serde_json::from_str(&text).expect("JSON")
}

/// Flags and their values, each of which the parser takes.
pub fn parsed(text: &str) -> BTreeMap<String, Vec<String>> {
    let table = arguments();
    assert!(text.contains(&table["commit"].as_str().expect("a commit")[..8]), "{text}");
    let mut out = BTreeMap::new();
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        let mut words = line.split(' ').map(String::from);
        let flag = words.next().expect("a flag");
        let values: Vec<String> = words.collect();
        let row = table.get(&flag).unwrap_or_else(|| panic!("no flag {flag}"));
        match &row["takes"] {
            Json::Number(n) => assert_eq!(n.as_u64(), Some(values.len() as u64), "{line}"),
            _ => assert!(!values.is_empty(), "{line}"),
        }
        for v in &values {
            let good = match row["type"].as_str() {
                Some("int") => v.parse::<i64>().is_ok(),
                Some("float") => v.parse::<f64>().is_ok(),
                _ => true,
            };
            let known = row["choices"].as_array().is_none_or(|c| c.iter().any(|c| c == v));
            assert!(good && known, "{line}");
        }
        assert!(out.insert(flag, values).is_none(), "{line} is there twice");
    }
    rules(&out);
    out
}

/// What must be given where another flag is.
const NEEDS: [(&str, &[&str]); 12] = [
    ("--overlap-param-gather", &["--overlap-grad-reduce", "--use-distributed-optimizer"]),
    ("--use-megatron-fsdp", &["--use-distributed-optimizer", "--init-model-with-meta-device"]),
    ("--data-parallel-sharding-strategy", &["--use-megatron-fsdp"]),
    ("--outer-dp-sharding-strategy", &["--num-distributed-optimizer-instances"]),
    ("--num-distributed-optimizer-instances", &["--use-distributed-optimizer"]),
    ("--cross-entropy-loss-fusion", &["--cross-entropy-fusion-impl"]),
    ("--recompute-modules", &["--recompute-granularity"]),
    ("--moe-router-group-topk", &["--moe-router-num-groups"]),
    ("--moe-router-enable-expert-bias", &["--moe-router-score-function"]),
    ("--kv-lora-rank", &["--multi-latent-attention", "--rope-type"]),
    ("--num-query-groups", &["--group-query-attention"]),
    ("--num-experts", &["--moe-router-topk", "--moe-grouped-gemm"]),
];

/// Modules that `TransformerConfig` makes again.
const MODULES: [&str; 7] =
    ["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"];

fn rules(flags: &BTreeMap<String, Vec<String>>) {
    let has = |flag: &str| flags.contains_key(flag);
    for (flag, all) in NEEDS {
        if has(flag) {
            all.iter().for_each(|other| assert!(has(other), "{flag} without {other}: {flags:?}"));
        }
    }
    let value = |flag: &str| flags.get(flag).map(|v| v.join(" "));
    if has("--use-megatron-fsdp") {
        assert_eq!(value("--ckpt-format").as_deref(), Some("fsdp_dtensor"));
        assert!(["sgd", "adam"].contains(&value("--optimizer").as_deref().unwrap_or("adam")));
    }
    assert_ne!(value("--cross-entropy-fusion-impl").as_deref(), Some("te"));
    for m in flags.get("--recompute-modules").into_iter().flatten() {
        assert!(MODULES.contains(&m.as_str()), "{m}");
        assert!(m != "moe_act" || has("--moe-grouped-gemm"));
    }
}

/// Modules and numbers of layers that are computed again have its words; what has none is refused.
#[test]
fn recomputation_is_by_modules_and_layers() {
    let lab = Lab::new("exports-recompute");
    let model = lab.model("deepseek_v3");
    let compile = |again: &str| {
        lab.ok(&["compile", &model, "--seq", "16", "--recompute", again, "-o", "p"]);
    };
    for (again, want) in [
        ("ops:elementwise,mla_up_proj,moe", "selective - - layernorm mla_up_proj moe moe_act"),
        ("ops:norms", "selective - - layernorm"),
        ("layers:2", "full block 2 -"),
        ("mix:1*full+elementwise", "full block 1 -"),
        ("full", "full uniform 1 -"),
    ] {
        compile(again);
        let text = lab.ok(&["export", "p", "--to", "megatron"]).stdout;
        let all = parsed(&String::from_utf8_lossy(&text));
        let of = |flag: &str| {
            all.get(&format!("--recompute-{flag}")).map_or("-".into(), |v| v.join(" "))
        };
        let said = ["granularity", "method", "num-layers", "modules"].map(of).join(" ");
        assert_eq!(said, want, "{again}");
    }
    for (again, word) in [
        ("ops:elementwise,experts", "without exchanges"),
        ("ops:mul", "recomputation by op"),
        ("mix:1*full+1*selective+none", "more than one way"),
    ] {
        compile(again);
        let said = lab.refuses(&["export", "p", "--to", "megatron"], 4, "export");
        assert!(said.contains(word), "{again}: {said}");
    }
}

/// What starts, and overlaps as prices assume.
#[test]
fn flags_start_and_overlap() {
    let lab = Lab::new("exports-megatron");
    let flags = |fixture: &str, more: &[&str]| {
        let model = format!("{}/{fixture}", crate::lab::FIXTURES);
        let base = ["compile", &model, "--seq", "16", "--decay", "matrices", "-o", "p"];
        lab.ok(&[&base[..], more].concat());
        let text = lab.ok(&["export", "p", "--to", "megatron"]).stdout;
        let text = String::from_utf8_lossy(&text).into_owned();
        (parsed(&text), text)
    };
    let is = |all: &BTreeMap<String, Vec<String>>, flag: &str, want: &str| {
        assert_eq!(all.get(flag).map(|v| v.join(" ")).as_deref(), Some(want), "{flag}: {all:?}");
    };
    let (one, text) = flags("llama_mha", &[]);
    assert!(!one.contains_key("--overlap-grad-reduce") && !text.contains("CUDA_DEVICE"), "{text}");
    is(&one, "--recompute-modules", "layernorm");
    is(&one, "--cross-entropy-loss-fusion", "");
    is(&one, "--cross-entropy-fusion-impl", "native");
    assert!(!one.contains_key("--moe-router-dtype"), "{one:?}");
    assert!(text.starts_with("# flags of Megatron-LM at commit "), "{text}");
    let (dp, _) = flags("llama_mha", &["--mesh", "dp=2"]);
    assert!(dp.contains_key("--overlap-grad-reduce") && !dp.contains_key("--overlap-param-gather"));
    let hsdp = ["--mesh", "dp_replicate=2,dp_shard=2", "--zero", "3", "--recompute", "none"];
    let (hsdp, text) = flags("llama_mha", &hsdp);
    is(&hsdp, "--num-distributed-optimizer-instances", "2");
    is(&hsdp, "--outer-dp-sharding-strategy", "no_shard");
    is(&hsdp, "--data-parallel-sharding-strategy", "optim_grads_params");
    assert!(
        hsdp.contains_key("--overlap-param-gather") && !hsdp.contains_key("--recompute-modules")
    );
    assert!(text.contains("# environment: CUDA_DEVICE_MAX_CONNECTIONS must not be 1\n"), "{text}");
    let (_, text) = flags("llama_mha", &["--mesh", "tp=2"]);
    assert!(
        text.contains("# environment: CUDA_DEVICE_MAX_CONNECTIONS=1, on GPUs before"),
        "{text}"
    );
    // Logits of routers are f32 in plans of any element type: products of f32 tokens with f32 gates.
    for fixture in ["mixtral", "deepseek_v3", "glm4_moe"] {
        let (all, _) = flags(fixture, &["--dtype", "bf16"]);
        is(&all, "--moe-router-dtype", "fp32");
        let text = std::fs::read_to_string(lab.path("p/programs/all.ir")).expect("programs");
        let own: Vec<&str> = text.lines().filter(|l| l.contains(".router_logits = dot")).collect();
        let wide = |l: &&str| l.contains(".tokens_f32, ") && l.contains(" : f32[");
        assert!(!own.is_empty() && own.iter().all(wide), "{fixture}: {own:?}");
    }
    // Families with latent attention, shared experts, leading dense layers, biases and learned positions.
    let (v3, _) = flags("deepseek_v3", &["--mesh", "dp=2,ep=2"]);
    for (flag, want) in [
        ("--q-lora-rank", "16"),
        ("--kv-lora-rank", "8"),
        ("--qk-head-dim", "8"),
        ("--qk-pos-emb-head-dim", "4"),
        ("--v-head-dim", "8"),
        ("--rope-type", "rope"),
        ("--moe-layer-freq", "([0]*1+[1]*2)"),
        ("--moe-shared-expert-intermediate-size", "16"),
        ("--moe-router-score-function", "sigmoid"),
        ("--moe-router-num-groups", "4"),
        ("--moe-router-group-topk", "2"),
        ("--moe-router-topk-scaling-factor", "2.5"),
        ("--recompute-modules", "layernorm moe_act"),
    ] {
        is(&v3, flag, want);
    }
    assert!(!v3.contains_key("--kv-channels") && !v3.contains_key("--num-query-groups"), "{v3:?}");
    let (glm, _) = flags("glm4_moe", &[]);
    is(&glm, "--rotary-percent", "0.5");
    is(&glm, "--kv-channels", "8");
    assert!(["--add-qkv-bias", "--qk-layernorm"].iter().all(|f| glm.contains_key(*f)), "{glm:?}");
    let (gpt2, _) = flags("gpt2", &[]);
    is(&gpt2, "--position-embedding-type", "learned_absolute");
    is(&gpt2, "--normalization", "LayerNorm");
    let rotary = ["--rotary-base", "--swiglu", "--disable-bias-linear"];
    assert!(rotary.iter().all(|f| !gpt2.contains_key(*f)), "{gpt2:?}");
}
