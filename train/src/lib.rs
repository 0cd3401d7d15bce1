//! Training: data, checkpoints, and the processes of a job.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod checkpoint;
pub mod cluster;
pub mod data;
pub mod lock;
