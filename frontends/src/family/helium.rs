//! Helium (Kyutai, 2025): Llama whose heads turn neighbours together.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "helium",
    padding: true,
    positions: Positions::Rotary(Turning { adjacent: Adjacent::Always, ..Turning::PLAIN }),
    attention: Attention { o: Linear::torch("o_proj", Bias::Never), ..llama::FAMILY.attention },
    ..llama::FAMILY
};
