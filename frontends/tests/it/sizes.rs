//! Published configs have as many parameters here as in transformers (`tests/fixtures/sizes.py`).

use serde_json::Value;
use shardc_frontends::{Shape, from_config};
use shardc_ir::ops::{Mask, Op};
use shardc_ir::plan::Mode;
use std::path::PathBuf;

#[test]
fn published_models_have_their_parameters() {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/sizes.json");
    let table: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let (shape, table) = (Shape::new(1, 16, Mode::Infer), table.as_object().unwrap());
    for (name, row) in table {
        let m = from_config(&row["config"], name, &shape).unwrap_or_else(|d| panic!("{name}: {d}"));
        // Of what the files of these say nothing comes of some keys, as in transformers.
        let known = ["Qwen2-VL-7B", "SmolLM2-135M", "gpt-neox-20b", "starcoder2-7b"];
        let unread = m.warnings.iter().find(|w| w.code == "unread-keys");
        assert!(unread.is_none() || known.contains(&&**name), "{name}: {unread:?}");
        // What corrects a choice of experts is a buffer there, but of ERNIE.
        let counts = |p: &str| name.starts_with("ERNIE") || !p.ends_with("e_score_correction_bias");
        let trained = m.weights.iter().filter(|w| counts(&w.param));
        let count: usize = trained.map(|w| w.shape.iter().product::<usize>()).sum();
        assert_eq!(count as u64, row["parameters"].as_u64().unwrap(), "{name}");
    }
    assert!(table.len() >= 69, "{} configs", table.len());
}

/// A word says which layers have a window; the last one has none.
#[test]
fn windows_by_a_word() {
    let of = |word: Value| {
        let config = serde_json::json!({"model_type": "exaone4", "hidden_size": 64, "num_attention_heads": 4,
            "num_hidden_layers": 7, "num_key_value_heads": 2, "intermediate_size": 32, "vocab_size": 32,
            "sliding_window": 8, "sliding_window_pattern": word});
        from_config(&config, "config.json", &Shape::new(1, 16, Mode::Infer))
    };
    let count = |word: &str, is: fn(&Op) -> bool| {
        of(word.into()).unwrap().module.funcs[0].nodes.iter().filter(|n| is(&n.op)).count()
    };
    let local = |op: &Op| matches!(op, Op::Attention(a) if a.mask == Mask::causal(Some(8)));
    let windows = ["LLLG", "LG", "L", "G"].map(|word| count(word, local));
    assert_eq!(windows, [5, 3, 6, 0]);
    // Those without a window do not turn.
    assert_eq!(count("LLLG", |op| matches!(op, Op::Rope(_))), 2 * 5);
    for bad in ["", "LLX", "3"] {
        assert_eq!(of(bad.into()).unwrap_err().code, "config", "{bad}");
    }
}

/// Published MiniMax-M2 says how many elements of a head turn, and not which part of it.
#[test]
fn a_part_of_heads_by_its_width() {
    let text = |keys: serde_json::Value| {
        let mut config = serde_json::json!({"model_type": "minimax_m2", "hidden_size": 32, "head_dim": 16,
            "num_attention_heads": 4, "num_hidden_layers": 1, "num_key_value_heads": 2, "intermediate_size": 8,
            "vocab_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 5e6});
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        let m = from_config(&config, "config.json", &Shape::new(1, 16, Mode::Infer)).unwrap();
        assert!(m.warnings.is_empty(), "{:?}", m.warnings);
        shardc_ir::text::print(&m.module)
    };
    let half = text(serde_json::json!({"partial_rotary_factor": 0.5}));
    assert_eq!(text(serde_json::json!({"rotary_dim": 8})), half);
    assert_eq!(text(serde_json::json!({"rotary_dim": 4, "partial_rotary_factor": 0.5})), half);
    assert_ne!(text(serde_json::json!({})), half);
}

/// `head_dim` is read where transformers' class reads it, and where it is null, heads divide the hidden size.
#[test]
fn heads_of_a_size_of_their_own() {
    let of = |kind: &str, head_dim: Value| {
        let config = serde_json::json!({"model_type": kind, "hidden_size": 64, "num_attention_heads": 4,
            "num_hidden_layers": 1, "num_key_value_heads": 2, "intermediate_size": 32, "vocab_size": 32,
            "head_dim": head_dim});
        from_config(&config, "config.json", &Shape::new(1, 16, Mode::Infer)).unwrap().facts.head_dim
    };
    assert_eq!(of("cohere2", 32.into()), 32);
    for kind in ["ernie4_5", "seed_oss"] {
        assert_eq!(of(kind, Value::Null), 16, "{kind}");
        assert_eq!(of(kind, 32.into()), 32, "{kind}");
    }
}
