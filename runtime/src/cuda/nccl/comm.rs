//! Communicators: how they are made, and what they do. NCCL is asked not to block: a call that takes longer than a
//! moment goes on beside its caller, who asks for how it is until it is over, and may give up meanwhile. Until then
//! nothing is queued yet, and nothing else may be done with the communicator. (`NCCL_COMM_BLOCKING=1` has it block.)

use super::library::{
    DataType, Fold, Handle, IN_PROGRESS, Id, Library, NcclCode, Queue, SUCCESS, ncclConfig_t,
};
use crate::alarm::{Alarm, silent};
use crate::cuda::device::wait_for;
use crate::transport::failure;
use shardc_ir::diag::{Diag, Result};
use std::ffi::{CString, c_int};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// `NCCL_SPLIT_NOCOLOR`: a member of no part.
const NO_PART: c_int = -1;
/// What a number of a configuration is that is the library's choice.
const UNSET: c_int = c_int::MIN;
/// What a limit of the start is longer here than for who watches it, who knows more to say.
const GRACE: Duration = Duration::from_secs(1);
/// How long who gives up waits for a call to end.
const BETWEEN: Duration = Duration::from_millis(200);

/// Elements in the device's memory: address, number and type.
#[derive(Clone, Copy)]
pub(super) struct Data {
    pub at: u64,
    pub count: usize,
    pub kind: DataType,
}

/// What a communicator is to be.
pub(super) struct Config {
    config: ncclConfig_t,
    /// What NCCL's own messages call it.
    label: CString,
}

impl Config {
    /// One whose calls take this many blocks of the device at most, if that is not the library's choice. Nothing is
    /// shared with others: of communicators that share, calls follow each other.
    pub fn of(label: &str, most_blocks: Option<c_int>) -> Config {
        let label = CString::new(label).unwrap_or_default();
        let config = ncclConfig_t {
            size: size_of::<ncclConfig_t>(),
            magic: 0xcafe_beef,
            version: 23_000,
            blocking: 0,
            cgaClusterSize: UNSET,
            minCTAs: UNSET,
            maxCTAs: most_blocks.unwrap_or(UNSET),
            netName: std::ptr::null(),
            splitShare: 0,
            trafficClass: UNSET,
            commName: label.as_ptr(),
            collnetEnable: UNSET,
            CTAPolicy: UNSET,
            shrinkShare: UNSET,
            nvlsCTAs: UNSET,
            nChannelsPerNetPeer: UNSET,
            nvlinkCentricSched: UNSET,
            graphUsageMode: UNSET,
            numRmaCtx: UNSET,
            maxP2pPeers: UNSET,
        };
        Config { config, label }
    }
}

/// What a rank's communicators have in common: who tells them to stop, and how long their calls may take.
pub(super) struct Limits {
    pub alarm: Arc<Alarm>,
    pub rank: usize,
    pub start: Duration,
    pub timeout: Duration,
    /// Ranks have met: steps may follow.
    met: AtomicBool,
    /// In the order in which they were made.
    made: Mutex<Vec<Weak<Comm>>>,
    /// The same until ranks have met: of a start that fails none is destroyed, as its calls may not be over.
    starting: Mutex<Vec<Arc<Comm>>>,
    /// Held in every call of NCCL; true if they are given up, and nothing may be done with them.
    gone: Mutex<bool>,
}

impl Limits {
    pub fn new(alarm: &Arc<Alarm>, rank: usize, start: Duration, timeout: Duration) -> Arc<Limits> {
        Arc::new(Limits {
            alarm: alarm.clone(),
            rank,
            start,
            timeout,
            met: AtomicBool::default(),
            made: Mutex::default(),
            starting: Mutex::default(),
            gone: Mutex::default(),
        })
    }

