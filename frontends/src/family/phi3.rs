//! Phi-3 (Abdin et al., 2024): Llama with one tensor for q, k and v and one for gate and up, a part of
//! each head that turns, and frequencies that are stretched one by one.

use super::*;

const fn slice(module: &'static str, part: &'static str) -> Linear {
    Linear { part: Some(part), ..Linear::torch(module, Bias::Never) }
}

pub(super) const FAMILY: Family = Family {
    model_type: "phi3",
    keys: Keys {
        dropout: Dropped {
            attention: ("attention_dropout", 0.0),
            // `embd_pdrop` is in configs, but transformers drops nothing there.
            embedding: None,
            residual: Some(("resid_pdrop", 0.0)),
        },
        ..llama::FAMILY.keys
    },
    absent: Absent { eps: 1e-5, max_positions: 4096, ..llama::FAMILY.absent },
    padding: PaddingToken::Key { absent: Some(32000) },
    positions: Positions::Rotary(Turning {
        part: Some(("partial_rotary_factor", 1.0)),
        stretched: Some(4096),
        ..Turning::PLAIN
    }),
    attention: Attention {
        heads: Heads::Plain {
            q: slice("qkv_proj", "q"),
            k: slice("qkv_proj", "k"),
            v: slice("qkv_proj", "v"),
            norms: None,
        },
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
        gate: Some(slice("gate_up_proj", "gate")),
        up: slice("gate_up_proj", "up"),
        ..llama::PLAIN_MLP
    },
    ..llama::FAMILY
};
