//! The tensor graph of shardc: types, ops, text, verifier, reference interpreter, plans.
//!
//! Everything else depends on this crate and on no other of ours. Meaning is executable here: each
//! op is evaluated in f64, on one device or on all ranks in lockstep ([`interp`]).
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod alike;
pub mod attr;
pub mod axes;
pub mod boxes;
pub mod builder;
pub mod cpu;
pub mod diag;
pub mod documents;
pub mod files;
pub mod func;
pub mod group;
pub mod hardware;
pub mod ids;
pub mod infer;
pub mod interp;
pub mod kernel;
pub mod launch;
pub mod loss_scale;
pub mod maps;
pub mod mesh;
pub mod names;
pub mod ops;
pub mod overlap;
pub mod phase;
pub mod plan;
pub mod price;
pub mod rng;
pub mod rule;
pub mod samples;
pub mod schedule;
pub mod source;
pub mod steps;
pub mod tensor;
pub mod text;
pub mod types;
pub mod verify;
pub mod weights;
