//! Makes the program that every rank runs: places f and g and every other collective.
//!
//! Before:  `%h = dot[mk,kn->mn] %x, %w : f32[4,16@tp]`, `%x: f32[4,8]`
//! After:   `%x.f = fan_out[tp] %x : f32[4,8]~tp`, `%h = dot[mk,kn->mn] %x.f, %w : f32[4,16@tp]`
//! Assumes: phase Sharded.  Leaves: phase Ranked.
//!
//! Each op runs with its loops split over some atoms (`orders`). That fixes the layout it needs
//! of each operand and the layout it gives; the difference is a shortest path of collectives, shared
//! by all uses that need the same. Parameters change layout at step scope, before the microbatches.

mod orders;
mod params;

pub(crate) use params::step_scope;

use super::auto::{Asked, Choices, Price, choose};
use super::defer::defer;
use super::factors::Factors;
use super::moves::Moves;
use super::reshard::Resharder;
use super::ways::{Chosen, Execution, Stored};
use crate::depends::active;
use crate::zero::{Zero, zero_axes};
use orders::Orders;
use shardc_ir::alike::Alike;
use shardc_ir::func::{Func, FuncKind, Node, ParamLayout, RoleKind, Scope, Value, ValueMap};
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::Op;
use shardc_ir::types::Type;
use smallvec::SmallVec;
use std::borrow::Cow;

/// The forward program of a microbatch, and what must be done to parameters before it.
pub struct Partitioned {
    pub forward: Func,
    pub params: Vec<ParamLayout>,
    /// Of what was chosen, and from what it was.
    pub price: Option<Price>,
    pub choices: Option<Choices>,
}

/// Partitions the one function of a module of phase Sharded. What ranks of `grid` use of a parameter
/// alike is stored in pieces over it, and gathered where it is used.
/// A parameter of 16 bits that is `trained` is stored as an f32 master copy, of which it is a cast: the
/// optimizer's moves are smaller than its last digit. The cast is the first thing done, so that what is
/// gathered has 2 bytes.
pub fn partition(
    mesh: &Mesh,
    src: &Func,
    frozen: &dyn Fn(&str) -> bool,
    trained: &dyn Fn(&str) -> bool,
    how: How,
) -> Partitioned {
    let is_param = params(src);
    let ops = Factors::of(src);
    let active = active(src, frozen);
    let mut resharder = Resharder::default();
    let (chosen, grid, price, choices) = match how {
        How::Asked { zero, grid, prices } => {
            let on_grid = !grid.is_empty();
            let orders = Orders { mesh, f: src, is_param: &is_param, active: &active, on_grid };
            let mut moves = Moves::new(mesh, prices.hardware, prices.trains);
            let mut chosen = as_asked(&orders, &ops, zero, &mut moves);
            if !on_grid && defer(&prices, src, &ops, &active, moves, &mut chosen) {
                spread(mesh, src, &ops, &mut chosen.run, &is_param, &active);
            }
            (chosen, grid, None, None)
        }
        How::Auto(asked) => {
            resharder = Resharder::new(asked.hardware);
            let (chosen, price, choices) = choose(&asked, src, &ops, &active, trained);
            (chosen, AtomSet::EMPTY, Some(price), choices)
        }
    };
    let mut p = Partition {
        mesh,
        src,
        ops,
        chosen,
        out: src.like(FuncKind::Forward, 0, 1),
        now: src.per_value(None),
        made: src.per_value(vec![]),
        resharder,
        needs: ValueMap::default(),
        active,
        grid,
        pieces: src.per_value(false),
        whole: src.per_value(None),
        alike: Alike::default(),
    };
    // Collectives come between.
    p.out.reserve(src.nodes.len() + src.nodes.len() / 2);
    p.needs = p.all_needs();
    let params = p.arguments(frozen, trained);
    for i in 0..src.nodes.len() {
        p.node(i);
    }
    let makers = src.makers();
    for r in &src.results {
        let mut value = p.now[r.value].expect("results are computed");
        let shown = r.role.as_ref().is_some_and(|r| r.kind == RoleKind::Output);
        // A sum over microbatches that is shown, too: of each microbatch, and whole.
        if let Some(u) = makers[r.value].filter(|_| shown && p.stays_pending(r.value)) {
            let to = p.chosen.settled(r.value, p.out.ty(value));
            value = p.reshard(value, &to, u as usize);
        }
        p.out.results.push(shardc_ir::func::Port { value, role: r.role.clone() });
    }
    Partitioned { forward: p.out, params, price, choices }
}

