//! Checks a memory plan by replay: every value that is read still lies where it was written.
//!
//! It knows nothing of how places were chosen (that a list repeats is a hint, which is checked). Each write stamps the bytes of its place; each read
//! asks for the stamp of the value. Two steps are replayed with an evaluation between them, so that
//! values which live from one to the next are asked for too. What the nodes of a function do to each
//! other's places is replayed once for all calls in which its frames overlap alike (in `effect`); what they
//! find in the arena, and leave there, in every call, until a list only repeats itself (in `steady`).

mod arena;
mod effect;
mod steady;

use crate::threads::all;
use arena::{Arena, Span};
use effect::{Function, Source, lost};
use shardc_ir::func::{Port, Role, RoleKind, Value, sent};
use shardc_ir::maps::{HashMap, HashSet};
use shardc_ir::plan::{Call, FramePlace, Instr, Plan, RankClass, calls};
use std::collections::{BTreeMap, VecDeque};

/// The stamp of nothing, of the data of a step, and of what nobody may read; others follow.
const UNMADE: u64 = 0;
const DATA: u64 = 1;
const SPENT: u64 = 2;

/// Where the stamp of a role is kept: one for a step, or one for each of its microbatches.
#[derive(Clone, Copy)]
enum Slot {
    Step(usize),
    Micro(usize),
}

/// Stamps of what roles now hold.
#[derive(Default)]
struct Stamps<'a> {
    slots: HashMap<&'a Role, Slot>,
    step: Vec<u64>,
    /// Of stashes, edges and data: what each has before it is made, and those outside of microbatches.
    unmade: Vec<u64>,
    outside: Vec<u64>,
    /// By microbatch; empty if nothing of it was made.
    micro: Vec<Vec<u64>>,
}

impl<'a> Stamps<'a> {
    /// Where a role's is kept.
    fn slot(&mut self, role: &'a Role) -> Slot {
        let Stamps { slots, step, unmade, outside, .. } = self;
        *slots.entry(role).or_insert_with(|| match role.kind {
            RoleKind::Stash | RoleKind::Edge | RoleKind::Input(_) => {
                let none = if role.kind.input().is_some() { DATA } else { UNMADE };
                unmade.push(none);
                outside.push(none);
                Slot::Micro(unmade.len() - 1)
            }
            _of_the_step => {
                step.push(UNMADE);
                Slot::Step(step.len() - 1)
            }
        })
    }

    fn get(&self, slot: Slot, microbatch: Option<usize>) -> u64 {
        match (slot, microbatch) {
            (Slot::Step(i), _) => self.step[i],
            (Slot::Micro(i), None) => self.outside[i],
            (Slot::Micro(i), Some(j)) => *self.micro[j].get(i).unwrap_or(&self.unmade[i]),
        }
    }

    fn set(&mut self, slot: Slot, microbatch: Option<usize>, stamp: u64) {
        match (slot, microbatch) {
            (Slot::Step(i), _) => self.step[i] = stamp,
            (Slot::Micro(i), None) => self.outside[i] = stamp,
            (Slot::Micro(i), Some(j)) => {
                let own = &mut self.micro[j];
                own.extend_from_slice(&self.unmade[own.len()..]);
                own[i] = stamp;
            }
        }
    }

    /// Forgets what a microbatch has.
    fn forget(&mut self, microbatch: usize) {
        self.micro[microbatch] = vec![];
    }
}

/// A function with where the stamps of its arguments and results are kept.
struct ReplayedFunc<'a> {
    function: Function<'a>,
    args: Vec<Slot>,
    results: Vec<Option<Slot>>,
    /// What is written from outside: data, scalars, and what a run begins with.
    inputs: Vec<Value>,
    /// Frames of data, each with nothing else in it.
    data: Vec<usize>,
    scalars: Vec<(Slot, Value)>,
    kept: Vec<(Slot, Value)>,
}

