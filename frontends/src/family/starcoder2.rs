//! StarCoder2 (Lozhkov et al., 2024): layer norms and an MLP without a gate, as in GPT-2, in the frame of Llama.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "starcoder2",
    keys: Keys {
        eps: Eps::Key("norm_epsilon"),
        dropout: Dropped::of(
            "attention_dropout",
            Some("embedding_dropout"),
            Some("residual_dropout"),
        ),
        ..llama::FAMILY.keys
    },
    norm: Norm::LAYER,
    attention: Attention {
        heads: Heads::of(Bias::Unless("use_bias")),
        o: Linear::torch("o_proj", Bias::Unless("use_bias")),
        window: Window::All { absent: None, listed: false },
        ..llama::FAMILY.attention
    },
    mlp: Mlp::of(["c_fc", "c_proj"], Bias::Unless("use_bias")),
    ..llama::FAMILY
};
