//! A rule as the ranks of a mesh run it for one parameter.

use super::{kept, kind, state};
use crate::shard::auto::Asked;
use crate::shard::partition::{How, partition};
use crate::zero::{Accumulate, Zero};
use shardc_ir::func::{Func, FuncKind, Node, Port, Role, RoleKind, Scope, Value, ValueMap};
use shardc_ir::hardware::Hardware;
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::Scale;
use shardc_ir::price;
use shardc_ir::rule::Dims;
use shardc_ir::text::update::Update;
use shardc_ir::types::{AtomList, Type};

/// Every rank makes what matrix products make.
pub(super) fn gathered(mesh: &Mesh, hw: &Hardware, u: &Update, stored: &Type) -> Func {
    let f = u.func(&stored.sizes()).expect("it was checked");
    let is_whole = whole(&f, usize::from(u.stack));
    on_ranks(mesh, hw, f, u, stored, &is_whole)
}

/// A rule's function as ranks run it; arguments without a role lie as the parameter does.
pub(super) fn on_ranks(
    mesh: &Mesh,
    hw: &Hardware,
    mut whole: Func,
    u: &Update,
    stored: &Type,
    is_whole: &ValueMap<bool>,
) -> Func {
    lay_out(mesh, &mut whole, u, stored, is_whole);
    let roles: Vec<Option<Role>> = whole.args.iter().map(|a| a.role.clone()).collect();
    whole.args.iter_mut().chain(&mut whole.results).for_each(|p| p.role = None);
    let prices =
        Asked { mesh, hardware: hw, trains: false, states: 0, microbatches: 1, budget: None };
    let zero = Zero::of(0, Accumulate::None, 1);
    let how = How::Asked { zero, grid: AtomSet::EMPTY, prices };
    let mut func = partition(mesh, &whole, &|_| true, &|_| false, how).forward;
    func.args.iter_mut().zip(roles).for_each(|(a, role)| a.role = role);
    write_last(&mut func);
    func.kind = FuncKind::OptimizerStep;
    func
}

/// Picoseconds of all that a rank does.
pub(super) fn price(mesh: &Mesh, hw: &Hardware, f: &Func) -> u64 {
    let one = |n: &Node| {
        let ins: Vec<&Type> = n.ins.iter().map(|&v| f.ty(v)).collect();
        n.outs.first().map_or(0, |&o| price::op(hw, mesh, &n.op, &ins, f.ty(o)))
    };
    f.nodes.iter().map(one).fold(0, u64::saturating_add)
}

/// The value whose memory this one is seen in.
fn seen(f: &Func, mut v: Value) -> Value {
    while let Some(n) = f.nodes.iter().find(|n| n.outs.contains(&v) && n.op.def().is_view()) {
        v = n.ins[0];
    }
    v
}

/// Lets no node read what a result was before, or a view of it, behind the node that makes the result, which is
/// written over it: that goes to the end, or where others need it a copy does.
fn write_last(f: &mut Func) {
    let is_old = |a: &&Port| matches!(kind(a), Some(RoleKind::Param | RoleKind::State(_)));
    let olds: Vec<Value> = f.args.iter().filter(is_old).map(|a| a.value).collect();
    for (k, &old) in olds.iter().enumerate() {
        let new = f.results[k].value;
        let of = seen(f, new);
        // The old value of another one.
        if of != old && f.args.iter().any(|a| a.value == of) {
            let made = f.nodes.iter().position(|n| n.outs.contains(&new));
            f.results[k].value = copied(f, new, made.map_or(0, |at| at + 1));
        }
    }
    // Two results are not one memory.
    for k in 1..olds.len() {
        let new = f.results[k].value;
        if f.results[..k].iter().any(|r| seen(f, r.value) == seen(f, new)) {
            f.results[k].value = copied(f, new, f.nodes.len());
        }
    }
    let mut moved = vec![false; olds.len()];
    loop {
        let early = |k: usize| {
            let new = f.results[k].value;
            let first = seen(f, new);
            let at = f.nodes.iter().position(|n| n.outs.contains(&first))?;
            let reads = |n: &Node| n.ins.iter().any(|&v| seen(f, v) == olds[k]);
            f.nodes[at + 1..].iter().any(reads).then_some((k, at, new))
        };
        let Some((k, at, new)) = (0..olds.len()).find_map(early) else { return };
        let read = f.nodes.iter().any(|n| n.ins.contains(&new));
        if read || moved[k] || !f.nodes[at].outs.contains(&new) {
            f.results[k].value = copied(f, new, f.nodes.len());
        } else {
            let node = f.nodes.remove(at);
            f.nodes.push(node);
            moved[k] = true;
        }
    }
}

