//! What processes of one job tell each other beside their data: who they are, results of a step, that
//! they are alive, and why all must end.
//!
//! Every process has a connection to process 0, which gathers and shares. Each tells once a second
//! where its ranks are, and is answered; one whose connection ends, or that is silent for
//! [`Terms::silence`], is lost. Then process 0 asks all where they are, prints one message, and every
//! process ends with the same status. If process 0 itself is lost, the lowest process that others can
//! reach does this.
//!
//! Who does not know the job's [`Secret`] is told nothing, delays nothing and ends nothing; what
//! processes say to each other is sealed, not hidden.

mod acceptor;
mod door;
mod ending;
mod join;
mod secret;
mod system;
mod watch;
mod wire;

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod waits;

pub use door::Door;
pub use join::no_secret;
pub use secret::{LEAST, Secret, draw};
pub(crate) use system::end;
pub use watch::{Watch, late};

use crate::alarm::Alarm;
use crate::spawn;
use acceptor::{Acceptor, KnownPeer};
use join::{Link, Met, knock, resolve, welcome};
use shardc_ir::diag::{Diag, Exit, Result};
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use wire::{FrameKind, Incoming, Outgoing};

/// Time between signs of life.
const BEAT: Duration = Duration::from_secs(1);
/// How long a process that was asked to end waits for the cause.
const TOLD: Duration = Duration::from_millis(400);
/// How long the message that all must end may take.
const AT_ONCE: Duration = Duration::from_millis(200);
/// Most bytes of a message with data, until somebody says [`Control::expect`].
const DATA: usize = 1 << 28;

/// How a process is known to the others, and what it says of itself.
pub struct Me {
    pub process: usize,
    pub processes: usize,
    /// By what its launcher calls the job, one line that all its processes have; empty if that is not known. Jobs that
    /// are called otherwise are told apart by it, also if they have the same secret.
    pub job: String,
    /// What others see of this process, its host first: one line.
    pub card: String,
}

/// How processes trust and wait for each other.
#[derive(Clone)]
pub struct Terms {
    pub secret: Secret,
    /// Connect over more than the loopback interface although there is no secret.
    pub insecure: bool,
    /// How many ports behind that of process 0 it may be at, if others have that one: who calls tells it by the secret.
    pub spare: u16,
    /// Since when this process waits for the others, and how long it may: until all have come, and again at
    /// the end, until all have gone.
    pub began: Instant,
    pub timeout: Duration,
    /// A process that says nothing for so long is lost.
    pub silence: Duration,
    /// Says what does not end the job, and should be known while it is waited for.
    pub warn: fn(Diag),
}

impl Terms {
    /// How long others may still take to come.
    fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.began.elapsed())
    }
    /// Whether processes of other hosts may be connected to.
    fn trusts(&self) -> bool {
        self.secret.is_secret() || self.insecure
    }
}

/// What the ranks of this process are doing, and where to write it down.
pub trait StatusSource: Send + Sync {
    /// One line.
    fn whereabouts(&self) -> String;
    /// Writes the record of the last instructions; says where.
    fn record(&self) -> Option<String>;
}

/// Prints the message of a job that fails, in the process that does.
pub type Print = Box<dyn Fn(&str) + Send + Sync>;

/// A cause to end.
#[derive(Clone)]
struct Failure {
    process: usize,
    text: String,
    status: i32,
}

#[derive(Default)]
struct Inbox {
    gathered: Vec<VecDeque<Vec<u8>>>,
    shared: VecDeque<Vec<u8>>,
    /// By process: when it was last heard of, and where it was.
    last: Vec<Option<(Instant, String)>>,
    /// By process: where it was when all had to stop.
    stopped: Vec<Option<String>>,
    left: Vec<bool>,
    failure: Option<Failure>,
}

