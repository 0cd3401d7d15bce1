//! MiniMax-M2 (MiniMax, 2025): the experts of Mixtral, chosen by sigmoids with a correcting bias; norms of all heads
//! of q and k together; a part of each head turns.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "minimax_m2",
    positions: Positions::Rotary(Turning {
        part: Some(("partial_rotary_factor", 1.0)),
        width: Some(("rotary_dim", None)),
        ..Turning::PLAIN
    }),
    attention: Attention {
        norms: Some(HeadNorms { over: NormedOver::All, ..HeadNorms::EACH }),
        ..llama::PLAIN_ATTENTION
    },
    mlp: llama::PLAIN_MLP,
    experts: Some(Experts {
        score: Score {
            function: ScoreFunction::Sigmoid,
            bias: Some("e_score_correction_bias"),
            ..Score::SHARES
        },
        ..mixtral::EXPERTS
    }),
    known: Known {
        aliases: &[("num_experts", "num_local_experts")],
        refused: &[
            ("output_router_logits", Only::Flag(false)),
            ("router_jitter_noise", Only::Numbers(&[0.0])),
        ],
        idle: &[
            ("scoring_func", Only::Word("sigmoid")),
            ("qk_norm_type", Only::Word("per_layer")),
            ("shared_intermediate_size", Only::Numbers(&[0.0])),
            ("use_qk_norm", Only::Flag(true)),
            ("use_routing_bias", Only::Flag(true)),
        ],
        harmless: &["attn_type_list", "mtp_transformer_layers", "num_mtp_modules", "use_mtp"],
        ..Known::NONE
    },
    ..llama::FAMILY
};
