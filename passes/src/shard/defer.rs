//! Takes sums behind the op that reads them rather than before it, where that costs less.
//!
//! Before:  `%o = all_reduce[tp] %o_part`, `%y = unpermute %o, %slot, %gates`
//! After:   `%y_part = unpermute %o_part, %slot_f, %gates_f`, `%y = all_reduce[tp] %y_part`
//!
//! Where values lie is asked for, and so is how each op runs, but for this: an op that is linear may run on parts
//! of a sum, and what it makes is such parts. Which do is the least cost of all together, forward and backward,
//! exactly (`crate::choose`): two sums that meet in an `add` may be taken as one. (An op that runs as its operands
//! lie, so that its result is gathered and not they, is of `partition/orders`.)

use super::auto::{Asked, units};
use super::factors::Factors;
use super::moves::Moves;
use super::ways::{Chosen, Execution, Way, linear_in, way};
use crate::choose::{Cost, Problem, Var, within};
use shardc_ir::func::{Func, Port, Uses, Value, ValueMap};
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::AtomSet;
use shardc_ir::ops::Kind;
use shardc_ir::price;
use shardc_ir::types::{Reduction, Type};
use smallvec::SmallVec;

/// A way to run an op of one result.
struct Alternative {
    way: Way,
    /// The result goes to its one user as it is made: a sum that is not taken.
    keeps: bool,
}

impl Alternative {
    fn made(&self) -> &Type {
        &self.way.outs[0]
    }
}

struct Deferral<'a> {
    asked: &'a Asked<'a>,
    f: &'a Func,
    ops: &'a Factors,
    active: &'a ValueMap<bool>,
    chosen: &'a Chosen,
    moves: Moves<'a>,
    uses: Uses,
    /// By node: the first is as asked. None where there is nothing to choose.
    all: Vec<Vec<Alternative>>,
    problem: Problem,
    vars: Vec<Option<Var>>,
    /// Whether a value is there in another type, too.
    also: HashMap<(Value, u32), Var>,
    /// The number of the type in which all users of a value find it.
    lying: HashMap<Value, u32>,
    units: Vec<usize>,
}

/// Most entries that are looked at for one choice: those of models have some dozens, and what needs more stays as it
/// is asked for.
const LIMIT: usize = 1 << 12;

/// Changes how ops run, and which results stay sums, where it costs less; true if it does anywhere.
pub(super) fn defer(
    asked: &Asked,
    f: &Func,
    ops: &Factors,
    active: &ValueMap<bool>,
    moves: Moves,
    chosen: &mut Chosen,
) -> bool {
    let mut d = Deferral {
        asked,
        f,
        ops,
        active,
        chosen,
        moves,
        uses: f.uses(),
        all: vec![],
        problem: Problem::new(),
        vars: vec![None; f.nodes.len()],
        also: HashMap::default(),
        lying: HashMap::default(),
        units: vec![],
    };
    d.problem.limit = LIMIT;
    for u in 0..f.nodes.len() {
        let all = d.alternatives(u);
        d.all.push(all);
    }
    (0..f.nodes.len()).rev().for_each(|u| d.drop_useless(u));
    if d.all.iter().all(Vec::is_empty) {
        return false;
    }
    let changes = d.solve();
    let any = !changes.is_empty();
    for (u, run, kept) in changes {
        chosen.run[u] = run;
        if let Some(made) = kept {
            chosen.own[f.nodes[u].outs[0]] = made;
        }
    }
    any
}

