//! AFM (Arcee AI, 2025): Llama with an MLP of squared rectifiers, without a gate.

use super::*;

pub(super) const FAMILY: Family = Family {
    model_type: "arcee",
    mlp: Mlp { gate: None, activations: &[Activation::SquaredRelu], ..llama::FAMILY.mlp },
    ..llama::FAMILY
};
