//! Mixtral (Jiang et al., 2024): Mistral whose every MLP is a mixture of experts.

use super::*;

/// Experts in every layer, of which a token takes the best.
pub(super) const EXPERTS: Experts = Experts {
    module: "block_sparse_moe",
    gate: Some("w1"),
    up: "w3",
    down: "w2",
    count: "num_local_experts",
    width: "intermediate_size",
    aux: true,
    ..Experts::EACH
};

pub(super) const FAMILY: Family = Family {
    model_type: "mixtral",
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
