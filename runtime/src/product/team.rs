//! Threads that share the tasks of a launch: a rank's own, and its helpers, which stay awake from
//! one launch to the next.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Thread;

/// Rounds of waiting for others before their cores are offered to them.
const SPINS: u32 = 1 << 12;
/// Rounds that a helper waits for the next launch before it sleeps: less than a millisecond.
/// Launches mostly follow each other sooner, and to wake a thread takes as long as a small one.
const AWAKE: u32 = 1 << 14;
/// Bits of the number of helpers in a [`Post::job`].
const COUNT: u32 = 16;
/// The job with which helpers end.
const END: u64 = u64::MAX;

thread_local! {
    /// The helpers of this thread, who end with it.
    static HELPERS: RefCell<Helpers> = const { RefCell::new(Helpers { post: None, threads: vec![] }) };
}

/// What a thread runs with its helpers.
struct Job<'a>(&'a (dyn Fn() + Sync));

/// What a thread and its helpers have in common.
#[derive(Default)]
struct Post {
    /// How many jobs there were, and of how many helpers the last one is.
    job: AtomicU64,
    /// The last job, on its caller's stack: the caller waits until no helper is busy with it.
    work: AtomicPtr<Job<'static>>,
    busy: AtomicUsize,
    /// What a helper's panic said.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Default)]
struct Helpers {
    post: Option<Arc<Post>>,
    threads: Vec<Thread>,
}

impl Helpers {
    /// Runs a job on this thread and on so many helpers, or as many as the system gives.
    fn run(&mut self, count: usize, f: &(dyn Fn() + Sync)) {
        let post = self.post.get_or_insert_default();
        let jobs = post.job.load(Ordering::Relaxed);
        while self.threads.len() < count.min((1 << COUNT) - 1) {
            let (own, number) = (post.clone(), self.threads.len() as u64);
            let helper = std::thread::Builder::new().name(name());
            let Ok(made) = helper.spawn(move || own.help(number, jobs)) else { break };
            self.threads.push(made.thread().clone());
        }
        let count = count.min(self.threads.len());
        let job = Job(f);
        post.work.store((&raw const job).cast_mut().cast(), Ordering::Relaxed);
        post.busy.store(count, Ordering::Relaxed);
        post.job.store(((jobs >> COUNT) + 1) << COUNT | count as u64, Ordering::Release);
        self.threads[..count].iter().for_each(Thread::unpark);
        let own = catch_unwind(AssertUnwindSafe(f)).err();
        // Also after a panic: helpers use what is on this stack.
        wait(|| post.busy.load(Ordering::Acquire) == 0);
        let panic = post.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = own.or(panic) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        self.post.iter().for_each(|p| p.job.store(END, Ordering::Release));
        self.threads.iter().for_each(Thread::unpark);
    }
}

impl Post {
    /// What helper `number` does until its thread's end: its part of every job after those seen.
    fn help(&self, number: u64, mut seen: u64) {
        loop {
            let mut rounds = 0;
            while self.job.load(Ordering::Acquire) == seen {
                rounds += 1;
                match rounds {
                    AWAKE.. => std::thread::park(),
                    _ if rounds % SPINS == 0 => std::thread::yield_now(),
                    _ => std::hint::spin_loop(),
                }
            }
            seen = self.job.load(Ordering::Acquire);
            if seen == END {
                return;
            }
            if number < seen & ((1 << COUNT) - 1) {
                // SAFETY: the job's caller waits for this helper.
                let job = unsafe { &*self.work.load(Ordering::Relaxed) };
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (job.0)())) {
                    *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
                }
                self.busy.fetch_sub(1, Ordering::Release);
            }
        }
    }
}

/// Threads are named after whom they help.
fn name() -> String {
    std::thread::current().name().unwrap_or("helper").to_string()
}

/// Waits until something is so.
fn wait(is: impl Fn() -> bool) {
    let mut rounds = 0;
    while !is() {
        rounds += 1;
        if rounds < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
    }
}

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

/// Runs phases of tasks, of which the first ones are numbered `starts` and the last number is
/// behind all: `f` of a phase and a task in it. A phase begins when all tasks of the one before are
/// done; threads stay from phase to phase.
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
    // Tasks are taken in order: somebody is at work on each that is waited for. Of a phase none is
    // done before those of earlier ones are.
    let ready = |before: usize| wait(|| done.load(Ordering::Acquire) >= before);
    let shared = Shared(|i: usize| run(i, &ready));
    let work = || {
        while let Some(i) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&i| i < tasks) {
            let _counts = Counts(&done);
            shared.call(i);
        }
    };
    // Who is at work on another job already shares no more.
    HELPERS.with(|h| match h.try_borrow_mut() {
        Ok(mut helpers) => helpers.run(threads - 1, &work),
        Err(_) => work(),
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

    /// Launches of one thread follow each other at once, or when its helpers are asleep, with more
    /// and fewer of them, and inside each other.
    #[test]
    fn helpers_stay_for_the_next_launch() {
        let sum = AtomicUsize::new(0);
        let add = |i: usize| {
            sum.fetch_add(i, Ordering::Relaxed);
        };
        let (mut want, each_of) = (0, |n: usize| n * (n - 1) / 2);
        for (round, threads) in [2, 4, 1, 3].into_iter().cycle().take(400).enumerate() {
            // SAFETY: calls may run at the same time.
            unsafe { each(threads, 50, add) };
            want += each_of(50);
            assert_eq!(sum.load(Ordering::Relaxed), want, "round {round}");
            if round % 100 == 0 {
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
        }
        // SAFETY: calls may run at the same time.
        unsafe { each(3, 4, |_| each(3, 50, add)) };
        assert_eq!(sum.load(Ordering::Relaxed), want + 4 * each_of(50));
    }

    #[test]
    fn a_panic_ends_all_phases() {
        // Whoever has the task, and if all have one; and the next launch is as if nothing had been.
        for i in 0..100 {
            let f = |phase, task| assert!((phase, task) != (0, 2) && i % 2 == 0, "this one");
            // SAFETY: calls may run at the same time.
            let run = || unsafe { phases(3, &[0, 8, 16], f) };
            let said = catch_unwind(AssertUnwindSafe(run)).expect_err("a task panics");
            assert!(said.downcast_ref::<&str>().is_some_and(|s| s.contains("this one")));
            let count = AtomicUsize::new(0);
            // SAFETY: calls may run at the same time.
            unsafe {
                each(3, 20, |_| {
                    count.fetch_add(1, Ordering::Relaxed);
                });
            }
            assert_eq!(count.load(Ordering::Relaxed), 20);
        }
    }
}
