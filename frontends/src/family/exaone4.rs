//! EXAONE 4 (LG AI Research, 2025): norms behind attention and MLP as in OLMo 2, norms of every head as in Qwen3;
//! all layers but every fourth have a window, and those do not turn.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "exaone4",
    positions: Positions::Rotary(Turning {
        still: Still::WithoutWindow { unless_all: true },
        ..Turning::PLAIN
    }),
    attention: Attention {
        norm: None,
        norm_behind: Some("post_attention_layernorm"),
        norms: Some(HeadNorms::EACH),
        window: Window::Alternating { absent: 4096, every: 4, key: Some("sliding_window_pattern") },
        ..llama::PLAIN_ATTENTION
    },
    mlp: olmo2::FAMILY.mlp,
    ..llama::FAMILY
};
