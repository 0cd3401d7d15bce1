//! Hunyuan (Tencent, 2025), its dense models: Llama with norms of every head of q and k, after they have turned.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "hunyuan_v1_dense",
    positions: Positions::Rotary(Turning { alpha: true, ..Turning::PLAIN }),
    padding: true,
    attention: Attention {
        norms: Some(HeadNorms {
            modules: ["query_layernorm", "key_layernorm"],
            behind: true,
            ..HeadNorms::EACH
        }),
        ..llama::FAMILY.attention
    },
    mlp: llama::PLAIN_MLP,
    known: Known {
        idle: &[("use_qk_norm", Only::Flag(true))],
        harmless: &["eod_token_id"],
        ..Known::NONE
    },
    ..llama::FAMILY
};
