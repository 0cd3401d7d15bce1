//! Seed-OSS (ByteDance Seed, 2025): Llama with biases of q, k and v, and dropout in training.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "seed_oss",
    keys: Keys {
        dropout: Dropped::of("attention_dropout", None, Some("residual_dropout")),
        ..llama::FAMILY.keys
    },
    padding: true,
    attention: Attention {
        heads: Heads::of(Bias::Unless("attention_bias")),
        o: Linear::torch("o_proj", Bias::Key("attention_out_bias")),
        ..llama::FAMILY.attention
    },
    ..llama::FAMILY
};