/// A copy of a value, which the node at this place makes.
fn copied(f: &mut Func, v: Value, at: usize) -> Value {
    let (ty, name) = (f.ty(v).clone(), f.name(v).clone());
    let copy = f.value(ty, name);
    f.nodes.insert(at, Node::new(Scale { by: 1.0 }, &[v], &[copy], Scope(0)));
    copy
}

/// What of values that ranks have whole stays in pieces: their first dims, which all products see alike, and of a dim
/// that is rows of heads one behind the other whole heads.
struct Batch {
    dims: ValueMap<usize>,
    heads: ValueMap<usize>,
}

/// How many heads a reshape makes of a dim, or joins to one: `(hn)m->hnm` of the first dims behind a stack's.
fn heads_of(f: &Func, n: &Node, first: usize) -> Option<(usize, bool)> {
    let ranks: Vec<usize> = n.ins.iter().map(|&v| f.ty(v).rank()).collect();
    let rule = n.op.def().rule(&ranks).into_owned();
    let ([ins], [outs]) = (&rule.ins[..], &rule.outs[..]) else { return None };
    let pair = |joined: &Dims, apart: &Dims| {
        let &[head, _] = joined.get(first)?.letters() else { return None };
        (apart.get(first)?.single() == Some(head)).then_some(())
    };
    let size = |v: Value| f.ty(v).dims[first].size;
    let split = pair(ins, outs).map(|()| (size(n.outs[0]), true));
    split.or_else(|| pair(outs, ins).map(|()| (size(n.ins[0]), false)))
}

impl Batch {
    fn of(f: &Func, first: usize) -> Batch {
        let (mut dims, mut heads) = (f.per_value(first), f.per_value(1));
        let same = |n: &Node| match (&n.ins[..], &n.outs[..]) {
            (&[x], &[y]) if f.ty(x).sizes() == f.ty(y).sizes() => Some((x, y)),
            _other => None,
        };
        for n in &f.nodes {
            match heads_of(f, n, first) {
                Some((h, true)) => (dims[n.outs[0]], heads[n.ins[0]]) = (first + 1, h),
                Some((h, false)) => heads[n.outs[0]] = h,
                None => {
                    if let Some((x, y)) = same(n) {
                        heads[y] = heads[x];
                    }
                    let ranks: Vec<usize> = n.ins.iter().map(|&v| f.ty(v).rank()).collect();
                    let rule = n.op.def().rule(&ranks).into_owned();
                    for (&o, out) in n.outs.iter().zip(&rule.outs) {
                        let of = |(v, own): (&Value, &Dims)| {
                            let lead = dims[*v];
                            let kept = own.get(..lead).is_some_and(|l| out.get(..lead) == Some(l));
                            kept.then_some(lead)
                        };
                        let most = n.ins.iter().zip(&rule.ins).filter_map(of).max();
                        dims[o] = most.unwrap_or(first).max(first);
                    }
                }
            }
        }
        for (x, y) in f.nodes.iter().rev().filter_map(same) {
            heads[x] = heads[x].max(heads[y]);
        }
        Batch { dims, heads }
    }
}

/// The first atoms of a list, as many as cut a dim of this size evenly.
fn evenly(mesh: &Mesh, list: AtomList, size: usize) -> AtomList {
    let ways = |n: &usize| list.take(*n).iter().map(|a| mesh.size(a)).product::<usize>();
    let most = (0..=list.len()).rev().find(|n| size.is_multiple_of(ways(n)));
    list.take(most.unwrap_or(0))
}

