//! Memory that a thread keeps from kernel to kernel, for blocks of a bounded size.

use std::cell::Cell;
use std::thread::LocalKey;

/// A line of the cache.
#[repr(align(64))]
pub(crate) struct Line {
    _words: [u32; 16],
}

/// The memory of a thread.
pub(crate) type Room = Cell<Vec<Line>>;

/// Calls `f` with room for so many words, which hold anything.
pub(crate) fn with<R>(
    room: &'static LocalKey<Room>,
    words: usize,
    f: impl FnOnce(*mut u32) -> R,
) -> R {
    let mut lines = room.take();
    let needed = words.div_ceil(16);
    // No line is ever filled: there is only reserved room, and nothing in it to keep.
    if lines.capacity() < needed {
        lines = Vec::new();
        lines.reserve_exact(needed);
    }
    let result = f(lines.as_mut_ptr().cast());
    room.set(lines);
    result
}