/// Who says how ops run.
pub enum How<'a> {
    /// The layouts of values and parameters, with ZeRO and what ranks of a grid share.
    Asked { zero: Zero, grid: AtomSet, prices: Asked<'a> },
    /// The cheapest is chosen.
    Auto(Asked<'a>),
}

/// What the types of values say.
fn as_asked(orders: &Orders, ops: &Factors, zero: Zero, moves: &mut Moves) -> Chosen {
    let &Orders { mesh, f: src, is_param, active, .. } = orders;
    let mut run = orders.all(ops, moves);
    spread(mesh, src, ops, &mut run, is_param, active);
    let own: ValueMap<Type> = src.values.iter().map(|v| v.ty.clone()).collect();
    let over = if zero.splits { zero_axes(mesh) } else { AtomSet::EMPTY };
    let stored = |v: Value| is_param[v].then(|| Stored { ty: own[v].clone(), zero, over });
    Chosen { run, stored: own.ids().map(stored).collect(), own }
}

/// Lets ops run replicated over other atoms than they run over now.
fn spread(
    mesh: &Mesh,
    src: &Func,
    ops: &Factors,
    run: &mut [Execution],
    is_param: &ValueMap<bool>,
    active: &ValueMap<bool>,
) {
    let spread = replicated_mode(mesh, src, ops, run, is_param, active);
    run.iter_mut().zip(spread).for_each(|(e, s)| e.spread = s);
}

fn params(f: &Func) -> ValueMap<bool> {
    let mut is = f.per_value(false);
    for a in &f.args {
        is[a.value] = a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Param);
    }
    is
}

/// Ops that should run replicated (R) rather than invariant (I) over some atoms: where the result is
/// only used as R, and making the operands R is cheaper than fanning the result out. This is how KV
/// heads fewer than tp get the fan_out on their weight, once per step, and not on k and v.
fn replicated_mode(
    mesh: &Mesh,
    f: &Func,
    ops: &Factors,
    exec: &[Execution],
    is_param: &ValueMap<bool>,
    active: &ValueMap<bool>,
) -> Vec<AtomSet> {
    let mut mode = vec![AtomSet::EMPTY; f.nodes.len()];
    for a in mesh.all().iter() {
        let cuts = |u: usize| exec[u].atoms.has(a) || exec[u].pending().has(a);
        let part = |u: usize, j: usize| exec[u].parts.get(j).is_some_and(|p| p.has(a));
        let needs =
            |u: usize, j: usize| cuts(u) && !part(u, j) && !ops[u].holds(j, &exec[u].lists, a);
        // Values that may become R: every user needs them so, or may itself run so.
        let mut possible = f.per_value(true);
        let mut fanned = f.per_value(false);
        for r in &f.results {
            possible[r.value] = false;
        }
        for (u, n) in f.nodes.iter().enumerate().rev() {
            let may = !cuts(u) && n.outs.iter().all(|o| possible[o]);
            for (j, v) in n.ins.iter().enumerate() {
                fanned[v] |= needs(u, j);
                possible[v] &= needs(u, j) || may;
            }
        }
        if !fanned.iter().any(|&x| x) {
            continue;
        }
        // What it costs to have each value as R.
        let bytes = |v: Value| f.ty(v).local_bytes(mesh) as f64;
        let mut cost = f.per_value(0.0);
        let mut hoist = vec![f64::INFINITY; f.nodes.len()];
        for p in &f.args {
            cost[p.value] = if is_param[p.value] { bytes(p.value) * 1e-3 } else { 0.0 };
        }
        for (u, n) in f.nodes.iter().enumerate() {
            let operand = |v: &Value| {
                if !active[v] || (fanned[v] && !is_param[v]) { 0.0 } else { cost[v] }
            };
            if !cuts(u) && !n.ins.is_empty() {
                hoist[u] = n.ins.iter().map(operand).sum();
            }
            let own: f64 = n.outs.iter().map(|&o| bytes(o)).sum();
            for o in &n.outs {
                let may = possible[o];
                cost[o] = if may { own.min(hoist[u]) } else { own };
            }
        }
        // From the users back: run as R where all users are R and it pays.
        let mut all_r = f.per_value(true);
        let mut used = f.per_value(false);
        for r in &f.results {
            all_r[r.value] = false;
        }
        for (u, n) in f.nodes.iter().enumerate().rev() {
            let own: f64 = n.outs.iter().map(|&o| bytes(o)).sum();
            let wanted = n.outs.iter().all(|o| all_r[o] || !used[o]);
            let any = n.outs.iter().any(|o| used[o]);
            let live = n.outs.iter().any(|o| active[o]);
            if live && any && wanted && hoist[u] < own {
                mode[u] = mode[u].with(a);
            }
            for (j, v) in n.ins.iter().enumerate() {
                used[v] = true;
                all_r[v] &= needs(u, j) || mode[u].has(a);
            }
        }
    }
    mode
}

