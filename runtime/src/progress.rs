//! A progress thread: collectives of ranks that exchange messages go on while the rank computes, and what was
//! sent and posted moves.
//!
//! Operations happen one at a time, in the order of their calls. What is deferred is done by the thread;
//! everything else by who calls it, once the thread has done all that was deferred before: so a rank on which
//! nothing is deferred never waits for another thread. MPI has to serve several threads, one at a time
//! (`MPI_THREAD_SERIALIZED`).

use crate::alarm::{Alarm, Call};
use crate::spawn::refused;
use crate::transport::{Gathered, Reduced, Region, Scattered, Took, Transport, failure};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::mesh::AtomSet;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the thread sleeps while something is under way for which nobody waits.
const PAUSE: Duration = Duration::from_micros(100);

/// An end of a transport, in use by one thread at a time.
type End = Box<dyn Transport>;
/// A collective with its operands.
type Job = Box<dyn FnOnce(&mut dyn Transport) -> Result<()> + Send>;

/// A transport with a thread that does what is deferred.
pub struct Progress {
    rank: usize,
    world: usize,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    alarm: Arc<Alarm>,
    /// The next collective is deferred; and those that were, the oldest first.
    defers: bool,
    deferred: VecDeque<Call>,
    /// Operations so far.
    calls: Call,
}

/// What both threads see. Who locks both has locked `end` first.
struct Shared {
    end: Mutex<End>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Deferred, the oldest first; the first may be the one that is being done.
    queue: VecDeque<(Call, Option<Job>)>,
    /// When those were done for which nobody has waited, the oldest first.
    done: VecDeque<Took>,
    /// Why one has failed: all later operations do.
    failed: Option<Diag>,
    /// Something was sent or posted that is not waited for.
    under_way: bool,
    stops: bool,
}

fn held<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Does what is deferred, until it is stopped and nothing is left.
    fn work(&self) {
        loop {
            let mut state = held(&self.state);
            let job = loop {
                if let Some((_, job)) = state.queue.front_mut() {
                    break job.take();
                }
                if state.stops {
                    return;
                }
                if state.under_way {
                    let slept = self.changed.wait_timeout(state, PAUSE);
                    let (again, slept) = slept.unwrap_or_else(PoisonError::into_inner);
                    state = again;
                    if slept.timed_out() && state.queue.is_empty() {
                        break None;
                    }
                } else {
                    state = self.wait(state);
                }
            };
            drop(state);
            match job {
                Some(job) => self.run(job),
                None => self.advance(),
            }
        }
    }

    fn run(&self, job: Job) {
        let mut end = held(&self.end);
        let begun = Instant::now();
        let done = catch_unwind(AssertUnwindSafe(|| job(&mut **end)));
        drop(end);
        let mut state = held(&self.state);
        state.queue.pop_front();
        state.done.push_back(Took { begun, done: Instant::now() });
        let done = done.unwrap_or_else(|_| Err(failure("its progress thread panicked".into())));
        if let Err(cause) = done {
            state.failed.get_or_insert(cause);
        }
        self.changed.notify_all();
    }

    /// Moves on what is under way, unless the end is in use, which does that too.
    fn advance(&self) {
        let mut end = match self.end.try_lock() {
            Ok(end) => end,
            Err(TryLockError::Poisoned(p)) => p.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let left = end.advance();
        let mut state = held(&self.state);
        match left {
            Ok(left) => state.under_way = left,
            Err(cause) => {
                state.under_way = false;
                state.failed.get_or_insert(cause);
            }
        }
    }
}

