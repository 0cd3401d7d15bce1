//! GPT-J (Wang and Komatsuzaki, 2021): attention and MLP side by side behind one layer norm; neighbours of a part of each
//! head turn, by a base that no key changes; the output projection has a bias.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "gptj",
    positions: Positions::Rotary(Turning {
        theta: None,
        width: Some(("rotary_dim", Some(64))),
        adjacent: Adjacent::Always,
        ..Turning::PLAIN
    }),
    beside: Beside::OneNorm,
    attention: Attention {
        heads: Heads::of(Bias::Never),
        o: Linear::torch("out_proj", Bias::Never),
        ..gpt2::FAMILY.attention
    },
    mlp: Mlp { ratio: Some(4), ..Mlp::of(["fc_in", "fc_out"], Bias::Always) },
    head_bias: Bias::Always,
    scaled_residual_init: false,
    known: Known { refused: &[], harmless: &["scale_attn_weights"], ..gpt2::FAMILY.known },
    ..gpt2::FAMILY
};
