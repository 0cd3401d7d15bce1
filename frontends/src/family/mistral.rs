//! Mistral (Jiang et al., 2023): Llama without biases, every layer with the same window.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "mistral",
    attention: Attention {
        window: Window::All { absent: Some(4096), listed: true },
        ..llama::PLAIN_ATTENTION
    },
    mlp: llama::PLAIN_MLP,
    ..llama::FAMILY
};
