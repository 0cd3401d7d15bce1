//! Runs a plan: ranks are threads of this process, each with one arena and one list of kernels.
//!
//! The executor is one `match` over kernels; the step is the plan's list of actions; collectives go
//! through a [`transport::Transport`], so that another transport changes nothing here.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod alarm;
pub mod arena;
pub mod control;
pub mod cuda;
pub mod exec;
pub mod holdings;
pub mod memory;
pub mod messages;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod native;
pub mod progress;
pub mod session;
pub mod spawn;
pub mod threads;
pub mod transport;

mod attention;
mod batch;
mod call_plan;
mod element;
mod engine;
mod exchange;
mod experts;
mod flight_recorder;
mod grouped;
mod hub;
mod map;
mod math;
mod moves;
mod options;
mod product;
mod rank;
mod recurrence;
mod region;
mod rows;
mod team;
mod wiring;

pub use attention::QUERIES;

pub use batch::{Columns, Numbers, complete};
pub use flight_recorder::{Done, Timing};
pub use product::processor;

pub use options::{First, LoadFn, Options, Wanted, fresh};
pub use session::{Array, LowerFn, Process, Session, StepBatch, StepResult};

/// Most bytes that a process holds beside its arenas, its plan and its kernels, if so many threads compute, those of
/// all its ranks together: packed operands of products with sums that are not rounded yet, blocks of attention; and
/// code, queues and blocks of kernels over rows.
pub const fn beside(threads: usize) -> usize {
    const FIXED: usize = 24 << 20;
    const EACH: usize = 14 << 20;
    // A block of outputs has room, too.
    const _: () = assert!(product::KEPT + attention::KEPT + 4 * QUERIES * 512 <= EACH);
    FIXED + threads * EACH
}
