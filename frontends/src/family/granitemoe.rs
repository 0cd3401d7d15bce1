//! Granite 3 with experts (IBM Research, 2024): the factors of Granite, and the experts of Mixtral,
//! whose gates are the softmax of those that are chosen; the experts of a layer are two tensors.

use super::*;

/// Experts in two tensors for all of a layer.
pub(super) const EXPERTS: Experts = Experts {
    router: "router.layer",
    list: "",
    gate: Some("input_linear.weight"),
    up: "input_linear.weight",
    down: "output_linear.weight",
    stored: Stored::Together { order: WeightOrder::OutIn, in_turn: false, biases: false },
    aux: true,
    ..mixtral::EXPERTS
};

pub(super) const FAMILY: Family = Family {
    model_type: "granitemoe",
    mlp: llama::PLAIN_MLP,
    experts: Some(EXPERTS),
    ..granite::FAMILY
};
