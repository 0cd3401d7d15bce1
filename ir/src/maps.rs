//! Maps and sets whose hash is cheap: compiling asks them for roles, names and numbers some million times.
//!
//! The hash differs from process to process, so nothing depends on the order of their entries, and a file of
//! a stranger cannot be made of names that meet in one bucket without knowing it.

use foldhash::fast::RandomState;
pub use foldhash::{HashMap, HashSet};
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::LazyLock;

/// What makes one number of several, the same wherever the process asks for it.
pub(crate) fn hasher() -> impl Hasher {
    static STATE: LazyLock<RandomState> = LazyLock::new(RandomState::default);
    STATE.build_hasher()
}

/// The hash of a value, the same wherever the process asks for it.
pub(crate) fn hash(value: &(impl Hash + ?Sized)) -> u64 {
    let mut hasher = hasher();
    value.hash(&mut hasher);
    hasher.finish()
}
