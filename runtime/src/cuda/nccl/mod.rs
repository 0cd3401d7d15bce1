//! The transport between processes with a device each, by NCCL.
//!
//! Every group of the plan has a communicator, split from that of all ranks, and so has every
//! direction in which two ranks of a pipeline send, with a stream of its own: what waits for one rank
//! is not in the way of another. Collectives of groups that leave a host have a stream, and those of groups
//! within hosts another one: what is on its way between hosts for long is not in the way of what does not leave one.
//! NCCL starts kernels of several communicators in the order in which they are called, which is that of the plan, on
//! all ranks (`order`); versions that do not have one stream for all. Calls queue work, on a stream of collectives or
//! of a direction, behind what the rank's stream has so far, and that goes on behind them, at once or where it needs
//! them; a call waits for nothing but that NCCL has queued it (`comm`). What is not adjacent in memory passes through
//! scratch memory.
//!
//! NCCL connects ranks when they first exchange something, waits there for all of them, and takes memory: so
//! at the start every direction carries a byte, and every group does each kind of what it will do, one after
//! the other, in the same order on all ranks.
//!
//! NCCL orders sums as it likes, the same way in every run on the same devices.

mod collectives;
mod comm;
mod connect;
mod laid;
mod library;
mod order;
mod warm;

pub use library::Id;

use super::arena::DeviceArena;
use super::device::{Event, Stream};
use super::movement::OnDevice;
use crate::alarm::{Alarm, Call};
use crate::transport::failure;
use comm::Comm;
use library::Library;
use shardc_ir::diag::Result;
use shardc_ir::mesh::AtomSet;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
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
struct RankGroup {
    comm: Arc<Comm>,
    me: usize,
    ways: usize,
    /// Which stream of collectives it has.
    lane: usize,
}

/// A stream of collectives.
struct Lane {
    stream: Arc<Stream>,
    mover: OnDevice,
    scratch: Scratch,
    /// Collectives that were deferred, the oldest first.
    deferred: VecDeque<Event>,
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

/// Operations that were queued, by their numbers, the oldest first; and the oldest that was not done when
/// the rank last looked, 0 if there was none: who asks for that does not call the driver, which may hold
/// its lock for long.
#[derive(Default)]
struct UnderWay {
    all: Mutex<VecDeque<(Call, Event)>>,
    oldest: AtomicU64,
}

impl UnderWay {
    /// The oldest that is not known to be done: errors are told by who waits for the stream.
    fn look(&self) -> Option<Call> {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        while all.front().is_some_and(|x| x.1.done().unwrap_or(false)) {
            all.pop_front();
        }
        let found = all.front().map(|x| x.0);
        self.oldest.store(found.unwrap_or(0), Ordering::Relaxed);
        found
    }

    fn push(&self, call: Call, done: Event) {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).push_back((call, done));
        self.look();
    }

    /// What was last seen.
    fn seen(&self) -> Option<Call> {
        Some(self.oldest.load(Ordering::Relaxed)).filter(|&call| call > 0)
    }
}

/// One rank's end.
pub struct Nccl {
    rank: usize,
    ranks: usize,
    /// Of the rank's kernels.
    main: Arc<Stream>,
    /// Of collectives: of groups that leave a host, and, if those are apart, of groups that do not.
    lanes: Vec<Lane>,
    groups: BTreeMap<AtomSet, RankGroup>,
    to: BTreeMap<usize, Edge>,
    from: BTreeMap<usize, Edge>,
    /// Operations only say how much memory they need.
    rehearses: bool,
    alarm: Arc<Alarm>,
    /// The next collective is deferred.
    defers: bool,
    under_way: Arc<UnderWay>,
    /// Operations so far.
    calls: Call,
}

/// Memory for what is not adjacent.
#[derive(Default)]
struct Scratch {
    room: Option<DeviceArena>,
    bytes: usize,
}

/// A job's ends: how long they wait, and whom they tell.
pub(super) struct Job<'a> {
    pub id: &'a Id,
    /// How long until they have met.
    pub start: Duration,
    pub timeout: Duration,
    pub alarm: Arc<Alarm>,
    /// Ranks of a host, which follow each other.
    pub near: usize,
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
        self.under_way.push(self.calls, done);
    }

    fn unknown<T>(&self, other: usize) -> Result<T> {
        let message = format!("the plan of rank {} has nothing for rank {other}", self.rank);
        Err(failure(message))
    }
}
