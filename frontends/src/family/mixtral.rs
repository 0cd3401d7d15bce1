//! Mixtral (Jiang et al., 2024): Mistral whose every MLP is a mixture of experts.

use super::*;

/// Experts in every layer, of which a token takes the best.
pub(super) const EXPERTS: Experts = Experts {
    module: "block_sparse_moe",
    router: "gate",
    router_bias: false,
    list: "experts",
    gate: "w1",
    up: "w3",
    down: "w2",
    stored: Stored::Each,
    clamped: None,
    count: "num_local_experts",
    top_k: "num_experts_per_tok",
    width: "intermediate_size",
    score: Score::SHARES,
    shared: None,
    layers: SparseLayers::All,
    absent: (8, 2, 14336, Some(0.001)),
};

pub(super) const FAMILY: Family = Family {
    model_type: "mixtral",
    absent: Absent {
        kv_heads: Some(8),
        max_positions: 4096 * 32,
        eps: 1e-5,
        theta: 1e6,
        ..llama::FAMILY.absent
    },
    attention: Attention {
        window: Window::All { absent: None, listed: false },
        ..mistral::FAMILY.attention
    },
    experts: Some(EXPERTS),
    known: Known {
        aliases: &[("num_experts", "num_local_experts")],
        refused: &[("router_jitter_noise", Only::Numbers(&[0.0]))],
        ..Known::NONE
    },
    ..mistral::FAMILY
};
