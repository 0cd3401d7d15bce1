//! The integration tests of the command and of whole plans, in one program.

mod auto;
mod bad_input;
mod bad_layouts;
mod balance;
mod cases;
mod checkpoints;
#[cfg(feature = "mpi")]
mod clusters;
mod compiled;
mod context;
mod cuts;
mod determinism;
mod device;
mod device_code;
mod dropout;
mod experts;
mod files;
mod fixture;
mod grids;
mod imports;
mod inspect;
mod interpreter;
mod lab;
mod layouts;
mod least;
mod memory;
mod meshes;
mod mutations;
mod orders;
mod passes;
mod pictures;
mod pipelines;
mod planner;
mod precision;
mod programs;
mod proofs;
mod ranks;
mod recompute;
mod report;
mod search;
mod sinks;
#[cfg(feature = "tokenizers")]
mod text;
mod training;
mod volumes;
mod zero;
