//! Chooses how every op of a model runs, and where every value and parameter lies, at least cost.
//!
//! Before:  `%q = dot[bsh,oh->bso] %normed, %q_proj : f32[2,32,128]`, nothing split, nothing asked
//! After:   a way for each op, with which `partition` makes the program of the ranks
//!
//! Variables are the ops, and the values that several ops use; tables are what each way costs, and what
//! collectives cost between two, forward and the mirror in backward. So there is no backward graph, and what
//! joins one layer to the next is the residual stream alone. Values that depend on no parameter (positions,
//! tables, masks) are the same everywhere. The least sum is exact (`crate::choose`)
//! over one or two axes; over more, pairs of axes are chosen exactly (`pairs`).

mod choices;
mod pairs;
mod prices;

pub use choices::{Choices, Compared};
pub use pairs::MOST_EXACT;

use super::factors::Factors;
use super::moves::Moves;
use super::ways::{Chosen, Execution, Place, PlacedAtoms, Stored, Way, ways};
use crate::choose::{BudgetAnswer, Cost, Costs, Problem, Var, within};
use crate::depends::weighted;
use crate::zero::Zero;
use shardc_ir::func::{Func, Port, RoleKind, Uses, Value, ValueMap};
use shardc_ir::hardware::Hardware;
use shardc_ir::infer::Linear;
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::types::{AtomList, State, Type};
use smallvec::SmallVec;
use std::rc::Rc;

/// What the choice is for.
pub struct Asked<'a> {
    pub mesh: &'a Mesh,
    pub hardware: &'a Hardware,
    /// Gradients are made.
    pub trains: bool,
    /// How many f32 the optimizer keeps of each element of a trained parameter.
    pub states: u64,
    /// Of a step: what is done to parameters once per step counts so much less.
    pub microbatches: usize,
    /// Bytes of a rank for parameters, their gradients and state, and what backward reads.
    pub budget: Option<u64>,
}

/// What the choice costs, by its prices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Price {
    /// Picoseconds of a microbatch, with its share of the step.
    pub time: u64,
    /// No choice takes less; none if that is not known.
    pub bound: Option<u64>,
    /// Bytes, as [`Asked::budget`] counts them.
    pub memory: u64,
    pub fits: bool,
}

/// How a parameter may be stored over the ranks that use it alike; the first are preferred: its state in
/// pieces; whole; in pieces, and gathered where it is used.
const STORED: [Zero; 3] = [
    Zero { splits: true, gathers_once: true, reduces_once: true },
    Zero { splits: false, gathers_once: true, reduces_once: true },
    Zero { splits: true, gathers_once: false, reduces_once: false },
];

/// The same in words.
const STORED_AS: [&str; 3] = [
    "its state in pieces, gathered once per step",
    "whole",
    "in pieces, gathered where it is used",
];

/// Something that has ways.
struct Variable {
    var: Var,
    /// Types that each way gives, by result, by [`Moves`].
    gives: Vec<SmallVec<[u32; 2]>>,
    needs: Vec<SmallVec<[u32; 4]>>,
}

/// A node's variable and its ways, a value's and its layouts.
type Running = (Variable, Rc<[Way]>);
type Lying = (Variable, Vec<Type>);

struct Builder<'a> {
    asked: &'a Asked<'a>,
    f: &'a Func,
    ops: &'a Factors,
    /// Axes that go one way together; each with whether all ways are open, or only the way of `now`.
    over: Vec<(AtomSet, bool)>,
    now: Option<Chosen>,
    /// Values that depend on a parameter, and those with a gradient.
    weighted: ValueMap<bool>,
    active: &'a ValueMap<bool>,
    trained: ValueMap<bool>,
    /// Values that backward reads.
    saved: ValueMap<bool>,
    /// By value, of parameters: how it is stored.
    zero: ValueMap<Option<Var>>,
    uses: Uses,
    param: ValueMap<bool>,
    units: Vec<usize>,
    moves: Moves<'a>,
    problem: Problem,
    /// Ways of nodes alike, with what they cost.
    alike: HashMap<String, (Rc<[Way]>, Vec<Cost>)>,
    edges: HashMap<(Vec<u32>, Vec<u32>, bool), Costs>,
}

