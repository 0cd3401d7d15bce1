//! Chooses how every op of a model runs, and where every value and parameter lies, at least cost.
//!
//! Before:  `%q = dot[bsh,oh->bso] %normed, %q_proj : f32[2,32,128]`, nothing split, nothing asked
//! After:   a way for each op, with which `partition` makes the program of the ranks
//!
//! Variables are the ops, and the values that several ops use; tables are what each way costs, and what
//! collectives cost between two, forward and the mirror in backward. So there is no backward graph, and what
//! joins one layer to the next is the residual stream alone. Values that depend on no parameter (positions,
//! tables, masks) are the same everywhere. The least sum is exact (`crate::choose`).

use super::propagate::OpFactors;
use super::reshard::Resharder;
use super::ways::{Chosen, Execution, Stored, Way, ways};
use super::zero::Zero;
use crate::choose::{Choice, Cost, Costs, Problem, Var, within};
use crate::stages::weighted;
use shardc_ir::func::{Func, Port, RoleKind, Step, Value};
use shardc_ir::hardware::Hardware;
use shardc_ir::mesh::{Atom, AtomSet, Mesh, PIPELINE};
use shardc_ir::ops::{AllGather, AllReduce, Op, ReduceScatter};
use shardc_ir::price;
use shardc_ir::types::{AtomList, DType, Type};
use smallvec::SmallVec;
use std::collections::HashMap;

/// What the choice is for.
pub struct Asked<'a> {
    pub mesh: &'a Mesh,
    pub hardware: &'a Hardware,
    /// Gradients are made.
    pub trains: bool,
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
    /// No choice takes less.
    pub bound: u64,
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

/// Something that has ways.
struct Variable {
    var: Var,
    /// Types that each way gives, by result, by [`Types`].
    gives: Vec<SmallVec<[u32; 2]>>,
    needs: Vec<SmallVec<[u32; 4]>>,
}

/// Types by number.
#[derive(Default)]
struct Types {
    all: Vec<Type>,
    known: HashMap<Type, u32>,
}

impl Types {
    fn id(&mut self, t: &Type) -> u32 {
        if let Some(&id) = self.known.get(t) {
            return id;
        }
        self.all.push(t.clone());
        self.known.insert(t.clone(), self.all.len() as u32 - 1);
        self.all.len() as u32 - 1
    }
}

struct Builder<'a> {
    asked: &'a Asked<'a>,
    f: &'a Func,
    ops: &'a [OpFactors],
    atoms: Vec<Atom>,
    /// Values that depend on a parameter, and those with a gradient.
    weighted: Vec<bool>,
    active: &'a [bool],
    trained: Vec<bool>,
    /// By value, of parameters: how it is stored.
    zero: Vec<Option<Var>>,
    uses: Vec<SmallVec<[(u32, u32); 4]>>,
    param: Vec<bool>,
    units: Vec<usize>,
    types: Types,
    resharder: Resharder,
    problem: Problem,
    /// Picoseconds from a type to another, with the mirror or without.
    moves: HashMap<(u32, u32, bool), Cost>,
    /// Ways of nodes alike, with what they cost.
    alike: HashMap<String, (std::rc::Rc<[Way]>, Vec<Cost>)>,
    edges: HashMap<(Vec<u32>, Vec<u32>, bool), Costs>,
}

/// Chooses for all of a function; `active` are the values with a gradient.
pub(crate) fn choose(
    asked: &Asked,
    f: &Func,
    ops: &[OpFactors],
    active: &[bool],
    trained: &dyn Fn(&str) -> bool,
) -> (Chosen, Price) {
    let mut uses: Vec<SmallVec<[(u32, u32); 4]>> = vec![SmallVec::new(); f.values.len()];
    for (u, n) in f.nodes.iter().enumerate() {
        for (j, v) in n.ins.iter().enumerate() {
            uses[v.0 as usize].push((u as u32, j as u32));
        }
    }
    let (mut param, mut mine) = (vec![false; f.values.len()], vec![false; f.values.len()]);
    for a in &f.args {
        if let Some(r) = a.role.as_ref().filter(|r| r.kind == RoleKind::Param) {
            param[a.value.0 as usize] = true;
            mine[a.value.0 as usize] = trained(&r.name);
        }
    }
    let pipeline = asked.mesh.axis(PIPELINE).unwrap_or_default();
    let b = Builder {
        asked,
        f,
        ops,
        atoms: asked.mesh.all().minus(pipeline).iter().collect(),
        weighted: weighted(f),
        active,
        trained: mine,
        zero: vec![None; f.values.len()],
        uses,
        param,
        units: units(f),
        types: Types::default(),
        resharder: Resharder::new(asked.hardware),
        problem: Problem::new(),
        moves: HashMap::new(),
        alike: HashMap::new(),
        edges: HashMap::new(),
    };
    b.all()
}

