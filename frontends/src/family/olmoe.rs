//! OLMoE (Muennighoff et al., 2024): the norms of all heads of q and k of OLMo 2, the experts of Qwen3-MoE in every
//! layer, and a bound of queries, keys and values.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "olmoe",
    keys: Keys { head_dim: None, ..llama::FAMILY.keys },
    absent: Absent { max_positions: 4096, eps: 1e-5, ..llama::FAMILY.absent },
    padding: PaddingToken::Key { absent: Some(1) },
    attention: Attention {
        norm: llama::FAMILY.attention.norm,
        norm_behind: None,
        clip: Some("clip_qkv"),
        ..olmo2::FAMILY.attention
    },
    mlp: llama::PLAIN_MLP,
    experts: Some(Experts {
        module: "mlp",
        router: "gate",
        router_bias: false,
        list: "experts",
        gate: "gate_proj",
        up: "up_proj",
        down: "down_proj",
        stored: Stored::Each,
        clamped: None,
        count: "num_experts",
        top_k: "num_experts_per_tok",
        width: "intermediate_size",
        score: Score { normed: Normed::Key("norm_topk_prob"), ..Score::SHARES },
        shared: None,
        layers: SparseLayers::All,
        absent: (64, 8, 2048, Some(0.01)),
    }),
    known: Known { aliases: &[("num_local_experts", "num_experts")], ..Known::NONE },
    ..llama::FAMILY
};
