//! Command R (Cohere, 2024): attention and MLP side by side after one norm, which has no bias; neighbours of a head
//! turn together; logits are scaled.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "cohere",
    keys: Keys { eps: Some("layer_norm_eps"), ..llama::FAMILY.keys },
    absent: Absent {
        max_positions: 8192,
        eps: 1e-5,
        theta: 5e5,
        tied: true,
        ..llama::FAMILY.absent
    },
    factors: Factors { logits: Factor::Key("logit_scale", 0.0625), ..Factors::NONE },
    padding: PaddingToken::Key { absent: Some(0) },
    positions: Positions::Rotary(Turning { adjacent: Adjacent::Always, ..Turning::PLAIN }),
    beside: Beside::OneNorm,
    attention: Attention {
        heads: Heads::of(
            Bias::Key("attention_bias"),
            Some(HeadNorms {
                over: NormedOver::OwnHead,
                key: Some(("use_qk_norm", false)),
                ..HeadNorms::EACH
            }),
        ),
        ..llama::FAMILY.attention
    },
    norm: Norm { bias: false, ..Norm::LAYER },
    mlp: Mlp { norm: None, ..llama::PLAIN_MLP },
    ..llama::FAMILY
};
