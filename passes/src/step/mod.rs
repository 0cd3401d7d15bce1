//! The step around the microbatches: what happens to parameters before them, and gradients after.

pub mod assemble;
pub mod bucket_grads;
pub mod early;
pub mod early_sums;
pub mod elide_accumulators;
pub mod enter;
pub mod finish;
pub mod instructions;
mod losses;
mod norm;
pub mod once;
pub mod replay;
pub mod router_bias;
mod updates;
