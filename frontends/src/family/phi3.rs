//! Phi-3 (Abdin et al., 2024): Llama with one tensor for q, k and v and one for gate and up, a part of
//! each head that turns, and frequencies that are stretched one by one.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "phi3",
    keys: Keys {
        // `embd_pdrop` is in configs, but transformers drops nothing there.
        dropout: Dropped::of("attention_dropout", None, Some("resid_pdrop")),
        ..llama::FAMILY.keys
    },
    padding: true,
    positions: Positions::Rotary(Turning {
        part: Some(("partial_rotary_factor", 1.0)),
        stretched: Some(4096),
        ..Turning::PLAIN
    }),
    attention: Attention {
        heads: Heads::fused(Linear::torch("qkv_proj", Bias::Never)),
        o: Linear::torch("o_proj", Bias::Never),
        window: Window::All { absent: None, listed: false },
        ..llama::FAMILY.attention
    },
    known: Known {
        idle: &[
            ("attention_bias", Only::Flag(false)),
            ("embd_pdrop", Only::Numbers(&[0.0])),
            ("full_attn_mod", Only::Numbers(&[1.0])),
            ("interpolate_factor", Only::Numbers(&[1.0])),
            ("lm_head_bias", Only::Flag(false)),
            ("mlp_bias", Only::Flag(false)),
        ],
        ..Known::NONE
    },
    mlp: Mlp {
        gate: Some(Linear::torch("gate_up_proj", Bias::Never).slice("gate")),
        up: Linear::torch("gate_up_proj", Bias::Never).slice("up"),
        ..llama::PLAIN_MLP
    },
    ..llama::FAMILY
};
