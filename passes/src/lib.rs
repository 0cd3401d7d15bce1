//! The passes: from a model on one device to a plan for every rank.
//!
//! [`pipeline`] is the one list of their order; each pass is one function in one file.

pub mod autodiff;
pub mod cases;
pub mod checks;
pub mod choose;
pub mod classes;
mod compilation;
pub mod depends;
pub mod experts;
pub mod globs;
pub mod group;
pub mod lora;
mod lower;
pub mod memory;
pub mod optim;
pub mod options;
pub mod overlap;
pub mod pipeline;
mod places;
pub mod precision;
pub mod rewrite;
mod rows;
pub mod schedule;
pub mod shard;
pub mod stages;
pub mod states;
pub mod step;
mod table;
pub mod threads;
pub mod warnings;
pub mod window;
pub mod zero;
