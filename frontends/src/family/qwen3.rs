//! Qwen3 (Yang et al., 2025): Llama with a norm of every head of q and k, and a head size of its
//! own.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3",
    absent: Absent {
        kv_heads: Some(32),
        head_dim: Some(128),
        max_positions: 32768,
        ..llama::FAMILY.absent
    },
    positions: Positions::Rotary(Turning { kinds: true, ..Turning::PLAIN }),
    attention: Attention {
        heads: Heads::Plain {
            q: Linear::torch("q_proj", Bias::Key("attention_bias")),
            k: Linear::torch("k_proj", Bias::Key("attention_bias")),
            v: Linear::torch("v_proj", Bias::Key("attention_bias")),
            norms: Some(HeadNorms::EACH),
        },
        window: Window::Switched { absent: 4096, first: 28 },
        ..llama::FAMILY.attention
    },
    mlp: llama::PLAIN_MLP,
    ..llama::FAMILY
};
