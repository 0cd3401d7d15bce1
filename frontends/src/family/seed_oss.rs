//! Seed-OSS (ByteDance Seed, 2025): Llama with biases of q, k and v, and dropout in training.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "seed_oss",
    keys: Keys {
        dropout: Dropped {
            attention: ("attention_dropout", 0.1),
            embedding: None,
            residual: Some(("residual_dropout", 0.1)),
        },
        ..llama::FAMILY.keys
    },
    absent: Absent {
        kv_heads: Some(8),
        head_dim: Some(128),
        max_positions: 524_288,
        ..llama::FAMILY.absent
    },
    padding: PaddingToken::Key { absent: Some(1) },
    attention: Attention {
        heads: Heads::of(Bias::Unless("attention_bias"), None),
        o: Linear::torch("o_proj", Bias::Key("attention_out_bias")),
        ..llama::FAMILY.attention
    },
    ..llama::FAMILY
};
