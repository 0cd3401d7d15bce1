//! Gradients: reverse-mode differentiation of the per-rank program, and its cut into F and B.

pub mod differentiate;
pub mod recompute;
pub mod split;
