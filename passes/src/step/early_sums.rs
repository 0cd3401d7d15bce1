//! Starts the sums of gradients over ranks within the last backward, beside whose work they go on: where data move
//! while ranks work.
//!
//! ```text
//! Before:  @backward(…):  %d_w_sum = accumulate %d_w_acc, %d_w : f32[4,8]+dp
//!                         return %d_w_sum grad "w"
//!          @optimizer_step(%d_w: f32[4,8]+dp grad "w", …):
//!                         %d_w.1 = all_reduce[dp] %d_w : f32[4,8]
//! After:   @backward(…):  as before
//!          @backward_last(…):
//!                         %d_w_sum = accumulate %d_w_acc, %d_w
//!                         %d_w.1 = all_reduce[dp] %d_w_sum
//!                         return %d_w.1 grad_sum "w"
//!          @optimizer_step(%d_w: f32[4,8] grad_sum "w", …)
//! ```
//! Assumes: phase Step, sums not combined.  Leaves: phase Step.
//!
//! With one microbatch the backward that there is starts them; with several, one of its own for the last microbatch
//! of its stage. What `@optimizer_step` does with a gradient must begin with a collective, which is what moves; further
//! ones stay. All sums of a rank of the pipeline stay but those of gradients that only its last call before
//! `@optimizer_step` makes, and all if others wait for something of that call, or for a gradient of the rank: so no
//! rank waits longer than before. (Of a tied table and a loss in chunks forward makes a part: its sum stays.) A sum
//! also stays if microbatches have exchanged the gradient already (ZeRO-2 and 3): `overlap` joins these calls. And
//! some stay if a step would need more memory for them.

use shardc_ir::func::{Func, FuncKind, Module, Node, Patch, Port, Role, RoleKind, Uses, Value};
use shardc_ir::maps::{HashMap, HashSet};
use shardc_ir::mesh::AtomSet;
use shardc_ir::ops::{Kind, Sends};
use shardc_ir::schedule::{ActionKind, Schedule};
use std::collections::BTreeMap;

/// What may stand in the place of functions, by their index.
pub(crate) type Replacements = BTreeMap<usize, Vec<Func>>;

/// The first collective of a gradient.
struct Sum {
    role: Role,
    /// In `@optimizer_step`: the argument, and the node that reads it.
    arg: Value,
    node: usize,
}

/// Parts of a function's nodes, of which the first have no sums started.
const PARTS: usize = 8;

/// How many of these parts start no sums, in the order in which it is tried.
const TRIES: [usize; 4] = [0, 1, 2, PARTS / 2];

/// By function, what stands in its place where sums are moved, but those of gradients that the first parts of their
/// function make: more of them stay in each try.
pub(crate) fn early_sums(m: &Module, s: &Schedule, tried: usize) -> Replacements {
    let mut others = Replacements::new();
    let Some(left) = TRIES.get(tried) else { return others };
    let ends_step = |f: &(usize, &Func)| f.1.kind == FuncKind::OptimizerStep;
    for (finish, end) in m.funcs.iter().enumerate().filter(ends_step) {
        let Some(maker) = ends(m, s, end.stage) else { continue };
        let alone = own_gradients(m, s, (finish, end.stage), maker);
        let own = &m.funcs[maker];
        let first = own.nodes.len() * left / PARTS;
        let made = FuncUses::of(own);
        let starts = |sum: &Sum| {
            alone.contains(&sum.role) && made.at(&sum.role).is_some_and(|at| at >= first)
        };
        let found: Vec<Sum> = sums(end).into_iter().filter(starts).collect();
        if found.is_empty() {
            continue;
        }
        let kind = own.kind.of_last().filter(|_| s.microbatches > 1).unwrap_or(own.kind);
        let (mut f, mut last) = (own.clone(), end.clone());
        (f.kind, f.name) = (kind, kind.numbered(own.stage, s.owner.len()));
        start(&mut f, end, &found);
        take(&mut last, &found);
        match s.microbatches {
            1 => others.extend([(maker, vec![f]), (finish, vec![last])]),
            _several => others.extend([(finish, vec![f, last])]),
        }
    }
    others
}

/// The function that a rank of the pipeline calls last before `@optimizer_step`.
fn ends(m: &Module, s: &Schedule, rank: usize) -> Option<usize> {
    let last = s.ranks.get(rank)?.last()?;
    let of = |kind| m.funcs.iter().position(|f| (f.kind, f.stage) == (kind, last.stage));
    match last.kind {
        ActionKind::Forward => None,
        ActionKind::Backward => of(FuncKind::Weight).or_else(|| of(FuncKind::Backward)),
        ActionKind::Input => of(FuncKind::Backward),
        ActionKind::Weight => of(FuncKind::Weight),
    }
}

/// The gradients that only this function of its rank makes; none if somebody waits for what it makes, or another rank
/// for a gradient of this one, of which `finish` is the end.
fn own_gradients(
    m: &Module,
    s: &Schedule,
    (finish, rank): (usize, usize),
    maker: usize,
) -> HashSet<Role> {
    let roles = |ports: &[Port], kind: RoleKind| -> HashSet<Role> {
        let roles = ports.iter().filter_map(|p| p.role.clone());
        roles.filter(|r| r.kind == kind).collect()
    };
    let taken = roles(&m.funcs[finish].args, RoleKind::Grad);
    let mut own = roles(&m.funcs[maker].results, RoleKind::Grad);
    let edges = roles(&m.funcs[maker].results, RoleKind::Edge);
    let mut waits = !edges.is_empty() || !own.is_subset(&taken);
    for (i, f) in m.funcs.iter().enumerate() {
        if i != maker && f.kind.is_looped() && s.owner.get(f.stage) == Some(&rank) {
            let made = roles(&f.results, RoleKind::Grad);
            waits |= !made.is_subset(&taken);
            own.retain(|r| !made.contains(r));
        }
    }
    own.retain(|_| !waits);
    own
}

