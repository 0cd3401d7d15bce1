//! OLMo (Groeneveld et al., 2024): Llama with layer norms that have no weights, and bounded queries, keys and values.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "olmo",
    keys: Keys { eps: None, ..llama::FAMILY.keys },
    absent: Absent { eps: 1e-5, ..llama::FAMILY.absent },
    padding: PaddingToken::Key { absent: Some(1) },
    norm: Norm { weight: false, ..Norm::LAYER },
    attention: Attention { clip: Some("clip_qkv"), ..llama::FAMILY.attention },
    mlp: llama::PLAIN_MLP,
    ..llama::FAMILY
};
