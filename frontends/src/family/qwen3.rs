//! Qwen3 (Yang et al., 2025): Llama with a norm of every head of q and k, and a head size of its
//! own.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3",
    positions: Positions::Rotary(Turning { kinds: true, ..Turning::PLAIN }),
    attention: Attention {
        norms: Some(HeadNorms::EACH),
        window: Window::Switched { absent: Some(4096), unlisted: Unlisted::From(28) },
        ..llama::FAMILY.attention
    },
    mlp: llama::PLAIN_MLP,
    ..llama::FAMILY
};
