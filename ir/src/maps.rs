//! Maps and sets whose hash is cheap: compiling asks them for roles, names and numbers some million times.
//!
//! The hash differs from process to process, so nothing depends on the order of their entries, and a file of
//! a stranger cannot be made of names that meet in one bucket without knowing it.

use foldhash::fast::RandomState;
pub use foldhash::{HashMap, HashSet};
use std::hash::{BuildHasher, Hash};
use std::sync::LazyLock;

/// The hash of a value, the same wherever the process asks for it.
pub(crate) fn hash(value: &(impl Hash + ?Sized)) -> u64 {
    static STATE: LazyLock<RandomState> = LazyLock::new(RandomState::default);
    STATE.hash_one(value)
}