struct Partition<'a> {
    mesh: &'a Mesh,
    src: &'a Func,
    ops: Factors,
    chosen: Chosen,
    out: Func,
    /// The new value of each source value, in its own layout.
    now: ValueMap<Option<Value>>,
    /// The same in other layouts, as uses needed them.
    made: ValueMap<Vec<(Type, Value, Scope)>>,
    resharder: Resharder,
    /// The layouts that the users of each source value need, in program order.
    needs: ValueMap<SmallVec<[Type; 1]>>,
    active: ValueMap<bool>,
    grid: AtomSet,
    /// Parameters that are gathered where they are used.
    pieces: ValueMap<bool>,
    /// How such a one is gathered if its gradient is reduced at step scope: to this, in these steps.
    whole: ValueMap<Option<Type>>,
    /// Nodes of the source and what they became, which others do that are like them.
    alike: Alike<(usize, usize)>,
}

impl Partition<'_> {
    fn all_needs(&self) -> ValueMap<SmallVec<[Type; 1]>> {
        let mut needs: ValueMap<SmallVec<[Type; 1]>> = self.src.per_value(SmallVec::new());
        for (u, n) in self.src.nodes.iter().enumerate() {
            for (j, v) in n.ins.iter().enumerate() {
                let t = self.required(u, j);
                if !needs[v].contains(&t) {
                    needs[v].push(t);
                }
            }
        }
        needs
    }

    /// Fans a value out that has no gradient, for all users at once: it costs nothing, and layers
    /// that share it (positions, rotary tables) stay alike.
    fn fan_out_early(&mut self, src: Value, u: Option<usize>) {
        if self.active[src] {
            return;
        }
        let have = self.now[src].expect("just made");
        for want in self.needs[src].clone() {
            let only_fan_out = {
                let mut t = self.out.ty(have).clone();
                t.replicated = want.replicated;
                t == want && self.out.ty(have).replicated.within(want.replicated)
            };
            if only_fan_out && *self.out.ty(have) != want {
                let scope = u.map_or(Scope(0), |u| self.src.nodes[u].scope);
                let v = self.reshard_in(have, &want, scope);
                self.made[src].push((want, v, scope));
            }
        }
    }

    /// The type that node `u` needs of its operand `j`.
    fn required(&self, u: usize, j: usize) -> Type {
        self.chosen.run[u].required(self.src, &self.ops[u], u, j)
    }

    /// The operand in the layout that the node needs.
    fn operand(&mut self, u: usize, j: usize) -> Value {
        let src = self.src.nodes[u].ins[j];
        let have = self.now[src].expect("operands come first");
        let want = self.required(u, j);
        if *self.out.ty(have) == want {
            return have;
        }
        match self.whole[src].clone() {
            Some(whole) if whole != want => {
                let have = self.made(src, have, whole, u);
                self.made(src, have, want, u)
            }
            _ => self.made(src, have, want, u),
        }
    }

    /// A value in another layout, as another use of it had it or made of `have`.
    fn made(&mut self, src: Value, have: Value, want: Type, u: usize) -> Value {
        // A parameter is gathered again where another part of the model uses it.
        let scope = self.src.nodes[u].scope;
        let near = |s: Scope| !self.pieces[src] || s == scope;
        if let Some(m) = self.made[src].iter().find(|m| m.0 == want && near(m.2)) {
            return m.1;
        }
        let v = self.reshard(have, &want, u);
        self.made[src].push((want, v, scope));
        v
    }

    /// Appends the collectives from a value's type to another.
    fn reshard(&mut self, v: Value, to: &Type, u: usize) -> Value {
        self.reshard_in(v, to, self.src.nodes[u].scope)
    }

    fn reshard_in(&mut self, v: Value, to: &Type, scope: Scope) -> Value {
        let path = self.resharder.path(self.mesh, self.out.ty(v), to);
        let path = path.unwrap_or_else(|| panic!("partition: {:?} to {to:?}", self.out.ty(v)));
        let mut at = v;
        for s in path {
            let (suffix, note) = words(&s.op, self.out.ty(at));
            let mut name = self.out.name(v).clone();
            name.hint = format!("{}_{suffix}", name.hint).into();
            name.dup = 0;
            let new = self.out.value(s.ty, name);
            let node =
                Node { note: Some(Cow::Borrowed(note)), ..Node::new(s.op, &[at], &[new], scope) };
            self.out.nodes.push(node);
            at = new;
        }
        at
    }

    fn node(&mut self, u: usize) {
        let src = self.src;
        let n = &src.nodes[u];
        let ins: SmallVec<[Value; 4]> = (0..n.ins.len()).map(|j| self.operand(u, j)).collect();
        let (op, types) = self.run(u, &ins);
        let mut outs: SmallVec<[Value; 2]> = SmallVec::new();
        for (t, &o) in types.into_iter().zip(&n.outs) {
            let mut name = self.src.name(o).clone();
            if !t.partial().is_empty() && !self.stays_pending(o) {
                name.hint = name.hint + "_part";
            }
            outs.push(self.out.value(t, name));
        }
        self.out.nodes.push(Node {
            note: n.note.clone().or(op.layout().map(|_| Cow::Borrowed(CROSSES))),
            ..Node::new(op, &ins, &outs, n.scope)
        });
        for (&o, v) in n.outs.iter().zip(outs) {
            let mut at = v;
            if !self.stays_pending(o) {
                let to = self.chosen.settled(o, self.out.ty(v));
                at = self.finish(v, &to, o, u);
            }
            self.now[o] = Some(at);
            self.fan_out_early(o, Some(u));
        }
    }

    /// The op that a node runs as, and the types that it makes of these operands.
    fn run(&mut self, u: usize, ins: &[Value]) -> (Op, SmallVec<[Type; 2]>) {
        let (src, out, op, run) = (self.src, &self.out, &self.ops[u], &self.chosen.run[u]);
        let n = &src.nodes[u];
        let same =
            |f: &Func, a: &[Value], b: &[Value]| a.iter().zip(b).all(|(a, b)| f.ty(*a) == f.ty(*b));
        let kind = self.ops.kind(u).into();
        let known = self.alike.find(kind, |&(other, made)| {
            self.chosen.run[other] == *run
                && same(src, &src.nodes[other].outs, &n.outs)
                && same(out, &out.nodes[made].ins, ins)
        });
        if let Some(&(_, made)) = known {
            let types = out.nodes[made].outs.iter().map(|&o| out.ty(o).clone());
            return (run.op(n, op).into_owned(), types.collect());
        }
        let given: SmallVec<[&Type; 4]> = ins.iter().map(|&v| out.ty(v)).collect();
        let made = run.check(self.mesh, src, op, u, &given);
        let (op, types) = made.unwrap_or_else(|e| {
            let shown: Vec<_> =
                given.iter().map(|t| shardc_ir::text::type_text(self.mesh, t)).collect();
            panic!("partition: {:?} of ({}): {}; {}", n.op, shown.join(", "), e.message, e.help)
        });
        self.alike.add(kind, (u, out.nodes.len()));
        (op.into_owned(), types)
    }

    /// Brings a fresh result into its own layout; the last value takes the source's name.
    fn finish(&mut self, v: Value, to: &Type, src: Value, u: usize) -> Value {
        let before = self.out.nodes.len();
        let at = self.reshard(v, to, u);
        if self.out.nodes.len() > before {
            let name = self.src.name(src).clone();
            self.out.rename(at, name);
        }
        at
    }

    /// Sums over microbatches are reduced once per step.
    fn stays_pending(&self, v: Value) -> bool {
        self.src
            .results
            .iter()
            .any(|r| r.value == v && r.role.as_ref().is_some_and(|r| r.kind.is_summed()))
    }
}

/// Note of an exchange in the place of an op that shifts indices.
const CROSSES: &str = "only what crosses from piece to piece moves";

/// Suffix of the value and note of a collective that partition inserts.
fn words(op: &Op, from: &Type) -> (&'static str, &'static str) {
    match op.mnemonic() {
        "all_reduce" if !from.max.is_empty() => ("max", "largest of the ranks' parts"),
        "all_reduce" if !from.min.is_empty() => ("min", "smallest of the ranks' parts"),
        "fan_out" => ("f", "f: ranks use it differently from here"),
        "all_reduce" => ("sum", "g: sum of the ranks' parts"),
        "reduce_scatter" => ("piece", "each rank keeps its piece of the sum"),
        "all_gather" => ("all", "the op needs it whole"),
        "slice" => ("piece", "each rank goes on with its piece"),
        _ => ("moved", "another dim is split from here"),
    }
}