struct Shared {
    me: usize,
    processes: usize,
    cards: Vec<String>,
    addresses: Vec<Vec<SocketAddr>>,
    /// Process 0 has one to every other; they have one to it.
    links: Vec<Option<Mutex<Outgoing>>>,
    terms: Terms,
    /// When this process last ran for sure, and when it last found that it had not for long.
    ran: Mutex<(Instant, Option<Instant>)>,
    /// Most bytes of a message with data.
    expected: AtomicUsize,
    inbox: Mutex<Inbox>,
    wake: Condvar,
    alarm: Arc<Alarm>,
    source: Mutex<Option<Arc<dyn StatusSource>>>,
    print: Print,
    /// All have done what they were started for; what is left is to end alike.
    finished: AtomicBool,
    /// This process has said goodbye, and misses nobody any more.
    gone: AtomicBool,
    ending: AtomicBool,
    /// Process 0 has told this one to stop.
    answered: AtomicBool,
    /// The signal that has asked some process to save and end; 0: none has.
    wished: AtomicI32,
    /// With which this process ends.
    status: AtomicI32,
    /// Those that have called this process and know the secret.
    callers: Mutex<Vec<KnownPeer>>,
    /// What this process does before its ranks can say where they are, and when they cannot any more.
    phase: Mutex<&'static str>,
    /// Watches the end.
    watch: Mutex<Option<Watch>>,
}

/// A process's connection to the others of its job.
#[derive(Clone)]
pub struct Control(Arc<Shared>);