struct Replay<'a> {
    class: &'a RankClass,
    /// By function, those of the class.
    known: HashMap<usize, ReplayedFunc<'a>>,
    /// Sent results and received arguments, by function and value.
    sent: HashMap<(usize, Value), (&'a Role, Slot)>,
    received: HashMap<(usize, Value), Slot>,
    stamps: Stamps<'a>,
    arena: Arena,
    next: u64,
    /// Offers to other ranks that may still be taken: bytes and stamp.
    offers: BTreeMap<usize, VecDeque<(Span, u64)>>,
    /// Receives from other ranks that were posted and may still be under way: the same.
    posted: BTreeMap<usize, VecDeque<(Span, u64)>>,
}

/// Replays two steps and an evaluation between them on one rank of every class; says which value is
/// lost, and where.
pub fn replay(plan: &Plan) -> Result<(), String> {
    replay_by(plan, true).map(drop)
}

/// As [`replay`], with what repeats left out or not; how many instructions of all lists were left out.
pub fn replay_by(plan: &Plan, leave_out: bool) -> Result<usize, String> {
    let classes: Vec<usize> = (0..plan.classes.len()).collect();
    // Classes are apart; the first that fails is told, whatever the number of threads.
    let one = |&i: &usize| one_class(plan, i, leave_out).map_err(|e| format!("class {i}: {e}"));
    all(&classes, usize::MAX, one).into_iter().sum()
}

fn one_class(plan: &Plan, i: usize, leave_out: bool) -> Result<usize, String> {
    let class = &plan.classes[i];
    let mut left_out = 0;
    let mut r = Replay::of(plan, class)?;
    for list in [&class.step, &class.evaluation, &class.step] {
        r.fill_inputs()?;
        // From the last instruction that names a microbatch on, nobody asks for what is its own.
        let mut last = vec![0; r.stamps.micro.len()];
        for (i, instr) in list.iter().enumerate() {
            instr.microbatch().into_iter().for_each(|j| last[j] = i);
        }
        let mut steady = leave_out.then(|| r.steady(list)).flatten();
        let mut i = 0;
        while i < list.len() {
            if let Some(s) = &mut steady {
                let some = r.leave_out(s, list, i);
                (i, left_out) = (i + some, left_out + some);
            }
            let Some(instr) = list.get(i) else { break };
            r.instr(plan, instr)?;
            if let Some(j) = instr.microbatch().filter(|&j| last[j] == i) {
                r.stamps.forget(j);
            }
            i += 1;
        }
        // The last instruction of some is left out.
        (0..last.len()).for_each(|j| r.stamps.forget(j));
        if let Some((to, _)) = r.offers.iter().find(|o| !o.1.is_empty()) {
            return Err(format!("nobody waits for an offer to class {to}"));
        }
        if let Some((from, _)) = r.posted.iter().find(|p| !p.1.is_empty()) {
            return Err(format!("nobody waits for what was posted of class {from}"));
        }
    }
    Ok(left_out)
}

impl<'a> ReplayedFunc<'a> {
    fn of(
        plan: &'a Plan,
        c: &'a RankClass,
        func: usize,
        s: &mut Stamps<'a>,
    ) -> Result<Self, String> {
        let f = &plan.module.funcs[func];
        let (mut args, mut inputs, mut scalars, mut kept) = (vec![], vec![], vec![], vec![]);
        for a in &f.args {
            let Some(role) = &a.role else {
                return Err(format!("@{}: {} has no role", f.name, f.name(a.value)));
            };
            let slot = s.slot(role);
            args.push(slot);
            match role.kind {
                RoleKind::Input(_) => inputs.push(a.value),
                RoleKind::Scalar => scalars.push((slot, a.value)),
                RoleKind::Param | RoleKind::State(_) => kept.push((slot, a.value)),
                _made_in_the_step => {}
            }
        }
        let results = f.results.iter().map(|r| r.role.as_ref().map(|r| s.slot(r))).collect();
        let function = Function::of(f, func, &c.memory);
        let places = &c.memory.places[func];
        let of_inputs: Vec<FramePlace> = inputs.iter().map(|v| places[v]).collect();
        let is_data = |p: &FramePlace| {
            let holds =
                |i: &FramePlace| i.offset <= p.offset && p.offset + p.bytes <= i.offset + i.bytes;
            of_inputs.iter().any(|i| i.frame == p.frame && holds(i))
        };
        let all = || places.iter().chain(&c.memory.workspaces[func]).filter(|p| p.bytes > 0);
        let mut data: Vec<usize> = of_inputs.iter().map(|p| p.frame as usize).collect();
        data.retain(|&f| all().filter(|p| p.frame as usize == f).all(is_data));
        Ok(ReplayedFunc { function, args, results, inputs, data, scalars, kept })
    }
}

