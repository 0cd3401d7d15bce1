//! Threads that share the tasks of a launch: a rank's own, and its helpers, which stay awake from
//! one launch to the next.

use smallvec::SmallVec;
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Thread;

/// Rounds of waiting for others before their cores are offered to them.
const SPINS: u32 = 1 << 12;
/// Rounds that a helper waits for the next launch before it sleeps: less than a millisecond.
/// Launches mostly follow each other sooner, and to wake a thread takes as long as a small one.
const AWAKE: u32 = 1 << 14;
/// Bits of the number of helpers in a [`TeamPost::job`].
const COUNT: u32 = 16;
/// The job with which helpers end.
const END: u64 = u64::MAX;
/// In [`TeamPost::busy`], while helpers may still begin with the job.
const OPEN: usize = 1 << (usize::BITS - 1);

thread_local! {
    /// The helpers of this thread, who end with it.
    static HELPERS: RefCell<Helpers> = const { RefCell::new(Helpers { post: None, threads: vec![] }) };
    /// Whether this thread's core is wanted by others while it waits.
    static CROWDED: Cell<bool> = const { Cell::new(false) };
}

/// Says whether more threads run than there are cores: whoever waits on a launch of this thread then offers
/// its core at once, and helpers sleep between launches.
pub(crate) fn crowd(crowded: bool) {
    CROWDED.set(crowded);
}

/// What a thread runs with its helpers, by the number of who runs it.
struct HelperJob<'a>(&'a (dyn Fn(usize) + Sync));

/// What a thread and its helpers have in common.
#[derive(Default)]
struct TeamPost {
    /// How many jobs there were, and of how many helpers the last one is.
    job: AtomicU64,
    /// The last job, on its caller's stack: the caller waits until no helper is busy with it. One that has
    /// not begun with it by the time the caller is done does not: it may be asleep for long.
    work: AtomicPtr<HelperJob<'static>>,
    /// How many helpers have begun with the job and are not done, and [`OPEN`].
    busy: AtomicUsize,
    /// What the caller says of the cores.
    crowded: AtomicBool,
    /// What a helper's panic said.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Default)]
struct Helpers {
    post: Option<Arc<TeamPost>>,
    threads: Vec<Thread>,
}

impl Helpers {
    /// Runs a job on this thread, which is number 0, and on so many helpers, or as many as the
    /// system gives.
    fn run(&mut self, count: usize, f: &(dyn Fn(usize) + Sync)) {
        let post = self.post.get_or_insert_default();
        let jobs = post.job.load(Ordering::Relaxed);
        while self.threads.len() < count.min((1 << COUNT) - 1) {
            let (own, number) = (post.clone(), self.threads.len() as u64);
            let helper = std::thread::Builder::new().name(name());
            let Ok(made) = helper.spawn(move || own.help(number, jobs)) else { break };
            self.threads.push(made.thread().clone());
        }
        let count = count.min(self.threads.len());
        let job = HelperJob(f);
        post.work.store((&raw const job).cast_mut().cast(), Ordering::Relaxed);
        let crowded = CROWDED.get();
        post.crowded.store(crowded, Ordering::Relaxed);
        post.busy.store(OPEN, Ordering::Release);
        post.job.store(((jobs >> COUNT) + 1) << COUNT | count as u64, Ordering::Release);
        self.threads[..count].iter().for_each(Thread::unpark);
        let own = catch_unwind(AssertUnwindSafe(|| f(0))).err();
        // Also after a panic: helpers use what is on this stack.
        post.busy.fetch_and(!OPEN, Ordering::AcqRel);
        wait(crowded, || post.busy.load(Ordering::Acquire) == 0);
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

impl TeamPost {
    /// What helper `number` does until its thread's end: its part of every job after those seen.
    fn help(&self, number: u64, mut seen: u64) {
        loop {
            let mut rounds = 0;
            let awake = if self.crowded.load(Ordering::Relaxed) { 1 } else { AWAKE };
            while self.job.load(Ordering::Acquire) == seen {
                rounds += 1;
                match rounds {
                    _ if rounds >= awake => std::thread::park(),
                    _ if rounds % SPINS == 0 => std::thread::yield_now(),
                    _ => std::hint::spin_loop(),
                }
            }
            seen = self.job.load(Ordering::Acquire);
            if seen == END {
                return;
            }
            if number < seen & ((1 << COUNT) - 1) && self.begin() {
                // SAFETY: the job's caller waits for this helper.
                let job = unsafe { &*self.work.load(Ordering::Relaxed) };
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (job.0)(number as usize + 1)))
                {
                    *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
                }
                self.busy.fetch_sub(1, Ordering::Release);
            }
        }
    }