impl Deferral<'_> {
    /// The sum that may reach an operand without being taken.
    fn carried(&self, v: Value) -> AtomSet {
        let only = self.uses.only_use(v);
        let Some(m) = self.uses.maker(v).filter(|_| only.is_some()) else { return AtomSet::EMPTY };
        let kept = self.all[m].iter().filter(|a| a.keeps);
        kept.fold(AtomSet::EMPTY, |s, a| s.union(a.made().sum))
    }

    /// The ways of a node; none if there is one only. Those of what it reads are known.
    fn alternatives(&self, u: usize) -> Vec<Alternative> {
        let n = &self.f.nodes[u];
        let [out] = n.outs[..] else { return vec![] };
        if self.uses.count(out) == 0 {
            return vec![];
        }
        let base = &self.chosen.run[u];
        let carried: SmallVec<[AtomSet; 4]> = n.ins.iter().map(|&v| self.carried(v)).collect();
        let mut runs = vec![base.clone()];
        if carried.iter().any(|c| !c.is_empty()) {
            for mask in linear_in(self.f, n) {
                let of = carried.iter().enumerate().filter(|(j, _)| mask >> j & 1 == 1);
                let atoms = of.fold(self.asked.mesh.all(), |s, (_, &c)| s.and(c));
                if !atoms.is_empty() {
                    runs.push(base.of_parts(mask, atoms));
                }
            }
        }
        let sums = self.may_keep(u, out);
        if runs.len() == 1 && !sums {
            return vec![];
        }
        let known = |run: Execution| way(self.asked.mesh, self.f, u, &self.ops[u], run);
        let mut ways: Vec<Way> = runs.into_iter().filter_map(known).collect();
        if ways.first().is_none_or(|w| w.run != *base) {
            return vec![];
        }
        // A parameter stays split as it is: nothing here counts its memory.
        let split = |w: &Way, j: usize| w.ins[j].sharded();
        let params: SmallVec<[usize; 2]> =
            (0..n.ins.len()).filter(|&j| self.is_param(n.ins[j])).collect();
        let first: SmallVec<[AtomSet; 2]> = params.iter().map(|&j| split(&ways[0], j)).collect();
        ways.retain(|w| params.iter().zip(&first).all(|(&j, s)| s.within(split(w, j))));
        // What a user asks to lie somewhere is there, whole sums; of buffers of experts only the place is asked for.
        // And what another stage reads is summed before.
        let asked = self.f.annotations.contains_key(&out) && !n.op.facts().kind.of_experts();
        let stays = !asked && self.in_one_stage(u, out);
        let mut all = vec![];
        for way in ways {
            if stays && !way.outs[0].sum.is_empty() && self.uses.only_use(out).is_some() {
                all.push(Alternative { way: way.clone(), keeps: false });
                all.push(Alternative { way, keeps: true });
            } else {
                all.push(Alternative { way, keeps: false });
            }
        }
        all
    }

    fn is_param(&self, v: Value) -> bool {
        self.chosen.stored[v].is_some()
    }

    /// Whether a value is a parameter, or made of one element by element.
    fn is_of_param(&self, mut v: Value) -> bool {
        while let Some(m) = self.uses.maker(v) {
            let n = &self.f.nodes[m];
            match &n.ins[..] {
                &[only] if n.op.facts().kind == Kind::Elementwise => v = only,
                _more => return false,
            }
        }
        self.is_param(v)
    }

    /// Whether the stage that makes a value is the one that reads it.
    fn in_one_stage(&self, u: usize, out: Value) -> bool {
        let stage = |u: usize| self.f.stage_of(&self.f.nodes[u]);
        self.uses.only_user(out).is_none_or(|user| stage(user) == stage(u))
    }

    /// Whether the op makes a sum which the one op that reads it might leave so.
    fn may_keep(&self, u: usize, out: Value) -> bool {
        let (n, op, run) = (&self.f.nodes[u], &self.ops[u], &self.chosen.run[u]);
        let mut cut = op.factor_ids().filter(|&g| !run.lists[g as usize].is_empty());
        let Some(only) = self.uses.only_use(out) else { return false };
        n.op.def().reduction() == Reduction::Sum
            && cut.any(|g| op.is_reduced(g))
            && linear_in(self.f, &self.f.nodes[only.at()])
                .iter()
                .any(|m| m >> only.operand & 1 == 1)
    }

    /// Drops ways that leave a sum to a user which takes none, and nodes without a choice.
    fn drop_useless(&mut self, u: usize) {
        if self.all[u].iter().any(|a| a.keeps) {
            let out = self.f.nodes[u].outs[0];
            let only = self.uses.only_use(out).expect("kept for one");
            let ins = self.all[only.at()].iter().map(|a| &a.way.ins);
            let taken = ins.map(|ins| ins[only.operand as usize].sum);
            let taken = taken.fold(AtomSet::EMPTY, AtomSet::union);
            self.all[u].retain(|a| !a.keeps || a.made().sum.within(taken));
        }
        if self.all[u].len() == 1 {
            self.all[u].clear();
        }
    }

    /// How it runs as asked.
    fn base(&self, u: usize) -> Option<Way> {
        way(self.asked.mesh, self.f, u, &self.ops[u], self.chosen.run[u].clone())
    }

    /// The number of the type in which all users of a value find it, made as asked.
    fn lies(&mut self, v: Value) -> u32 {
        if let Some(&known) = self.lying.get(&v) {
            return known;
        }
        let maker = self.uses.maker(v);
        let ty = match maker.and_then(|m| self.base(m)) {
            None => self.chosen.own[v].clone(),
            Some(way) => {
                let outs = &self.f.nodes[maker.expect("it has a way")].outs;
                let o = outs.iter().position(|&x| x == v).expect("its maker");
                self.chosen.settled(v, &way.outs[o])
            }
        };
        let id = self.moves.id(&ty);
        self.lying.insert(v, id);
        id
    }

    /// What a result is to its users.
    fn left(&self, out: Value, a: &Alternative) -> Type {
        if a.keeps { a.made().clone() } else { self.chosen.settled(out, a.made()) }
    }

    /// The nodes that run otherwise than asked: how, and their results that stay sums.
    fn solve(mut self) -> Vec<(usize, Execution, Option<Type>)> {
        self.units = units(self.f);
        for u in 0..self.f.nodes.len() {
            if self.all[u].is_empty() {
                self.read_as_asked(u);
            } else {
                self.node(u);
            }
        }
        let found = within(&self.problem, u64::MAX >> 3);
        let mut changes = vec![];
        if !found.exact {
            return changes;
        }
        for (u, var) in self.vars.iter().enumerate() {
            let Some(i) = var.map(|v| found.ways[v.index()]).filter(|&i| i > 0) else { continue };
            let a = &self.all[u][i];
            changes.push((u, a.way.run.clone(), a.keeps.then(|| a.made().clone())));
        }
        changes
    }

    /// The variable of a node, what its ways cost, and what their operands do.
    fn node(&mut self, u: usize) {
        let n = &self.f.nodes[u];
        let out = n.outs[0];
        let (hw, mesh) = (self.asked.hardware, self.asked.mesh);
        let active = self.active[out];
        let times = if self.asked.trains && active { 3 } else { 1 };
        // What is summed over microbatches is reduced once per step.
        let of_step = |r: &Port| r.role.as_ref().is_some_and(|r| r.kind.is_summed());
        let summed = self.f.results.iter().any(|r| r.value == out && of_step(r));
        let mut costs = vec![];
        let (all, moves) = (&self.all[u], &mut self.moves);
        for a in all {
            let ins: SmallVec<[&Type; 4]> = a.way.ins.iter().collect();
            let time = match a.way.op.layout() {
                Some(_) => moves.step(&a.way.op, ins[0], a.made(), active),
                None => times * price::op(hw, mesh, &n.op, &ins, a.made()),
            };
            let own = Cost { time, memory: 0 };
            let settled = match a.keeps || summed {
                true => Cost::ZERO,
                false => {
                    let to = self.chosen.settled(out, a.made());
                    let (from, to) = (moves.id(a.made()), moves.id(&to));
                    moves.cost(from, to, active)
                }
            };
            costs.push(own.plus(settled));
        }
        let var = self.problem.var(costs.len(), self.units[u]);
        self.problem.table(&[var], costs);
        self.vars[u] = Some(var);
        for (j, &v) in n.ins.iter().enumerate() {
            match self.maker(v) {
                Some((m, maker)) => {
                    let mut costs = vec![];
                    for a in &self.all[m] {
                        let from = self.moves.id(&self.left(v, a));
                        for b in &self.all[u] {
                            let to = self.moves.id(&b.way.ins[j]);
                            costs.push(self.moves.cost(from, to, self.active[v]));
                        }
                    }
                    self.problem.table(&[maker, var], costs);
                }
                None => self.also(u, j, v, var),
            }
        }
    }

    /// The variable of a value's maker, where it and its one user are chosen together.
    fn maker(&self, v: Value) -> Option<(usize, Var)> {
        let m = self.uses.maker(v).filter(|_| self.uses.only_use(v).is_some())?;
        Some((m, self.vars[m]?))
    }

    /// What a node that runs as asked costs with what it reads.
    fn read_as_asked(&mut self, u: usize) {
        for (j, &v) in self.f.nodes[u].ins.iter().enumerate() {
            let Some((m, maker)) = self.maker(v) else { continue };
            let to = self.moves.id(&self.chosen.run[u].required(self.f, &self.ops[u], u, j));
            let mut costs = vec![];
            for a in &self.all[m] {
                let from = self.moves.id(&self.left(v, a));
                costs.push(self.moves.cost(from, to, self.active[v]));
            }
            self.problem.table(&[maker], costs);
        }
    }

    /// A value that several may use has to be there in each type in which one of them needs it, once.
    fn also(&mut self, u: usize, j: usize, v: Value, var: Var) {
        let lies = self.lies(v);
        let all = std::mem::take(&mut self.all[u]);
        let needs: Vec<u32> = all.iter().map(|a| self.moves.id(&a.way.ins[j])).collect();
        self.all[u] = all;
        let mut wants = needs.clone();
        wants.sort_unstable();
        wants.dedup();
        for want in wants.into_iter().filter(|&w| w != lies) {
            if self.is_there(v, want) {
                continue;
            }
            let there = match self.also.get(&(v, want)) {
                Some(&there) => there,
                None => {
                    let mut cost = self.moves.cost(lies, want, self.active[v]);
                    if self.is_of_param(v) && cost.allowed() {
                        // A parameter is moved once per step, and so is what is made of it alone.
                        cost.time /= self.asked.microbatches as u64;
                    }
                    let there = self.problem.var(2, self.units[u]);
                    self.problem.table(&[there], vec![Cost::ZERO, cost]);
                    self.also.insert((v, want), there);
                    there
                }
            };
            let table = needs.iter().flat_map(|&n| {
                let absent = if n == want { Cost::NEVER } else { Cost::ZERO };
                [absent, Cost::ZERO]
            });
            self.problem.table(&[var, there], table.collect());
        }
    }

    /// True if a user that runs as asked needs the value in this type anyway.
    fn is_there(&mut self, v: Value, want: u32) -> bool {
        self.uses.of(v).iter().any(|x| {
            let u = x.at();
            let needs = || self.chosen.run[u].required(self.f, &self.ops[u], u, x.operand as usize);
            self.all[u].is_empty() && self.moves.id(&needs()) == want
        })
    }
}