/// The unit of each node: a number that grows where a layer begins or ends.
fn units(f: &Func) -> Vec<usize> {
    let mut seen: HashMap<Option<u32>, usize> = HashMap::new();
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
    fn all(mut self) -> (Chosen, Price) {
        let f = self.f;
        let mut nodes: Vec<Option<(Variable, std::rc::Rc<[Way]>)>> = vec![];
        let mut values: Vec<Option<(Variable, Vec<Type>)>> =
            (0..f.values.len()).map(|_| None).collect();
        for a in &f.args {
            if self.param[a.value.0 as usize] && self.is_shared(a.value) {
                let v = self.value(a.value);
                values[a.value.0 as usize] = Some(v);
            }
        }
        for u in 0..f.nodes.len() {
            let own = self.node(u);
            if let Some((variable, _)) = &own {
                self.operands(u, variable, &nodes, &values);
            }
            nodes.push(own);
            for (o, &v) in f.nodes[u].outs.iter().enumerate() {
                if !self.weighted[v.0 as usize] || !self.is_shared(v) {
                    continue;
                }
                let made = self.value(v);
                if let Some((maker, _)) = &nodes[u] {
                    let gives = maker.gives.iter().map(|g| g[o]).collect();
                    let needs = made.0.needs.iter().map(|g| g[0]).collect();
                    self.edge((maker.var, gives), (made.0.var, needs), self.active[v.0 as usize]);
                }
                values[v.0 as usize] = Some(made);
            }
        }
        let budget = self.asked.budget.unwrap_or(u64::MAX >> 3);
        let found = within(&self.problem, budget);
        self.done(&found, &nodes, &values)
    }

    /// True for what has a variable of its own: several ops use it, or it is a result.
    fn is_shared(&self, v: Value) -> bool {
        // What is summed over microbatches is reduced once per step: it stays as it is made.
        let shown = |r: &Port| r.value == v && !r.role.as_ref().is_some_and(|r| r.kind.is_summed());
        let asked = self.f.annotations.contains_key(&v);
        asked || self.uses[v.0 as usize].len() > 1 || self.f.results.iter().any(shown)
    }

    /// The variable of a node that depends on a parameter.
    fn node(&mut self, u: usize) -> Option<(Variable, std::rc::Rc<[Way]>)> {
        let n = &self.f.nodes[u];
        if !n.outs.iter().any(|o| self.weighted[o.0 as usize]) {
            return None;
        }
        let mut key = String::new();
        n.op.write(self.asked.mesh, &mut key);
        for v in n.ins.iter().chain(&n.outs) {
            let t = self.f.ty(*v);
            let i = v.0 as usize;
            let own = self.param[i] && !self.is_shared(*v);
            key +=
                &format!(" {:?}{:?}{}{own}{}", t.dtype, t.sizes(), self.active[i], self.trained[i]);
        }
        let known = self.alike.get(&key).cloned();
        let (all, costs) = known.unwrap_or_else(|| {
            let all = ways(self.asked.mesh, self.f, u, &self.ops[u], &self.atoms);
            let costs = all.iter().map(|w| self.cost(u, w)).collect();
            let made: (std::rc::Rc<[Way]>, Vec<Cost>) = (all.into(), costs);
            self.alike.insert(key, made.clone());
            made
        });
        let var = self.problem.var(all.len(), self.units[u]);
        self.problem.table(&[var], costs);
        for (j, &v) in n.ins.iter().enumerate() {
            if self.param[v.0 as usize] && !self.is_shared(v) {
                let used: Vec<Type> = all.iter().map(|w| w.ins[j].clone()).collect();
                self.stored(v, var, &used, self.units[u]);
            }
        }
        let ids = |b: &mut Self, t: &[Type]| t.iter().map(|t| b.types.id(t)).collect();
        let gives = all.iter().map(|w| ids(self, &w.outs)).collect();
        let needs = all.iter().map(|w| w.ins.iter().map(|t| self.types.id(t)).collect()).collect();
        Some((Variable { var, gives, needs }, all))
    }

    /// What a way costs by itself.
    fn cost(&self, u: usize, w: &Way) -> Cost {
        let (n, mesh) = (&self.f.nodes[u], self.asked.mesh);
        let ins: SmallVec<[&Type; 4]> = w.ins.iter().collect();
        let own = price::op(self.asked.hardware, mesh, &n.op, &ins, &w.outs[0]);
        let active = n.outs.iter().any(|o| self.active[o.0 as usize]);
        // Backward does each product twice, once for each operand's gradient, and reads and writes as often.
        let times = if self.asked.trains && active { 3 } else { 1 };
        let kept: usize = match self.asked.trains && active && !n.op.def().is_view() {
            true => w.outs.iter().map(|t| t.local_bytes(mesh)).sum(),
            false => 0,
        };
        Cost { time: own * times, memory: kept as u64 }
    }

    /// What a parameter costs that is used in this layout, stored in each of [`STORED`].
    fn parameter(&self, v: Value, used: &Type) -> [Cost; STORED.len()] {
        let (mesh, hw) = (self.asked.mesh, self.asked.hardware);
        let held = used.local_bytes(mesh) as u64;
        let over = used.replicated;
        let trains = self.asked.trains && self.trained[v.0 as usize];
        let elements = held / used.dtype.bytes() as u64;
        // f32: the gradient, two moments, and a master copy where the parameter is of 16 bits.
        let (state, grads) = match (trains, used.dtype) {
            (false, _) => (0, 0),
            (true, DType::F32) => (elements * 8, elements * 4),
            (true, _) => (elements * 12, elements * 4),
        };
        let never = Cost::NEVER;
        let whole = |time| Cost { time, memory: held + state + grads };
        if over.is_empty() {
            return [never, whole(0), never];
        }
        let of = |dtype, sum: bool| {
            let mut t = Type { dtype, ..used.clone() };
            (t.replicated, t.sum) = (AtomSet::EMPTY, if sum { over } else { AtomSet::EMPTY });
            t
        };
        let part = of(DType::F32, true);
        let share = |time: u64| time / self.asked.microbatches as u64;
        let all: Op = AllReduce { axes: over }.into();
        let sum =
            if trains { price::op(hw, mesh, &all, &[&part], &of(DType::F32, false)) } else { 0 };
        let plain = whole(share(sum));
        // In pieces of the first dim that is cut evenly.
        let ways = mesh.ways(over);
        let even = |d: &usize| used.dims[*d].size % (used.pieces(mesh, *d) * ways) == 0;
        let Some(dim) = (0..used.rank()).find(even) else { return [never, plain, never] };
        let atoms = AtomList::collect(used.dims[dim].atoms.iter().chain(over.iter()));
        let Some(atoms) = atoms else { return [never, plain, never] };
        let piece = |dtype| {
            let mut t = of(dtype, false);
            t.dims[dim].atoms = atoms;
            t
        };
        let gather: Op = AllGather { axes: over, dim }.into();
        let gathered = price::op(hw, mesh, &gather, &[&piece(used.dtype)], used);
        let scatter: Op = ReduceScatter { axes: over, dim }.into();
        let scattered = match trains {
            true => price::op(hw, mesh, &scatter, &[&part], &piece(DType::F32)),
            false => 0,
        };
        let ways = ways as u64;
        let once = Cost { time: share(gathered + scattered), memory: held + grads + state / ways };
        let times = if trains { 2 } else { 1 };
        let each =
            Cost { time: times * gathered + scattered, memory: (held + grads + state) / ways };
        [if trains { once } else { never }, plain, each]
    }

    /// How a parameter is stored, a variable beside that of its use.
    fn stored(&mut self, v: Value, used: Var, layouts: &[Type], unit: usize) {
        let costs: Vec<Cost> = layouts.iter().flat_map(|t| self.parameter(v, t)).collect();
        let var = self.problem.var(STORED.len(), unit);
        self.problem.table(&[used, var], costs);
        self.zero[v.0 as usize] = Some(var);
    }

    /// The variable of a value: where it lies between the op that makes it and those that use it.
    fn value(&mut self, v: Value) -> (Variable, Vec<Type>) {
        let i = v.0 as usize;
        let result = self.f.results.iter().any(|r| r.value == v);
        let mut all = vec![];
        // What is asked for is there; what else may split the value splits its open dims.
        let asked = self.f.annotations.get(&v);
        let plain = self.asked_for(v);
        let open = |d: usize| asked.is_none_or(|a| a.dims[d].open);
        let free: Vec<Atom> =
            self.atoms.iter().copied().filter(|&a| !plain.sharded().has(a)).collect();
        let may_spread = !result && (self.active[i] || self.param[i]);
        layouts(self.asked.mesh, &free, may_spread, &open, plain, &mut |t| all.push(t));
        let first = self.uses[i].first().map_or(0, |u| self.units[u.0 as usize]);
        let makers = self.f.nodes.iter().position(|n| n.outs.contains(&v));
        let var = self.problem.var(all.len(), makers.map_or(first, |u| self.units[u]));
        if self.param[i] {
            self.stored(v, var, &all, first);
        }
        let ids: Vec<u32> = all.iter().map(|t| self.types.id(t)).collect();
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
        nodes: &[Option<(Variable, std::rc::Rc<[Way]>)>],
        values: &[Option<(Variable, Vec<Type>)>],
    ) {
        let f = self.f;
        let makers = |v: Value| f.nodes[..u].iter().rposition(|n| n.outs.contains(&v));
        let mut joined: Vec<(Var, Vec<u32>, usize, bool)> = vec![];
        for (j, &v) in f.nodes[u].ins.iter().enumerate() {
            let i = v.0 as usize;
            let active = self.active[i];
            if let Some((value, _)) = &values[i] {
                joined.push((value.var, value.gives.iter().map(|g| g[0]).collect(), j, active));
            } else if self.weighted[i] && !self.param[i] {
                let Some(m) = makers(v) else { continue };
                let Some((maker, _)) = &nodes[m] else { continue };
                let o = f.nodes[m].outs.iter().position(|&x| x == v).expect("its maker");
                joined.push((maker.var, maker.gives.iter().map(|g| g[o]).collect(), j, active));
            } else if !self.param[i] {
                // The same everywhere, but where it is asked for.
                let t = self.asked_for(v);
                let from = self.types.id(&t);
                let costs =
                    own.needs.iter().map(|n| self.moved(from, n[j], false)).collect::<Vec<_>>();
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
                costs.push(self.moved(a, b, active));
            }
        }
        let made = self.problem.table(&vars, costs);
        self.edges.insert(key, made);
    }

    /// Picoseconds of the collectives from a type to another, and of their mirrors.
    fn moved(&mut self, from: u32, to: u32, active: bool) -> Cost {
        if from == to {
            return Cost::ZERO;
        }
        if let Some(&known) = self.moves.get(&(from, to, active)) {
            return known;
        }
        let [a, b] = [from, to].map(|i| self.types.all[i as usize].clone());
        let cost = match self.resharder.path(self.asked.mesh, &a, &b) {
            None => Cost::NEVER,
            Some(steps) => Cost { time: self.time(&a, &steps, active), memory: 0 },
        };
        self.moves.insert((from, to, active), cost);
        cost
    }

    fn time(&self, from: &Type, steps: &[Step], active: bool) -> u64 {
        let (hw, mesh) = (self.asked.hardware, self.asked.mesh);
        let mut at = from;
        let mut sum = 0;
        for s in steps {
            let backward = active && self.asked.trains;
            if s.op.collective().is_some() {
                // Pieces are saved, and gathered again in backward.
                let times = if backward && s.op.gathers() { 2 } else { 1 };
                sum += times * price::op(hw, mesh, &s.op, &[at], &s.ty);
            }
            if backward {
                sum += mirrored(hw, mesh, &s.op, at, &s.ty);
            }
            at = &s.ty;
        }
        sum
    }

    fn done(
        self,
        found: &Choice,
        nodes: &[Option<(Variable, std::rc::Rc<[Way]>)>],
        values: &[Option<(Variable, Vec<Type>)>],
    ) -> (Chosen, Price) {
        let f = self.f;
        let same = |v: Value| self.asked_for(v);
        let mut own: Vec<Type> = (0..f.values.len()).map(|i| same(Value(i as u32))).collect();
        let mut stored: Vec<Option<Stored>> = vec![None; f.values.len()];
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
                let i = v.0 as usize;
                if self.weighted[i] && !self.is_shared(*v) {
                    own[i] = way.ins[j].clone();
                }
            }
        }
        for (i, v) in values.iter().enumerate() {
            if let Some((variable, all)) = v {
                own[i].clone_from(&all[found.ways[variable.var.index()]]);
            }
        }
        for a in &f.args {
            let i = a.value.0 as usize;
            if self.param[i] {
                let zero = STORED[self.zero[i].map_or(1, |v| found.ways[v.index()])];
                let over = if zero.splits { own[i].replicated } else { AtomSet::EMPTY };
                let mut ty = own[i].clone();
                ty.replicated = AtomSet::EMPTY;
                stored[i] = Some(Stored { ty, zero, over });
            }
        }
        let price = Price {
            time: found.cost.time,
            bound: found.bound,
            memory: found.cost.memory,
            fits: found.fits,
        };
        (Chosen { run, own, stored }, price)
    }
}

