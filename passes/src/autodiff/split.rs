//! Cuts the joint program into `forward` and `backward` of every stage, with explicit stashes and
//! edges between them.
//!
//! Before:  one function with F and B
//! After:   `@forward` with results `stash NAME`, `@backward` with arguments `stash NAME`; gradients
//!          and the loss are added to accumulators that live through all microbatches. What one
//!          stage makes and another uses is a result and an argument `edge NAME`. If asked for,
//!          `@backward` is cut again: what makes the gradient of the stage's input, and `@weight`
//! Assumes: phase Differentiated.  Leaves: phase Staged.
//!
//! Every node has one home: a stage and a function of it (F, B or W). Every value that crosses from F to B, or
//! from B to W, is saved or recomputed, as [`super::recompute`] says. What depends on no parameter
//! has no home: each stage makes its own. Nothing is assumed of what crosses a boundary: it is what
//! later stages use. Of a weight that is used several times each contribution to its gradient is added to the
//! accumulator where it is made, so that none waits for the others.

use super::differentiate::only_weights;
use super::recompute::{Program, Recompute, recomputed};
use crate::depends::weighted;
use shardc_ir::func::{
    Func, FuncKind, Name, Node, Part, Port, Role, RoleKind, Scope, Value, ValueMap,
};
use shardc_ir::maps::{HashMap, HashSet};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{Accumulate, Kind};
use shardc_ir::schedule::Schedule;
use shardc_ir::steps;
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;

/// A function to be: stage and kind.
type Home = (usize, FuncKind);

/// Cuts a joint program. If the schedule cuts a backward, gradients of parameters get a function of
/// their own. `keep`: parameters that forward gathers are saved for backward.
pub fn split(mesh: &Mesh, joint: &Func, policy: &Recompute, keep: bool, s: &Schedule) -> Vec<Func> {
    let apart = contributions(joint);
    let joint = apart.as_ref().unwrap_or(joint);
    let in_flight: Vec<usize> = (0..s.owner.len()).map(|i| s.in_flight(i)).collect();
    let program = Program { mesh, func: joint, in_flight: &in_flight };
    let mut again = recomputed(&program, policy);
    if keep {
        let weights = only_weights(joint);
        for (n, again) in joint.nodes.iter().zip(&mut again) {
            *again &= !(n.op.gathers() && weights[n.outs[0]]);
        }
    }
    cut(joint, again, in_flight.len(), true, s.splits_backward())
}

/// A joint program whose results are the contributions to a gradient, in place of their sum, if that is all the
/// sum is for; `None` if there is no such gradient. A sum stays if its terms are of other types, or if ranks
/// exchange them or it in each microbatch, since their exchanges may become one; so do those of 16-bit products
/// over the chunks of a loss, which are one kernel each.
fn contributions(joint: &Func) -> Option<Func> {
    let uses = joint.uses();
    let maker = |v: Value| uses.made_by(&joint.nodes, v);
    let terms = |v: Value| -> Option<&[Value]> {
        let n = maker(v).filter(|n| n.op.is_plain_sum() && uses.count(v) == 1)?;
        let converts = |n: &Node| n.op.facts().kind == Kind::Conversion;
        let exchanges = |v: Value| {
            let n = maker(v)?;
            let of = n.ins.first().filter(|_| converts(n)).and_then(|&v| maker(v));
            let n = of.unwrap_or(n);
            Some(n.op.collective().is_some())
        };
        let own = |&t: &Value| joint.ty(t) == joint.ty(v) && exchanges(t) == Some(false);
        let of_chunks =
            n.part == Part::Forward && n.ins.last().and_then(|&v| maker(v)).is_some_and(converts);
        (n.ins.iter().all(own) && !of_chunks).then_some(&n.ins[..])
    };
    let mut results = vec![];
    for r in &joint.results {
        let is_grad = r.role.as_ref().is_some_and(|r| r.kind == RoleKind::Grad);
        let mut open = vec![r.value];
        while let Some(value) = open.pop() {
            match terms(value).filter(|_| is_grad) {
                Some(terms) => open.extend(terms.iter().rev()),
                None => results.push(Port { value, role: r.role.clone() }),
            }
        }
    }
    (results.len() > joint.results.len()).then(|| {
        let mut f = joint.clone();
        f.results = results;
        f.drop_dead();
        f
    })
}

/// Cuts a program without a backward.
pub fn split_forward(f: &Func, stages: usize) -> Vec<Func> {
    let again = f.nodes.iter().map(|n| n.op.def().is_view()).collect();
    cut(f, again, stages, false, false)
}

