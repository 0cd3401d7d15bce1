//! Qwen1.5-MoE and Qwen2-MoE (Yang et al., 2024): Qwen2 with experts beside an MLP that every token passes, as much
//! as a sigmoid says.

use super::*;

/// Beside the experts.
pub(super) const SHARED: Shared = Shared {
    module: "shared_expert",
    beside: false,
    width: SharedWidth::Key("shared_expert_intermediate_size", 5632),
    gate: Some("shared_expert_gate"),
};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen2_moe",
    attention: Attention {
        heads: Heads::of(Bias::Unless("qkv_bias")),
        o: Linear::torch("o_proj", Bias::Never),
        window: Window::Switched { absent: Some(4096), unlisted: Unlisted::OddBefore(28) },
        ..llama::FAMILY.attention
    },
    mlp: llama::PLAIN_MLP,
    experts: Some(Experts {
        score: Score { normed: Normed::Key("norm_topk_prob"), ..Score::SHARES },
        shared: Some(SHARED),
        layers: SparseLayers::Stepped,
        aux: true,
        ..Experts::EACH
    }),
    ..llama::FAMILY
};
