//! Ranks that other programs run: a session asks them what it asks its own, and knows of them what they answer.

use super::status::RankStatus;
use super::worker::{Answer, Serve, Worker, start};
use super::{LoadFn, Session};
use crate::alarm::Alarm;
use crate::batch::{self, StepData};
use crate::holdings::{self, Holding, Sink, Task};
use crate::options::{First, Wanted};
use crate::rank::{Command, Failed, OutputPiece, Reply};
use crate::wiring::{Port, Wiring, owns};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Role, RoleKind, StateInit};
use shardc_ir::plan::Plan;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Something that a rank shows of a step: its piece, dense, row-major.
#[derive(Clone, Debug)]
pub struct Shown {
    /// The words of its role.
    pub kind: String,
    pub name: String,
    pub microbatch: usize,
    pub data: Vec<f32>,
}

/// What a rank in another program could not do.
#[derive(Clone, Debug)]
pub struct RemoteFailed {
    /// It began there, and is not what a failure elsewhere has led to.
    pub own: bool,
    pub cause: Diag,
}

/// Gives this rank's piece of a parameter or a state before the first step, by the words of its role.
pub type Given<'a> = dyn FnMut(&str, &str) -> Result<Vec<f32>> + 'a;

/// A rank that another program runs.
pub trait Remote: Send + 'static {
    /// Its number.
    fn rank(&self) -> usize;

    /// Fills all that the rank keeps from step to step.
    ///
    /// # Errors
    /// Those of `given`, and what the program says.
    fn fill(&mut self, given: &mut Given) -> std::result::Result<(), RemoteFailed>;

    /// Takes a step; what it shows, of which pieces that equal another rank's may be any rank's.
    ///
    /// # Errors
    /// What the program says.
    fn step(&mut self, data: &StepData) -> std::result::Result<Vec<Shown>, RemoteFailed>;

    /// The rank's piece of a value after a step, or of what it keeps; none of what it does not have.
    ///
    /// # Errors
    /// What the program says.
    fn piece(&mut self, role: &Role) -> std::result::Result<Option<Vec<f32>>, RemoteFailed>;
}

impl From<RemoteFailed> for Failed {
    fn from(f: RemoteFailed) -> Failed {
        Failed { own: f.own, cause: f.cause }
    }
}

impl Session {
    /// The session of a plan whose ranks are these, by their numbers. What they keep is filled.
    ///
    /// # Errors
    /// `plan` if the plan contradicts itself, `weight-missing`, and those of `load` and of the ranks.
    pub fn remote(
        plan: &Plan,
        ranks: Vec<Box<dyn Remote>>,
        timeout: Duration,
        load: &LoadFn,
    ) -> Result<Session> {
        let wiring = Arc::new(Wiring::new(plan)?);
        let table = batch::check_inputs(&wiring)?;
        let (alarm, records): (Arc<Alarm>, _) = (Arc::default(), PathBuf::new());
        let status =
            Arc::new(RankStatus { wiring: wiring.clone(), recorders: vec![], alarm, records });
        let filled: Mutex<Vec<(usize, Result<RemoteRank>)>> = Mutex::new(vec![]);
        let count = ranks.len();
        std::thread::scope(|s| {
            for remote in ranks {
                let (wiring, filled, rank) = (wiring.clone(), &filled, remote.rank());
                let thread = std::thread::Builder::new().name(super::rank_thread(rank));
                let fill = move || {
                    let mut r = RemoteRank { rank, wiring, remote };
                    let done = r.fill(load).map(|()| r);
                    filled.lock().unwrap_or_else(PoisonError::into_inner).push((rank, done));
                };
                thread.spawn_scoped(s, fill).map_err(|e| super::unstarted(rank, count, &e))?;
            }
            Ok(())
        })?;
        let mut filled = filled.into_inner().unwrap_or_else(PoisonError::into_inner);
        filled.sort_by_key(|f| f.0);
        let filled = filled.into_iter().map(|(rank, r)| Ok((rank, r?)));
        let workers: Result<Vec<Worker>> = filled.map(|r: Result<_>| start(r?, count)).collect();
        Ok(Session::with(status, workers?, None, table, (timeout, false)))
    }
}

/// A rank that another program runs, and what the plan says of it.
struct RemoteRank {
    rank: usize,
    wiring: Arc<Wiring>,
    remote: Box<dyn Remote>,
}

fn reply(pieces: Vec<OutputPiece>, given: Vec<u8>) -> Reply {
    Reply { pieces, touched: 0, timings: vec![], given }
}

impl RemoteRank {
    fn coords(&self) -> Vec<usize> {
        self.wiring.mesh().coords(self.rank)
    }

