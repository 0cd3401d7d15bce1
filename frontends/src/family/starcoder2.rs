//! StarCoder2 (Lozhkov et al., 2024): layer norms and an MLP without a gate, as in GPT-2, in the frame of Llama.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "starcoder2",
    keys: Keys {
        eps: Some("norm_epsilon"),
        dropout: Dropped {
            attention: ("attention_dropout", 0.0),
            embedding: Some(("embedding_dropout", 0.0)),
            residual: Some(("residual_dropout", 0.0)),
        },
        ..llama::FAMILY.keys
    },
    absent: Absent {
        kv_heads: Some(2),
        max_positions: 4096,
        eps: 1e-5,
        tied: true,
        ..llama::FAMILY.absent
    },
    norm: Norm::LAYER,
    attention: Attention {
        heads: Heads::of(Bias::Unless("use_bias"), None),
        o: Linear::torch("o_proj", Bias::Unless("use_bias")),
        window: Window::All { absent: None, listed: false },
        ..llama::FAMILY.attention
    },
    mlp: Mlp {
        gate: None,
        up: Linear::torch("c_fc", Bias::Unless("use_bias")),
        down: Linear::torch("c_proj", Bias::Unless("use_bias")),
        activations: &[Activation::GeluTanh, Activation::Gelu],
        ..llama::FAMILY.mlp
    },
    ..llama::FAMILY
};
