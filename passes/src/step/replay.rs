//! Checks the lists of all ranks of the pipeline against each other, by replay.
//!
//! It knows nothing of how the lists were made: every send must be taken by a receive of the same
//! value and type, in order; every wait must end; all ranks must come to the same sums over the
//! stages; and nothing may be left over.

use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Func, Module, Node, Port, Role, RoleKind, Value};
use shardc_ir::maps::HashSet;
use shardc_ir::mesh::{AtomSet, PIPELINE};
use shardc_ir::plan::{Call, Instr, Plan, Transfer, calls};
use shardc_ir::text::type_text;
use std::collections::{BTreeMap, VecDeque};

struct InstructionReplay<'a> {
    plan: &'a Plan,
    lists: Vec<&'a [Instr]>,
    /// Next instruction of each class, and within a call the sums over stages it has passed.
    at: Vec<(usize, usize)>,
    /// What is on its way, as its giver knows it.
    mail: BTreeMap<(usize, usize), VecDeque<Transfer>>,
    /// Offers that were taken and not yet waited for.
    taken: BTreeMap<(usize, usize), usize>,
    /// Receives that were posted and not waited for, by giver and taker.
    posted: BTreeMap<(usize, usize), VecDeque<Transfer>>,
    /// By function.
    sums: Vec<Vec<AtomSet>>,
    /// Ends of transfers that fit: functions and values. It is the same for every microbatch.
    fitting: HashSet<(usize, Value, usize, Value, usize)>,
}

/// Replays a step and an evaluation.
///
/// # Errors
/// `deadlock` if ranks wait for each other, `schedule` if a transfer has no or the wrong other end.
pub fn replay(plan: &Plan) -> Result<()> {
    called(plan)?;
    for evaluation in [false, true] {
        let classes = plan.classes.iter();
        let lists = classes.map(|c| if evaluation { &c.evaluation[..] } else { &c.step[..] });
        let lists: Vec<&[Instr]> = lists.collect();
        let at = vec![(0, 0); lists.len()];
        let (mail, taken, posted) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let fitting = HashSet::default();
        let sums = plan.module.funcs.iter().map(|f| sums(&plan.module, f)).collect();
        InstructionReplay { plan, lists, at, mail, taken, posted, sums, fitting }.run()?;
    }
    Ok(())
}

/// Checks that a step calls what runs for microbatches once for each, and in place of the last call of a function
/// what runs for the last microbatch of its stage, if there is such: it hands on what all of them have added up.
fn called(plan: &Plan) -> Result<()> {
    for (number, class) in plan.classes.iter().enumerate() {
        let own = || class.funcs.iter().filter_map(|&i| Some((i, plan.module.funcs.get(i)?)));
        let of_microbatch = own().filter(|(_, f)| f.kind.is_looped() && f.kind == f.kind.plain());
        for (plain, f) in of_microbatch {
            let last = own().find(|(_, g)| (Some(g.kind), g.stage) == (f.kind.of_last(), f.stage));
            let last = last.map_or(plain, |(i, _)| i);
            let is = |c: &&Call| c.func == plain || c.func == last;
            let all: Vec<&Call> = calls(&class.step).filter(is).collect();
            let mut of: Vec<Option<usize>> = all.iter().map(|c| c.microbatch).collect();
            of.sort_unstable();
            let end = all.iter().position(|c| c.func == last).filter(|_| last != plain);
            let at_end = last == plain || end == all.len().checked_sub(1);
            if !at_end || !of.into_iter().eq((0..plan.settings.microbatches).map(Some)) {
                let what = format!(
                    "class {number} does not call @{} once for each microbatch, and @{} for the last",
                    f.name, plan.module.funcs[last].name
                );
                return Err(bug(Diag::new("schedule", what)));
            }
        }
    }
    Ok(())
}

/// The collectives of a function in which all ranks of the pipeline take part.
fn sums(m: &Module, f: &Func) -> Vec<AtomSet> {
    let pipeline = m.mesh.axis(PIPELINE).unwrap_or_default();
    let over = |n: &Node| n.op.collective().map(|c| c.atoms());
    f.nodes.iter().filter_map(over).filter(|a| a.meets(pipeline)).collect()
}

fn bug(d: Diag) -> Diag {
    d.rule("the lists of all ranks fit together")
        .help("recompile the plan with this version of shardc")
}