impl<'a> Replay<'a> {
    fn of(plan: &'a Plan, class: &'a RankClass) -> Result<Replay<'a>, String> {
        let mut stamps = Stamps::default();
        let (mut known, mut sent_to, mut received) =
            (HashMap::default(), HashMap::default(), HashMap::default());
        let funcs = &plan.module.funcs;
        for instr in class.step.iter().chain(&class.evaluation) {
            let microbatches = instr.microbatch().map_or(0, |j| j + 1);
            if stamps.micro.len() < microbatches {
                stamps.micro.resize(microbatches, vec![]);
            }
            match instr {
                Instr::Call(c) if !known.contains_key(&c.func) => {
                    known.insert(c.func, ReplayedFunc::of(plan, class, c.func, &mut stamps)?);
                }
                Instr::Send(t) if !sent_to.contains_key(&(t.func, t.value)) => {
                    let role = sent(&funcs[t.func].results, t.value);
                    let role = role.ok_or("a transfer of no result")?;
                    sent_to.insert((t.func, t.value), (role, stamps.slot(role)));
                }
                Instr::Recv(t) if !received.contains_key(&(t.func, t.value)) => {
                    let port = funcs[t.func].args.iter().find(|a: &&Port| a.value == t.value);
                    let role = port.and_then(|p| p.role.as_ref());
                    let slot = stamps.slot(role.ok_or("a transfer of no argument")?);
                    received.insert((t.func, t.value), slot);
                }
                Instr::Call(_)
                | Instr::Send(_)
                | Instr::PostRecv(_)
                | Instr::Recv(_)
                | Instr::Sent { .. } => {}
            }
        }
        let (arena, next) = (Arena::default(), SPENT);
        let (offers, posted, sent) = (BTreeMap::new(), BTreeMap::new(), sent_to);
        Ok(Replay { class, known, sent, received, stamps, arena, next, offers, posted })
    }

    fn inside(&self, from: usize, bytes: usize) -> Result<Span, String> {
        inside(self.class.memory.peak_bytes, from, bytes)
    }

    /// Where a value of a call lies.
    fn span(&self, c: &Call, v: Value) -> Result<Span, String> {
        let p = self.class.memory.places[c.func][v];
        let base = c.frames.get(p.frame as usize).copied().unwrap_or(0);
        self.inside(base + p.offset, p.bytes)
    }

    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Data and scalars of a step, and at first parameters and state, are written from outside.
    fn fill_inputs(&mut self) -> Result<(), String> {
        let class = self.class;
        let mut called = HashSet::default();
        let mut data: Vec<Span> = vec![];
        for c in calls(&class.step).chain(calls(&class.evaluation)) {
            let known = &self.known[&c.func];
            for &v in &known.inputs {
                data.push(self.span(c, v)?);
            }
            // What a run begins with is the same in every call of a function.
            let kept = if called.insert(c.func) { &known.kept[..] } else { &[] };
            for (i, &(slot, v)) in known.scalars.iter().chain(kept).enumerate() {
                // One tensor has one stamp, whoever names it, and is written once unless it is a scalar.
                let mut stamp = self.stamps.get(slot, c.microbatch);
                if stamp != UNMADE && i >= known.scalars.len() {
                    continue;
                }
                if stamp == UNMADE {
                    self.next += 1;
                    stamp = self.next;
                }
                self.arena.write(self.span(c, v)?, stamp);
                self.stamps.set(slot, c.microbatch, stamp);
            }
        }
        // All of a batch is its parts.
        data.sort_unstable();
        let mut whole: Vec<Span> = vec![];
        for (from, to) in data {
            match whole.last_mut().filter(|w| from <= w.1) {
                Some(last) => last.1 = last.1.max(to),
                None => whole.push((from, to)),
            }
        }
        whole.into_iter().for_each(|span| self.arena.write(span, DATA));
        Ok(())
    }

    fn instr(&mut self, plan: &Plan, i: &Instr) -> Result<(), String> {
        match i {
            Instr::Call(c) => self.call(c),
            Instr::Send(t) => {
                let (role, slot) = self.sent[&(t.func, t.value)];
                let stamp = self.stamps.get(slot, t.microbatch);
                if stamp == UNMADE {
                    return Err(format!("{role} is sent unmade"));
                }
                let span = self.inside(t.offset, t.bytes)?;
                self.offers.entry(t.with).or_default().push_back((span, stamp));
                if self.arena.holds(span, stamp) {
                    return Ok(());
                }
                let f = &plan.module.funcs[t.func];
                Err(format!("@{}: {} was overwritten before it was sent", f.name, f.name(t.value)))
            }
            Instr::Sent { to } => {
                let offer = self.offers.get_mut(to).and_then(VecDeque::pop_front);
                let (span, stamp) = offer.ok_or("a wait for no offer")?;
                if self.arena.holds(span, stamp) {
                    return Ok(());
                }
                let (from, end) = span;
                Err(format!("bytes {from}..{end} were overwritten before class {to} took them"))
            }
            Instr::PostRecv(t) => {
                // It may arrive at any time: what was there is lost, and nobody may write there.
                let stamp = self.fresh();
                let span = self.inside(t.offset, t.bytes)?;
                self.arena.write(span, stamp);
                self.posted.entry(t.with).or_default().push_back((span, stamp));
                Ok(())
            }
            Instr::Recv(t) => {
                let span = self.inside(t.offset, t.bytes)?;
                let posted = self.posted.get_mut(&t.with).and_then(VecDeque::pop_front);
                if let Some((place, stamp)) = posted {
                    let (from, end) = span;
                    if place != span {
                        return Err(format!("bytes {from}..{end} were not posted"));
                    }
                    if !self.arena.holds(span, stamp) {
                        let what = format!("bytes {from}..{end} were overwritten");
                        return Err(format!("{what} while class {} may write there", t.with));
                    }
                }
                let stamp = self.fresh();
                self.arena.write(span, stamp);
                self.stamps.set(self.received[&(t.func, t.value)], t.microbatch, stamp);
                Ok(())
            }
        }
    }

    /// What its arguments hold lies where it reads it, and what it makes lies where it leaves it.
    fn call(&mut self, c: &Call) -> Result<(), String> {
        let known = self.known.get_mut(&c.func).expect("all functions that are called are known");
        let f = known.function.f;
        let mut stamps = Vec::with_capacity(known.args.len());
        for (a, &slot) in f.args.iter().zip(&known.args) {
            let stamp = self.stamps.get(slot, c.microbatch);
            if let (UNMADE, Some(role)) = (stamp, &a.role) {
                return Err(format!("@{}: nobody made {role}", f.name));
            }
            stamps.push(stamp);
        }
        let layout = known.function.layout(c, self.class.memory.peak_bytes)?;
        let effect = known.function.effect(c, &layout)?;
        let reads = effect.reads.iter().map(|r| (layout.read(r), stamps[r.arg]));
        if !self.arena.hold_all(reads) {
            let fails = |r: &&effect::Read| !self.arena.holds(layout.read(r), stamps[r.arg]);
            let first = effect.reads.iter().filter(fails).min_by_key(|r| r.order);
            let first = first.expect("one of them is not held");
            return Err(lost(f, first.value, layout.read(first)));
        }
        let first = self.next + 1;
        self.next += effect.made as u64;
        let made = |k: usize| first + k as u64;
        for group in &effect.writes {
            let stamp = |w: &effect::Write| w.value.map_or(SPENT, made);
            self.arena.write_all(group.iter().map(|w| (layout.written(w), stamp(w))));
        }
        for (slot, source) in known.results.iter().zip(&effect.results) {
            let stamp = match *source {
                Source::Arg(a) => stamps[a],
                Source::Made(k) => made(k),
            };
            slot.iter().for_each(|&s| self.stamps.set(s, c.microbatch, stamp));
        }
        Ok(())
    }
}

fn inside(peak: usize, from: usize, bytes: usize) -> Result<Span, String> {
    if from + bytes > peak {
        return Err(format!("bytes {from}..{} are outside the arena of {peak}", from + bytes));
    }
    Ok((from, from + bytes))
}
