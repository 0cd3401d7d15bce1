//! Command R (Cohere, 2024): attention and MLP side by side after one norm, which has no bias; neighbours of a head
//! turn together; logits are scaled.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "cohere",
    keys: Keys { eps: Eps::Key("layer_norm_eps"), ..llama::FAMILY.keys },
    factors: Factors { logits: Factor::Key("logit_scale", 0.0625), ..Factors::NONE },
    padding: true,
    positions: Positions::Rotary(Turning { adjacent: Adjacent::Always, ..Turning::PLAIN }),
    beside: Beside::OneNorm,
    attention: Attention {
        norms: Some(HeadNorms {
            over: NormedOver::OwnHead,
            key: Some(("use_qk_norm", false)),
            ..HeadNorms::EACH
        }),
        ..llama::FAMILY.attention
    },
    norm: Norm { bias: false, ..Norm::LAYER },
    mlp: llama::PLAIN_MLP,
    ..llama::FAMILY
};
