//! GLM-4 (Team GLM, 2024), as published in 2024: Llama with one tensor for gate and up, and half of each head that
//! turns, neighbours together.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "glm",
    padding: true,
    positions: Positions::Rotary(Turning {
        part: Some(("partial_rotary_factor", 0.5)),
        adjacent: Adjacent::Always,
        ..Turning::PLAIN
    }),
    attention: Attention {
        heads: Heads::of(Bias::Unless("attention_bias")),
        o: Linear::torch("o_proj", Bias::Never),
        ..llama::FAMILY.attention
    },
    mlp: phi3::FAMILY.mlp,
    ..llama::FAMILY
};
