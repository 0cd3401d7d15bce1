//! How a job ends because of one process: one message, one status for all.

use super::join::call;
use super::watch::WAITS;
use super::wire::{FrameKind, lines};
use super::{BEAT, Failure, Inbox, Shared, held, is_late, system};
use shardc_ir::diag::{Diag, Exit, one_line};
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// How long process 0 waits for where the others were.
const ASKED: Duration = Duration::from_millis(700);
/// How long a process that has failed, or was told to stop, waits for the message to be printed.
const PRINTED: Duration = Duration::from_secs(4);
/// How long a process without process 0 waits for others that look for it: they miss its answers to
/// their signs of life at different times.
const GATHERED: Duration = Duration::from_millis(600).saturating_add(BEAT);
/// What ends so soon after this process has been stopped and goes on has ended because of it.
const RESUMED: Duration = Duration::from_secs(5);
/// How long what is under way on devices may take to be given up.
const ABORTED: Duration = Duration::from_secs(5);
/// More processes than this are not listed in a message.
const LISTED: usize = 16;

impl Shared {
    /// Notes that this process runs.
    pub(super) fn runs(&self) {
        let mut ran = held(self.ran.lock());
        if ran.0.elapsed() > self.terms.silence {
            ran.1 = Some(Instant::now());
        }
        ran.0 = Instant::now();
    }

    /// Whether this process was stopped until just now for so long that the others have missed it.
    fn was_stopped(&self) -> bool {
        let ran = held(self.ran.lock());
        ran.0.elapsed() > self.terms.silence || ran.1.is_some_and(|r| r.elapsed() < RESUMED)
    }

    /// A connection has ended, or is silent.
    pub(super) fn lost(self: &Arc<Self>, other: usize, error: &std::io::Error) {
        if held(self.inbox.lock()).left[other] || self.gone.load(Ordering::Acquire) {
            return;
        }
        if self.was_stopped() {
            // Those that are gone have said why they ended: this one was silent.
            self.alarm.ring();
            self.record(Exit::RankFailed as i32);
            self.over(None, Exit::RankFailed as i32);
        }
        let silence = self.terms.silence.as_secs();
        let how = match error.kind() {
            _ if is_late(error) => {
                format!(
                    "was silent for {silence} s: its host or the network is down, or the process is stopped"
                )
            }
            ErrorKind::InvalidData => "sent what no process of this job sends".to_string(),
            _ => "ended without a word: it was killed, or its host is down".to_string(),
        };
        if self.ending.load(Ordering::Acquire) {
            if self.me == 0 {
                return;
            }
            // Process 0 has printed the message, or is lost before it could.
            match self.answered.load(Ordering::Acquire) {
                true => self.over(None, self.status.load(Ordering::Acquire)),
                false => return self.succeed(&how),
            }
        }
        if self.me != 0 {
            return self.succeed(&how);
        }
        let card = &self.cards[other];
        let mut cause = Diag::new("rank-failed", format!("process {other} ({card}) {how}"));
        if let Some((when, text)) = &held(self.inbox.lock()).last[other] {
            let ago = when.elapsed().as_secs_f64();
            cause = cause.at(format!("last heard of {ago:.1} s before: {text}"));
        }
        let cause = self.way_on(cause);
        self.fail(other, cause.render(), cause.exit as i32)
    }

    /// What the user does when a process was lost.
    fn way_on(&self, cause: Diag) -> Diag {
        match self.finished.load(Ordering::Acquire) {
            true => cause
                .why("this was at the end of the job: all steps are done, and what was to be saved is saved"),
            false => cause.help(
                "restart from the latest checkpoint with --resume DIR, if the run saved any (--save DIR --save-every N)",
            ),
        }
    }

    /// The first cause ends the job; those that follow wait for that.
    pub(super) fn fail(self: &Arc<Self>, process: usize, text: String, status: i32) -> ! {
        let failed = self.ending.swap(true, Ordering::AcqRel);
        self.alarm.ring();
        if failed {
            self.end_as_failed();
        }
        self.status.store(status, Ordering::Release);
        if self.me != 0 {
            self.record(status);
            held(self.inbox.lock()).failure =
                Some(Failure { process: self.me, text: text.clone(), status });
            self.tell(FrameKind::Fail, format!("{status}\n{text}").as_bytes());
            // Process 0 answers, or is found to be lost.
            std::thread::sleep(self.terms.silence.saturating_add(PRINTED));
            self.over(Some(&text), status);
        }
        held(self.inbox.lock()).failure = Some(Failure { process, text, status });
        self.tell_to_stop(status);
        self.conclude(ASKED)
    }

    /// Ends this process of a job that has failed, when whoever found that has had time to print why.
    pub(super) fn end_as_failed(&self) -> ! {
        std::thread::sleep(PRINTED);
        self.over(None, self.status.load(Ordering::Acquire))
    }

