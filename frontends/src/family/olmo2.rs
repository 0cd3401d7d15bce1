//! OLMo 2 (OLMo Team, 2024): Llama with norms behind attention and MLP only, and norms of all heads of q
//! together, and of k.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "olmo2",
    padding: true,
    attention: Attention {
        norm: None,
        norm_behind: Some("post_attention_layernorm"),
        norms: Some(HeadNorms { over: NormedOver::All, ..HeadNorms::EACH }),
        ..llama::FAMILY.attention
    },
    mlp: Mlp { norm: None, norm_behind: Some("post_feedforward_layernorm"), ..llama::PLAIN_MLP },
    ..llama::FAMILY
};
