//! Turns nodes into kernels: the loops that one rank runs, with its own sizes.
//!
//! Nothing is decided here that a plan does not say: which node runs when and where its values lie
//! was settled by the passes. This crate knows how letters become loops.

mod collective;
pub mod cuda;
mod elementwise;
mod experts;
mod fused;
mod layout;
mod lower;
mod moves;
pub mod nvrtc;
mod product;

pub use lower::{lower, program};
