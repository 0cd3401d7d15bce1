//! ERNIE 4.5 (Baidu, 2025): Llama whose heads turn neighbours together, and with one key for all biases.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "ernie4_5",
    padding: true,
    positions: Positions::Rotary(Turning { adjacent: Adjacent::Always, ..Turning::PLAIN }),
    attention: Attention {
        heads: Heads::of(Bias::Key("use_bias")),
        o: Linear::torch("o_proj", Bias::Key("use_bias")),
        ..llama::FAMILY.attention
    },
    mlp: Mlp {
        gate: Some(Linear::torch("gate_proj", Bias::Key("use_bias"))),
        up: Linear::torch("up_proj", Bias::Key("use_bias")),
        down: Linear::torch("down_proj", Bias::Key("use_bias")),
        ..llama::FAMILY.mlp
    },
    ..llama::FAMILY
};