/// Chooses for all of a function; `active` are the values with a gradient.
pub(crate) fn choose(
    asked: &Asked,
    f: &Func,
    ops: &Factors,
    active: &ValueMap<bool>,
    trained: &dyn Fn(&str) -> bool,
) -> (Chosen, Price, Option<Choices>) {
    let (mut param, mut mine) = (f.per_value(false), f.per_value(false));
    for a in &f.args {
        if let Some(r) = a.role.as_ref().filter(|r| r.kind == RoleKind::Param) {
            param[a.value] = true;
            mine[a.value] = trained(&r.name);
        }
    }
    let mut b = Builder {
        asked,
        f,
        ops,
        over: vec![],
        now: None,
        weighted: weighted(f),
        active,
        trained: mine,
        saved: saved(asked, f, active),
        zero: f.per_value(None),
        uses: f.uses(),
        param,
        units: units(f),
        moves: Moves::new(asked.mesh, asked.hardware, asked.trains),
        problem: Problem::new(),
        alike: HashMap::default(),
        edges: HashMap::default(),
    };
    b.least()
}

/// Values that backward reads, about: operands of ops with a gradient that are not linear in all of them.
fn saved(asked: &Asked, f: &Func, active: &ValueMap<bool>) -> ValueMap<bool> {
    let mut saved = f.per_value(false);
    let nodes = f.nodes.iter().filter(|n| n.outs.iter().any(|o| active[o]));
    for n in nodes.filter(|n| !matches!(n.op.def().linear(), Linear::Together(_))) {
        n.ins.iter().for_each(|v| saved[v] = asked.trains);
    }
    saved
}

/// The unit of each node: a number that grows where a layer begins or ends.
pub(super) fn units(f: &Func) -> Vec<usize> {
    let mut seen: HashMap<Option<u32>, usize> = HashMap::default();
    let (mut next, mut last) = (0, None);
    let mut of = vec![];
    for n in &f.nodes {
        let layer = f.scope_info(n.scope).layer;
        // What is in no layer stands before the first or behind the last.
        let key = layer.or(last).filter(|_| layer.is_some());
        let unit = match layer {
            Some(_) => *seen.entry(layer).or_insert_with(|| {
                next += 1;
                next
            }),
            None if last.is_none() => 0,
            None => next + 1,
        };
        last = key.or(last);
        of.push(unit);
    }
    of
}