/// True if nothing came in time.
fn is_late(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn held<T>(lock: std::result::Result<T, PoisonError<T>>) -> T {
    lock.unwrap_or_else(PoisonError::into_inner)
}

impl Control {
    /// Connects all processes: this one's `door`, if it is process 0, and where all find that, the same
    /// text in all.
    ///
    /// # Errors
    /// `start-timeout` if not all come in time; `cluster` if another says that it is this one, if process 0 is
    /// of another job, or if this is process 0 without a door; `no-secret`.
    pub fn join(
        me: &Me,
        door: Option<Door>,
        leader: &str,
        terms: Terms,
        alarm: Arc<Alarm>,
        print: Print,
    ) -> Result<Control> {
        let met = match door.filter(|_| me.process == 0) {
            Some(door) if door.is_far() && me.processes > 1 && !terms.trusts() => {
                return Err(no_secret(&door.addresses));
            }
            Some(door) => {
                let own = format!("{}\n{}", door.addresses, me.card);
                welcome(me, door, leader, &own, &terms)?
            }
            None => knock(me, leader, &me.card, &terms)?,
        };
        let Met { links, hellos, listeners } = met;
        let of = |i: usize| -> Vec<String> {
            hellos.iter().map(|h: &Vec<String>| h.get(i).cloned().unwrap_or_default()).collect()
        };
        let n = me.processes;
        let cut = |l: Option<Link>| l.map_or((None, None), |(out, from)| (Some(out), Some(from)));
        let (outs, froms): (Vec<_>, Vec<_>) = links.into_iter().map(cut).unzip();
        let shared = Shared {
            me: me.process,
            processes: n,
            addresses: of(0).iter().map(|a| resolve(a).unwrap_or_default()).collect(),
            cards: of(1),
            links: outs.into_iter().map(|l| l.map(Mutex::new)).collect(),
            terms,
            ran: Mutex::new((Instant::now(), None)),
            expected: AtomicUsize::new(DATA),
            inbox: Mutex::new(Inbox {
                gathered: vec![VecDeque::new(); n],
                last: vec![None; n],
                stopped: vec![None; n],
                left: vec![false; n],
                ..Inbox::default()
            }),
            wake: Condvar::new(),
            alarm,
            source: Mutex::new(None),
            print,
            finished: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            answered: AtomicBool::new(false),
            wished: AtomicI32::new(0),
            status: AtomicI32::new(Exit::RankFailed as i32),
            callers: Mutex::default(),
            phase: Mutex::new("not running yet"),
            watch: Mutex::default(),
        };
        let control = Control(Arc::new(shared));
        control.listen(froms, listeners)?;
        Ok(control)
    }

    /// Messages with data may have so many bytes; those of a process that sends more end the job.
    pub fn expect(&self, bytes: usize) {
        self.0.expected.fetch_max(bytes, Ordering::AcqRel);
    }

    /// What every process says of itself.
    pub fn cards(&self) -> &[String] {
        &self.0.cards
    }
    pub fn process(&self) -> usize {
        self.0.me
    }
    /// How long all may take to begin and to end what they share.
    pub fn timeout(&self) -> Duration {
        self.0.terms.timeout
    }
    pub fn leads(&self) -> bool {
        self.0.me == 0
    }
    /// Who tells where the ranks of this process are.
    pub fn watch(&self, source: Arc<dyn StatusSource>) {
        *held(self.0.source.lock()) = Some(source);
    }

    /// Threads that read what the others say, and one that says that this process lives. They do no
    /// work of the ranks, and wait for none: no lock of theirs is held while there is work.
    fn listen(&self, froms: Vec<Option<Incoming>>, listeners: Vec<TcpListener>) -> Result<()> {
        let count = froms.iter().flatten().count() + 2;
        let start = |work: Box<dyn FnOnce() + Send>| match thread::Builder::new().spawn(work) {
            Ok(_) => Ok(()),
            Err(e) => Err(spawn::refused("a thread that listens to other processes", count, &e)),
        };
        self.0.links.iter().flatten().for_each(|l| held(l.lock()).patience(self.0.terms.silence));
        for (other, from) in froms.into_iter().enumerate() {
            let Some(mut from) = from else { continue };
            let shared = self.0.clone();
            start(Box::new(move || {
                from.patience(shared.terms.silence);
                loop {
                    match from.read(shared.expected.load(Ordering::Acquire)) {
                        Ok((kind, data)) => shared.heard(other, kind, data),
                        Err(e) => return shared.lost(other, &e),
                    }
                }
            }))?;
        }
        if !listeners.is_empty() {
            let shared = self.0.clone();
            start(Box::new(move || shared.receive(listeners)))?;
        }
        let shared = self.0.clone();
        start(Box::new(move || {
            while !shared.gone.load(Ordering::Acquire) {
                shared.runs();
                if let Some(d) = shared.alarm.overdue() {
                    shared.fail(shared.me, d.render(), d.exit as i32);
                }
                // Process 0 answers those that say that they live.
                if shared.me != 0 {
                    let text = shared.whereabouts();
                    shared.tell(FrameKind::Beat, text.as_bytes());
                }
                std::thread::sleep(BEAT.min(shared.terms.silence / 4));
            }
        }))
    }

    /// Gives process 0 what each process has, in their order; the others get nothing.
    pub fn gather(&self, data: Vec<u8>) -> Vec<Vec<u8>> {
        let s = &self.0;
        if s.me != 0 {
            s.tell(FrameKind::Gather, &data);
            return vec![];
        }
        let mut inbox = held(s.inbox.lock());
        inbox.gathered[0].push_back(data);
        loop {
            if inbox.gathered.iter().all(|g| !g.is_empty()) {
                return inbox.gathered.iter_mut().filter_map(VecDeque::pop_front).collect();
            }
            inbox = s.sleep(inbox);
        }
    }

    /// Gives everybody what process 0 has.
    pub fn share(&self, data: Vec<u8>) -> Vec<u8> {
        let s = &self.0;
        if s.me == 0 {
            s.tell(FrameKind::Share, &data);
            return data;
        }
        let mut inbox = held(s.inbox.lock());
        loop {
            if let Some(data) = inbox.shared.pop_front() {
                return data;
            }
            inbox = s.sleep(inbox);
        }
    }

    /// Waits for all processes.
    pub fn barrier(&self) {
        self.gather(vec![]);
        self.share(vec![]);
    }

    /// Ends the job, with this cause: one process prints it, all end with the status.
    pub fn fail(&self, cause: &Diag) -> ! {
        self.0.fail(self.0.me, cause.render(), cause.exit as i32)
    }

    /// The user, or the launcher, wants the job to end. A cause that is about to be told goes first.
    pub fn interrupt(&self) -> ! {
        std::thread::sleep(TOLD);
        self.0.fail(self.0.me, "interrupted".into(), 130)
    }

    /// A signal asks the job to save and end: process 0 is told, which decides after which step.
    pub fn wish(&self, signal: i32) {
        self.0.wished.store(signal, Ordering::Release);
        if self.0.me != 0 {
            self.0.tell(FrameKind::Wish, signal.to_string().as_bytes());
        }
    }

    /// The signal by which some process was asked to save and end.
    pub fn wished(&self) -> Option<i32> {
        Some(self.0.wished.load(Ordering::Acquire)).filter(|&s| s != 0)
    }
}

impl Shared {
    fn whereabouts(&self) -> String {
        let w = held(self.source.lock()).clone();
        let phase = || format!("rank {} is {}", self.me, self.at(*held(self.phase.lock())));
        match w.filter(|_| !self.finished.load(Ordering::Acquire)) {
            Some(w) => w.whereabouts(),
            None => phase(),
        }
    }

    /// Accepts who comes while the job runs, and keeps those that know the secret until they are asked for:
    /// strangers are let go, so that they are in nobody's way when process 0 is lost.
    fn receive(&self, listeners: Vec<TcpListener>) {
        let mut acceptor = Acceptor::new(listeners, self.terms.secret.clone());
        loop {
            acceptor.wait();
            // Without random numbers nobody is answered.
            let came = acceptor.look().map(|c| c.0).unwrap_or_default();
            let mut callers = held(self.callers.lock());
            let room = self.processes.saturating_sub(callers.len());
            callers.extend(came.into_iter().take(room));
        }
    }

    /// Says something to all that this process is connected to. Whoever cannot be told is lost, and
    /// found to be.
    fn tell(&self, kind: FrameKind, data: &[u8]) {
        for link in self.links.iter().flatten() {
            let _ = held(link.lock()).write(kind, data);
        }
    }

    /// Says that all must end. A process that does not take what it was sent before is not waited for:
    /// its connection ends with this process.
    fn tell_to_stop(&self, status: i32) {
        let text = format!("{status}\n");
        let start = Instant::now();
        let mut left: Vec<&Mutex<Outgoing>> = self.links.iter().flatten().collect();
        while !left.is_empty() && start.elapsed() < AT_ONCE {
            left.retain(|link| match link.try_lock() {
                Ok(mut link) => {
                    link.patience(AT_ONCE);
                    let _ = link.write(FrameKind::Stop, text.as_bytes());
                    false
                }
                Err(_) => true,
            });
            std::thread::sleep(AT_ONCE / 100);
        }
    }

    fn sleep<'a>(&self, inbox: MutexGuard<'a, Inbox>) -> MutexGuard<'a, Inbox> {
        held(self.wake.wait_timeout(inbox, BEAT)).0
    }

    fn heard(self: &Arc<Self>, other: usize, kind: FrameKind, data: Vec<u8>) {
        let text = || String::from_utf8_lossy(&data).into_owned();
        let mut inbox = held(self.inbox.lock());
        match kind {
            FrameKind::Gather => inbox.gathered[other].push_back(data),
            FrameKind::Share => {
                inbox.shared.push_back(data);
                // At the end nothing else is shared than that all are there.
                if held(self.watch.lock()).is_some() {
                    self.finished.store(true, Ordering::Release);
                }
            }
            FrameKind::Beat => {
                inbox.last[other] = Some((Instant::now(), text()));
                drop(inbox);
                if let Some(link) = self.links[other].as_ref().filter(|_| self.me == 0) {
                    let _ = held(link.lock()).write(FrameKind::Beat, &[]);
                }
                return;
            }
            FrameKind::Where => inbox.stopped[other] = Some(text()),
            FrameKind::Bye => inbox.left[other] = true,
            FrameKind::Hello | FrameKind::Refuse => {}
            FrameKind::Wish => self.wished.store(text().parse().unwrap_or(0), Ordering::Release),
            FrameKind::Fail | FrameKind::Stop => {
                drop(inbox);
                let text = text();
                let (status, text) = text.split_once('\n').unwrap_or((&text, ""));
                let status = status.parse().unwrap_or(Exit::RankFailed as i32);
                if kind == FrameKind::Stop {
                    return self.stop(status);
                }
                if self.ending.load(Ordering::Acquire) {
                    // It fails too: what it says is where it is.
                    let line = text.lines().next().unwrap_or_default();
                    let line = line.split_once("]: ").map_or(line, |x| x.1).to_string();
                    held(self.inbox.lock()).stopped[other].get_or_insert(line);
                    return self.wake.notify_all();
                }
                self.fail(other, text.to_string(), status)
            }
        }
        self.wake.notify_all();
    }
}
