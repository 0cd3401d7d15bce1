//! Threads of one product.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Rounds of waiting for others before their cores are offered to them.
const SPINS: u32 = 1 << 12;

/// Counts a task as done, also if it panics: others shall not wait for it for ever.
struct Counts<'a>(&'a AtomicUsize);

impl Drop for Counts<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

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
    // SAFETY: by the caller.
    unsafe { phases(threads, &[0, tasks], |_, i| f(i)) }
}

/// Runs phases of tasks, of which the first ones are numbered `starts` and the last number is behind
/// all: `f` of a phase and a task in it. A phase begins when all tasks of the one before are done;
/// threads stay from phase to phase.
///
/// # Safety
/// Calls of `f` for different tasks of a phase may run at the same time, on any threads.
pub(crate) unsafe fn phases(threads: usize, starts: &[usize], f: impl Fn(usize, usize)) {
    let tasks = starts.last().copied().unwrap_or(0);
    let run = |i: usize, ready: &dyn Fn(usize)| {
        let phase = starts.partition_point(|&s| s <= i) - 1;
        ready(starts[phase]);
        f(phase, i - starts[phase]);
    };
    let threads = threads.min(tasks);
    if threads <= 1 {
        return (0..tasks).for_each(|i| run(i, &|_| ()));
    }
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    // Tasks are taken in order: somebody is at work on each that is waited for. Of a phase none is done
    // before those of earlier ones are.
    let ready = |before: usize| {
        let mut spins = 0;
        while done.load(Ordering::Acquire) < before {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    };
    let shared = Shared(|i: usize| run(i, &ready));
    let work = || {
        while let Some(i) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&i| i < tasks) {
            let _counts = Counts(&done);
            shared.call(i);
        }
    };
    rayon::in_place_scope(|s| {
        (1..threads).for_each(|_| s.spawn(|_| work()));
        work();
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Mutex;

    /// Several teams at once, of more threads than there may be.
    #[test]
    fn phases_follow_each_other() {
        let one = || {
            let done = Mutex::new(vec![]);
            // The second phase has no tasks.
            let f = |phase, i| done.lock().unwrap().push((phase, i));
            // SAFETY: calls may run at the same time.
            unsafe { phases(3, &[0, 40, 40, 41, 80], f) };
            let done = done.into_inner().unwrap();
            assert!(done.is_sorted_by_key(|x| x.0) && done.len() == 80, "{done:?}");
            assert_eq!(done[40], (2, 0));
        };
        std::thread::scope(|s| (0..4).for_each(|_| drop(s.spawn(one))));
    }

    #[test]
    fn a_panic_ends_all_phases() {
        let f = |phase, i| assert!((phase, i) != (0, 2), "this one");
        // SAFETY: calls may run at the same time.
        let run = || unsafe { phases(3, &[0, 8, 16], f) };
        assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
    }
}