    fn fill(&mut self, load: &LoadFn) -> Result<()> {
        let w = self.wiring.clone();
        let (class, coords) = (w.plan.class_of(self.rank), self.coords());
        let mut given = |kind: &str, name: &str| {
            let kept = |k| matches!(k, RoleKind::Param | RoleKind::State(_));
            let same = |p: &Port| w.class_of[p.func] == class && is_called(p.role, kind, name);
            let Some(p) = w.args(kept).find(same) else {
                let who = w.rank_text(self.rank);
                return Err(Diag::new("plan", format!("{who} has no {kind} `{name}`"))
                    .help("export the plan again: its program is another's"));
            };
            let extents = (0..p.ty.rank()).map(|d| p.ty.extent(w.mesh(), d, &coords));
            let ranges: Vec<Range<usize>> = extents.map(|e| e.offset..e.offset + e.len).collect();
            let mut out = vec![0.0; ranges.iter().map(Range::len).product()];
            if out.is_empty() {
                return Ok(out);
            }
            let first = match w.init(p.role)? {
                StateInit::Number(x) => First::Number(x),
                StateInit::File => First::Weight(w.weight(p.role)?),
            };
            load(Wanted { role: p.role, shape: &p.ty.sizes(), first }, &ranges, &mut out)?;
            Ok(out)
        };
        self.remote.fill(&mut given).map_err(|f| f.cause)
    }

    fn step(&mut self, data: &StepData) -> Answer {
        let shown = self.remote.step(data)?;
        let w = &self.wiring;
        let (class, coords) = (w.plan.class_of(self.rank), self.coords());
        let ports: Vec<(usize, Port)> = w.results(RoleKind::is_shown).enumerate().collect();
        let mut pieces = vec![];
        for s in shown {
            let same = |x: &&(usize, Port)| {
                w.class_of[x.1.func] == class && is_called(x.1.role, &s.kind, &s.name)
            };
            let Some((output, p)) = ports.iter().find(same) else { continue };
            if !owns(w.mesh(), p.ty, &coords) {
                continue;
            }
            check_len(w, (self.rank, &coords), p, s.data.len())?;
            pieces.push(OutputPiece { output: *output, microbatch: s.microbatch, data: s.data });
        }
        Ok(reply(pieces, vec![]))
    }

    fn fetch(&mut self, func: usize, value: shardc_ir::func::Value) -> Answer {
        let w = self.wiring.clone();
        let (class, coords) = (w.plan.class_of(self.rank), self.coords());
        let all = |_| true;
        let own = |p: &Port| w.class_of[p.func] == class && owns(w.mesh(), p.ty, &coords);
        // What a function passes on as it is is a result that nobody keeps, and an argument that somebody does.
        let ports = w.results(all).chain(w.args(all));
        for p in ports.filter(|p| (p.func, p.value) == (func, value)).filter(own) {
            let Some(data) = self.remote.piece(p.role)? else { continue };
            check_len(&w, (self.rank, &coords), &p, data.len())?;
            return Ok(reply(vec![OutputPiece { output: 0, microbatch: 0, data }], vec![]));
        }
        Ok(reply(vec![], vec![]))
    }

    fn perform(&mut self, task: &Task) -> Answer {
        let all = holdings::of(&self.wiring, self.rank);
        let mut failed = None;
        let remote = &mut self.remote;
        let rank = self.rank;
        let mut give = |h: &Holding, sink: &mut Sink| {
            let found = remote.piece(&h.role).map_err(|f| {
                failed = Some(f.own);
                f.cause
            })?;
            let n: usize = h.len.iter().product();
            match found.filter(|data| data.len() == n) {
                Some(data) => sink(&data),
                None => Err(unlike(rank, &h.role, n)),
            }
        };
        let given = task(rank, &all, &mut give);
        let given = given.map_err(|cause| Failed { own: failed.unwrap_or(true), cause })?;
        Ok(reply(vec![], given))
    }
}

impl Serve for RemoteRank {
    fn serve(mut self, commands: &Receiver<Command>, replies: &Sender<Answer>) {
        while let Ok(command) = commands.recv() {
            let done = match &command {
                Command::Step(data) => self.step(data),
                Command::Fetch { func, value } => self.fetch(*func, *value),
                Command::Task(_, task) => self.perform(&**task),
            };
            if replies.send(done).is_err() {
                return;
            }
        }
    }
}

fn is_called(role: &Role, kind: &str, name: &str) -> bool {
    &*role.name == name && role.kind.to_string() == kind
}

/// What a rank has sent is not what the plan says.
fn unlike(rank: usize, role: &Role, n: usize) -> Diag {
    Diag::new("rank-failed", format!("rank {rank} did not send the {n} elements of its {role}"))
        .help("export the plan again, and use the Python package of this version of shardc")
}

fn check_len(
    w: &Wiring,
    (rank, coords): (usize, &[usize]),
    p: &Port,
    found: usize,
) -> std::result::Result<(), Failed> {
    let n = (0..p.ty.rank()).map(|d| p.ty.extent(w.mesh(), d, coords).len).product();
    match found == n {
        true => Ok(()),
        false => Err(Failed { own: true, cause: unlike(rank, p.role, n) }),
    }
}
