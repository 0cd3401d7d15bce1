//! Phi-2 (Microsoft, 2023): attention and MLP side by side behind one layer norm, a part of each head turns, biases
//! everywhere, the output projection's too.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "phi",
    keys: Keys {
        eps: Eps::Key("layer_norm_eps"),
        dropout: Dropped::of("attention_dropout", Some("embd_pdrop"), Some("resid_pdrop")),
        ..llama::FAMILY.keys
    },
    positions: Positions::Rotary(Turning {
        part: Some(("partial_rotary_factor", 0.5)),
        ..Turning::PLAIN
    }),
    beside: Beside::OneNorm,
    norm: Norm::LAYER,
    attention: Attention {
        heads: Heads::of(Bias::Always),
        norms: Some(HeadNorms {
            modules: ["q_layernorm", "k_layernorm"],
            key: Some(("qk_layernorm", false)),
            ..HeadNorms::EACH
        }),
        o: Linear::torch("dense", Bias::Always),
        ..llama::FAMILY.attention
    },
    mlp: Mlp::of(["fc1", "fc2"], Bias::Always),
    final_norm: "final_layernorm",
    head_bias: Bias::Always,
    ..llama::FAMILY
};
