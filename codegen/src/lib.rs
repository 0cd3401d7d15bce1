//! Turns nodes into kernels: the loops that one rank runs, with its own sizes.
//!
//! Nothing is decided here that a plan does not say: which node runs when and where its values lie
//! was settled by the passes. This crate knows how letters become loops.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod c;
pub mod cache;
mod collective;
mod cubin;
pub mod cuda;
mod experts;
mod fused;
pub mod kept;
mod layout;
mod lower;
mod moves;
pub mod nvrtc;
mod product;
mod rows;

pub use lower::{launch, lower, program};
