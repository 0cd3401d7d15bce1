//! SmolLM3 (Hugging Face, 2025): Llama of which every fourth layer does not turn.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "smollm3",
    padding: true,
    positions: Positions::Rotary(Turning { still: Still::Listed { every: 4 }, ..Turning::PLAIN }),
    attention: Attention {
        window: Window::Switched { absent: None, unlisted: Unlisted::Still },
        ..llama::FAMILY.attention
    },
    known: Known { harmless: &["max_window_layers"], ..Known::NONE },
    ..llama::FAMILY
};
