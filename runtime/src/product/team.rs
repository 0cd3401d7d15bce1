//! Threads of one product.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Lets several threads call a function that reaches memory by its address.
struct Shared<F>(F);

// SAFETY: who calls `each` says that calls may run at the same time.
unsafe impl<F> Sync for Shared<F> {}

impl<F: Fn(usize)> Shared<F> {
    fn call(&self, task: usize) {
        (self.0)(task);
    }
}

/// Runs all tasks, on so many threads at most; who is free takes the next.
///
/// # Safety
/// Calls of `f` for different tasks may run at the same time, on any threads.
pub(crate) unsafe fn each(threads: usize, tasks: usize, f: impl Fn(usize)) {
    let threads = threads.min(tasks);
    if threads <= 1 {
        return (0..tasks).for_each(f);
    }
    let (f, next) = (Shared(f), AtomicUsize::new(0));
    let work = || {
        while let Some(i) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&i| i < tasks) {
            f.call(i);
        }
    };
    rayon::in_place_scope(|s| {
        (1..threads).for_each(|_| s.spawn(|_| work()));
        work();
    });
}
