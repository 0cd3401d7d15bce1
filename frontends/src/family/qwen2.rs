//! Qwen2 (Yang et al., 2024): Llama with biases of q, k and v only, and windows of some layers.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "qwen2",
    positions: Positions::Rotary(Turning { kinds: true, ..Turning::PLAIN }),
    attention: Attention {
        heads: Heads::of(Bias::Always),
        o: Linear::torch("o_proj", Bias::Never),
        window: Window::Switched { absent: Some(4096), unlisted: Unlisted::From(28) },
        ..llama::FAMILY.attention
    },
    mlp: llama::PLAIN_MLP,
    known: Known { idle: &[("use_mrope", Only::Flag(false))], ..Known::NONE },
    ..llama::FAMILY
};
