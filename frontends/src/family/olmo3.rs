//! OLMo 3 (OLMo Team, 2025): OLMo 2 of which all layers but every fourth have a window, in which the scaling of
//! rotary frequencies does not act.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "olmo3",
    positions: Positions::Rotary(Turning { local: Some((None, 5e5)), ..Turning::PLAIN }),
    attention: Attention {
        window: Window::Alternating { absent: 4096, every: 4, key: None },
        ..olmo2::FAMILY.attention
    },
    ..olmo2::FAMILY
};
