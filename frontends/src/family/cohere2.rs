//! Command R7B (Cohere, 2024): Command R of which all layers but every fourth have a window, and those do not turn.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "cohere2",
    positions: Positions::Rotary(Turning {
        adjacent: Adjacent::Always,
        still: Still::WithoutWindow { unless_all: false },
        ..Turning::PLAIN
    }),
    attention: Attention {
        window: Window::Alternating { absent: 4096, every: 4, key: Some("sliding_window_pattern") },
        ..llama::FAMILY.attention
    },
    known: Known { idle: &[("use_qk_norm", Only::Flag(false))], ..Known::NONE },
    ..cohere::FAMILY
};
