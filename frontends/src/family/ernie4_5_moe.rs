//! ERNIE 4.5 with experts (Baidu, 2025): experts by a softmax whose choice a bias corrects, in some of the layers, beside
//! MLPs that every token passes.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "ernie4_5_moe",
    head_bias: Bias::Key("use_bias"),
    experts: Some(Experts {
        count: "moe_num_experts",
        top_k: "moe_k",
        score: Score {
            bias: Some("moe_statics.e_score_correction_bias"),
            bias_of_row: true,
            normed: Normed::AtLeast("moe_norm_min", 1e-12),
            ..Score::SHARES
        },
        shared: Some(Shared::of(
            "shared_experts",
            SharedWidth::Experts("moe_num_shared_experts", 2),
        )),
        layers: SparseLayers::Between {
            first: ("moe_layer_start_index", 1),
            last: "moe_layer_end_index",
            step: "moe_layer_interval",
        },
        ..deepseek_v3::EXPERTS
    }),
    known: Known {
        aliases: &[("num_experts_per_tok", "moe_k"), ("num_experts", "moe_num_experts")],
        refused: &[("output_router_logits", Only::Flag(false))],
        harmless: &["router_aux_loss_coef"],
        ..Known::NONE
    },
    ..ernie4_5::FAMILY
};
