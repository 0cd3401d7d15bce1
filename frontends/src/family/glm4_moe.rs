//! GLM-4.5 (GLM-4.5 Team, 2025): Llama of which half of each head turns, with the experts of DeepSeek-V3.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "glm4_moe",
    positions: Positions::Rotary(Turning {
        part: Some(("partial_rotary_factor", 0.5)),
        ..Turning::PLAIN
    }),
    attention: Attention {
        norms: Some(HeadNorms { key: Some(("use_qk_norm", false)), ..HeadNorms::EACH }),
        o: Linear::torch("o_proj", Bias::Never),
        ..llama::FAMILY.attention
    },
    mlp: llama::PLAIN_MLP,
    experts: Some(Experts {
        score: Score {
            groups: Groups::BestTwo { absent: (1, 1) },
            factor: Some(("routed_scaling_factor", 1.0)),
            ..deepseek_v3::SCORE
        },
        layers: SparseLayers::From { absent: 1 },
        ..deepseek_v3::EXPERTS
    }),
    mtp: deepseek_v3::FAMILY.mtp,
    known: Known {
        aliases: deepseek_v3::EXPERT_ALIASES,
        idle: deepseek_v3::EXPERT_WORDS,
        harmless: &["output_router_logits"],
        ..Known::NONE
    },
    ..llama::FAMILY
};
