//! Gradients: reverse-mode differentiation of the per-rank program, and its cut into F and B.

pub mod chunks;
pub mod differentiate;
mod mincut;
pub(crate) mod named;
pub mod recompute;
pub mod split;
