//! Checks a memory plan by replay: every value that is read still lies where it was written.
//!
//! It knows nothing of how places were chosen. Each write stamps the bytes of its place; each read
//! asks for the stamp of the value. Two steps are replayed with an evaluation between them, so that
//! values which live from one to the next are asked for too.

use crate::threads::all;
use shardc_ir::func::{Func, Role, RoleKind, Value, sent};
use shardc_ir::group::{Launch, epilogue, launches};
use shardc_ir::plan::{Call, Instr, Place, Plan, RankClass, Transfer};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::rc::Rc;

/// Who wrote which bytes of the arena last.
#[derive(Default)]
struct Arena {
    /// Start → (end, stamp); ranges do not overlap.
    ranges: BTreeMap<usize, (usize, u64)>,
}

impl Arena {
    fn write(&mut self, from: usize, to: usize, stamp: u64) {
        if from == to {
            return;
        }
        let before = self.ranges.range(..from).next_back().map(|(&s, &r)| (s, r));
        if let Some((s, (end, old))) = before.filter(|b| b.1.0 > from) {
            self.ranges.insert(s, (from, old));
            if end > to {
                self.ranges.insert(to, (end, old));
            }
        }
        let inside: Vec<usize> = self.ranges.range(from..to).map(|(&s, _)| s).collect();
        for s in inside {
            let (end, old) = self.ranges.remove(&s).expect("just listed");
            if end > to {
                self.ranges.insert(to, (end, old));
            }
        }
        self.ranges.insert(from, (to, stamp));
    }

    fn holds(&self, from: usize, to: usize, stamp: u64) -> bool {
        let mut at = from;
        while at < to {
            match self.ranges.range(..=at).next_back() {
                Some((_, &(end, s))) if end > at && s == stamp => at = end,
                _ => return false,
            }
        }
        true
    }
}

/// A launch of a function, with what is the same in every call.
struct Step {
    launch: Launch,
    kernels: Vec<Launch>,
    /// Results that are other names of operands.
    views: Vec<Value>,
    is_several: bool,
    has_epilogue: bool,
}

impl Step {
    fn all(f: &Func) -> Vec<Step> {
        let one = |launch: Launch| {
            let nodes = &f.nodes[launch.nodes.clone()];
            let views = nodes.iter().filter(|n| n.op.def().is_view()).map(|n| n.outs[0]);
            Step {
                kernels: launch.kernels(f),
                views: views.collect(),
                is_several: launch.is_several(f),
                has_epilogue: epilogue(f, nodes.iter()).is_some(),
                launch,
            }
        };
        launches(f).into_iter().map(one).collect()
    }
}

struct Replay<'a> {
    plan: &'a Plan,
    class: &'a RankClass,
    /// By function, those of the class: a step calls them once per microbatch.
    steps: HashMap<usize, Rc<[Step]>>,
    arena: Arena,
    next: u64,
    /// Stamp of what each role now holds; of stashes and edges, by microbatch.
    roles: HashMap<(Role, Option<usize>), u64>,
    /// Offers to other ranks that may still be taken: bytes and stamp.
    offers: BTreeMap<usize, VecDeque<(usize, usize, u64)>>,
}

/// Replays two steps and an evaluation between them on one rank of every class; says which value is
/// lost, and where.
pub fn replay(plan: &Plan) -> Result<(), String> {
    let classes: Vec<usize> = (0..plan.classes.len()).collect();
    // Classes are apart; the first that fails is told, whatever the number of threads.
    all(&classes, usize::MAX, |&i| one_class(plan, i)).into_iter().collect()
}

fn one_class(plan: &Plan, i: usize) -> Result<(), String> {
    let class = &plan.classes[i];
    let mut r = Replay {
        plan,
        class,
        steps: HashMap::new(),
        arena: Arena::default(),
        next: 1,
        roles: HashMap::new(),
        offers: BTreeMap::new(),
    };
    for list in [&class.step, &class.evaluation, &class.step] {
        r.fill_inputs().map_err(|e| format!("class {i}: {e}"))?;
        for instr in list {
            r.instr(instr).map_err(|e| format!("class {i}: {e}"))?;
        }
        if let Some((to, _)) = r.offers.iter().find(|o| !o.1.is_empty()) {
            return Err(format!("class {i}: nobody waits for an offer to class {to}"));
        }
    }
    Ok(())
}

