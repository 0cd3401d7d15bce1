//! Ministral 3 (Mistral AI, 2025): Mistral without windows, whose queries are scaled behind the positions before scaling.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "ministral3",
    absent: Absent {
        head_dim: Some(128),
        max_positions: 262_144,
        eps: 1e-5,
        ..mistral::FAMILY.absent
    },
    padding: PaddingToken::Key { absent: Some(11) },
    positions: Positions::Rotary(Turning { scaled_queries: true, ..Turning::PLAIN }),
    attention: Attention {
        window: Window::All { absent: None, listed: false },
        ..mistral::FAMILY.attention
    },
    ..mistral::FAMILY
};