/// The gradients of which `@optimizer_step` first makes a sum over ranks, each alone.
fn sums(f: &Func) -> Vec<Sum> {
    let uses = f.uses();
    let sums = |n: &Node| {
        let sends = n.op.collective().map(|c| c.sends());
        n.ins.len() == 1 && !n.kept && matches!(sends, Some(Sends::SumToAll | Sends::Share))
    };
    let one = |a: &Port| {
        let role = a.role.clone().filter(|r| r.kind == RoleKind::Grad)?;
        let &[only] = uses.of(a.value) else { return None };
        let node = only.at();
        sums(&f.nodes[node]).then_some(Sum { role, arg: a.value, node })
    };
    f.args.iter().filter_map(one).collect()
}

/// A function, and who makes and reads its values.
struct FuncUses<'a> {
    f: &'a Func,
    uses: Uses,
}

impl<'a> FuncUses<'a> {
    fn of(f: &'a Func) -> FuncUses<'a> {
        FuncUses { f, uses: f.uses() }
    }

    fn maker(&self, v: Value) -> Option<&'a Node> {
        self.uses.made_by(&self.f.nodes, v)
    }

    /// The node that makes a gradient, if it makes all of it: as its own result, of what has not been exchanged, and
    /// perhaps of what was added up before.
    fn at(&self, role: &Role) -> Option<usize> {
        let is = |p: &&Port| p.role.as_ref() == Some(role);
        let total = self.f.results.iter().find(is)?.value;
        self.maker(total).filter(|n| !n.op.def().is_view())?;
        let before = self.f.args.iter().find(is).map(|a| a.value);
        let sums: Vec<&Node> = match before {
            Some(_) => self.f.accumulations(&self.uses, total).collect(),
            None => vec![],
        };
        let adds = before.is_none_or(|v| sums.last().is_some_and(|n| n.ins[0] == v));
        let of_microbatch = sums.iter().flat_map(|n| &n.ins[1..]);
        let exchanged = of_microbatch.chain([&total]).any(|&v| {
            let carries = |n: &&Node| matches!(n.op.facts().kind, Kind::Conversion | Kind::Layout);
            let next = |n: &&Node| self.maker(n.ins[0]).filter(carries);
            let mut chain = std::iter::successors(self.maker(v).filter(carries), next);
            chain.any(|n| n.op.collective().is_some())
        });
        let whole = self.uses.count(total) == 1 && adds && !exchanged;
        self.uses.maker(total).filter(|_| whole)
    }
}

/// Makes the sums in the function that makes the gradients, of which those of a layer to all ranks are one call.
fn start(f: &mut Func, finish: &Func, sums: &[Sum]) {
    let makers = f.makers();
    // By call: the node behind which it is, and what is summed.
    let mut calls: Vec<(usize, Node)> = vec![];
    let mut of_layer: HashMap<(AtomSet, u32), usize> = HashMap::default();
    for sum in sums {
        let n = &finish.nodes[sum.node];
        let scope = finish.scope_info(n.scope);
        let is = |r: &&mut Port| r.role.as_ref() == Some(&sum.role);
        let Some(result) = f.results.iter_mut().find(is) else { continue };
        let total = result.value;
        let Some(at) = makers[total].map(|i| i as usize) else { continue };
        let (ty, name) = (finish.ty(n.outs[0]).clone(), f.name(total).clone());
        let out = f.value(ty, name);
        if let Some(r) = f.results.iter_mut().find(|r| r.value == total) {
            (r.value, r.role) = (out, Some(Role { kind: RoleKind::GradSum, ..sum.role.clone() }));
        }
        let to_all = n.op.collective().filter(|c| c.sends() == Sends::SumToAll);
        let key = to_all.zip(scope.layer).map(|(c, layer)| (c.atoms(), layer));
        if let Some(&known) = key.and_then(|k| of_layer.get(&k)) {
            let (last, call) = &mut calls[known];
            *last = at.max(*last);
            call.ins.push(total);
            call.outs.push(out);
            continue;
        }
        of_layer.extend(key.map(|k| (k, calls.len())));
        let scope = f.scope(&scope.path);
        let node = Node::new(n.op.clone(), &[total], &[out], scope);
        calls.push((at, Node { note: n.note.clone(), ..node }));
    }
    let mut patch = Patch::of(f);
    calls.into_iter().for_each(|(at, call)| patch.insert_after(at, call));
    patch.apply(f);
}

/// Takes the sums as arguments.
fn take(finish: &mut Func, sums: &[Sum]) {
    let mut patch = Patch::of(finish);
    for s in sums {
        let out = finish.nodes[s.node].outs[0];
        let ty = finish.ty(out).clone();
        finish.values[s.arg].ty = ty;
        patch.replace(out, s.arg);
        patch.erase(s.node);
        let own = finish.args.iter_mut().filter(|a| a.value == s.arg);
        own.for_each(|a| a.role = Some(Role { kind: RoleKind::GradSum, ..s.role.clone() }));
    }
    patch.apply(finish);
}
