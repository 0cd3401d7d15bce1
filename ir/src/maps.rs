//! Maps and sets whose hash is cheap: compiling asks them for roles, names and numbers some million times.
//!
//! The hash differs from process to process, so nothing depends on the order of their entries, and a file of
//! a stranger cannot be made of names that meet in one bucket without knowing it.

pub use foldhash::{HashMap, HashSet};