impl InstructionReplay<'_> {
    fn run(mut self) -> Result<()> {
        loop {
            let mut moved = false;
            for class in 0..self.lists.len() {
                while self.advance(class)? {
                    moved = true;
                }
            }
            if !moved && !self.sum() {
                break;
            }
        }
        if let Some(class) = (0..self.lists.len()).find(|&c| self.at[c].0 < self.lists[c].len()) {
            let waits = |c: usize| {
                let i = self.lists[c].get(self.at[c].0)?;
                Some(format!("class {c} waits in {}", self.text(i)))
            };
            let first = waits(class).unwrap_or_default();
            let mut d = Diag::new("deadlock", format!("{first} for ever"));
            for c in (0..self.lists.len()).filter(|&c| c != class) {
                d = d.why(waits(c).unwrap_or_else(|| format!("class {c} has nothing left to do")));
            }
            return Err(bug(d));
        }
        let left = self.mail.iter().find(|m| !m.1.is_empty()).map(|m| *m.0);
        if let Some((from, to)) = left {
            let what = format!("class {to} does not take all that class {from} sends");
            return Err(bug(Diag::new("schedule", what)));
        }
        if let Some(((from, to), _)) = self.taken.iter().find(|t| *t.1 > 0) {
            let what = format!("class {from} does not wait until class {to} has taken all");
            return Err(bug(Diag::new("schedule", what)));
        }
        if let Some(((from, to), _)) = self.posted.iter().find(|p| !p.1.is_empty()) {
            let what = format!("class {to} does not wait for all that it posts of class {from}");
            return Err(bug(Diag::new("schedule", what)));
        }
        Ok(())
    }

    /// Runs the next instruction of a class; false if it waits or there is none.
    fn advance(&mut self, class: usize) -> Result<bool> {
        let Some(i) = self.lists[class].get(self.at[class].0) else { return Ok(false) };
        match i {
            Instr::Call(c) => {
                if self.at[class].1 < self.sums[c.func].len() {
                    return Ok(false);
                }
            }
            Instr::Send(t) => self.mail.entry((class, t.with)).or_default().push_back(*t),
            Instr::Sent { to } => match self.taken.get_mut(&(class, *to)).filter(|n| **n > 0) {
                Some(n) => *n -= 1,
                None => return Ok(false),
            },
            Instr::PostRecv(t) => self.posted.entry((t.with, class)).or_default().push_back(*t),
            Instr::Recv(t) => {
                let offer = self.mail.get_mut(&(t.with, class)).and_then(VecDeque::pop_front);
                let Some(offer) = offer else { return Ok(false) };
                self.fits(class, &offer, t)?;
                self.was_posted(class, t)?;
                *self.taken.entry((t.with, class)).or_default() += 1;
            }
        }
        self.at[class] = (self.at[class].0 + 1, 0);
        Ok(true)
    }

    /// Checks that what is taken is what was posted first, if anything was.
    fn was_posted(&mut self, class: usize, t: &Transfer) -> Result<()> {
        let posted = self.posted.get_mut(&(t.with, class)).and_then(VecDeque::pop_front);
        if posted.is_none_or(|p| p == *t) {
            return Ok(());
        }
        let what = format!("class {class} takes from class {} what it has not posted", t.with);
        Err(bug(Diag::new("schedule", what)))
    }

    /// Lets all classes pass a sum over the stages, if all wait in one.
    fn sum(&mut self) -> bool {
        let waits = |c: usize| match self.lists[c].get(self.at[c].0) {
            Some(Instr::Call(call)) => self.sums[call.func].get(self.at[c].1).copied(),
            _ => None,
        };
        let all: Vec<Option<AtomSet>> = (0..self.lists.len()).map(waits).collect();
        let same = all.first().copied().flatten().is_some() && all.iter().all(|a| *a == all[0]);
        if same {
            self.at.iter_mut().for_each(|a| a.1 += 1);
        }
        same
    }

    /// Checks that a value is received as what it was sent.
    fn fits(&mut self, class: usize, sent: &Transfer, got: &Transfer) -> Result<()> {
        let m = &self.plan.module;
        let ends = (sent.func, sent.value, got.func, got.value, got.with);
        let alike = sent.bytes == got.bytes && sent.microbatch == got.microbatch;
        if alike && self.fitting.contains(&ends) {
            return Ok(());
        }
        let (a, b) = (&m.funcs[sent.func], &m.funcs[got.func]);
        let roles = |ports: &[Port], v| -> Vec<Role> {
            ports.iter().filter(|p| p.value == v).filter_map(|p| p.role.clone()).collect()
        };
        let (from, to) = (roles(&a.results, sent.value), roles(&b.args, got.value));
        let (s, r) = (a.ty(sent.value), b.ty(got.value));
        // A gradient of a parameter is received under a role of its own.
        let own = RoleKind::GradFrom(got.with as u32);
        let gradient = |f: &Role, t: &Role| f.kind == RoleKind::Grad && t.is(own, &f.name);
        let named = from.iter().any(|f| to.iter().any(|t| f == t || gradient(f, t)));
        if named && s == r && alike {
            self.fitting.insert(ends);
            return Ok(());
        }
        let text = |t: &Transfer, f: &Func| {
            let of = t.microbatch.map_or(String::new(), |j| format!(" of microbatch {j}"));
            format!("{}: {}{of}", f.name(t.value), type_text(&m.mesh, f.ty(t.value)))
        };
        let what = format!(
            "class {class} takes {} where class {} sends {}",
            text(got, b),
            got.with,
            text(sent, a)
        );
        Err(bug(Diag::new("schedule", what)))
    }

    fn text(&self, i: &Instr) -> String {
        let f = |func: usize| &self.plan.module.funcs[func];
        match i {
            Instr::Call(c) => format!("@{}", f(c.func).name),
            Instr::Send(t) => format!("send {}", f(t.func).name(t.value)),
            Instr::PostRecv(t) => {
                format!("the post of {} from class {}", f(t.func).name(t.value), t.with)
            }
            Instr::Recv(t) => format!("recv {} from class {}", f(t.func).name(t.value), t.with),
            Instr::Sent { to } => format!("the wait for class {to}"),
        }
    }
}
