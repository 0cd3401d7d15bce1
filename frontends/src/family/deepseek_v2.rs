//! DeepSeek-V2 (DeepSeek-AI, 2024): the latent attention of DeepSeek-V3, and experts by a softmax,
//! whose gates are not divided by their sum.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "deepseek_v2",
    positions: Positions::Rotary(Turning { adjacent: Adjacent::Always, ..Turning::PLAIN }),
    mtp: None,
    mlp: llama::FAMILY.mlp,
    experts: Some(Experts {
        score: Score {
            groups: Groups::Best,
            normed: Normed::Never,
            factor: Some(("routed_scaling_factor", 1.0)),
            ..Score::SHARES
        },
        layers: SparseLayers::From { absent: 0 },
        ..deepseek_v3::EXPERTS
    }),
    known: Known {
        aliases: &[("num_experts", "n_routed_experts")],
        idle: &[
            ("scoring_func", Only::Word("softmax")),
            ("moe_layer_freq", Only::Numbers(&[1.0])),
            ("norm_topk_prob", Only::Flag(false)),
        ],
        ..deepseek_v3::FAMILY.known
    },
    ..deepseek_v3::FAMILY
};
