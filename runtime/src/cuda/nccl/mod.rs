//! The transport between processes with a device each, by NCCL.
//!
//! Every group of the plan has a communicator, split from that of all ranks, and so has every
//! direction in which two ranks of a pipeline send, with a stream of its own: what waits for one rank
//! is not in the way of another. Nothing here waits: calls queue work, on the stream of collectives or
//! of a direction, behind what the rank's stream has so far, and that goes on behind them, at once or
//! where it needs them. What is not adjacent in memory passes through scratch memory.
//!
//! NCCL connects two ranks when they first exchange something, and waits there for both: so every
//! direction carries a byte at the start, one after the other, in the same order on all ranks.
//!
//! NCCL orders sums as it likes, the same way in every run on the same devices.

mod collectives;
mod connect;
mod laid;
mod library;

pub use library::Id;

use super::arena::Arena;
use super::device::{Event, Stream};
use super::movement::OnDevice;
use crate::alarm::{Alarm, Call};
use crate::transport::failure;
use library::{Comm, Library};
use shardc_ir::diag::Result;
use shardc_ir::mesh::AtomSet;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What NCCL calls itself, as 22605 for 2.26.5.
///
/// # Errors
/// `missing-library`.
pub fn version() -> Result<i32> {
    Library::get()?.version()
}

/// By which all processes of a job find each other; one makes it, all get it.
///
/// # Errors
/// `missing-library`, and those of NCCL.
pub fn id() -> Result<Id> {
    Library::get()?.unique_id()
}

/// The ranks of a group.
struct Group {
    comm: Arc<Comm>,
    me: usize,
    ways: usize,
}

/// One direction between two ranks.
struct Edge {
    comm: Arc<Comm>,
    stream: Arc<Stream>,
    /// Sends that were not waited for.
    offers: VecDeque<Event>,
    /// Receives that were posted: where to, and when they are done.
    posted: VecDeque<((u64, usize), Event)>,
}

/// Operations that were queued, by their numbers, the oldest first.
type UnderWay = Arc<Mutex<VecDeque<(Call, Event)>>>;

/// One rank's end.
pub struct Nccl {
    rank: usize,
    ranks: usize,
    /// Of the rank's kernels, and of collectives.
    main: Arc<Stream>,
    stream: Arc<Stream>,
    mover: OnDevice,
    groups: BTreeMap<AtomSet, Group>,
    to: BTreeMap<usize, Edge>,
    from: BTreeMap<usize, Edge>,
    scratch: Option<(Arena, usize)>,
    alarm: Arc<Alarm>,
    /// The next collective is deferred; and those that were, the oldest first.
    defers: bool,
    deferred: VecDeque<Event>,
    under_way: UnderWay,
    /// Operations so far.
    calls: Call,
}

/// A job's ends: how long they wait, and whom they tell.
pub(super) struct Job<'a> {
    pub id: &'a Id,
    /// How long until they have met.
    pub start: Duration,
    pub timeout: Duration,
    pub alarm: Arc<Alarm>,
}

impl Nccl {
    /// The rank's stream goes on after an operation.
    fn follow(&mut self, done: Event) -> Result<()> {
        self.main.after(&done)?;
        self.begun(done);
        Ok(())
    }

    /// Counts an operation.
    fn begun(&mut self, done: Event) {
        self.calls += 1;
        not_done(&self.under_way).push_back((self.calls, done));
    }

    fn unknown<T>(&self, other: usize) -> Result<T> {
        let message = format!("the plan of rank {} has nothing for rank {other}", self.rank);
        Err(failure(message))
    }
}

/// True if work is known to be done: errors are told by who waits for the stream.
fn is_done(work: &Event) -> bool {
    work.done().unwrap_or(false)
}

/// Operations that are not known to be done.
fn not_done(under_way: &UnderWay) -> MutexGuard<'_, VecDeque<(Call, Event)>> {
    let mut all = under_way.lock().unwrap_or_else(PoisonError::into_inner);
    while all.front().is_some_and(|x| is_done(&x.1)) {
        all.pop_front();
    }
    all
}
