//! A limit for what cannot be interrupted: the start and the end of MPI and of NCCL, and what a system may
//! wait for while processes meet.

use super::wire::FrameKind;
use super::{BEAT, Control, Shared, held, system};
use crate::spawn;
use shardc_ir::diag::{Diag, Result};
use std::net::Shutdown;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// How long one that gives up waits for the others to say that they do, before its launcher ends them.
const OTHERS: Duration = Duration::from_secs(1);
/// Time after which a watch looks again.
const SOME: Duration = Duration::from_millis(250);
/// Processes that are listed as missing.
const LISTED: usize = 16;
/// What one that waits for others says of where it is.
pub(super) const WAITS: &str = ": others have not come to it";

/// A thread that waits while something goes on; dropped when that is over.
pub struct Watch(#[expect(dead_code, reason = "its end is what the thread waits for")] Sender<()>);

impl Watch {
    /// Does `late` if this lives longer than `limit`.
    ///
    /// # Errors
    /// `threads` if the thread does not start.
    pub fn new(limit: Duration, late: impl FnOnce() + Send + 'static) -> Result<Watch> {
        let (lives, waits) = channel();
        let wait = move || {
            let mut left = limit;
            while !left.is_zero() {
                let some = left.min(SOME);
                if waits.recv_timeout(some) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                // Time in which this process was stopped does not count: the others wait for it.
                left -= some;
            }
            late();
        };
        match std::thread::Builder::new().name("watch".into()).spawn(wait) {
            Ok(_) => Ok(Watch(lives)),
            Err(e) => Err(spawn::refused("the thread that watches the start", 1, &e)),
        }
    }

    /// As long as no process can ask another: says in one line how long this one has waited, in what and for
    /// whom, and ends it.
    ///
    /// # Errors
    /// `threads` if the thread does not start.
    pub fn alone(
        rank: usize,
        limit: Duration,
        what: String,
        print: impl Fn(&str) + Send + 'static,
    ) -> Result<Watch> {
        Watch::new(limit, move || {
            let d = late(rank, limit, &what);
            print(&d.render());
            std::thread::sleep(OTHERS);
            system::end(d.exit as i32)
        })
    }
}

/// A rank has waited for so long: one line, as every rank may say its own. `what` goes on from "waited 20 s":
/// in which phase, and for whom.
pub fn late(rank: usize, waited: Duration, what: &str) -> Diag {
    Diag::new("start-timeout", format!("rank {rank} waited {:.0} s {what}", waited.as_secs_f64()))
}

impl Control {
    /// What this process is in, for those who ask when the job fails before its ranks can say it.
    pub fn enter(&self, phase: &'static str) {
        *held(self.0.phase.lock()) = phase;
    }

    /// The job fails if what all processes begin now takes longer than `Terms::timeout`; dropped when it is
    /// over.
    ///
    /// # Errors
    /// `threads` if a thread does not start.
    pub fn limit(&self, phase: &'static str) -> Result<Watch> {
        self.enter(phase);
        let (shared, limit) = (self.0.clone(), self.0.terms.timeout);
        Watch::new(limit, move || {
            let d = shared.unmet(late(shared.me, limit, &shared.at(phase)));
            shared.fail(shared.me, d.render(), d.exit as i32)
        })
    }

    /// Waits until all have done what they were started for. From now on all have `Terms::timeout` to end.
    ///
    /// # Errors
    /// `threads` if a thread does not start.
    pub fn finish(&self) -> Result<()> {
        let watch = self.limit("at the end of the job")?;
        *held(self.0.watch.lock()) = Some(watch);
        self.gather(vec![]);
        // All have come this far, and have done their part.
        if self.leads() {
            self.0.finished.store(true, Ordering::Release);
        }
        self.share(vec![]);
        self.0.finished.store(true, Ordering::Release);
        Ok(())
    }

    /// Leaves the others, when all that they share has ended; they have [`Control::finish`]ed.
    pub fn leave(self) {
        // A rank that the alarm let out of its last operation does not end the job as if all were well.
        if self.0.ending.load(Ordering::Acquire) {
            self.0.end_as_failed();
        }
        self.0.gone.store(true, Ordering::Release);
        self.0.tell(FrameKind::Bye, &[]);
        self.0.links.iter().flatten().for_each(|l| {
            held(l.lock()).end(Shutdown::Write);
        });
        *held(self.0.watch.lock()) = None;
    }
}

impl Shared {
    /// A phase, with that part of it that goes on, and whether this process has come to it and others have not.
    pub(super) fn at(&self, phase: &str) -> String {
        let (part, waits) = self.alarm.begins();
        format!("{phase}{part}{}", if waits { WAITS } else { "" })
    }

    /// Which processes are known to be missing where all have to be: at the end those that have not come to it,
    /// or not left it as others have; and any that has not been heard of for long.
    pub(super) fn unmet(&self, cause: Diag) -> Diag {
        let (inbox, ends) = (held(self.inbox.lock()), held(self.watch.lock()).is_some());
        let finished = self.finished.load(Ordering::Acquire);
        let some_left = inbox.left.contains(&true);
        let why = |p: usize| match &inbox.last[p] {
            Some((when, _)) if when.elapsed() > BEAT * 2 => {
                Some(format!("was last heard of {:.1} s before", when.elapsed().as_secs_f64()))
            }
            _ if self.me != 0 || !ends => None,
            _ if !finished => inbox.gathered[p].is_empty().then(|| "has not finished".to_string()),
            _ => (some_left && !inbox.left[p]).then(|| "has not left".to_string()),
        };
        let others = (0..self.processes).filter(|&p| p != self.me);
        let missing = others.filter_map(|p| Some((p, why(p)?))).take(LISTED);
        missing.fold(cause, |d, (p, how)| d.why(format!("process {p} ({}) {how}", self.cards[p])))
    }
}
