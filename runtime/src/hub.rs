//! What rank threads share: groups in which they wait for each other, and the failure that ends all.

use crate::region::Region;
use crate::transport::failure;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::mesh::Mesh;
use shardc_ir::types::Reduction;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// Rounds of waiting in place, then of offering the core to others, before sleeping.
const SPINS: u32 = 64;
const YIELDS: u32 = 16;

/// What all ranks share. A `K` is a moment of a rank's work.
pub(crate) struct Hub<K> {
    pub mesh: Mesh,
    pub timeout: Duration,
    pub failed: AtomicBool,
    pub cause: Mutex<Option<Diag>>,
    pub left: Vec<AtomicBool>,
    pub groups: Mutex<BTreeMap<Vec<usize>, Arc<Group<K>>>>,
    pub boxes: Mutex<Boxes<K>>,
}

/// By giver and taker.
pub(crate) type Boxes<K> = BTreeMap<(usize, usize), Arc<Mailbox<K>>>;

/// What one rank offers to another.
pub(crate) struct Mailbox<K> {
    pub offers: Mutex<Offers<K>>,
    pub wake: Condvar,
}

pub(crate) struct Offers<K> {
    /// What is offered, and when the giver has it there.
    pub waiting: VecDeque<(Region, K)>,
    /// When those were read that were taken, and that nobody has waited for.
    pub taken: VecDeque<K>,
}

impl<K> Default for Mailbox<K> {
    fn default() -> Mailbox<K> {
        let offers = Offers { waiting: VecDeque::new(), taken: VecDeque::new() };
        Mailbox { offers: Mutex::new(offers), wake: Condvar::new() }
    }
}

/// What the members of a group share.
pub(crate) struct Group<K> {
    /// Ranks, in group order.
    pub members: Vec<usize>,
    /// Completed waits.
    pub round: AtomicU64,
    /// Members that wait in this round.
    pub count: AtomicUsize,
    /// Number of waits each member has begun.
    pub begun: Vec<AtomicU64>,
    pub lock: Mutex<()>,
    pub wake: Condvar,
    /// What each member has published, in even and in odd rounds: who begins the next call before
    /// all have read this one's does not disturb them.
    pub calls: [Vec<RwLock<HubCall>>; 2],
    /// When each member's work was done that it had begun before it waited, in even and in odd rounds
    /// too.
    pub marks: [Vec<RwLock<Option<K>>>; 2],
}

#[derive(Default)]
pub(crate) struct HubCall {
    pub name: &'static str,
    pub folds: Vec<Reduction>,
    pub regions: Vec<Region>,
    /// Where each member's regions begin, if they are not one each.
    pub starts: Vec<usize>,
    pub data: Vec<f32>,
}

/// A panic of another rank is reported by that rank; what it locked holds plain data.
pub(crate) fn held<T>(lock: std::result::Result<T, PoisonError<T>>) -> T {
    lock.unwrap_or_else(PoisonError::into_inner)
}

impl<K> Hub<K> {
    pub fn fail(&self, cause: Diag) {
        held(self.cause.lock()).get_or_insert(cause);
        self.failed.store(true, Ordering::Release);
        self.wake_all();
    }

    pub fn wake_all(&self) {
        for g in held(self.groups.lock()).values() {
            let _guard: MutexGuard<()> = held(g.lock.lock());
            g.wake.notify_all();
        }
        for b in held(self.boxes.lock()).values() {
            let _guard = held(b.offers.lock());
            b.wake.notify_all();
        }
    }

