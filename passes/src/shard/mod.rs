//! Shardings: where they come from, how they spread, and the collectives they need.

pub mod annotate;
pub(crate) mod asked;
pub mod auto;
mod defer;
pub mod experts;
mod factors;
pub mod grid;
mod moves;
pub mod partition;
pub mod propagate;
pub mod reshard;
mod ways;

/// Priority of how tokens are cut, those of the residual stream and of experts: after parameters and batch have
/// spread.
const SEQUENCE: u8 = 1;
