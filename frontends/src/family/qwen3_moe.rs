//! Qwen3-MoE (Yang et al., 2025): Qwen3 with experts in all layers, or in some.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3_moe",
    absent: Absent { kv_heads: Some(4), head_dim: None, ..qwen3::FAMILY.absent },
    positions: llama::FAMILY.positions,
    attention: Attention {
        window: Window::AllSwitched { absent: 4096 },
        ..qwen3::FAMILY.attention
    },
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
        width: "moe_intermediate_size",
        score: Score { normed: Normed::Key("norm_topk_prob"), ..Score::SHARES },
        shared: None,
        layers: SparseLayers::Stepped,
        absent: (128, 8, 768, Some(0.001)),
    }),
    known: Known {
        aliases: &[("num_local_experts", "num_experts")],
        harmless: &["max_window_layers"],
        ..Known::NONE
    },
    ..qwen3::FAMILY
};
