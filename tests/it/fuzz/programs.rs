//! Random models, as `programs.rs` compares them.

#[path = "../programs/axes.rs"]
pub mod axes;
#[path = "../programs/blocks.rs"]
mod blocks;
#[path = "../programs/drawn.rs"]
pub mod drawn;

pub use super::mutate::Draw;
