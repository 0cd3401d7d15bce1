//! Helium (Kyutai, 2025): Llama whose heads turn neighbours together.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "helium",
    absent: Absent {
        kv_heads: Some(20),
        head_dim: Some(128),
        max_positions: 4096,
        eps: 1e-8,
        theta: 1e5,
        ..llama::FAMILY.absent
    },
    padding: PaddingToken::Key { absent: Some(3) },
    positions: Positions::Rotary(Turning { adjacent: Adjacent::Always, ..Turning::PLAIN }),
    attention: Attention { o: Linear::torch("o_proj", Bias::Never), ..llama::FAMILY.attention },
    ..llama::FAMILY
};
