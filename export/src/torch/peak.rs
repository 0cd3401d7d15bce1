//! The most memory that the tensors of a program take at a time: those that are alive at a line, and what the line takes beside
//! its results.

use super::layers::{Stretch, stretches};
use super::ops::memory::{beside, exchanged, viewed};
use super::ops::strides::copied;
use super::seen::{KEPT, Seen};
use shardc_ir::func::{Func, Port, Role, RoleKind, Value, ValueMap, sent};
use shardc_ir::plan::{Instr, Plan, RankClass, Transfer};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A value between functions; of what is made for each microbatch with its number.
type Key = (Role, Option<usize>);
/// The number of a storage.
type Storage = usize;

/// Storages, with who holds them.
#[derive(Default)]
struct Heap {
    /// Bytes and holders.
    all: Vec<(usize, usize)>,
    live: usize,
    most: usize,
}

impl Heap {
    fn made(&mut self, bytes: usize) -> Storage {
        self.live += bytes;
        self.most = self.most.max(self.live);
        self.all.push((bytes, 1));
        self.all.len() - 1
    }

    fn held(&mut self, s: Storage) -> Storage {
        self.all[s].1 += 1;
        s
    }

    fn left(&mut self, s: Storage) {
        let (bytes, holders) = &mut self.all[s];
        *holders -= 1;
        if *holders == 0 {
            self.live -= *bytes;
        }
    }
}

/// A rank that runs a program, as far as memory goes.
struct Rank<'a> {
    plan: &'a Plan,
    seen: &'a [Seen<'a>],
    /// By function the results that are copies, and not views as their ops are.
    copied: &'a [BTreeSet<Value>],
    heap: Heap,
    store: BTreeMap<Key, Storage>,
    /// Inputs that are the same in each step.
    fixed: BTreeMap<String, Storage>,
    begun: Vec<Begun>,
    /// By who takes it what was sent, until that is waited for.
    sent: BTreeMap<usize, VecDeque<Storage>>,
}

/// An exchange that goes on.
struct Begun {
    /// The line before which it is waited for.
    until: usize,
    /// What it has until then.
    has: Vec<Storage>,
    /// What it takes then.
    ends: usize,
}

/// By class of ranks, the most bytes in a step of a program.
pub(super) fn peaks(plan: &Plan, seen: &[Seen]) -> Vec<usize> {
    let copied = &copied(&plan.module.mesh, seen)[..];
    let of = |c: &RankClass| {
        let (heap, store, fixed, begun, sent) = Default::default();
        let mut rank = Rank { plan, seen, copied, heap, store, fixed, begun, sent };
        rank.keep(c);
        // From the second step on all is there that lasts.
        (0..2).for_each(|_| rank.step(c));
        rank.heap.most
    };
    plan.classes.iter().map(of).collect()
}

fn key(role: &Role, microbatch: Option<usize>) -> Key {
    let looped = matches!(role.kind, RoleKind::Stash | RoleKind::Edge);
    (role.clone(), microbatch.filter(|_| looped))
}

fn lasts(role: &Role) -> bool {
    matches!(role.kind, RoleKind::Param | RoleKind::State(_))
}

