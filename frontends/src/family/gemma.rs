//! Gemma (Gemma Team, 2024): Llama with norms whose weights are around 0, scaled embeddings, and GELU.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "gemma",
    factors: gemma2::FAMILY.factors,
    padding: true,
    norm: gemma2::FAMILY.norm,
    mlp: Mlp { activations: &[Activation::GeluTanh], ..llama::PLAIN_MLP },
    known: Known {
        // Of the first files, which mean the other form.
        words: &[("gelu", "gelu_pytorch_tanh")],
        idle: &[
            ("use_bidirectional_attention", Only::Flag(false)),
            ("hidden_activation", Only::Word("gelu_pytorch_tanh")),
        ],
        ..Known::NONE
    },
    ..llama::FAMILY
};
