//! Granite 3 (IBM Research, 2024): Llama with factors of embeddings, of scores, of what blocks add, and of logits
//! (after Yang et al., 2022, *Tensor Programs V*).

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "granite",
    factors: Factors {
        embedding: Factor::Key("embedding_multiplier", 1.0),
        residual: Factor::Key("residual_multiplier", 1.0),
        logits: Factor::Over("logits_scaling", 1.0),
    },
    attention: Attention {
        scores: QkScale::Times("attention_multiplier", 1.0),
        ..llama::FAMILY.attention
    },
    ..llama::FAMILY
};
