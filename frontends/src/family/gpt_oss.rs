//! gpt-oss (OpenAI, 2025): heads with sinks, a window in every second layer, and in all of them
//! experts with biases, whose products are limited; the router's logits have a bias, too.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "gpt_oss",
    absent: Absent {
        kv_heads: Some(8),
        head_dim: Some(64),
        max_positions: 131_072,
        eps: 1e-5,
        theta: 1.5e5,
        ..llama::FAMILY.absent
    },
    attention: Attention {
        heads: Heads::of(Bias::Unless("attention_bias"), None),
        o: Linear::torch("o_proj", Bias::Unless("attention_bias")),
        window: Window::Alternating { absent: 128, every: 2, key: None },
        sinks: Some("sinks"),
        ..llama::FAMILY.attention
    },
    mlp: Mlp { activations: &[], ..llama::PLAIN_MLP },
    experts: Some(Experts {
        router: "router",
        router_bias: true,
        gate: "gate_up_proj",
        up: "gate_up_proj",
        down: "down_proj",
        stored: Stored::Together { order: WeightOrder::InOut, in_turn: true, biases: true },
        clamped: Some(Clamped { alpha: ("swiglu_alpha", 1.702), limit: ("swiglu_limit", 7.0) }),
        module: "mlp",
        absent: (128, 4, 2880, Some(0.001)),
        ..mixtral::EXPERTS
    }),
    known: Known {
        aliases: mixtral::FAMILY.known.aliases,
        idle: &[("hidden_act", Only::Word("silu"))],
        harmless: &["experts_per_token", "initial_context_length"],
        ..Known::NONE
    },
    ..llama::FAMILY
};
