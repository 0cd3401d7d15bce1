//! gpt-oss (OpenAI, 2025): heads with sinks, a window in every second layer, and in all of them
//! experts with biases, whose products are limited; the router's logits have a bias, too.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "gpt_oss",
    attention: Attention {
        heads: Heads::of(Bias::Unless("attention_bias")),
        o: Linear::torch("o_proj", Bias::Unless("attention_bias")),
        window: Window::Alternating { absent: 128, every: 2, key: None },
        sinks: Some("sinks"),
        ..llama::FAMILY.attention
    },
    mlp: Mlp { activations: &[], ..llama::PLAIN_MLP },
    experts: Some(Experts {
        router_bias: true,
        stored: Stored::Together { order: WeightOrder::InOut, in_turn: true, biases: true },
        clamped: Some(Clamped { alpha: ("swiglu_alpha", 1.702), limit: ("swiglu_limit", 7.0) }),
        aux: true,
        ..Experts::TOGETHER
    }),
    known: Known {
        aliases: mixtral::FAMILY.known.aliases,
        idle: &[("hidden_act", Only::Word("silu"))],
        harmless: &["experts_per_token", "initial_context_length"],
        ..Known::NONE
    },
    ..llama::FAMILY
};
