//! What users ask of the compiler, the models that they give, and stored plans.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod adapters;
pub mod again;
pub mod axes;
mod bounds;
pub mod flags;
pub mod hub;
pub mod input;
pub mod machine;
pub mod plan_dir;
pub mod rules;
pub mod seal;
pub mod stored;
