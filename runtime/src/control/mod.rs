//! What processes of one job tell each other beside their data: who they are, results of a step, that
//! they are alive, and why all must end.
//!
//! Every process has a connection to process 0, which gathers and shares. Each tells once a second
//! where its ranks are; one whose connection ends, or that is silent for 4 s, is lost. Then
//! process 0 asks all where they are, prints one message, and every process ends with the same
//! status. If process 0 itself is lost, the lowest process that others can reach does this.

mod ending;
mod join;
mod wire;

pub use join::Door;

use crate::alarm::Alarm;
use crate::spawn;
use join::{knock, resolve, welcome};
use shardc_ir::diag::{Diag, Exit, Result};
use std::collections::VecDeque;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use wire::{FrameKind, read, write};

/// A process that was silent for so long is lost.
const LOST: Duration = Duration::from_secs(4);
/// Time between signs of life.
const BEAT: Duration = Duration::from_secs(1);
/// How long a process that was asked to end waits for the cause.
const TOLD: Duration = Duration::from_millis(400);
/// How a process is known to the others, and what it says of itself.
pub struct Me {
    pub process: usize,
    pub processes: usize,
    /// What others see of this process, its host first: one line.
    pub card: String,
}

/// What the ranks of this process are doing, and where to write it down.
pub trait Witness: Send + Sync {
    /// One line.
    fn whereabouts(&self) -> String;
    /// Writes the record of the last instructions; says where.
    fn record(&self) -> Option<String>;
}

/// Prints the message of a job that fails, in the process that does.
pub type Print = Box<dyn Fn(&str) + Send + Sync>;

/// A cause to end.
#[derive(Clone)]
struct Trouble {
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
    trouble: Option<Trouble>,
}

struct Shared {
    me: usize,
    processes: usize,
    cards: Vec<String>,
    addresses: Vec<Vec<SocketAddr>>,
    /// Process 0 has one to every other; they have one to it.
    links: Vec<Option<Mutex<TcpStream>>>,
    inbox: Mutex<Inbox>,
    wake: Condvar,
    alarm: Arc<Alarm>,
    witness: Mutex<Option<Arc<dyn Witness>>>,
    print: Print,
    /// Nobody is missed any more.
    leaving: AtomicBool,
    ending: AtomicBool,
    /// Process 0 has told this one to stop.
    answered: AtomicBool,
    /// The signal that has asked some process to save and end; 0: none has.
    wished: AtomicI32,
    /// With which this process ends.
    status: AtomicI32,
    listener: TcpListener,
}

/// A process's connection to the others of its job.
#[derive(Clone)]
pub struct Control(Arc<Shared>);

fn held<T>(lock: std::result::Result<T, PoisonError<T>>) -> T {
    lock.unwrap_or_else(PoisonError::into_inner)
}

impl Control {
    /// Connects all processes: this one's `door`, and where all find process 0's, the same text in all.
    ///
    /// # Errors
    /// `cluster` if not all come within `timeout`, or two say that they are the same.
    pub fn join(
        me: &Me,
        door: Door,
        leader: &str,
        timeout: Duration,
        alarm: Arc<Alarm>,
        print: Print,
    ) -> Result<Control> {
        let own = format!("{}\n{}", door.addresses, me.card);
        let (links, hellos) = match me.process {
            0 => welcome(me.processes, &door.listener, leader, &own, timeout)?,
            _ => knock(me, leader, &own, timeout)?,
        };
        let of = |i: usize| -> Vec<String> {
            hellos.iter().map(|h: &Vec<String>| h.get(i).cloned().unwrap_or_default()).collect()
        };
        let n = me.processes;
        let shared = Shared {
            me: me.process,
            processes: n,
            addresses: of(0).iter().map(|a| resolve(a)).collect(),
            cards: of(1),
            links: links.into_iter().map(|l| l.map(Mutex::new)).collect(),
            inbox: Mutex::new(Inbox {
                gathered: vec![VecDeque::new(); n],
                last: vec![None; n],
                stopped: vec![None; n],
                left: vec![false; n],
                ..Inbox::default()
            }),
            wake: Condvar::new(),
            alarm,
            witness: Mutex::new(None),
            print,
            leaving: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            answered: AtomicBool::new(false),
            wished: AtomicI32::new(0),
            status: AtomicI32::new(Exit::RankFailed as i32),
            listener: door.listener,
        };
        let control = Control(Arc::new(shared));
        control.listen()?;
        Ok(control)
    }

    /// What every process says of itself.
    pub fn cards(&self) -> &[String] {
        &self.0.cards
    }
    pub fn process(&self) -> usize {
        self.0.me
    }
    pub fn leads(&self) -> bool {
        self.0.me == 0
    }
    /// Who tells where the ranks of this process are.
    pub fn watch(&self, witness: Arc<dyn Witness>) {
        *held(self.0.witness.lock()) = Some(witness);
    }

    /// Threads that read what the others say, and one that says that this process lives.
    fn listen(&self) -> Result<()> {
        let count = self.0.links.iter().flatten().count() + 1;
        let start = |work: Box<dyn FnOnce() + Send>| match thread::Builder::new().spawn(work) {
            Ok(_) => Ok(()),
            Err(e) => Err(spawn::refused("a thread that listens to other processes", count, &e)),
        };
        for (other, link) in self.0.links.iter().enumerate() {
            let Some(link) = link else { continue };
            let Ok(mut stream) = held(link.lock()).try_clone() else { continue };
            let shared = self.0.clone();
            start(Box::new(move || {
                let _ = stream.set_read_timeout(Some(LOST));
                let _ = stream.set_write_timeout(Some(LOST));
                loop {
                    match read(&mut stream) {
                        Ok((kind, data)) => shared.heard(other, kind, data),
                        Err(e) => return shared.lost(other, &e),
                    }
                }
            }))?;
        }
        let shared = self.0.clone();
        start(Box::new(move || {
            while !shared.leaving.load(Ordering::Acquire) {
                let text = shared.whereabouts();
                shared.tell(FrameKind::Beat, text.as_bytes());
                std::thread::sleep(BEAT);
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

    /// Leaves the others: all have done what they were started for.
    pub fn leave(self) {
        self.gather(vec![]);
        // All have come this far, and have done their part.
        if self.leads() {
            self.0.leaving.store(true, Ordering::Release);
        }
        self.share(vec![]);
        self.0.leaving.store(true, Ordering::Release);
        self.0.tell(FrameKind::Bye, &[]);
        self.0.links.iter().flatten().for_each(|l| {
            let _ = held(l.lock()).shutdown(Shutdown::Write);
        });
    }
}

impl Shared {
    fn whereabouts(&self) -> String {
        let w = held(self.witness.lock()).clone();
        w.map_or("its ranks have not started".into(), |w| w.whereabouts())
    }

    /// Says something to all that this process is connected to. Whoever cannot be told is lost, and
    /// found to be.
    fn tell(&self, kind: FrameKind, data: &[u8]) {
        for link in self.links.iter().flatten() {
            let mut link: MutexGuard<TcpStream> = held(link.lock());
            let _ = write(&mut link, kind, data);
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
            FrameKind::Share => inbox.shared.push_back(data),
            FrameKind::Beat => inbox.last[other] = Some((Instant::now(), text())),
            FrameKind::Where => inbox.stopped[other] = Some(text()),
            FrameKind::Bye => inbox.left[other] = true,
            FrameKind::Hello => {}
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
