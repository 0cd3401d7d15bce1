//! Nemotron-4 (Parmar et al., 2024) and Minitron: Llama with layer norms whose weights are around 0, an MLP of squared
//! rectifiers without a gate, and half of each head that turns.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "nemotron",
    keys: Keys { eps: Eps::Key("norm_eps"), ..llama::FAMILY.keys },
    norm: Norm { around_one: true, ..Norm::LAYER },
    positions: Positions::Rotary(Turning {
        part: Some(("partial_rotary_factor", 0.5)),
        ..Turning::PLAIN
    }),
    mlp: arcee::FAMILY.mlp,
    ..llama::FAMILY
};