/// Cuts a program. `again`: per node of forward, whether backward makes its results again; `trains`: sums over
/// microbatches are kept; `apart`: gradients of parameters get a function of their own.
pub(super) fn cut(
    j: &Func,
    again: Vec<bool>,
    stages: usize,
    trains: bool,
    apart: bool,
) -> Vec<Func> {
    let mut s = Split {
        j,
        makers: j.makers(),
        homes: homes(j, stages, apart),
        again,
        ports: j.args.iter().rev().map(|a| (a.value, a)).collect(),
        sums: BTreeMap::new(),
        out: BTreeMap::new(),
        map: j.per_value((None, Value(0))),
        made: j.per_value(Value(0)),
        free: HashMap::default(),
        crossing: vec![],
        trains,
    };
    let backward = (0..stages).rev().flat_map(|i| {
        let weight = apart.then_some((i, FuncKind::Weight));
        [Some((i, FuncKind::Backward)), weight].into_iter().flatten()
    });
    let forward = (0..stages).map(|i| (i, FuncKind::Forward));
    let order: Vec<Home> = forward.chain(backward.filter(|_| trains)).collect();
    for r in &j.results {
        let summed = r.role.as_ref().filter(|r| r.kind.is_summed());
        summed.into_iter().for_each(|role| s.sums.entry(r.value).or_default().push(role));
    }
    let mut contents = s.contents(stages);
    for &home in &order {
        s.function(home, contents.remove(&home).unwrap_or_default(), stages);
    }
    s.finish()
}

/// What of the joint program a function has, each in its order.
#[derive(Default)]
struct FuncContent<'a> {
    nodes: Vec<usize>,
    /// Arguments that these nodes read.
    args: Vec<&'a Port>,
    /// Results that it makes, but for gradients that its nodes make.
    results: Vec<&'a Port>,
}

/// Stage and part of every node; `None` for forward nodes that depend on no parameter, if there are
/// several stages.
fn homes(j: &Func, stages: usize, apart: bool) -> Vec<Option<Home>> {
    let (from, weighted) = (j.forward_nodes(), weighted(j));
    // Backward: what the gradient of something computed from data needs, and what another stage
    // needs, since its backward waits for backwards only.
    let mut needed = j.per_value(false);
    let mut input: Vec<bool> = j.nodes.iter().map(|n| !apart || n.part == Part::Backward).collect();
    let makers = j.makers();
    let stage = |n: usize| j.stage_of(&j.nodes[n]);
    for n in (from..j.nodes.len()).rev() {
        for v in &j.nodes[n].ins {
            let elsewhere = makers[v].is_some_and(|m| stage(m as usize) != stage(n));
            needed[v] |= elsewhere;
        }
        if input[n] || j.nodes[n].outs.iter().any(|o| needed[o]) {
            input[n] = true;
            j.nodes[n].ins.iter().for_each(|v| needed[v] = true);
        }
    }
    let home = |n: usize| {
        let node = &j.nodes[n];
        let stage = j.stage_of(node);
        match () {
            () if n >= from && input[n] => Some((stage, FuncKind::Backward)),
            () if n >= from => Some((stage, FuncKind::Weight)),
            () if stages == 1 || node.outs.iter().any(|o| weighted[o]) => {
                Some((stage, FuncKind::Forward))
            }
            () => None,
        }
    };
    (0..j.nodes.len()).map(home).collect()
}

struct Split<'a> {
    j: &'a Func,
    makers: ValueMap<Option<u32>>,
    homes: Vec<Option<Home>>,
    /// Arguments of the joint program, by value.
    ports: HashMap<Value, &'a Port>,
    /// By value: the sums over microbatches that it is added to, while its node is not copied.
    sums: BTreeMap<Value, Vec<&'a Role>>,
    /// Per forward node: backward makes its results again.
    again: Vec<bool>,
    out: BTreeMap<Home, Func>,
    /// Per value: the function that knows it, and as what.
    map: ValueMap<(Option<Home>, Value)>,
    /// Per value: what it is in its home.
    made: ValueMap<Value>,
    /// What a forward has of the values without a home.
    free: HashMap<(usize, Value), Value>,
    /// Values that another function uses, with their roles.
    crossing: Vec<(Home, Value, Role)>,
    /// Sums over microbatches are kept.
    trains: bool,
}

