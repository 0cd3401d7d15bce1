//! OLMo (Groeneveld et al., 2024): Llama with layer norms that have no weights, and bounded queries, keys and values.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "olmo",
    keys: Keys { eps: Eps::Is(1e-5), ..llama::FAMILY.keys },
    padding: true,
    norm: Norm { weight: false, ..Norm::LAYER },
    attention: Attention { clip: Some("clip_qkv"), ..llama::FAMILY.attention },
    mlp: llama::PLAIN_MLP,
    ..llama::FAMILY
};
