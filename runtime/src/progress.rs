//! A progress thread: collectives of ranks that exchange messages go on while the rank computes, and what was
//! sent and posted moves.
//!
//! Operations happen one at a time, in the order of their calls. What is deferred is done by the thread;
//! everything else by who calls it, once the thread has done all that was deferred before. MPI has to serve several threads, one at a time
//! (`MPI_THREAD_SERIALIZED`).

use crate::alarm::{Alarm, Call};
use crate::spawn::refused;
use crate::transport::{Gathered, Reduced, Region, Scattered, Took, Transport, failure};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::mesh::AtomSet;
use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the thread sleeps while something is under way for which nobody waits.
const PAUSE: Duration = Duration::from_micros(100);

/// An end of a transport, in use by one thread at a time.
type End = Box<dyn Transport>;
/// A collective with its operands.
type DeferredOp = Box<dyn FnOnce(&mut dyn Transport) -> Result<()> + Send>;

/// A transport with a thread that does what is deferred.
pub struct Progress {
    rank: usize,
    world: usize,
    shared: Arc<ProgressState>,
    thread: Option<JoinHandle<()>>,
    /// The next collective is deferred; and those that were, the oldest first.
    defers: bool,
    deferred: VecDeque<Call>,
    /// Operations so far.
    calls: Call,
}

/// What both threads see. Who locks both has locked `end` first.
struct ProgressState {
    end: Mutex<End>,
    state: Mutex<State>,
    changed: Condvar,
    alarm: Arc<Alarm>,
}

#[derive(Default)]
struct State {
    /// Deferred, the oldest first; the first may be the one that is being done.
    queue: VecDeque<(Call, Option<DeferredOp>)>,
    /// What became of those for which nobody has waited, the oldest first.
    done: VecDeque<Result<Took>>,
    /// The first failure, and of which call it was. Nothing is done after it.
    failed: Option<(Option<Call>, Diag)>,
    /// Of the thread, which is no more.
    panic: Option<Box<dyn Any + Send>>,
    /// Something was sent or posted that is not waited for.
    under_way: bool,
    stops: bool,
}

impl State {
    fn check(&self) -> Result<()> {
        self.failed.as_ref().map_or(Ok(()), |(_, cause)| Err(cause.clone()))
    }
}

fn held<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ProgressState {
    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Works until it is stopped; a panic is the rank's.
    fn live(&self) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.work())) {
            let mut state = held(&self.state);
            state.queue.clear();
            let cause = failure("the progress thread panicked".into());
            state.failed.get_or_insert((None, cause));
            state.panic = Some(panic);
            self.changed.notify_all();
        }
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
                if state.under_way && !self.alarm.is_rung() {
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

    fn run(&self, job: DeferredOp) {
        let failed = held(&self.state).check();
        let done = failed.and_then(|()| {
            let mut end = held(&self.end);
            let begun = Instant::now();
            job(&mut **end).map(|()| Took { begun, done: Instant::now() })
        });
        let mut state = held(&self.state);
        let call = state.queue.pop_front().map(|x| x.0);
        if let Err(cause) = &done {
            state.failed.get_or_insert_with(|| (call, cause.clone()));
        }
        state.done.push_back(done);
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
                state.failed.get_or_insert((None, cause));
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
        let end = Mutex::new(end);
        let shared = Arc::new(ProgressState { end, state, changed, alarm: alarm.clone() });
        let worker = shared.clone();
        let started = std::thread::Builder::new()
            .name(format!("progress of rank {rank}"))
            .spawn(move || worker.live());
        let thread = started.map_err(|e| refused("the progress thread of a rank", 1, &e))?;
        let asked = Arc::downgrade(&shared);
        alarm.ask(Box::new(move || {
            let shared = asked.upgrade()?;
            let state = held(&shared.state);
            let failed = state.failed.as_ref().and_then(|f| f.0);
            failed.or_else(|| state.queue.front().map(|x| x.0))
        }));
        let (deferred, thread) = (VecDeque::new(), Some(thread));
        Ok(Progress { rank, world, shared, thread, defers: false, deferred, calls: 0 })
    }

    /// Waits until all that was deferred up to a call is done.
    fn until(&self, last: Call) -> MutexGuard<'_, State> {
        let alarm = &self.shared.alarm;
        let mut state = held(&self.shared.state);
        while state.queue.front().is_some_and(|x| x.0 <= last) {
            alarm.set_calm(false);
            state = self.shared.wait(state);
        }
        if let Some(panic) = state.panic.take() {
            drop(state);
            resume_unwind(panic);
        }
        // What is left goes on beside work.
        alarm.set_calm(!state.queue.is_empty());
        state
    }

    /// Does an operation now.
    fn now<T>(&mut self, f: impl FnOnce(&mut dyn Transport) -> Result<T>) -> Result<T> {
        let fine = self.until(self.calls).check();
        self.calls += 1;
        fine?;
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
        let mut state = held(&self.shared.state);
        state.check()?;
        self.deferred.push_back(self.calls);
        self.shared.alarm.set_calm(true);
        state.queue.push_back((self.calls, Some(Box::new(f))));
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

    fn finish(&mut self, _lane: usize) -> Result<Option<Took>> {
        let Some(oldest) = self.deferred.pop_front() else { return Ok(None) };
        // They are done in their order.
        let mut state = self.until(oldest);
        match state.done.pop_front() {
            Some(done) => done.map(Some),
            None => state.check().map(|()| None),
        }
    }

    fn settle(&mut self) {
        drop(self.until(self.calls));
    }

    fn abort(&mut self, _cause: Diag) {
        // As the end does, which may be in use.
        self.shared.alarm.ring();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        let mut state = held(&self.shared.state);
        state.stops = true;
        if !state.queue.is_empty() {
            // Who leaves in the middle has failed: the thread must not wait for the others.
            self.shared.alarm.ring();
        }
        drop(state);
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
