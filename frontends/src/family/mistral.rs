//! Mistral (Jiang et al., 2023): Llama without biases, every layer with the same window.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "mistral",
    absent: Absent { kv_heads: Some(8), max_positions: 4096 * 32, ..llama::FAMILY.absent },
    attention: Attention {
        heads: Heads::of(Bias::Never, None),
        o: Linear::torch("o_proj", Bias::Never),
        window: Window::All { absent: Some(4096), listed: true },
        ..llama::FAMILY.attention
    },
    mlp: llama::PLAIN_MLP,
    ..llama::FAMILY
};
