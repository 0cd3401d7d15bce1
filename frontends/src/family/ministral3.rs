//! Ministral 3 (Mistral AI, 2025): Mistral without windows, whose queries are scaled behind the positions before scaling.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "ministral3",
    padding: true,
    attention: Attention {
        growth: Growth::Rotary,
        window: Window::All { absent: None, listed: false },
        ..mistral::FAMILY.attention
    },
    ..mistral::FAMILY
};