/// All layouts of a value over these atoms: split in a dim, evenly; invariant; replicated.
fn layouts(
    mesh: &Mesh,
    atoms: &[Atom],
    spread: bool,
    open: &impl Fn(usize) -> bool,
    t: Type,
    f: &mut impl FnMut(Type),
) {
    let Some((&a, rest)) = atoms.split_first() else { return f(t) };
    for d in (0..t.rank()).filter(|&d| open(d)) {
        let even = t.dims[d].size % (t.pieces(mesh, d) * mesh.size(a)) == 0;
        if let (true, Some(list)) = (even, t.dims[d].atoms.push(a)) {
            let mut split = t.clone();
            split.dims[d].atoms = list;
            layouts(mesh, rest, spread, open, split, f);
        }
    }
    layouts(mesh, rest, spread, open, t.clone(), f);
    if spread {
        let mut t = t;
        t.replicated = t.replicated.union(AtomSet::one(a));
        layouts(mesh, rest, spread, open, t, f);
    }
}

/// Picoseconds of the mirror of a step: from the cotangent of its result to that of its operand.
fn mirrored(hw: &Hardware, mesh: &Mesh, op: &Op, from: &Type, to: &Type) -> u64 {
    let (back, at) = (from.cotangent(), to.cotangent());
    let same = |axes: AtomSet| axes.within(to.replicated);
    let mirror: Op = match op {
        Op::FanOut(o) => AllReduce { axes: o.axes }.into(),
        Op::AllReduce(o) if same(o.axes) => AllReduce { axes: o.axes }.into(),
        Op::AllGather(o) if same(o.axes) => ReduceScatter { axes: o.axes, dim: o.dim }.into(),
        Op::ReduceScatter(o) => AllGather { axes: o.axes, dim: o.dim }.into(),
        Op::Slice(o) if !o.axes.meets(from.replicated) => {
            AllGather { axes: o.axes, dim: o.dim }.into()
        }
        Op::AllToAll(_) | Op::Exchange(_) => op.clone(),
        _nothing_travels => return 0,
    };
    price::op(hw, mesh, &mirror, &[&at], &back)
}
