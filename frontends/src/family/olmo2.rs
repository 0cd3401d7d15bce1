//! OLMo 2 (OLMo Team, 2024): Llama with norms behind attention and MLP only, and norms of all heads of q
//! together, and of k.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "olmo2",
    absent: Absent { eps: 1e-5, ..llama::FAMILY.absent },
    padding: PaddingToken::Key { absent: Some(1) },
    attention: Attention {
        norm: None,
        norm_behind: Some("post_attention_layernorm"),
        heads: Heads::of(
            Bias::Key("attention_bias"),
            Some(HeadNorms { over: NormedOver::All, ..HeadNorms::EACH }),
        ),
        ..llama::FAMILY.attention
    },
    mlp: Mlp { norm: None, norm_behind: Some("post_feedforward_layernorm"), ..llama::PLAIN_MLP },
    ..llama::FAMILY
};