    /// Waits for where the others are, and prints all.
    fn conclude(&self, wait: Duration) -> ! {
        let start = Instant::now();
        let mut inbox = held(self.inbox.lock());
        let failure = inbox.failure.clone().expect("the cause is known");
        inbox.stopped[self.me] = Some(self.whereabouts());
        let known =
            |i: &Inbox| (0..self.processes).all(|p| p == failure.process || i.stopped[p].is_some());
        while !known(&inbox) && start.elapsed() < wait {
            inbox = held(self.wake.wait_timeout(inbox, wait / 20)).0;
        }
        let mut text = failure.text.clone();
        if failure.status == Exit::RankFailed as i32 {
            let others = (0..self.processes).filter(|&p| p != failure.process);
            let mut whys: Vec<String> = others
                .filter_map(|p| inbox.stopped[p].as_ref())
                .take(LISTED)
                .map(|w| format!("\n   = why: {w}"))
                .collect();
            whys.extend(self.not_come(&failure, &inbox).take(LISTED));
            let at = text.find("\n   = help:").unwrap_or(text.len());
            text.insert_str(at, &whys.concat());
        }
        drop(inbox);
        if let Some(place) = self.record(failure.status) {
            text.push_str(&format!(
                "\n   = help: read the last instructions of every rank in {}",
                one_line(&place)
            ));
        }
        self.over(Some(&text), failure.status)
    }

    /// Where some wait for others to come to something: which those are, as far as they have said where they are.
    fn not_come<'a>(
        &'a self,
        failure: &'a Failure,
        inbox: &'a Inbox,
    ) -> impl Iterator<Item = String> + 'a {
        let at = move |p: usize| match p == failure.process {
            true => Some(&failure.text),
            false => inbox.stopped[p].as_ref(),
        };
        let waits = move |p: usize| at(p).map(|text| text.contains(WAITS));
        let some = (0..self.processes).any(|p| waits(p) == Some(true));
        let missing = (0..self.processes).filter(move |&p| some && waits(p) == Some(false));
        missing.map(|p| {
            format!(
                "\n   = why: process {p} ({}) has not come, or is in a call that does not end",
                self.cards[p]
            )
        })
    }

    /// Process 0 says that all is over: this one tells where it is, and waits for the end.
    pub(super) fn stop(self: &Arc<Self>, status: i32) {
        self.answered.store(true, Ordering::Release);
        let first = !self.ending.swap(true, Ordering::AcqRel);
        self.alarm.ring();
        self.status.store(status, Ordering::Release);
        self.record(status);
        self.tell(FrameKind::Where, self.whereabouts().as_bytes());
        // The connection ends when the message is printed.
        if first {
            let (shared, waits) = (self.clone(), std::thread::Builder::new());
            let end = move || {
                std::thread::sleep(PRINTED);
                shared.over(None, status);
            };
            if waits.spawn(end).is_err() {
                self.over(None, status);
            }
        }
    }

    /// Process 0 is lost: the lowest that is left gathers where the others are.
    fn succeed(self: &Arc<Self>, how: &str) {
        // The lowest prints what it knows; its own failure, if it has one, is the cause.
        self.ending.store(true, Ordering::Release);
        self.alarm.ring();
        let status = Exit::RankFailed as i32;
        self.record(status);
        let own = format!("{}\n{}", self.me, self.whereabouts());
        for lower in 1..self.me {
            let each = Duration::from_millis(500);
            let Ok((mut out, mut from)) = call(&self.addresses[lower], &self.terms.secret, each)
            else {
                continue;
            };
            if out.write(FrameKind::Where, own.as_bytes()).is_ok() {
                from.patience(GATHERED * 2);
                // It ends the connection when it has printed; one that hangs does not.
                let ended = from.read(0).is_err_and(|e| !is_late(&e));
                if ended {
                    self.over(None, status);
                }
            }
        }
        let start = Instant::now();
        let mut pending = vec![];
        let message = format!("process 0 ({}) {how}", self.cards[0]);
        let cause = self.way_on(Diag::new("rank-failed", message));
        while start.elapsed() < GATHERED && pending.len() + 2 < self.processes {
            let came = std::mem::take(&mut *held(self.callers.lock()));
            for known in came {
                let said = lines(&known.data);
                let number = said.first().and_then(|s| s.parse::<usize>().ok());
                let number = number.filter(|&p| p < self.processes);
                if let Some(number) = number.filter(|_| known.kind == FrameKind::Where) {
                    held(self.inbox.lock()).stopped[number] = Some(said[1..].join(" "));
                    pending.push((known.out, known.incoming));
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let text = cause.render();
        held(self.inbox.lock()).failure.get_or_insert(Failure { process: 0, text, status });
        self.conclude(Duration::ZERO)
    }

    /// Writes down the last instructions; says where.
    fn record(&self, status: i32) -> Option<String> {
        let source = held(self.source.lock()).clone();
        source.filter(|_| status == Exit::RankFailed as i32).and_then(|w| w.record())
    }

    fn over(&self, message: Option<&str>, status: i32) -> ! {
        if let Some(m) = message {
            (self.print)(m);
        }
        let (alarm, (ends, ended)) = (self.alarm.clone(), channel::<()>());
        let abort = move || {
            alarm.abort();
            drop(ends);
        };
        if std::thread::Builder::new().spawn(abort).is_ok() {
            let _ = ended.recv_timeout(ABORTED);
        }
        system::end(status)
    }
}
