//! Qwen3-Next (Qwen Team, 2025): gated DeltaNet in three of four layers, gated attention of which a quarter of each head
//! turns in the others, norms around 1, and the experts of Qwen2-MoE.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3_next",
    positions: Positions::Rotary(Turning {
        part: Some(("partial_rotary_factor", 0.25)),
        ..Turning::PLAIN
    }),
    norm: gemma2::FAMILY.norm,
    attention: Attention { norms: Some(HeadNorms::EACH), gated: true, ..llama::FAMILY.attention },
    recurrent: Some(Recurrent {
        module: "linear_attn",
        layers: Walking::Every("full_attention_interval", 4),
        mixer: Mixer::DeltaNet,
        keys: RecurrentKeys {
            taps: ("linear_conv_kernel_dim", 4),
            key_heads: ("linear_num_key_heads", 16),
            key_width: ("linear_key_head_dim", 128),
            value_heads: ("linear_num_value_heads", 32),
            value_width: ("linear_value_head_dim", 128),
        },
    }),
    mlp: llama::PLAIN_MLP,
    experts: Some(Experts {
        score: Score { normed: Normed::Unless("norm_topk_prob"), ..Score::SHARES },
        shared: Some(Shared {
            width: SharedWidth::Key("shared_expert_intermediate_size", 512),
            ..qwen2_moe::SHARED
        }),
        layers: SparseLayers::Stepped,
        aux: true,
        ..Experts::EACH
    }),
    ..llama::FAMILY
};