/// Under what a role's stamp is kept.
fn key(role: &Role, microbatch: Option<usize>) -> (Role, Option<usize>) {
    let own = matches!(role.kind, RoleKind::Stash | RoleKind::Edge | RoleKind::Input);
    (role.clone(), microbatch.filter(|_| own))
}

impl Replay<'_> {
    fn span(&self, c: &Call, p: Place) -> Result<(usize, usize), String> {
        let base = c.frames.get(p.frame as usize).copied().unwrap_or(0);
        self.inside(base + p.offset, p.bytes)
    }

    fn inside(&self, from: usize, bytes: usize) -> Result<(usize, usize), String> {
        let peak = self.class.memory.peak_bytes;
        if from + bytes > peak {
            return Err(format!("bytes {from}..{} are outside the arena of {peak}", from + bytes));
        }
        Ok((from, from + bytes))
    }

    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Data and scalars of a step, and at first parameters and state, are written from outside.
    fn fill_inputs(&mut self) -> Result<(), String> {
        let (plan, class) = (self.plan, self.class);
        let mut called = HashSet::new();
        for instr in class.step.iter().chain(&class.evaluation) {
            let Instr::Call(c) = instr else { continue };
            let first = called.insert(c.func);
            for a in &plan.module.funcs[c.func].args {
                let Some(role) = &a.role else { continue };
                // What a step begins with is the same in every call of a function.
                let each = matches!(role.kind, RoleKind::Input | RoleKind::Scalar);
                let once = matches!(role.kind, RoleKind::Param | RoleKind::State(_));
                if !(each || once && first) {
                    continue;
                }
                let k = key(role, c.microbatch);
                let known = self.roles.contains_key(&k);
                let outside = each || !known;
                if outside {
                    let (from, to) =
                        self.span(c, class.memory.places[c.func][a.value.0 as usize])?;
                    // One tensor has one stamp, whoever names it: all of a batch is its parts.
                    let stamp = match role.kind {
                        RoleKind::Input => 1,
                        _other if known => self.roles[&k],
                        _other => self.fresh(),
                    };
                    self.arena.write(from, to, stamp);
                    self.roles.insert(k, stamp);
                }
            }
        }
        Ok(())
    }

    fn instr(&mut self, i: &Instr) -> Result<(), String> {
        match i {
            Instr::Call(c) => self.call(c),
            Instr::Send(t) => {
                let f = &self.plan.module.funcs[t.func];
                let role = sent(&f.results, t.value).ok_or("a transfer of no result")?;
                let stamp = self.roles.get(&key(role, t.microbatch)).copied();
                let stamp = stamp.ok_or_else(|| format!("{role} is sent unmade"))?;
                let (from, to) = self.inside(t.offset, t.bytes)?;
                self.offers.entry(t.with).or_default().push_back((from, to, stamp));
                self.still(f, t, (from, to, stamp))
            }
            Instr::Sent { to } => {
                let offer = self.offers.get_mut(to).and_then(VecDeque::pop_front);
                let (from, end, stamp) = offer.ok_or("a wait for no offer")?;
                if self.arena.holds(from, end, stamp) {
                    return Ok(());
                }
                Err(format!("bytes {from}..{end} were overwritten before class {to} took them"))
            }
            Instr::Recv(t) => {
                let f = &self.plan.module.funcs[t.func];
                let role = f.args.iter().find(|a| a.value == t.value);
                let role = role.and_then(|r| r.role.as_ref()).ok_or("a transfer of no argument")?;
                let stamp = self.fresh();
                let (from, to) = self.inside(t.offset, t.bytes)?;
                self.arena.write(from, to, stamp);
                self.roles.insert(key(role, t.microbatch), stamp);
                Ok(())
            }
        }
    }

    fn still(&self, f: &Func, t: &Transfer, at: (usize, usize, u64)) -> Result<(), String> {
        if self.arena.holds(at.0, at.1, at.2) {
            return Ok(());
        }
        Err(format!("@{}: {} was overwritten before it was sent", f.name, f.name(t.value)))
    }

    fn call(&mut self, c: &Call) -> Result<(), String> {
        let f = &self.plan.module.funcs[c.func];
        let memory = &self.class.memory;
        let mut stamps: Vec<u64> = vec![0; f.values.len()];
        for a in &f.args {
            let Some(role) = &a.role else {
                return Err(format!("@{}: {} has no role", f.name, f.name(a.value)));
            };
            let Some(&stamp) = self.roles.get(&key(role, c.microbatch)) else {
                return Err(format!("@{}: nobody made {role}", f.name));
            };
            stamps[a.value.0 as usize] = stamp;
        }
        let steps = self.steps.entry(c.func).or_insert_with(|| Step::all(f).into()).clone();
        for Step { launch: x, kernels, views, is_several, has_epilogue } in &*steps {
            for &v in &x.ins {
                self.read(c, f, v, stamps[v.0 as usize])?;
            }
            for &work in &memory.workspaces[c.func][x.nodes.clone()] {
                let (from, to) = self.span(c, work)?;
                let stamp = self.fresh();
                self.arena.write(from, to, stamp);
            }
            let nodes = &f.nodes[x.nodes.clone()];
            for kernel in kernels {
                self.written_over(c, f, kernel)?;
            }
            for &o in x.outs.iter().filter(|o| !views.contains(o)) {
                let stamp = self.fresh();
                let (from, to) = self.span(c, memory.places[c.func][o.0 as usize])?;
                self.arena.write(from, to, stamp);
                stamps[o.0 as usize] = stamp;
            }
            // A product reads its operands while what becomes of it is written.
            if *has_epilogue {
                for &v in &nodes[0].ins {
                    self.read(c, f, v, stamps[v.0 as usize])?;
                }
            }
            if *is_several {
                self.apart(c, f, kernels)?;
            }
            for n in nodes.iter().filter(|n| views.contains(&n.outs[0])) {
                stamps[n.outs[0].0 as usize] = stamps[n.ins[0].0 as usize];
            }
        }
        for r in &f.results {
            self.read(c, f, r.value, stamps[r.value.0 as usize])?;
            if let Some(role) = &r.role {
                self.roles.insert(key(role, c.microbatch), stamps[r.value.0 as usize]);
            }
        }
        Ok(())
    }

    /// A kernel reads its operands while it writes, and so do the other ranks of a collective: a
    /// result lies on no operand, but for those that its op may write over, element by element.
    fn written_over(&self, c: &Call, f: &Func, x: &Launch) -> Result<(), String> {
        let place = |v: Value| self.span(c, self.class.memory.places[c.func][v.0 as usize]);
        let is_view = |v: Value| {
            f.nodes[x.nodes.clone()].iter().any(|n| n.outs.contains(&v) && n.op.def().is_view())
        };
        for (k, &o) in x.outs.iter().enumerate().filter(|o| !is_view(*o.1)) {
            let (from, to) = place(o)?;
            let mut over = None;
            for &v in &x.ins {
                let operand = place(v)?;
                if to <= operand.0 || operand.1 <= from {
                    continue;
                }
                let over = over.get_or_insert_with(|| x.over(f, k));
                if operand != (from, to) || !over.contains(&v) {
                    return Err(format!(
                        "@{}: {} lies on {}, which is read while it is written",
                        f.name,
                        f.name(o),
                        f.name(v)
                    ));
                }
            }
        }
        Ok(())
    }

    /// Kernels of one launch run in any order: what one writes, no other reads or writes.
    fn apart(&self, c: &Call, f: &Func, kernels: &[Launch]) -> Result<(), String> {
        let places = &self.class.memory.places[c.func];
        let spans = |all: &[Value]| -> Result<Vec<(usize, usize)>, String> {
            all.iter().map(|v| self.span(c, places[v.0 as usize])).collect()
        };
        for (i, x) in kernels.iter().enumerate() {
            let written = spans(&x.outs)?;
            for y in kernels.iter().enumerate().filter(|y| y.0 != i).map(|y| y.1) {
                let others = [spans(&y.ins)?, spans(&y.outs)?].concat();
                let meet = |a: &(usize, usize)| others.iter().any(|b| a.0 < b.1 && b.0 < a.1);
                if let Some(at) = written.iter().position(meet) {
                    let name = f.name(x.outs[at]);
                    return Err(format!(
                        "@{}: {name} lies on what another kernel of its launch uses",
                        f.name
                    ));
                }
            }
        }
        Ok(())
    }

    fn read(&self, c: &Call, f: &Func, v: Value, stamp: u64) -> Result<(), String> {
        let (from, to) = self.span(c, self.class.memory.places[c.func][v.0 as usize])?;
        if self.arena.holds(from, to, stamp) {
            return Ok(());
        }
        Err(format!(
            "@{}: {} was overwritten before it was read (bytes {from}..{to})",
            f.name,
            f.name(v)
        ))
    }
}
