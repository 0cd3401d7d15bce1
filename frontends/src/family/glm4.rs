//! GLM-4, as published in 2025: that of 2024 with norms behind attention and MLP.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "glm4",
    attention: Attention { norm_behind: Some("post_self_attn_layernorm"), ..glm::FAMILY.attention },
    mlp: Mlp { norm_behind: Some("post_mlp_layernorm"), ..glm::FAMILY.mlp },
    ..glm::FAMILY
};
