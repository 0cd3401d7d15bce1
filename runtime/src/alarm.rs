//! What a rank tells those who watch it, and what they tell it.

use crate::transport::failure;
use shardc_ir::diag::Diag;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// An operation of a rank's transport, by its number from 1.
pub type Call = u64;

/// Tells which operation has failed, or a device or progress thread has not done yet, the oldest.
pub(crate) type Oldest = Box<dyn Fn() -> Option<Call> + Send + Sync>;

/// What a rank tells those who watch it: whom it waits for; and what they tell it: to stop.
#[derive(Default)]
pub struct Alarm {
    rung: AtomicBool,
    waits: Mutex<Vec<usize>>,
    calm: AtomicBool,
    oldest: OnceLock<Oldest>,
    begins: Mutex<(String, bool)>,
    abort: OnceLock<Box<dyn Fn() + Send + Sync>>,
    copies: Mutex<BTreeMap<usize, (Instant, Duration)>>,
}

/// A rank has waited too long for something.
pub(crate) fn silent(rank: usize, limit: Duration, what: &str) -> Diag {
    let s = limit.as_secs_f64();
    let slow = format!("if other ranks are only slow, run with --timeout {}", s * 10.0);
    failure(format!("rank {rank} waited {s} s for {what}")).help(slow)
}

/// What it waited for that was queued there.
pub(crate) const DEVICE: &str = "its device";

impl Alarm {
    /// Makes every operation of this process fail.
    pub fn ring(&self) {
        self.rung.store(true, Ordering::Release);
    }
    /// True if every operation is to fail.
    pub fn is_rung(&self) -> bool {
        self.rung.load(Ordering::Acquire)
    }
    /// Ranks that an operation has waited for, longer than a moment.
    pub fn waits(&self) -> Vec<usize> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
    pub(crate) fn set_waits(&self, ranks: Vec<usize>) {
        *self.waits.lock().unwrap_or_else(PoisonError::into_inner) = ranks;
    }
    /// Whether operations may look seldom for what they wait for: the rank computes meanwhile, and its cores are
    /// better left to that.
    pub(crate) fn set_calm(&self, calm: bool) {
        self.calm.store(calm, Ordering::Relaxed);
    }
    pub(crate) fn is_calm(&self) -> bool {
        self.calm.load(Ordering::Relaxed)
    }
    /// Part of the start of a transport that goes on: its words follow those of the phase. Empty if there is none.
    pub(crate) fn begin(&self, part: String) {
        *self.begins.lock().unwrap_or_else(PoisonError::into_inner) = (part, false);
    }
    /// Whether this process has come to that part, and waits for others that have not, or not yet.
    pub(crate) fn waits_for_others(&self, does: bool) {
        self.begins.lock().unwrap_or_else(PoisonError::into_inner).1 = does;
    }
    /// The part that goes on, and whether it waits for others there.
    pub(crate) fn begins(&self) -> (String, bool) {
        self.begins.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
    /// Does what copies memory of a rank's device, with a limit for all of it: it may be in a call that never ends.
    pub(crate) fn copying<T>(&self, rank: usize, limit: Duration, work: impl FnOnce() -> T) -> T {
        let copies = || self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        copies().insert(rank, (Instant::now(), limit));
        let done = work();
        copies().remove(&rank);
        done
    }
    /// What is said of a rank whose copies take longer than their limit.
    pub(crate) fn overdue(&self) -> Option<Diag> {
        let copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        let late = copies.iter().find(|(_, (since, limit))| since.elapsed() > *limit);
        late.map(|(&rank, &(_, limit))| silent(rank, limit, DEVICE))
    }
    /// Who gives up what is under way on devices, before a process that has failed ends.
    pub(crate) fn at_end(&self, abort: Box<dyn Fn() + Send + Sync>) {
        let _ = self.abort.set(abort);
    }
    /// Gives up what is under way on devices.
    pub(crate) fn abort(&self) {
        if let Some(f) = self.abort.get() {
            f();
        }
    }
    /// Who knows which operations are done, if they are queued and not waited for.
    pub(crate) fn ask(&self, oldest: Oldest) {
        let _ = self.oldest.set(oldest);
    }
    /// The oldest operation that was queued and is not done.
    pub(crate) fn oldest(&self) -> Option<Call> {
        self.oldest.get().and_then(|f| f())
    }
}
