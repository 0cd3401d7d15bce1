//! GPT-J (Wang and Komatsuzaki, 2021): attention and MLP side by side behind one layer norm; neighbours of a part of each
//! head turn, by a base that no key changes; the output projection has a bias.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "gptj",
    keys: Keys {
        dropout: Dropped {
            attention: ("attn_pdrop", 0.0),
            embedding: Some(("embd_pdrop", 0.0)),
            residual: Some(("resid_pdrop", 0.0)),
        },
        ..gpt2::FAMILY.keys
    },
    absent: Absent { max_positions: 2048, tied: false, ..gpt2::FAMILY.absent },
    positions: Positions::Rotary(Turning {
        theta: None,
        width: Some(("rotary_dim", Some(64))),
        adjacent: Adjacent::Always,
        ..Turning::PLAIN
    }),
    beside: Beside::OneNorm,
    attention: Attention {
        heads: Heads::of(Bias::Never, None),
        o: Linear::torch("out_proj", Bias::Never),
        ..gpt2::FAMILY.attention
    },
    mlp: Mlp {
        norm: None,
        up: Linear::torch("fc_in", Bias::Always),
        down: Linear::torch("fc_out", Bias::Always),
        activations: &[Activation::GeluTanh, Activation::Gelu],
        ..gpt2::FAMILY.mlp
    },
    head_bias: Bias::Always,
    scaled_residual_init: false,
    known: Known {
        refused: &[],
        harmless: &[
            "n_ctx",
            "scale_attn_weights",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ],
        ..gpt2::FAMILY.known
    },
    ..gpt2::FAMILY
};
