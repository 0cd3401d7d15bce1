//! Ministral (Mistral AI, 2024): Mistral with windows in some layers.

use super::*;

pub(super) const FAMILY: Family = Family { model_type: "ministral", ..mistral::FAMILY };