impl<'a> Split<'a> {
    /// What each function has: everything is looked at once, however many functions there are.
    fn contents(&self, stages: usize) -> HashMap<Home, FuncContent<'a>> {
        let j = self.j;
        let mut all: HashMap<Home, FuncContent> = HashMap::default();
        for (n, home) in self.homes.iter().enumerate() {
            if let Some(home) = home {
                all.entry(*home).or_default().nodes.push(n);
            }
        }
        let mut users: ValueMap<SmallVec<[Home; 2]>> = j.per_value(SmallVec::new());
        for (n, home) in j.nodes.iter().zip(&self.homes) {
            for v in home.iter().flat_map(|_| &n.ins) {
                let users = &mut users[v];
                if self.ports.contains_key(v) && !users.contains(&home.expect("it has one")) {
                    users.extend(*home);
                }
            }
        }
        for a in &j.args {
            for home in &users[a.value] {
                all.entry(*home).or_default().args.push(a);
            }
        }
        for r in &j.results {
            let maker = self.makers[r.value].and_then(|m| self.homes[m as usize]);
            let home = match (r.role.as_ref().map(|r| r.kind), maker) {
                (None, _) | (Some(RoleKind::Grad), Some(_)) => continue,
                // A gradient that no node makes: the last stage hands it on.
                (Some(RoleKind::Grad), None) => (stages - 1, FuncKind::Backward),
                (Some(_), made) => made.unwrap_or((stages - 1, FuncKind::Forward)),
            };
            all.entry(home).or_default().results.push(r);
        }
        all
    }

    fn function(&mut self, home: Home, content: FuncContent<'a>, stages: usize) {
        let FuncContent { nodes, args, results } = content;
        steps::add("split", nodes.len() + args.len() + results.len());
        let mut new = Func::of(home.1, home.0, stages);
        // What is saved or made again comes to what is its own.
        new.reserve(nodes.len() + nodes.len() / 2);
        self.out.insert(home, new);
        // Arguments in the order of the joint program's, then stashes, then accumulators.
        for a in args {
            self.argument(home, a.value, a.role.clone());
        }
        // By gradient: the result that it is so far.
        let mut totals: HashMap<&Role, usize> = HashMap::default();
        for n in nodes {
            let node = &self.j.nodes[n];
            let ins = node.ins.iter().map(|&v| self.provide(home, v, node.scope)).collect();
            self.copy(home, node, ins, node.scope);
            for o in &node.outs {
                self.made[o] = self.map[o].1;
                for role in self.sums.remove(o).unwrap_or_default() {
                    // The loss is accumulated behind the rest of forward.
                    if role.kind == RoleKind::Grad {
                        let v = self.map[o].1;
                        let own = accumulate(self.func(home), v, role, totals.get(role).copied());
                        totals.insert(role, own);
                    }
                }
            }
        }
        for r in results {
            let v = self.provide(home, r.value, Scope(0));
            match &r.role {
                Some(role) if role.kind.is_summed() && self.trains => {
                    accumulate(self.func(home), v, role, None);
                }
                role => {
                    let port = Port { value: v, role: role.clone() };
                    self.func(home).results.push(port);
                }
            }
        }
    }

    fn func(&mut self, home: Home) -> &mut Func {
        self.out.get_mut(&home).expect("functions are begun before they are filled")
    }

    fn argument(&mut self, home: Home, v: Value, role: Option<Role>) {
        let (ty, name) = (self.j.ty(v).clone(), self.j.name(v).clone());
        let new = self.func(home).arg(ty, name, role);
        self.map[v] = (Some(home), new);
    }

    /// The value in a function: already there, made again, saved by another function of the stage,
    /// or received. What is made again stands in the scope of its first user, or in its own if that
    /// is of another layer. What makes it comes first; without recursion, since a run of layers, or
    /// a chain of views in a text, may be long.
    fn provide(&mut self, home: Home, v: Value, scope: Scope) -> Value {
        let mut open: SmallVec<[Value; 8]> = smallvec![v];
        while let Some(&v) = open.last() {
            if self.known(home, v) {
                open.pop();
                continue;
            }
            let Some(n) = self.made_again(home, v) else {
                self.taken(home, v);
                continue;
            };
            let node = &self.j.nodes[n];
            if let Some(&x) = node.ins.iter().find(|&&x| !self.known(home, x)) {
                open.push(x);
                continue;
            }
            let ins = node.ins.iter().map(|x| self.map[x].1).collect();
            let layer = |s: Scope| self.j.scope_info(s).layer;
            let own = layer(node.scope).is_some() && layer(node.scope) != layer(scope);
            self.copy(home, node, ins, if own { node.scope } else { scope });
            if home.1 == FuncKind::Forward {
                for o in &node.outs {
                    self.free.insert((home.0, *o), self.map[o].1);
                }
            }
        }
        self.map[v].1
    }

    fn known(&self, home: Home, v: Value) -> bool {
        self.map[v].0 == Some(home)
    }

    /// The node that a function repeats to have the value.
    fn made_again(&self, home: Home, v: Value) -> Option<usize> {
        let maker = self.makers[v]? as usize;
        let again = match self.homes[maker] {
            None => {
                let kept = home.1 != FuncKind::Forward && self.free.contains_key(&(home.0, v));
                !kept || self.again[maker]
            }
            Some((_, FuncKind::Forward)) => self.again[maker],
            Some(_) => {
                let op = &self.j.nodes[maker].op;
                op.def().is_view() || op.gathers()
            }
        };
        again.then_some(maker)
    }

    /// Takes the value as an argument: one of the whole program, a stash or an edge.
    fn taken(&mut self, home: Home, v: Value) {
        let Some(maker) = self.makers[v] else {
            let role = self.ports.get(&v).and_then(|a| a.role.clone());
            self.argument(home, v, role);
            return;
        };
        let from = self.homes[maker as usize].unwrap_or((home.0, FuncKind::Forward));
        let text = self.j.name(v).to_string();
        assert!(from != home && from.1 <= home.1, "{text} is used before it is made");
        let kind = if from.0 == home.0 { RoleKind::Stash } else { RoleKind::Edge };
        // What every stage makes for itself is each stage's own stash.
        let shared = self.homes[maker as usize].is_none();
        let name =
            if shared { format!("{} of stage {}", &text[1..], home.0) } else { text[1..].into() };
        let role = Role::new(kind, name);
        self.crossing.push((from, v, role.clone()));
        self.argument(home, v, Some(role));
    }

    fn copy(&mut self, home: Home, n: &Node, ins: SmallVec<[Value; 4]>, scope: Scope) {
        let mut outs: SmallVec<[Value; 2]> = SmallVec::new();
        for &o in &n.outs {
            let (ty, name) = (self.j.ty(o).clone(), self.j.name(o).clone());
            let new = self.func(home).value(ty, name);
            self.map[o] = (Some(home), new);
            outs.push(new);
        }
        // A function has the scopes of its own nodes alone.
        let path = &self.j.scope_info(scope).path;
        let scope = self.func(home).scope(path);
        let (note, kept) = (n.note.clone(), n.kept);
        let node = Node { note, kept, ..Node::new(n.op.clone(), &ins, &outs, scope) };
        self.func(home).nodes.push(node);
    }

    /// Adds what crosses to the results, and drops what nobody uses.
    fn finish(self) -> Vec<Func> {
        let Split { j, mut out, made, free, homes, makers, mut crossing, .. } = self;
        // By kind, and what belongs to no layer first, so that layers look alike.
        crossing.sort_by_key(|(home, v, r)| (*home, r.kind, j.name(*v).layer.is_some()));
        let mut known: HashSet<(Home, Value, Role)> = HashSet::default();
        for (home, v, role) in crossing {
            let has_home = makers[v].is_some_and(|m| homes[m as usize].is_some());
            let value = if has_home { made[v] } else { free[&(home.0, v)] };
            let f = out.get_mut(&home).expect("values come from functions that are there");
            if known.insert((home, value, role.clone())) {
                f.results.push(Port { value, role: Some(role) });
            }
        }
        for (home, f) in &mut out {
            f.drop_dead();
            if home.1 != FuncKind::Forward {
                let order =
                    |p: &Port| (p.role.as_ref().map(|r| r.kind), f.name(p.value).layer.is_some());
                let mut args = f.args.clone();
                args.sort_by_key(order);
                f.args = args;
            }
            drop_unused_args(f);
        }
        out.into_values().collect()
    }
}

/// Adds a value to the accumulator of its role, an argument that the result replaces, or to the result that this is
/// so far; says which result it is.
fn accumulate(f: &mut Func, v: Value, role: &Role, so_far: Option<usize>) -> usize {
    let (ty, name) = (f.ty(v).clone(), f.name(v).clone());
    let named = |end: &str| Name { hint: name.hint + end, dup: 0, ..name.clone() };
    let before = match so_far {
        Some(i) => f.results[i].value,
        None => f.arg(ty.clone(), named("_acc"), Some(role.clone())),
    };
    let sum = f.value(ty, named("_total"));
    let scope =
        f.nodes.iter().rev().find(|n| n.outs.contains(&v)).map(|n| n.scope).unwrap_or_default();
    f.nodes.push(Node::new(Accumulate {}, &[before, v], &[sum], scope));
    let own = so_far.unwrap_or(f.results.len());
    match f.results.get_mut(own) {
        Some(result) => result.value = sum,
        None => f.results.push(Port { value: sum, role: Some(role.clone()) }),
    }
    own
}

/// Removes arguments that nothing reads.
pub(crate) fn drop_unused_args(f: &mut Func) {
    let read = f.read();
    f.args.retain(|a| read[a.value]);
}