impl Builder<'_> {
    /// Chooses over the axes that are open.
    fn all(&mut self) -> (Chosen, Price, Choices) {
        let f = self.f;
        self.problem = Problem::new();
        self.zero.fill(None);
        self.alike.clear();
        self.edges.clear();
        let mut nodes: Vec<Option<Running>> = vec![];
        let mut values: ValueMap<Option<Lying>> = (0..f.values.len()).map(|_| None).collect();
        for a in &f.args {
            if self.param[a.value] && self.is_shared(a.value) {
                let v = self.value(a.value);
                values[a.value] = Some(v);
            }
        }
        for u in 0..f.nodes.len() {
            let own = self.node(u);
            if let Some((variable, _)) = &own {
                self.operands(u, variable, &nodes, &values);
            }
            nodes.push(own);
            for (o, &v) in f.nodes[u].outs.iter().enumerate() {
                if !self.weighted[v] || !self.is_shared(v) {
                    continue;
                }
                let made = self.value(v);
                if let Some((maker, _)) = &nodes[u] {
                    let gives = maker.gives.iter().map(|g| g[o]).collect();
                    let needs = made.0.needs.iter().map(|g| g[0]).collect();
                    self.edge((maker.var, gives), (made.0.var, needs), self.active[v]);
                }
                values[v] = Some(made);
            }
        }
        let budget = self.asked.budget.unwrap_or(u64::MAX >> 3);
        let found = within(&self.problem, budget);
        let (chosen, price) = self.done(&found, &nodes, &values);
        (chosen, price, self.choices(found, &nodes, &values))
    }

    fn choices(
        &mut self,
        found: BudgetAnswer,
        nodes: &[Option<Running>],
        values: &ValueMap<Option<Lying>>,
    ) -> Choices {
        let problem = std::mem::take(&mut self.problem);
        let mut all = Choices::new(problem, found, self.zero.clone());
        for (v, lying) in values.ids().zip(values) {
            lying.iter().for_each(|(own, layouts)| all.own(v, own.var, layouts));
        }
        for (n, own) in self.f.nodes.iter().zip(nodes) {
            let Some((own, ways)) = own else { continue };
            n.outs.iter().enumerate().for_each(|(o, &v)| all.result(v, own.var, ways, o));
            let params = n.ins.iter().enumerate().filter(|v| self.param[v.1]);
            params.for_each(|(j, &v)| all.operand(v, own.var, ways, j));
        }
        all
    }

    /// True for what has a variable of its own: several ops use it, or it is a result.
    fn is_shared(&self, v: Value) -> bool {
        // What is summed over microbatches is reduced once per step: it stays as it is made.
        let shown = |r: &Port| r.value == v && !r.role.as_ref().is_some_and(|r| r.kind.is_summed());
        let asked = self.f.annotations.contains_key(&v);
        asked || self.uses.of(v).len() > 1 || self.f.results.iter().any(shown)
    }

    fn is_result(&self, v: Value) -> bool {
        self.f.results.iter().any(|r| r.value == v)
    }

    /// The variable of a node that depends on a parameter.
    fn node(&mut self, u: usize) -> Option<Running> {
        let n = &self.f.nodes[u];
        if !n.outs.iter().any(|o| self.weighted[o]) {
            return None;
        }
        let mut key = String::new();
        n.op.write(self.asked.mesh, &mut key);
        for v in n.ins.iter().chain(&n.outs) {
            let t = self.f.ty(*v);
            let own = self.param[v] && !self.is_shared(*v);
            let (active, trained, saved) = (self.active[v], self.trained[v], self.saved[v]);
            let result = self.is_result(*v);
            key += &format!(" {:?}{:?}{active}{own}{trained}{saved}{result}", t.dtype, t.sizes());
        }
        let over = self.groups(|now, a| now.run[u].place(a));
        over.iter().filter_map(|g| g.1).for_each(|place| key += &format!(" {place:?}"));
        let known = self.alike.get(&key).cloned();
        let (all, costs) = known.unwrap_or_else(|| {
            let mut all = ways(self.asked.mesh, self.f, u, &self.ops[u], &over);
            // What every rank has its share of, or all of, is summed, not what they use differently.
            let same = |(o, t): (&Value, &Type)| !self.is_result(*o) || t.replicated.is_empty();
            all.retain(|w| n.outs.iter().zip(&w.outs).all(same));
            let costs = all.iter().map(|w| self.cost(u, w)).collect();
            let made: (Rc<[Way]>, Vec<Cost>) = (all.into(), costs);
            self.alike.insert(key, made.clone());
            made
        });
        let var = self.problem.var(all.len(), self.units[u]);
        self.problem.table(&[var], costs);
        for (j, &v) in n.ins.iter().enumerate() {
            if self.param[v] && !self.is_shared(v) {
                let used: Vec<Type> = all.iter().map(|w| w.ins[j].clone()).collect();
                self.stored(v, var, &used, self.units[u]);
            }
        }
        let ids = |b: &mut Self, t: &[Type]| t.iter().map(|t| b.moves.id(t)).collect();
        let gives = all.iter().map(|w| ids(self, &w.outs)).collect();
        let needs = all.iter().map(|w| w.ins.iter().map(|t| self.moves.id(t)).collect()).collect();
        Some((Variable { var, gives, needs }, all))
    }

    /// How a parameter is stored, a variable beside that of its use.
    fn stored(&mut self, v: Value, used: Var, layouts: &[Type], unit: usize) {
        let costs: Vec<Cost> = layouts.iter().flat_map(|t| self.parameter(v, t)).collect();
        let var = self.problem.var(STORED.len(), unit);
        self.problem.table(&[used, var], costs);
        self.zero[v] = Some(var);
    }

    /// The variable of a value: where it lies between the op that makes it and those that use it.
    fn value(&mut self, v: Value) -> Lying {
        let result = self.is_result(v);
        let mut all = vec![];
        // What is asked for is there; what else may split the value splits its open dims.
        let asked = self.f.annotations.get(&v);
        let plain = self.asked_for(v);
        let open = |d: usize| asked.is_none_or(|a| a.dims[d].open);
        let free: Vec<PlacedAtoms> = self
            .groups(|now, a| place(&now.own[v], a))
            .into_iter()
            .map(|(atoms, place)| (atoms.minus(plain.sharded()), place))
            .filter(|g| !g.0.is_empty())
            .collect();
        let may_spread = !result && (self.active[v] || self.param[v]);
        layouts(self.asked.mesh, &free, may_spread, &open, plain, &mut |t| all.push(t));
        let first = self.uses.users(v).next().map_or(0, |u| self.units[u]);
        let unit = self.uses.maker(v).map_or(first, |u| self.units[u]);
        let var = self.problem.var(all.len(), unit);
        if self.param[v] {
            self.stored(v, var, &all, first);
        }
        let ids: Vec<u32> = all.iter().map(|t| self.moves.id(t)).collect();
        let gives = ids.iter().map(|&t| SmallVec::from_slice(&[t])).collect();
        let needs = ids.iter().map(|&t| SmallVec::from_slice(&[t])).collect();
        (Variable { var, gives, needs }, all)
    }

    /// A value's layout as it is asked for, the same everywhere where nothing is.
    fn asked_for(&self, v: Value) -> Type {
        let src = self.f.ty(v);
        let mut t = Type::new(src.dtype, &src.sizes());
        if let Some(a) = self.f.annotations.get(&v) {
            t.dims.iter_mut().zip(&a.dims).for_each(|(d, a)| d.atoms = a.atoms);
        }
        t
    }

    /// The tables between a node and what makes its operands.
    fn operands(
        &mut self,
        u: usize,
        own: &Variable,
        nodes: &[Option<Running>],
        values: &ValueMap<Option<Lying>>,
    ) {
        let f = self.f;
        let mut joined: Vec<(Var, Vec<u32>, usize, bool)> = vec![];
        for (j, &v) in f.nodes[u].ins.iter().enumerate() {
            let active = self.active[v];
            if let Some((value, _)) = &values[v] {
                joined.push((value.var, value.gives.iter().map(|g| g[0]).collect(), j, active));
            } else if self.weighted[v] && !self.param[v] {
                let Some(m) = self.uses.maker(v) else { continue };
                let Some((maker, _)) = &nodes[m] else { continue };
                let o = f.nodes[m].outs.iter().position(|&x| x == v).expect("its maker");
                joined.push((maker.var, maker.gives.iter().map(|g| g[o]).collect(), j, active));
            } else if !self.param[v] {
                // The same everywhere, but where it is asked for.
                let t = self.asked_for(v);
                let from = self.moves.id(&t);
                let costs = own
                    .needs
                    .iter()
                    .map(|n| self.moves.cost(from, n[j], false))
                    .collect::<Vec<_>>();
                self.problem.table(&[own.var], costs);
            }
        }
        for (var, gives, j, active) in joined {
            let needs = own.needs.iter().map(|n| n[j]).collect();
            self.edge((var, gives), (own.var, needs), active);
        }
    }

    /// What it costs to bring a value from each layout of one variable to each that another needs.
    fn edge(&mut self, from: (Var, Vec<u32>), to: (Var, Vec<u32>), active: bool) {
        let key = (from.1, to.1, active);
        let vars = [from.0, to.0];
        if let Some(&costs) = self.edges.get(&key) {
            return self.problem.again(&vars, costs);
        }
        let mut costs = Vec::with_capacity(key.0.len() * key.1.len());
        for &a in &key.0 {
            for &b in &key.1 {
                costs.push(self.moves.cost(a, b, active));
            }
        }
        let made = self.problem.table(&vars, costs);
        self.edges.insert(key, made);
    }

    fn done(
        &self,
        found: &BudgetAnswer,
        nodes: &[Option<Running>],
        values: &ValueMap<Option<Lying>>,
    ) -> (Chosen, Price) {
        let f = self.f;
        let same = |v: Value| self.asked_for(v);
        let mut own: ValueMap<Type> = f.values.ids().map(same).collect();
        let mut stored: ValueMap<Option<Stored>> = f.per_value(None);
        let mut run = vec![];
        for (u, n) in nodes.iter().enumerate() {
            let Some((variable, all)) = n else {
                run.push(Execution::whole(&self.ops[u]));
                continue;
            };
            let way = &all[found.ways[variable.var.index()]];
            run.push(way.run.clone());
            // What only this node uses lies as it needs it.
            for (j, v) in f.nodes[u].ins.iter().enumerate() {
                if self.weighted[v] && !self.is_shared(*v) {
                    own[v] = way.ins[j].clone();
                }
            }
        }
        for (v, lying) in values.ids().zip(values) {
            if let Some((variable, all)) = lying {
                own[v].clone_from(&all[found.ways[variable.var.index()]]);
            }
        }
        for a in &f.args {
            let v = a.value;
            if self.param[v] {
                let zero = STORED[self.zero[v].map_or(1, |v| found.ways[v.index()])];
                let over = if zero.splits { own[v].replicated } else { AtomSet::EMPTY };
                let mut ty = own[v].clone();
                ty.replicated = AtomSet::EMPTY;
                stored[v] = Some(Stored { ty, zero, over });
            }
        }
        let price = Price {
            time: found.cost.time,
            bound: Some(found.bound),
            memory: found.cost.memory,
            fits: found.fits,
        };
        (Chosen { run, own, stored }, price)
    }
}

