//! DeepSeek-V3 (DeepSeek-AI, 2024): multi-head latent attention, leading layers with a plain MLP,
//! then experts among which groups are chosen first, beside one that every token passes.

use super::*;

/// Sigmoids, whose choice a bias corrects, among groups whose best two count.
pub(super) const SCORE: Score = Score {
    function: ScoreFunction::Sigmoid,
    bias: Some("gate.e_score_correction_bias"),
    groups: Groups::BestTwo { absent: (8, 4) },
    normed: Normed::Unless("norm_topk_prob"),
    factor: Some(("routed_scaling_factor", 2.5)),
    ..Score::SHARES
};

pub(super) const EXPERTS: Experts = Experts {
    count: "n_routed_experts",
    score: SCORE,
    shared: Some(Shared::of("shared_experts", SharedWidth::Experts("n_shared_experts", 1))),
    layers: SparseLayers::From { absent: 3 },
    ..Experts::EACH
};

/// Other names of the keys of [`EXPERTS`].
pub(super) const EXPERT_ALIASES: &[(&str, &str)] = &[("num_local_experts", "n_routed_experts")];

/// What DeepSeek's own code reads of [`EXPERTS`]: transformers' class computes this, whatever stands there.
pub(super) const EXPERT_WORDS: &[(&str, Only)] = &[
    ("scoring_func", Only::Word("sigmoid")),
    ("topk_method", Only::Word("noaux_tc")),
    ("moe_layer_freq", Only::Numbers(&[1.0])),
    ("num_mtp_layers", Only::Numbers(&[1.0, 0.0])),
];

pub(super) const FAMILY: Family = Family {
    model_type: "deepseek_v3",
    keys: Keys { kv_heads: KvHeads::All, head_dim: None, ..llama::FAMILY.keys },
    positions: Positions::Rotary(Turning {
        adjacent: Adjacent::Unless("rope_interleave"),
        ..Turning::PLAIN
    }),
    attention: Attention {
        heads: Heads::Latent(Latent {
            q: Linear::torch("q_proj", Bias::Never),
            q_down: Linear::torch("q_a_proj", Bias::Key("attention_bias")),
            q_norm: "q_a_layernorm",
            q_up: Linear::torch("q_b_proj", Bias::Never),
            kv_down: Linear::torch("kv_a_proj_with_mqa", Bias::Key("attention_bias")),
            kv_norm: "kv_a_layernorm",
            kv_up: Linear::torch("kv_b_proj", Bias::Never),
            absent: LatentSizes {
                q_rank: Some(1536),
                kv_rank: 512,
                still: 128,
                turning: 64,
                value: 128,
            },
        }),
        ..llama::FAMILY.attention
    },
    mlp: llama::PLAIN_MLP,
    experts: Some(EXPERTS),
    mtp: Some("num_nextn_predict_layers"),
    known: Known {
        aliases: EXPERT_ALIASES,
        idle: EXPERT_WORDS,
        harmless: &[
            "aux_loss_alpha",
            "ep_size",
            "head_dim",
            "num_key_value_heads",
            "output_router_logits",
            "qk_head_dim",
            "seq_aux",
        ],
        ..Known::NONE
    },
    ..llama::FAMILY
};
