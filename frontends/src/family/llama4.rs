//! The text model of Llama 4 (Meta, 2025): layers that turn see chunks of tokens, the others all, with larger queries the
//! further they stand; experts whose gates are sigmoids and multiply what enters, beside an MLP.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "llama4_text",
    keys: Keys { ffn: "intermediate_size_mlp", ..llama::FAMILY.keys },
    positions: Positions::Rotary(Turning {
        adjacent: Adjacent::Always,
        still: Still::Listed { every: 4 },
        ..Turning::PLAIN
    }),
    attention: Attention {
        norms: Some(HeadNorms {
            over: NormedOver::Bare,
            key: Some(("use_qk_norm", true)),
            behind: true,
            ..HeadNorms::EACH
        }),
        window: Window::Chunks("attention_chunk_size", 8192),
        growth: Growth::Still,
        ..llama::FAMILY.attention
    },
    mlp: Mlp { module: "feed_forward", ..llama::PLAIN_MLP },
    experts: Some(Experts {
        module: "feed_forward",
        score: Score {
            function: ScoreFunction::Sigmoid,
            normed: Normed::Never,
            before: true,
            ..Score::SHARES
        },
        shared: Some(Shared::of("shared_expert", SharedWidth::Key("intermediate_size", 8192))),
        layers: SparseLayers::Listed("moe_layers", "interleave_moe_layer_step"),
        ..Experts::TOGETHER
    }),
    known: Known {
        harmless: &["output_router_logits", "router_aux_loss_coef", "router_jitter_noise"],
        ..Known::NONE
    },
    ..llama::FAMILY
};