    /// Waits until something holds for a mailbox of ours that rank `other` fills or empties.
    pub fn wait_for<'a>(
        &self,
        mailbox: &'a Mailbox<K>,
        (rank, other): (usize, usize),
        ready: impl Fn(&Offers<K>) -> bool,
    ) -> Result<MutexGuard<'a, Offers<K>>> {
        let start = Instant::now();
        let mut guard = held(mailbox.offers.lock());
        while !ready(&guard) {
            self.check()?;
            if self.left[other].load(Ordering::Acquire) {
                drop(guard);
                return self.lost(format!("rank {other} is gone, and rank {rank} waits for it"));
            }
            let waited = start.elapsed();
            if waited >= self.timeout {
                drop(guard);
                let s = self.timeout.as_secs_f64();
                return self.lost(format!("rank {rank} waited {s} s for rank {other}"));
            }
            let left = (self.timeout - waited).min(Duration::from_millis(100));
            guard = held(mailbox.wake.wait_timeout(guard, left)).0;
        }
        Ok(guard)
    }

    fn lost<T>(&self, message: String) -> Result<T> {
        let slow = self.timeout.as_secs_f64() * 10.0;
        let slow = format!("if this rank is only slow, run with --timeout {slow}");
        self.fail(failure(message).help(slow));
        self.check().and_then(|()| Err(failure("another rank failed".into())))
    }

    /// Makes all ranks fail with this message.
    pub fn fail_with<T>(&self, message: String) -> Result<T> {
        self.fail(failure(message));
        self.check().and_then(|()| Err(failure("another rank failed".into())))
    }

    /// The error of a rank that did nothing wrong itself.
    pub fn check(&self) -> Result<()> {
        if !self.failed.load(Ordering::Acquire) {
            return Ok(());
        }
        let cause = held(self.cause.lock()).clone();
        Err(cause.unwrap_or_else(|| failure("another rank failed".into())))
    }
}

impl<K> Group<K> {
    pub fn new(members: Vec<usize>) -> Group<K> {
        let n = members.len();
        Group {
            members,
            round: AtomicU64::new(0),
            count: AtomicUsize::new(0),
            begun: (0..n).map(|_| AtomicU64::new(0)).collect(),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            calls: [0, 1].map(|_| (0..n).map(|_| RwLock::default()).collect()),
            marks: [0, 1].map(|_| (0..n).map(|_| RwLock::default()).collect()),
        }
    }

    /// Waits until all members wait.
    pub fn wait(&self, hub: &Hub<K>, me: usize) -> Result<()> {
        let (g, rank) = (self, self.members[me]);
        hub.check()?;
        let round = g.round.load(Ordering::Acquire);
        g.begun[me].store(round + 1, Ordering::Release);
        if g.count.fetch_add(1, Ordering::AcqRel) + 1 == g.members.len() {
            g.count.store(0, Ordering::Release);
            g.round.store(round + 1, Ordering::Release);
            let _guard: MutexGuard<()> = held(g.lock.lock());
            g.wake.notify_all();
            return Ok(());
        }
        let done = || g.round.load(Ordering::Acquire) != round;
        for i in 0..SPINS + YIELDS {
            if done() {
                return Ok(());
            }
            if i < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        let start = Instant::now();
        let mut guard = held(g.lock.lock());
        while !done() {
            hub.check()?;
            let missing = |m: &usize| g.begun[*m].load(Ordering::Acquire) <= round;
            let late: Vec<usize> =
                (0..g.members.len()).filter(missing).map(|m| g.members[m]).collect();
            let gone = late.iter().find(|&&r| hub.left[r].load(Ordering::Acquire));
            let waited = start.elapsed();
            // Between the look at `done` and the look at `late` the last member may have come.
            if done() {
                break;
            }
            if let Some(r) = gone {
                drop(guard);
                return hub.fail_with(format!("rank {r} is gone, and rank {rank} waits for it"));
            }
            if waited >= hub.timeout {
                drop(guard);
                let s = hub.timeout.as_secs_f64();
                let message = format!("rank {rank} waited {s} s for ranks {late:?}");
                let slow = format!("if these ranks are only slow, run with --timeout {}", s * 10.0);
                hub.fail(failure(message).help(slow));
                return hub.check();
            }
            let left = (hub.timeout - waited).min(Duration::from_millis(100));
            guard = held(g.wake.wait_timeout(guard, left)).0;
        }
        Ok(())
    }
}
