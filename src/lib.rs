//! The command `shardc`: its command line, and ranks that other programs start.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod commands;
mod torch;

pub use shardc_compiler::{
    Output, as_made, compare, compile, compile_config, compile_with, device, measure, numbers,
    planner, recompile, retarget, search,
};
pub use shardc_plans::input::{Input, brought, facts, read_model, shape, text_source};
pub use shardc_plans::plan_dir::SCHEMA;
pub use shardc_plans::{flags, hub, machine, plan_dir, rules, seal, stored};
pub use shardc_process::{signals, terminal};
pub use shardc_report::{explain, inspect, page, pictures, proof, report};
pub use shardc_train::{checkpoint, cluster, data, lock};
pub use {shardc_audit as audit, shardc_export as export};