    /// Ranks have met.
    pub fn met(&self) {
        self.met.store(true, Ordering::Relaxed);
        self.starting.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Before a call of NCCL.
    fn enter(&self) -> Result<MutexGuard<'_, bool>> {
        let gone = self.gone.lock().unwrap_or_else(PoisonError::into_inner);
        if *gone { Err(failed_elsewhere()) } else { Ok(gone) }
    }

    /// Gives up all that is under way, communicator by communicator, in any thread.
    pub fn abort(&self) {
        // A call that does not end for now is one of those.
        let since = Instant::now();
        while since.elapsed() < BETWEEN {
            if let Ok(mut gone) = self.gone.try_lock() {
                *gone = true;
                break;
            }
            std::thread::sleep(BETWEEN / 100);
        }
        let made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.iter().filter_map(Weak::upgrade).for_each(|c| {
            // SAFETY: the communicator lives: after a failure it is not destroyed.
            let _ = unsafe { (c.library.functions.abort)(c.handle) };
        });
    }
}

/// Who waits is let out.
pub(super) fn failed_elsewhere() -> Diag {
    failure("another rank failed".into())
}

/// A communicator: some ranks, in order.
pub(super) struct Comm {
    library: &'static Library,
    handle: Handle,
    /// For errors: `rank 3 of tp`.
    name: String,
    _label: CString,
    limits: Arc<Limits>,
}

// SAFETY: one thread at a time calls NCCL for a communicator; any may abort it.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

/// Where NCCL writes a handle, also behind the call: freed only when that is over.
struct Slot(*mut Handle);

