//! The text model of Llama 4 (Meta, 2025): layers that turn see chunks of tokens, the others all, with larger queries the
//! further they stand; experts whose gates are sigmoids and multiply what enters, beside an MLP.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "llama4_text",
    keys: Keys { ffn: "intermediate_size_mlp", ..llama::FAMILY.keys },
    absent: Absent {
        kv_heads: Some(8),
        head_dim: Some(128),
        max_positions: 131_072,
        eps: 1e-5,
        theta: 5e5,
        ..llama::FAMILY.absent
    },
    positions: Positions::Rotary(Turning {
        adjacent: Adjacent::Always,
        still: Still::Listed { every: 4 },
        ..Turning::PLAIN
    }),
    attention: Attention {
        heads: Heads::of(
            Bias::Key("attention_bias"),
            Some(HeadNorms {
                over: NormedOver::Bare,
                key: Some(("use_qk_norm", true)),
                behind: true,
                ..HeadNorms::EACH
            }),
        ),
        window: Window::Chunks("attention_chunk_size", 8192),
        growth: Some(Growth {
            key: "attn_temperature_tuning",
            by: ("attn_scale", 0.1),
            every: ("floor_scale", 8192),
        }),
        ..llama::FAMILY.attention
    },
    mlp: Mlp { module: "feed_forward", ..llama::PLAIN_MLP },
    experts: Some(Experts {
        module: "feed_forward",
        router: "router",
        gate: "gate_up_proj",
        up: "gate_up_proj",
        down: "down_proj",
        stored: Stored::Together { order: WeightOrder::InOut, in_turn: false, biases: false },
        list: "experts",
        score: Score {
            function: ScoreFunction::Sigmoid,
            normed: Normed::Never,
            before: true,
            ..Score::SHARES
        },
        shared: Some(Shared {
            module: "shared_expert",
            width: SharedWidth::Key("intermediate_size", 8192),
            gate: None,
        }),
        layers: SparseLayers::Listed("moe_layers", "interleave_moe_layer_step"),
        absent: (16, 1, 8192, None),
        ..mixtral::EXPERTS
    }),
    known: Known {
        harmless: &["output_router_logits", "router_aux_loss_coef", "router_jitter_noise"],
        ..Known::NONE
    },
    ..llama::FAMILY
};
