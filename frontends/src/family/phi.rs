//! Phi-2 (Microsoft, 2023): attention and MLP side by side behind one layer norm, a part of each head turns, biases
//! everywhere, the output projection's too.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "phi",
    keys: Keys {
        head_dim: Some("head_dim"),
        eps: Some("layer_norm_eps"),
        dropout: Dropped {
            attention: ("attention_dropout", 0.0),
            embedding: Some(("embd_pdrop", 0.0)),
            residual: Some(("resid_pdrop", 0.0)),
        },
        ..llama::FAMILY.keys
    },
    absent: Absent { eps: 1e-5, ..llama::FAMILY.absent },
    positions: Positions::Rotary(Turning {
        part: Some(("partial_rotary_factor", 0.5)),
        ..Turning::PLAIN
    }),
    beside: Beside::OneNorm,
    norm: Norm::LAYER,
    attention: Attention {
        heads: Heads::of(
            Bias::Always,
            Some(HeadNorms {
                modules: ["q_layernorm", "k_layernorm"],
                key: Some(("qk_layernorm", false)),
                ..HeadNorms::EACH
            }),
        ),
        o: Linear::torch("dense", Bias::Always),
        ..llama::FAMILY.attention
    },
    mlp: Mlp {
        norm: None,
        gate: None,
        up: Linear::torch("fc1", Bias::Always),
        down: Linear::torch("fc2", Bias::Always),
        activations: &[Activation::GeluTanh, Activation::Gelu],
        ..llama::FAMILY.mlp
    },
    final_norm: "final_layernorm",
    head_bias: Bias::Always,
    ..llama::FAMILY
};
