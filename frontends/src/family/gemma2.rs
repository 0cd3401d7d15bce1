//! Gemma 2 (Gemma Team, 2024): norms before and behind attention and MLP, with weights around 0;
//! scaled embeddings; softcaps of scores and logits; every second layer with a window.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "gemma2",
    keys: Keys { activation: "hidden_activation", ..llama::FAMILY.keys },
    factors: Factors { embedding: Factor::RootOfHidden, ..Factors::NONE },
    padding: true,
    norm: Norm { around_one: true, ..Norm::RMS },
    positions: Positions::Rotary(Turning { kinds: true, ..Turning::PLAIN }),
    attention: Attention {
        norm_behind: Some("post_attention_layernorm"),
        window: Window::Alternating { absent: 4096, every: 2, key: None },
        scores: QkScale::OverRootOf("query_pre_attn_scalar", 256.0),
        softcap: Some(Softcap { key: "attn_logit_softcapping", absent: Some(50.0) }),
        ..llama::FAMILY.attention
    },
    mlp: Mlp {
        norm: Some("pre_feedforward_layernorm"),
        norm_behind: Some("post_feedforward_layernorm"),
        activations: &[Activation::GeluTanh],
        ..llama::PLAIN_MLP
    },
    softcap: Some(Softcap { key: "final_logit_softcapping", absent: Some(30.0) }),
    known: Known {
        // Transformers reads it in no class of text before Gemma 3.
        idle: &[
            ("use_bidirectional_attention", Only::Flag(false)),
            ("hidden_act", Only::Word("gelu_pytorch_tanh")),
        ],
        harmless: &["sliding_window_size"],
        ..Known::NONE
    },
    ..llama::FAMILY
};
