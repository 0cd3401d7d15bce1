//! The flight recorder of a rank: what it did last, and what it is doing.

use crate::alarm::Call;
use crate::wiring::Wiring;
use shardc_ir::mesh::AtomSet;
use shardc_ir::plan::{Instr, Transfer};
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Something a rank did in a step, in time since the session began.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timing {
    pub what: Done,
    pub start: Duration,
    pub end: Duration,
}

/// What was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Done {
    /// An instruction of the step, by its number in the list of the rank's class.
    Instr(usize),
    /// A kernel inside a call: function and first node.
    Launch(usize, usize),
}

/// Instructions that are remembered.
const ENTRIES: usize = 4096;

/// Something that was begun, in time since the recorder was made.
#[derive(Clone, Copy, Debug)]
struct RecorderEntry {
    what: Done,
    /// From 1; 0 of an evaluation.
    step: usize,
    microbatch: Option<usize>,
    /// Of a collective: its group, and its number among the group's collectives, from 1.
    call: Option<(AtomSet, u64)>,
    /// Of an operation of the transport.
    number: Option<Call>,
    start: Duration,
    end: Option<Duration>,
}

#[derive(Default)]
struct Log {
    entries: VecDeque<RecorderEntry>,
    calls: BTreeMap<AtomSet, u64>,
    /// Operations of the transport so far.
    operations: Call,
    microbatch: Option<usize>,
    step: usize,
}

/// The last instructions of a rank.
pub(crate) struct FlightRecorder {
    began: Instant,
    log: Mutex<Log>,
}

impl FlightRecorder {
    pub fn new() -> FlightRecorder {
        FlightRecorder { began: Instant::now(), log: Mutex::default() }
    }

    fn with<T>(&self, f: impl FnOnce(&mut Log) -> T) -> T {
        f(&mut self.log.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn step(&self, step: usize) {
        self.with(|l| l.step = step);
    }
    /// The microbatch of what follows.
    pub fn microbatch(&self, m: Option<usize>) {
        self.with(|l| l.microbatch = m);
    }

    /// Something begins. Of an operation of the transport its number, by which [`FlightRecorder::ended`] knows it.
    pub fn begin(&self, what: Done, group: Option<AtomSet>) -> Option<Call> {
        let start = self.began.elapsed();
        self.with(|l| {
            let call = group.map(|g| {
                let n = l.calls.entry(g).or_default();
                *n += 1;
                (g, *n)
            });
            let exchanges = group.is_some() || matches!(what, Done::Instr(_));
            l.operations += Call::from(exchanges);
            let number = exchanges.then_some(l.operations);
            if l.entries.len() == ENTRIES {
                l.entries.pop_front();
            }
            let (step, microbatch) = (l.step, l.microbatch);
            let end = None;
            l.entries.push_back(RecorderEntry { what, step, microbatch, call, number, start, end });
            number
        })
    }
    /// An operation that was deferred has ended.
    pub fn ended(&self, number: Option<Call>) {
        let now = self.began.elapsed();
        self.with(|l| {
            let mut late = l.entries.iter_mut().rev();
            if let Some(e) = late.find(|e| number.is_some() && e.number == number) {
                e.end = Some(now);
            }
        });
    }
    pub fn end(&self) {
        let now = self.began.elapsed();
        self.with(|l| {
            if let Some(e) = l.entries.back_mut() {
                e.end = Some(now);
            }
        });
    }

    /// Where a rank is, in one line; `waits` are those it waits for, and `oldest` the operation that has
    /// failed, or that its device or progress thread has not done, if it was only queued.
    pub fn whereabouts(
        &self,
        w: &Wiring,
        rank: usize,
        waits: &[usize],
        oldest: Option<Call>,
    ) -> String {
        let queued = |e: &&RecorderEntry| oldest.is_some() && e.number == oldest;
        let found = self.with(|l| {
            let late = l.entries.iter().rfind(queued).map(|e| RecorderEntry { end: None, ..*e });
            late.or_else(|| l.entries.back().copied())
        });
        let who = w.rank_text(rank);
        let Some(e) = found else { return format!("{who} has done nothing yet") };
        let mut s = match e.end {
            None if e.call.is_some() || !waits.is_empty() => format!("{who} waits in "),
            None => format!("{who} is in "),
            Some(_) => format!("{who} has done "),
        };
        s += &name(w, rank, &e);
        if let (None, [first, rest @ ..]) = (e.end, waits) {
            let _ = write!(s, ", for rank {first}");
            rest.iter().for_each(|r| s += &format!(" and {r}"));
        }
        if e.step > 0 {
            let _ = write!(s, ", step {}", e.step);
        }
        s
    }

    /// All that is remembered, a line each: when it began and how long it took in milliseconds, what
    /// it was. At the end how many collectives of each group there were.
    pub fn lines(&self, w: &Wiring, rank: usize) -> String {
        let (entries, calls) = self.with(|l| (l.entries.clone(), l.calls.clone()));
        let ms = |t: Duration| t.as_secs_f64() * 1e3;
        let mut out = format!("# {}\n#   began ms      took ms  instruction\n", w.rank_text(rank));
        for e in &entries {
            let took =
                e.end.map_or("    not done".into(), |end| format!("{:12.3}", ms(end - e.start)));
            let _ = writeln!(out, "{:12.3} {took}  {}", ms(e.start), name(w, rank, e));
        }
        for (g, n) in calls {
            let _ = writeln!(out, "# {n} collectives over {}", w.mesh().names(g, "+"));
        }
        out
    }
}

/// What an entry is: its op, where that comes from, and with whom.
fn name(w: &Wiring, rank: usize, e: &RecorderEntry) -> String {
    let mut s = match e.what {
        Done::Launch(func, node) => {
            let mut s = String::new();
            if let Some((group, number)) = e.call {
                let op = w.plan.module.funcs[func].nodes[node].op.mnemonic();
                let members = w.mesh().group(group, rank);
                let axes = w.mesh().names(group, "+");
                let _ = write!(s, "{op} #{number} over {axes} {members:?}, ");
            }
            s + &w.node_text(func, node)
        }
        Done::Instr(i) => {
            let class = &w.plan.classes[w.plan.class_of(rank)];
            let list = if e.step == 0 { &class.evaluation } else { &class.step };
            let peer = |class| w.plan.peer(rank, class);
            match list.get(i) {
                Some(Instr::Send(t)) => format!("send of {} to rank {}", value(w, t), peer(t.with)),
                Some(Instr::PostRecv(t)) => {
                    format!("post of a recv of {} from rank {}", value(w, t), peer(t.with))
                }
                Some(Instr::Recv(t)) => {
                    format!("recv of {} from rank {}", value(w, t), peer(t.with))
                }
                Some(Instr::Sent { to }) => format!("the wait for rank {} to receive", peer(*to)),
                Some(Instr::Call(_)) | None => format!("instruction {i}"),
            }
        }
    };
    if let Some(m) = e.microbatch {
        let _ = write!(s, ", microbatch {m}");
    }
    s
}

fn value(w: &Wiring, t: &Transfer) -> String {
    let f = &w.plan.module.funcs[t.func];
    format!("{} of @{}", f.name(t.value), f.name)
}
