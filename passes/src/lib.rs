//! The passes: from a model on one device to a plan for every rank.
//!
//! [`pipeline`] is the one list of their order; each pass is one function in one file.

pub mod autodiff;
pub mod cases;
pub mod checks;
pub mod choose;
pub mod classes;
pub mod depends;
pub mod experts;
pub mod globs;
pub mod group;
pub mod lora;
pub mod memory;
pub mod optim;
pub mod options;
pub mod overlap;
pub mod pipeline;
mod places;
pub mod precision;
pub mod rewrite;
pub mod schedule;
pub mod shard;
pub mod stages;
mod state;
pub mod states;
pub mod step;
pub mod threads;
pub mod warnings;
pub mod window;