/// Where a value has an atom.
fn place(t: &Type, a: Atom) -> Place {
    match t.state(a) {
        State::Sharded(d) => Place::Split(d as u8),
        State::Replicated => Place::Spread,
        _ => Place::Alike,
    }
}

/// All layouts of a value over these atoms: split in a dim, evenly; invariant; replicated.
fn layouts(
    mesh: &Mesh,
    over: &[PlacedAtoms],
    spread: bool,
    open: &impl Fn(usize) -> bool,
    t: Type,
    f: &mut impl FnMut(Type),
) {
    let Some((&(atoms, place), rest)) = over.split_first() else { return f(t) };
    let may = |p: Place| place.is_none_or(|own| own == p);
    for d in (0..t.rank()).filter(|&d| open(d) && may(Place::Split(d as u8))) {
        let even = t.dims[d].size % (t.pieces(mesh, d) * mesh.ways(atoms)) == 0;
        let list = AtomList::collect(t.dims[d].atoms.iter().chain(atoms.iter()));
        if let (true, Some(list)) = (even, list) {
            let mut split = t.clone();
            split.dims[d].atoms = list;
            layouts(mesh, rest, spread, open, split, f);
        }
    }
    if may(Place::Alike) {
        layouts(mesh, rest, spread, open, t.clone(), f);
    }
    if spread && may(Place::Spread) {
        let mut t = t;
        t.replicated = t.replicated.union(atoms);
        layouts(mesh, rest, spread, open, t, f);
    }
}