/// Says how the values of a rule lie: arguments and results as they are stored, what matrix
/// products read and what is made of it alone whole but for what they all see alike, all else in pieces.
fn lay_out(mesh: &Mesh, f: &mut Func, u: &Update, stored: &Type, is_whole: &ValueMap<bool>) {
    let first = usize::from(u.stack);
    let batch = Batch::of(f, first);
    let mut states = kept(u, stored.rank()).into_iter();
    let mut fixed: ValueMap<Option<Type>> = f.per_value(None);
    for (a, r) in f.args.iter().map(|a| (a.value, kind(a))) {
        fixed[a] = match r {
            Some(RoleKind::Param | RoleKind::Grad) => Some(stored.clone()),
            Some(RoleKind::State(_)) => states.next().map(|k| state(&k, stored)),
            Some(_scalar) => None,
            // What owners gave back.
            None => Some(stored.clone()),
        };
    }
    let outputs =
        f.args.iter().filter(|a| matches!(kind(a), Some(RoleKind::Param | RoleKind::State(_))));
    let ends: Vec<(Value, Value)> =
        outputs.zip(&f.results).map(|(a, r)| (r.value, a.value)).collect();
    for a in &f.args {
        if let Some(ty) = &fixed[a.value] {
            f.values[a.value].ty.dims.clone_from(&ty.dims);
        }
    }
    for i in 0..f.nodes.len() {
        let n = f.nodes[i].clone();
        let ranks: Vec<usize> = n.ins.iter().map(|&v| f.ty(v).rank()).collect();
        let rule = n.op.def().rule(&ranks).into_owned();
        let heads = heads_of(f, &n, first);
        for (k, &o) in n.outs.iter().enumerate() {
            for (d, group) in rule.outs[k].iter().enumerate() {
                if let (Some((h, _)), true) = (heads, d == first) {
                    let list = f.ty(n.ins[0]).dims[first].atoms;
                    f.values[o].ty.dims[d].atoms = evenly(mesh, list, h);
                    continue;
                }
                let of = n.ins.iter().zip(&rule.ins).filter_map(|(v, dims)| {
                    let at = dims.iter().position(|g| g == group)?;
                    Some(f.ty(*v).dims[at].atoms)
                });
                let atoms = of.into_iter().find(|a| !a.is_empty());
                let atoms = atoms.unwrap_or(AtomList::EMPTY);
                let atoms = match is_whole[o] {
                    false => atoms,
                    true if d < first => atoms,
                    true if d < batch.dims[o] => evenly(mesh, atoms, f.ty(o).dims[d].size),
                    true if d == first => match batch.heads[o] {
                        1 => AtomList::EMPTY,
                        h => evenly(mesh, atoms, h),
                    },
                    true => AtomList::EMPTY,
                };
                f.values[o].ty.dims[d].atoms = atoms;
            }
        }
    }
    for (new, old) in ends {
        f.values[new].ty.dims = f.ty(old).dims.clone();
    }
}

/// Values that every rank has whole but for the first dims.
pub(super) fn whole(f: &Func, first: usize) -> ValueMap<bool> {
    let mut is = f.per_value(false);
    let makers = f.makers();
    let large = |v: &Value| f.ty(*v).rank() > first;
    loop {
        let before = is.clone();
        for n in f.nodes.iter().rev() {
            if n.op.facts().is_matrix_product() {
                n.ins.iter().for_each(|v| is[v] = true);
                n.outs.iter().for_each(|v| is[v] = true);
            }
        }
        // What is made of one value alone is gathered as that, where it is smallest, and of such places at the first.
        for v in f.values.ids().filter(|v| before[v]).collect::<Vec<_>>() {
            let bytes = |v: Value| f.ty(v).elements() * f.ty(v).dtype.bytes();
            let (mut chain, mut at) = (vec![], v);
            while let Some(u) = makers[at] {
                let own: Vec<Value> =
                    f.nodes[u as usize].ins.iter().copied().filter(large).collect();
                match &own[..] {
                    &[one] if makers[one].is_some() => at = one,
                    _several => break,
                }
                chain.push(at);
            }
            let least = chain.iter().map(|&x| bytes(x)).min().unwrap_or(0);
            let at = chain.iter().rposition(|&x| bytes(x) == least && least <= bytes(v));
            chain[..at.map_or(0, |k| k + 1)].iter().for_each(|&x| is[x] = true);
        }
        for n in &f.nodes {
            let mut own = n.ins.iter().filter(|v| large(v)).peekable();
            if own.peek().is_some() && own.all(|v| is[v]) {
                n.outs.iter().for_each(|v| is[v] = true);
            }
        }
        if is == before {
            return is;
        }
    }
}