impl Progress {
    /// Starts the thread of an end; the alarm is that of the end.
    ///
    /// # Errors
    /// `threads`.
    pub fn new(end: Box<dyn Transport>, alarm: Arc<Alarm>) -> Result<Progress> {
        let (rank, world) = (end.rank(), end.world());
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { end: Mutex::new(end), state, changed });
        let worker = shared.clone();
        let started = std::thread::Builder::new()
            .name(format!("progress of rank {rank}"))
            .spawn(move || worker.work());
        let thread = started.map_err(|e| refused("a progress thread", 1, &e))?;
        let asked = Arc::downgrade(&shared);
        alarm.ask(Box::new(move || {
            asked.upgrade().and_then(|s| held(&s.state).queue.front().map(|x| x.0))
        }));
        let (deferred, thread) = (VecDeque::new(), Some(thread));
        Ok(Progress { rank, world, shared, thread, alarm, defers: false, deferred, calls: 0 })
    }

    /// Waits until all that was deferred up to a call is done.
    fn until(&self, last: Call) -> MutexGuard<'_, State> {
        let mut state = held(&self.shared.state);
        while state.queue.front().is_some_and(|x| x.0 <= last) {
            self.alarm.set_calm(false);
            state = self.shared.wait(state);
        }
        // What is left goes on beside work.
        self.alarm.set_calm(!state.queue.is_empty());
        state
    }

    /// Does an operation now.
    fn now<T>(&mut self, f: impl FnOnce(&mut dyn Transport) -> Result<T>) -> Result<T> {
        let failed = self.until(self.calls).failed.clone();
        self.calls += 1;
        failed.map_or(Ok(()), Err)?;
        f(&mut **held(&self.shared.end))
    }

    /// As [`Progress::now`], for what begins something that is waited for later.
    fn begun(&mut self, f: impl FnOnce(&mut dyn Transport) -> Result<()>) -> Result<()> {
        let shared = self.shared.clone();
        self.now(|end| {
            f(end)?;
            held(&shared.state).under_way = true;
            shared.changed.notify_all();
            Ok(())
        })
    }

    /// Does a collective, now or later.
    fn collective(
        &mut self,
        f: impl FnOnce(&mut dyn Transport) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        if !std::mem::take(&mut self.defers) {
            return self.now(f);
        }
        self.calls += 1;
        self.deferred.push_back(self.calls);
        self.alarm.set_calm(true);
        held(&self.shared.state).queue.push_back((self.calls, Some(Box::new(f))));
        self.shared.changed.notify_all();
        Ok(())
    }
}

impl Transport for Progress {
    fn rank(&self) -> usize {
        self.rank
    }
    fn world(&self) -> usize {
        self.world
    }
    fn barrier(&mut self, axes: AtomSet) -> Result<()> {
        self.now(|t| t.barrier(axes))
    }
    fn all_reduce(&mut self, axes: AtomSet, tensors: &[Reduced]) -> Result<()> {
        let tensors = tensors.to_vec();
        self.collective(move |t| t.all_reduce(axes, &tensors))
    }
    fn all_gather(&mut self, axes: AtomSet, tensors: &[Gathered]) -> Result<()> {
        let tensors = tensors.to_vec();
        self.collective(move |t| t.all_gather(axes, &tensors))
    }
    fn reduce_scatter(&mut self, axes: AtomSet, tensors: &[Scattered]) -> Result<()> {
        let tensors = tensors.to_vec();
        self.collective(move |t| t.reduce_scatter(axes, &tensors))
    }
    fn all_to_all(&mut self, axes: AtomSet, from: &[Region], to: &[Region]) -> Result<()> {
        let (from, to) = (from.to_vec(), to.to_vec());
        self.collective(move |t| t.all_to_all(axes, &from, &to))
    }
    fn all_to_all_v(
        &mut self,
        axes: AtomSet,
        from: &[Vec<Region>],
        to: &[Vec<Region>],
    ) -> Result<()> {
        let (from, to) = (from.to_vec(), to.to_vec());
        self.collective(move |t| t.all_to_all_v(axes, &from, &to))
    }
    fn permute(&mut self, axes: AtomSet, shift: usize, from: &Region, to: &Region) -> Result<()> {
        let (from, to) = (from.clone(), to.clone());
        self.collective(move |t| t.permute(axes, shift, &from, &to))
    }
    fn broadcast(&mut self, axes: AtomSet, root: usize, data: &Region) -> Result<()> {
        let data = data.clone();
        self.collective(move |t| t.broadcast(axes, root, &data))
    }
    fn send(&mut self, to: usize, data: &Region) -> Result<()> {
        self.begun(|t| t.send(to, data))
    }
    fn sent(&mut self, to: usize) -> Result<()> {
        self.now(|t| t.sent(to))
    }
    fn post_recv(&mut self, from: usize, data: &Region) -> Result<()> {
        self.begun(|t| t.post_recv(from, data))
    }
    fn recv(&mut self, from: usize, data: &Region) -> Result<()> {
        self.now(|t| t.recv(from, data))
    }

    fn overlaps(&self) -> bool {
        true
    }

    fn defer(&mut self) {
        self.defers = true;
    }

    fn finish(&mut self) -> Result<Option<Took>> {
        let Some(oldest) = self.deferred.pop_front() else { return Ok(None) };
        // They are done in their order.
        let mut state = self.until(oldest);
        let took = state.done.pop_front();
        state.failed.clone().map_or(Ok(took), Err)
    }

    fn abort(&mut self, _cause: Diag) {
        // As the end does, which may be in use.
        self.alarm.ring();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        let mut state = held(&self.shared.state);
        state.stops = true;
        if !state.queue.is_empty() {
            // Who leaves in the middle has failed: the thread must not wait for the others.
            self.alarm.ring();
        }
        drop(state);
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
