//! This process: what it prints, the signals that it gets, its memory, and words as a shell takes them.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod memory;
pub mod shell;
pub mod signals;
pub mod terminal;
