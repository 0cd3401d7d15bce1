//! Gemma 3 (Gemma Team, 2025), its text model: Gemma 2 with norms of every head of q and k, without
//! softcaps; all layers but every sixth have a window, and turn by a base of their own.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "gemma3_text",
    positions: Positions::Rotary(Turning {
        local: Some((Some("rope_local_base_freq"), 1e4)),
        ..Turning::PLAIN
    }),
    attention: Attention {
        norms: Some(HeadNorms::EACH),
        window: Window::Alternating { absent: 4096, every: 6, key: Some("sliding_window_pattern") },
        // Transformers has a key for a softcap of the scores, and does not use it.
        softcap: None,
        ..gemma2::FAMILY.attention
    },
    softcap: Some(Softcap { key: "final_logit_softcapping", absent: None }),
    known: Known {
        refused: &[("use_bidirectional_attention", Only::Flag(false))],
        idle: &[
            ("attn_logit_softcapping", Only::Nothing),
            ("hidden_act", Only::Word("gelu_pytorch_tanh")),
        ],
        harmless: &["_sliding_window_pattern"],
        ..Known::NONE
    },
    ..gemma2::FAMILY
};
