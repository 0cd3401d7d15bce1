//! OLMoE (Muennighoff et al., 2024): the norms of all heads of q and k of OLMo 2, the experts of Qwen3-MoE in every
//! layer, and a bound of queries, keys and values.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "olmoe",
    keys: Keys { head_dim: None, ..llama::FAMILY.keys },
    padding: true,
    attention: Attention {
        norm: llama::FAMILY.attention.norm,
        norm_behind: None,
        clip: Some("clip_qkv"),
        ..olmo2::FAMILY.attention
    },
    mlp: llama::PLAIN_MLP,
    experts: Some(Experts {
        width: "intermediate_size",
        score: Score { normed: Normed::Key("norm_topk_prob"), ..Score::SHARES },
        aux: true,
        ..Experts::EACH
    }),
    known: Known { aliases: &[("num_local_experts", "num_experts")], ..Known::NONE },
    ..llama::FAMILY
};
