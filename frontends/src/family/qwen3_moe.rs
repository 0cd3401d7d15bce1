//! Qwen3-MoE (Yang et al., 2025): Qwen3 with experts in all layers, or in some.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3_moe",
    positions: llama::FAMILY.positions,
    attention: Attention {
        window: Window::AllSwitched { absent: 4096 },
        ..qwen3::FAMILY.attention
    },
    experts: Some(Experts {
        score: Score { normed: Normed::Key("norm_topk_prob"), ..Score::SHARES },
        layers: SparseLayers::Stepped,
        aux: true,
        ..Experts::EACH
    }),
    known: Known {
        aliases: &[("num_local_experts", "num_experts")],
        harmless: &["max_window_layers"],
        ..Known::NONE
    },
    ..qwen3::FAMILY
};
