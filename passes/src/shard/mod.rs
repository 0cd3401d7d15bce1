//! Shardings: where they come from, how they spread, and the collectives they need.

pub mod annotate;
mod asked;
pub mod auto;
pub mod experts;
pub mod grid;
pub mod partition;
pub mod propagate;
pub mod reshard;
mod ways;
pub mod zero;