impl Slot {
    fn new() -> Slot {
        Slot(Box::into_raw(Box::new(null_mut())))
    }
    fn handle(&self) -> Handle {
        // SAFETY: a box of its own, which nobody frees before; NCCL's thread may have written it.
        unsafe { self.0.read_volatile() }
    }
    fn free(self) {
        // SAFETY: made by `new`, and NCCL is done with it.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

impl Comm {
    /// The communicator of all ranks, with the device that is current; all ranks call it.
    pub fn of_all(id: &Id, ranks: usize, limits: &Arc<Limits>) -> Result<Arc<Comm>> {
        let (library, slot) = (Library::get()?, Slot::new());
        let (call, name) = ("ncclCommInitRank", format!("rank {} of all {ranks}", limits.rank));
        let mut c = Config::of("all", None);
        let (n, rank) = (ranks as c_int, limits.rank as c_int);
        // SAFETY: writes one handle; the configuration is read meanwhile.
        let code = unsafe { (library.functions.init)(slot.0, n, id.nccl(), rank, &mut c.config) };
        if code != SUCCESS && code != IN_PROGRESS {
            library.check(code, || format!("{call} on {name}"))?;
        }
        let comm = Comm::made(library, slot, name, c.label, limits);
        comm.settle(call, code)?;
        Ok(comm)
    }

    fn made(
        library: &'static Library,
        slot: Slot,
        name: String,
        label: CString,
        limits: &Arc<Limits>,
    ) -> Arc<Comm> {
        let limits = limits.clone();
        let comm = Arc::new(Comm { library, handle: slot.handle(), name, _label: label, limits });
        slot.free();
        let mut made = comm.limits.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.push(Arc::downgrade(&comm));
        drop(made);
        comm.limits.starting.lock().unwrap_or_else(PoisonError::into_inner).push(comm.clone());
        comm
    }

    /// The part of this communicator whose members give the same number, in the order of `key`; `None`
    /// for those that give none. All members call it.
    pub fn part(
        &self,
        (number, key): (Option<usize>, usize),
        mut config: Config,
        name: String,
    ) -> Result<Option<Arc<Comm>>> {
        let (call, slot) = ("ncclCommSplit", Slot::new());
        let color = number.map_or(NO_PART, |n| n as c_int);
        let held = self.limits.enter()?;
        // SAFETY: writes one handle, until this communicator is no longer busy; the configuration is read meanwhile.
        let code = unsafe {
            let split = self.library.functions.split;
            split(self.handle, color, key as c_int, slot.0, &mut config.config)
        };
        drop(held);
        self.settle(call, code).map_err(|d| d.why(format!("it makes that of {name}")))?;
        if slot.handle().is_null() {
            slot.free();
            return match number {
                None => Ok(None),
                Some(_) => Err(failure(format!("{call} has not made that of {name}"))),
            };
        }
        let comm = Comm::made(self.library, slot, name, config.label, &self.limits);
        // It may be there before it is ready.
        comm.settle(call, IN_PROGRESS)?;
        Ok(Some(comm))
    }

    fn check(&self, call: &str, code: NcclCode) -> Result<()> {
        self.library.check(code, || format!("{call} on {}", self.name))
    }

    /// How what goes on is: in progress, or how it has ended.
    fn state(&self) -> Result<NcclCode> {
        let mut state = SUCCESS;
        let _held = self.limits.enter()?;
        // SAFETY: the communicator lives.
        let code = unsafe { (self.library.functions.async_error)(self.handle, &mut state) };
        self.check("ncclCommGetAsyncError", code).map(|()| state)
    }

    /// What went wrong since it was made.
    pub fn check_async(&self) -> Result<()> {
        let state = self.state()?;
        if state == IN_PROGRESS { Ok(()) } else { self.check("what was queued", state) }
    }

    /// Waits until a call that gave this code is over. While ranks start, who watches their start has its limit too;
    /// the end has that one alone.
    fn settle(&self, call: &str, code: NcclCode) -> Result<()> {
        if code != IN_PROGRESS {
            return self.check(call, code);
        }
        let (l, mut state) = (&self.limits, IN_PROGRESS);
        let starts = !l.met.load(Ordering::Relaxed);
        let limit = if starts { l.start + GRACE } else { l.timeout };
        let done = || {
            state = self.state()?;
            Ok(state != IN_PROGRESS)
        };
        wait_for(done, |waited| {
            if starts {
                l.alarm.waits_for_others(true);
            }
            if l.alarm.is_rung() {
                return Err(failed_elsewhere());
            }
            if waited < limit || call == FINALIZE {
                return Ok(());
            }
            let what = format!("the others in {call} on {}", self.name);
            if !starts {
                return Err(silent(l.rank, limit, &what));
            }
            let (rank, s) = (l.rank, l.start.as_secs_f64());
            let d = failure(format!("rank {rank} waited {s} s for {what}, at the start"));
            Err(d.help("if other ranks are only slow to start, run with a longer --start-timeout"))
        })?;
        if starts {
            l.alarm.waits_for_others(false);
        }
        self.check(call, state)
    }

    /// Does a call that may go on beside its caller, until it is over.
    fn begin(&self, call: &str, f: impl FnOnce() -> NcclCode) -> Result<()> {
        let code = self.limits.enter().map(|_held| f())?;
        self.settle(call, code)
    }

    /// Calls within become one operation.
    pub fn together(&self, calls: impl FnOnce() -> Result<()>) -> Result<()> {
        let f = &self.library.functions;
        // SAFETY: no conditions.
        self.begin("ncclGroupStart", || unsafe { (f.group_start)() })?;
        let done = calls();
        // SAFETY: no conditions.
        let ended = self.begin("ncclGroupEnd", || unsafe { (f.group_end)() });
        done.and(ended)
    }
}

impl Comm {
    /// Queues a send to member `to`.
    ///
    /// # Safety
    /// All data are memory of the communicator's device and are there until what is queued is done;
    /// nobody writes what is read meanwhile, nor uses what is written. The queue is a stream of that
    /// device.
    pub unsafe fn send(&self, d: Data, to: usize, queue: Queue) -> Result<()> {
        let f = self.library.functions.send;
        // SAFETY: the communicator lives; all else by the caller.
        let call = || unsafe { f(d.at as _, d.count, d.kind, to as c_int, self.handle, queue) };
        self.begin("ncclSend", call)
    }

    /// Queues that data of member `from` arrive.
    ///
    /// # Safety
    /// As for [`Comm::send`].
    pub unsafe fn recv(&self, d: Data, from: usize, queue: Queue) -> Result<()> {
        let f = self.library.functions.recv;
        // SAFETY: the communicator lives; all else by the caller.
        let call = || unsafe { f(d.at as _, d.count, d.kind, from as c_int, self.handle, queue) };
        self.begin("ncclRecv", call)
    }

    /// `from` of member `root` to everybody's `to`, which has room for as many.
    ///
    /// # Safety
    /// As for [`Comm::send`].
    pub unsafe fn broadcast(&self, from: Data, to: u64, root: usize, queue: Queue) -> Result<()> {
        let (f, root) = (self.library.functions.broadcast, root as c_int);
        // SAFETY: the communicator lives; all else by the caller.
        let call =
            || unsafe { f(from.at as _, to as _, from.count, from.kind, root, self.handle, queue) };
        self.begin("ncclBroadcast", call)
    }

    /// `from` of every member, one after the other, to `to`, which has room for all.
    ///
    /// # Safety
    /// As for [`Comm::send`].
    pub unsafe fn all_gather(&self, from: Data, to: u64, queue: Queue) -> Result<()> {
        let f = self.library.functions.all_gather;
        // SAFETY: the communicator lives; all else by the caller.
        let call =
            || unsafe { f(from.at as _, to as _, from.count, from.kind, self.handle, queue) };
        self.begin("ncclAllGather", call)
    }

    /// The fold of everybody's `from`, to everybody's `to`, which has room for as many.
    ///
    /// # Safety
    /// As for [`Comm::send`].
    pub unsafe fn all_reduce(&self, from: Data, to: u64, fold: Fold, queue: Queue) -> Result<()> {
        let f = self.library.functions.all_reduce;
        // SAFETY: the communicator lives; all else by the caller.
        let call =
            || unsafe { f(from.at as _, to as _, from.count, from.kind, fold, self.handle, queue) };
        self.begin("ncclAllReduce", call)
    }

    /// The fold of everybody's `from`, to `to` of member `root`, which has room for as many.
    ///
    /// # Safety
    /// As for [`Comm::send`].
    pub unsafe fn reduce(
        &self,
        from: Data,
        to: u64,
        fold: Fold,
        root: usize,
        queue: Queue,
    ) -> Result<()> {
        let (f, root) = (self.library.functions.reduce, root as c_int);
        // SAFETY: the communicator lives; all else by the caller.
        let call = || unsafe {
            f(from.at as _, to as _, from.count, from.kind, fold, root, self.handle, queue)
        };
        self.begin("ncclReduce", call)
    }

    /// The fold of everybody's part for this member: `from` has one of `to.count` for each.
    ///
    /// # Safety
    /// As for [`Comm::send`].
    pub unsafe fn reduce_scatter(
        &self,
        from: u64,
        to: Data,
        fold: Fold,
        queue: Queue,
    ) -> Result<()> {
        let f = self.library.functions.reduce_scatter;
        // SAFETY: the communicator lives; all else by the caller.
        let call =
            || unsafe { f(from as _, to.at as _, to.count, to.kind, fold, self.handle, queue) };
        self.begin("ncclReduceScatter", call)
    }
}

const FINALIZE: &str = "ncclCommFinalize";

impl Drop for Comm {
    fn drop(&mut self) {
        // After a failure, what is under way may never end, and it would wait for that.
        if self.limits.alarm.is_rung() {
            return;
        }
        let f = &self.library.functions;
        // SAFETY: made by the library, and nothing is queued any more.
        let over = self.begin(FINALIZE, || unsafe { (f.finalize)(self.handle) });
        // An error has no one to tell.
        if let (Ok(()), Ok(_held)) = (over, self.limits.enter()) {
            // SAFETY: as above; it waits for nobody any more.
            let _ = unsafe { (f.destroy)(self.handle) };
        }
    }
}