    /// Counts a helper as busy with the job that is open, the last one; false if none is.
    fn begin(&self) -> bool {
        let mut busy = self.busy.load(Ordering::Relaxed);
        while busy & OPEN != 0 {
            let (more, order) = (busy + 1, Ordering::Relaxed);
            match self.busy.compare_exchange_weak(busy, more, Ordering::AcqRel, order) {
                Ok(_) => return true,
                Err(other) => busy = other,
            }
        }
        false
    }
}

/// Threads are named after whom they help.
fn name() -> String {
    std::thread::current().name().unwrap_or("helper").to_string()
}

/// Waits until something is so.
fn wait(crowded: bool, is: impl Fn() -> bool) {
    let mut rounds = if crowded { SPINS } else { 0 };
    while !is() {
        rounds = rounds.saturating_add(1);
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

/// A number that threads write, in a line of the cache of its own.
#[repr(align(64))]
#[derive(Default)]
struct Apart(AtomicUsize);

impl Apart {
    /// Takes a task of those in this range, where the number is the first that nobody has taken;
    /// none if all are taken.
    fn take(&self, range: Range<usize>) -> Option<usize> {
        let mut next = self.0.load(Ordering::Relaxed);
        loop {
            let task = next.max(range.start);
            if task >= range.end {
                return None;
            }
            let order = Ordering::Relaxed;
            match self.0.compare_exchange_weak(next, task + 1, order, order) {
                Ok(_) => return Some(task),
                Err(other) => next = other,
            }
        }
    }
}

/// Lets several threads call a function that reaches memory by its address.
struct Shared<F>(F);

// SAFETY: who calls `phases` says that calls may run at the same time.
unsafe impl<F> Sync for Shared<F> {}

impl<F: Fn(usize, usize)> Shared<F> {
    fn call(&self, phase: usize, task: usize) {
        (self.0)(phase, task);
    }
}

/// Runs all tasks, on so many threads at most, as one of [`phases`].
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
/// Every thread has a share of a phase, tasks that follow each other, the first thread the first
/// ones: so a thread mostly reads what it wrote itself, which counts where cores share no cache.
/// Who is done with its share takes what others have not begun.
///
/// # Safety
/// Calls of `f` for different tasks of a phase may run at the same time, on any threads.
pub(crate) unsafe fn phases(threads: usize, starts: &[usize], f: impl Fn(usize, usize)) {
    let threads = threads.min(starts.last().copied().unwrap_or(0));
    let phases = || starts.windows(2).map(|w| w[0]..w[1]).enumerate();
    if threads <= 1 {
        return phases().for_each(|(phase, all)| (0..all.len()).for_each(|i| f(phase, i)));
    }
    let mut next: SmallVec<[Apart; 8]> = SmallVec::new();
    next.resize_with(threads, Apart::default);
    let (done, shared, crowded) = (Apart::default(), Shared(f), CROWDED.get());
    let work = |thread: usize| {
        for (phase, all) in phases() {
            // Somebody is at work on each task that is not done, as all before are taken.
            wait(crowded, || done.0.load(Ordering::Acquire) >= all.start);
            for of in (0..threads).map(|i| (thread + i) % threads) {
                let share = |i: usize| all.start + all.len() * i / threads;
                while let Some(task) = next[of].take(share(of)..share(of + 1)) {
                    let _counts = Counts(&done.0);
                    shared.call(phase, task - all.start);
                }
            }
        }
    };
    // Who is at work on another job already shares no more.
    HELPERS.with(|h| match h.try_borrow_mut() {
        Ok(mut helpers) => helpers.run(threads - 1, &work),
        Err(_) => work(0),
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
            // The second phase has no tasks. Who takes the third's only one is late with it.
            let f = |phase, i| {
                if phase == 2 {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                done.lock().unwrap().push((phase, i));
            };
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

    /// With more threads than cores: helpers that sleep begin, or the job is done without them.
    #[test]
    fn crowded_threads_do_all_tasks_once() {
        let one = || {
            crowd(true);
            for round in 0..200 {
                let done: Vec<AtomicUsize> = (0..60).map(|_| AtomicUsize::new(0)).collect();
                let first = AtomicUsize::new(0);
                let f = |phase: usize, i: usize| {
                    if phase == 0 {
                        first.fetch_add(1, Ordering::Relaxed);
                    }
                    assert!(phase == 0 || first.load(Ordering::Relaxed) == 20, "phases mix");
                    done[phase * 20 + i].fetch_add(1, Ordering::Relaxed);
                };
                // SAFETY: calls may run at the same time.
                unsafe { phases(2 + round % 4, &[0, 20, 60], f) };
                assert!(done.iter().all(|n| n.load(Ordering::Relaxed) == 1), "round {round}");
            }
        };
        std::thread::scope(|s| (0..4).for_each(|_| drop(s.spawn(one))));
    }

    /// Two threads, each held up until both are at work: in every phase each has the same share.
    #[test]
    fn a_thread_has_the_same_share_of_every_phase() {
        let (both, ran) = (std::sync::Barrier::new(2), Mutex::new(vec![]));
        let f = |_, i| {
            both.wait();
            ran.lock().unwrap().push((i / 2, std::thread::current().id()));
            both.wait();
        };
        // SAFETY: calls may run at the same time.
        unsafe { phases(2, &[0, 4, 6, 10], |p, i| f(p, if p == 1 { i * 2 } else { i })) };
        let (ran, own) = (ran.into_inner().unwrap(), std::thread::current().id());
        assert_eq!(ran.len(), 10);
        assert!(ran.iter().all(|&(share, thread)| (share == 0) == (thread == own)), "{ran:?}");
    }

    /// Nothing twice, also by who comes late.
    #[test]
    fn tasks_are_taken_once() {
        let next = Apart::default();
        let all: Vec<_> = std::iter::from_fn(|| next.take(3..6)).collect();
        assert_eq!((all, next.take(9..9), next.take(3..6)), (vec![3, 4, 5], None, None));
        assert_eq!(
            (next.take(9..11), next.take(3..6), next.take(9..11)),
            (Some(9), None, Some(10))
        );
        assert_eq!(next.take(9..11), None);
        let taken = Mutex::new(vec![]);
        let take = || std::iter::from_fn(|| next.take(20..20_020)).collect::<Vec<_>>();
        std::thread::scope(|s| {
            (0..4).for_each(|_| drop(s.spawn(|| taken.lock().unwrap().extend(take()))))
        });
        let mut taken = taken.into_inner().unwrap();
        taken.sort_unstable();
        assert_eq!(taken, (20..20_020).collect::<Vec<_>>());
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