impl Rank<'_> {
    fn bytes(&self, f: &Func, v: Value) -> usize {
        f.ty(v).local_bytes(&self.plan.module.mesh)
    }

    /// Parameters and states of what the class calls.
    fn keep(&mut self, c: &RankClass) {
        let plan = self.plan;
        for f in c.calls().map(|call| &plan.module.funcs[call.func]) {
            for a in &f.args {
                let Some(role) = a.role.as_ref().filter(|r| lasts(r)) else { continue };
                let bytes = self.bytes(f, a.value);
                if !self.store.contains_key(&key(role, None)) {
                    let made = self.heap.made(bytes);
                    self.store.insert(key(role, None), made);
                }
            }
        }
    }

    fn role_of(&self, t: &Transfer, sends: bool) -> Key {
        let f = &self.plan.module.funcs[t.func];
        let taken = || f.args.iter().find(|a| a.value == t.value).and_then(|a| a.role.as_ref());
        let role = if sends { sent(&f.results, t.value) } else { taken() };
        key(role.expect("what is sent has a role"), t.microbatch)
    }

    fn step(&mut self, c: &RankClass) {
        let old: Vec<Key> = self.store.keys().filter(|k| !lasts(&k.0)).cloned().collect();
        old.iter().for_each(|k| self.drop(k));
        let ends = self.last_reads(&c.step);
        for (i, ends) in c.step.iter().zip(ends) {
            match i {
                Instr::Call(call) => self.call(call.func, call.microbatch, &ends),
                Instr::PostRecv(t) => self.receive(t),
                Instr::Recv(t) if !self.store.contains_key(&self.role_of(t, false)) => {
                    self.receive(t);
                }
                Instr::Send(t) => {
                    let held = self.heap.held(self.store[&self.role_of(t, true)]);
                    self.sent.entry(t.with).or_default().push_back(held);
                    ends.iter().for_each(|k| self.drop(k));
                }
                Instr::Sent { to } => {
                    let oldest = self.sent.get_mut(to).and_then(VecDeque::pop_front);
                    oldest.into_iter().for_each(|s| self.heap.left(s));
                }
                Instr::Recv(_) => {}
            }
        }
        let left = std::mem::take(&mut self.sent).into_values().flatten();
        left.for_each(|s| self.heap.left(s));
    }

    fn receive(&mut self, t: &Transfer) {
        let made = self.heap.made(self.bytes(&self.plan.module.funcs[t.func], t.value));
        self.store.insert(self.role_of(t, false), made);
    }

    fn drop(&mut self, k: &Key) {
        if let Some(s) = self.store.remove(k) {
            self.heap.left(s);
        }
    }

    /// For each instruction what nothing reads behind it.
    fn last_reads(&self, step: &[Instr]) -> Vec<BTreeSet<Key>> {
        let mut later: BTreeMap<Key, bool> = BTreeMap::new();
        let mut out = vec![BTreeSet::new(); step.len()];
        for (at, i) in step.iter().enumerate().rev() {
            let (reads, makes): (Vec<Key>, Vec<Key>) = match i {
                Instr::Call(c) => {
                    let f = &self.plan.module.funcs[c.func];
                    let keys = |all: &[Port]| {
                        all.iter()
                            .filter_map(|p| Some(key(p.role.as_ref()?, c.microbatch)))
                            .collect()
                    };
                    (keys(&f.args), keys(&f.results))
                }
                Instr::Send(t) => (vec![self.role_of(t, true)], vec![]),
                Instr::Recv(t) => (vec![], vec![self.role_of(t, false)]),
                Instr::PostRecv(_) | Instr::Sent { .. } => (vec![], vec![]),
            };
            later.extend(makes.into_iter().map(|k| (k, false)));
            for k in reads {
                if !later.get(&k).copied().unwrap_or(lasts(&k.0)) {
                    out[at].insert(k.clone());
                }
                later.insert(k, true);
            }
        }
        out
    }

    fn call(&mut self, func: usize, microbatch: Option<usize>, ends: &BTreeSet<Key>) {
        let (plan, seen) = (self.plan, &self.seen[func]);
        let f = seen.f;
        let mut has: ValueMap<Option<Storage>> = f.per_value(None);
        for a in &f.args {
            let Some(role) = &a.role else { continue };
            let bytes = self.bytes(f, a.value);
            let stored = self.store.get(&key(role, microbatch)).copied();
            has[a.value] = Some(match (stored, role.kind.input()) {
                (Some(s), _) => self.heap.held(s),
                (None, Some(_)) if role.is(role.kind, "positions") => {
                    let text = format!("{} {bytes}", &*role.name);
                    let known = self.fixed.get(&text).copied();
                    let s = known.unwrap_or_else(|| self.heap.made(bytes));
                    self.fixed.insert(text, s);
                    self.heap.held(s)
                }
                (None, Some(_)) => self.heap.made(bytes),
                // What no function makes, as calls of libraries do without it.
                (None, None) => continue,
            });
        }
        ends.iter().for_each(|k| self.drop(k));
        for s in stretches(seen, &plan.module.mesh) {
            match s {
                Stretch::Plain(range) => {
                    range.for_each(|at| {
                        self.waited(at);
                        self.line(func, at, &mut has, None);
                    });
                }
                Stretch::Layers { first, lines, count } => {
                    // Their functions take results, not what goes on.
                    self.waited(first + lines * count - 1);
                    for unit in (0..count).map(|k| first + k * lines..first + (k + 1) * lines) {
                        let mut small = vec![];
                        for at in unit {
                            self.waited(at);
                            self.line(func, at, &mut has, Some(&mut small));
                        }
                        // Its function waits for all that it has begun.
                        self.waited(KEPT);
                        small.into_iter().for_each(|s| self.heap.left(s));
                    }
                }
            }
        }
        self.waited(KEPT);
        for r in &f.results {
            let v = seen.same[r.value];
            let (Some(role), Some(s)) = (&r.role, has[v]) else { continue };
            if seen.last[v] == KEPT {
                let held = self.heap.held(s);
                if let Some(old) = self.store.insert(key(role, microbatch), held) {
                    self.heap.left(old);
                }
            }
        }
        has.iter().flatten().for_each(|s| self.heap.left(*s));
    }

    /// Drops what exchanges have that are waited for before this line.
    fn waited(&mut self, at: usize) {
        let all = std::mem::take(&mut self.begun);
        let (done, begun): (Vec<Begun>, _) = all.into_iter().partition(|b| b.until <= at);
        self.begun = begun;
        for b in done {
            self.heap.most = self.heap.most.max(self.heap.live + b.ends);
            b.has.into_iter().for_each(|s| self.heap.left(s));
        }
    }

    /// A line; what is small and of one layer goes with its function.
    fn line(
        &mut self,
        func: usize,
        at: usize,
        has: &mut ValueMap<Option<Storage>>,
        mut small: Option<&mut Vec<Storage>>,
    ) {
        let seen = &self.seen[func];
        let l = &seen.lines[at];
        let before = self.heap.live;
        let copied = l.outs.first().is_some_and(|v| self.copied[func].contains(v));
        let from = viewed(seen.f, &seen.same, l).filter(|_| !copied);
        for (o, v) in l.outs.iter().enumerate().filter(|(_, v)| seen.same[**v] == **v) {
            has[*v] = match from.filter(|_| o == 0).and_then(|i| has[l.ins[i]]) {
                Some(s) => Some(self.heap.held(s)),
                None => Some(self.heap.made(self.bytes(seen.f, *v))),
            };
        }
        let goes_on = seen.goes_on(at).map(|until| (until, exchanged(seen, l)));
        let beside = goes_on.as_ref().map_or_else(|| beside(seen, l), |e| e.1.going);
        self.heap.most = self.heap.most.max(before + beside).max(self.heap.live);
        if let Some((until, e)) = goes_on {
            // The result stands for as much of it.
            let beside = e.going.saturating_sub(self.heap.live - before);
            let operands = l.ins.iter().filter(|_| e.keeps).filter_map(|v| has[*v]);
            let mut all: Vec<Storage> = operands.map(|s| self.heap.held(s)).collect();
            all.push(self.heap.made(beside));
            self.begun.push(Begun { until, has: all, ends: e.ends });
        }
        let unread = seen.own(at).filter(|v| seen.first[*v] == KEPT && seen.last[*v] == 0);
        for v in seen.dying(at).into_iter().chain(unread) {
            let Some(s) = has[v] else { continue };
            match (&mut small, seen.small[v]) {
                (Some(small), true) => small.push(s),
                (None, true) => continue,
                (_, false) => self.heap.left(s),
            }
            has[v] = None;
        }
    }
}
