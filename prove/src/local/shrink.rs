//! The same obligation on a small mesh at small sizes: every axis that it names has two or three ranks,
//! every letter as many pieces as before has axes, of one to three elements each.

use super::law;
use super::letters::{self, Sizes};
use super::{Fault, Obligation};
use crate::meaning;
use shardc_ir::mesh::{Atom, AtomInfo, AtomSet, Axis, Mesh};
use shardc_ir::ops::Op;
use shardc_ir::rule::{Group, Letter, Rule};
use shardc_ir::types::Type;
use std::collections::BTreeSet;

/// An obligation with its mesh.
pub struct Small {
    pub o: Obligation,
    pub mesh: Mesh,
}

/// Axes of which blocks of a ring are counted: these keep their sizes, as shifts are modulo them.
pub(crate) fn ring(op: &Op) -> AtomSet {
    match op {
        Op::ToVarying(k) => k.axes,
        Op::FromVarying(k) => k.axes,
        Op::Piece(k) => k.axes,
        Op::Permute(k) => k.axes,
        _other => AtomSet::EMPTY,
    }
}

/// Axes that an op names.
pub(crate) fn axes(op: &Op) -> AtomSet {
    match op {
        Op::FanOut(k) => k.axes,
        Op::AllReduce(k) => k.axes,
        Op::AllGather(k) => k.axes,
        Op::ReduceScatter(k) => k.axes,
        Op::Broadcast(k) => k.axes,
        Op::Reduce(k) => k.axes,
        Op::Slice(k) => k.axes,
        Op::Place(k) => k.axes,
        Op::AllToAll(k) => k.axes,
        Op::Exchange(k) => k.axes,
        Op::AllToAllV(k) => k.axes,
        Op::ToPartial(k) => k.axes,
        other => ring(other),
    }
}

/// True for an op with sizes that its letters do not tie, but for rotations.
pub(crate) fn is_tied(op: &Op) -> bool {
    if let Op::Exchange(k) = op {
        return k.start.0.is_some();
    }
    matches!(
        op,
        Op::Concat(_)
            | Op::Narrow(_)
            | Op::Widen(_)
            | Op::TopK(_)
            | Op::Route(_)
            | Op::Dispatch(_)
            | Op::Combine(_)
            | Op::RowDots(_)
            | Op::GroupedDot(_)
            | Op::GroupedDotT(_)
            | Op::GroupedOuter(_)
    )
}

/// A mesh with an axis for each atom; those that are not named have one rank.
pub fn mesh_of(sizes: impl Iterator<Item = usize>) -> Mesh {
    let mut m = Mesh::default();
    for (i, size) in sizes.enumerate() {
        m.axes.push(Axis { name: format!("a{i}"), size });
        m.atoms.push(AtomInfo { axis: i as u8, pre: 1, size });
    }
    m
}

/// All letters of an obligation, with the axes that cut them anywhere.
struct Plan {
    rule: Rule,
    /// In the order of appearance; the axes; whether a dim of several letters has it; whether it must be
    /// cut to single elements, since the axes of its dim go on with the next letter.
    letters: Vec<(Letter, AtomSet, bool, bool)>,
    sizes: Sizes,
}

/// First even sizes, then each letter in turn uneven.
///
/// # Errors
/// Says that sizes are not those of letters.
pub fn variants(o: &Obligation, mesh: &Mesh, ways: usize) -> Result<Vec<Small>, Fault> {
    let types = || o.ins.iter().chain(&o.outs).map(|h| &h.ty);
    let named = types().fold(axes(&o.op), |s, t| s.union(t.marked()));
    let kept = ring(&o.op);
    let size = |a: Atom| match (kept.has(a), named.has(a)) {
        (true, _) => mesh.size(a),
        (_, true) => ways,
        _unnamed => 1,
    };
    let small = mesh_of((0..mesh.atoms.len() as u8).map(|a| size(Atom(a))));
    let plan = plan(o, mesh)?;
    let odd = plan.letters.iter().filter(|l| !l.1.is_empty() && !l.2).map(|l| Some(l.0));
    let one =
        |odd: Option<Letter>| Small { o: resized(o, &plan, &small, odd), mesh: small.clone() };
    Ok(std::iter::once(None).chain(odd).map(one).collect())
}

fn plan(o: &Obligation, mesh: &Mesh) -> Result<Plan, Fault> {
    let ins: Vec<&Type> = o.ins.iter().map(|h| &h.ty).collect();
    let outs: Vec<&Type> = o.outs.iter().map(|h| &h.ty).collect();
    let rule = match &o.op {
        // Each dim for itself.
        Op::Fill(_) | Op::Literal(_) => Rule::elementwise(0, outs.len(), outs[0].rank()),
        Op::AllToAllV(_) => meaning::rule(&o.op, &ins).into_owned(),
        // The dim that is shifted may change its size.
        Op::Exchange(k) if k.start.0.is_some() => meaning::rule(&o.op, &ins).into_owned(),
        op if !axes(op).is_empty() => {
            let most = ins.iter().chain(&outs).map(|t| t.rank()).max().unwrap_or(0);
            let one = Rule::elementwise(1, 1, most);
            let [of, to] = [vec![&one.ins[0]; ins.len()], vec![&one.outs[0]; outs.len()]];
            Rule::of(&of, &to)
        }
        op => letters::rule(op, &ins, &outs)?,
    };
    let sizes = match axes(&o.op).is_empty() && !ins.is_empty() {
        true => letters::sizes(&o.op, &rule, &ins, &outs)?,
        false => Sizes::new(),
    };
    let mut letters: Vec<(Letter, AtomSet, bool, bool)> = vec![];
    let dims = rule.ins.iter().chain(&rule.outs).zip(ins.iter().chain(&outs));
    for (group, dim) in dims.flat_map(|(d, t)| d.iter().zip(&t.dims)) {
        let first = group.letters()[0];
        let cut = letters::split(mesh, group, &sizes, *dim)
            .unwrap_or_else(|_across| vec![(first, dim.atoms)]);
        for (i, &l) in group.letters().iter().enumerate() {
            let own = cut.iter().find(|c| c.0 == l).map_or(AtomSet::EMPTY, |c| c.1.set());
            let minor = |c: &(Letter, _)| group.letters()[i + 1..].contains(&c.0);
            let full = cut.iter().any(|c| minor(&(c.0, ())) && !c.1.is_empty());
            let joined = group.single().is_none();
            match letters.iter_mut().find(|x| x.0 == l) {
                Some(x) => *x = (l, x.1.union(own), x.2 || joined, x.3 || full),
                None => letters.push((l, own, joined, full)),
            }
        }
    }
    Ok(Plan { rule, letters, sizes })
}

/// The obligation at small sizes; of a letter with an odd piece the last is short.
fn resized(o: &Obligation, plan: &Plan, small: &Mesh, odd: Option<Letter>) -> Obligation {
    let most = small.atoms.iter().map(|a| a.size).max().unwrap_or(1);
    let mut sizes = Sizes::new();
    for (i, (l, cut, _, full)) in plan.letters.iter().enumerate() {
        let each = match odd == Some(*l) {
            true => 2,
            false if *full || plan.sizes.get(l) == Some(&1) => 1,
            false => [2, 1, 3][(i + most) % 3],
        };
        let pieces = if plan.sizes.get(l) == Some(&1) { 1 } else { small.ways(*cut) };
        sizes.insert(*l, each * pieces - usize::from(odd == Some(*l)));
    }
    let mut out = o.clone();
    tie(&mut out.op, plan, &mut sizes);
    for (l, n) in law::sizes_mut(&mut out.op) {
        *n = sizes.get(l).copied().unwrap_or(*n);
    }
    let of = |g: &Group| g.letters().iter().map(|l| sizes.get(l).copied().unwrap_or(1)).product();
    for (h, dims) in out.ins.iter_mut().zip(&plan.rule.ins) {
        h.ty.dims.iter_mut().zip(dims).for_each(|(d, g)| d.size = of(g));
    }
    for (h, dims) in out.outs.iter_mut().zip(&plan.rule.outs) {
        h.ty.dims.iter_mut().zip(dims).for_each(|(d, g)| d.size = of(g));
    }
    pieces(&mut out, small);
    out
}

/// Dims that change their size: a value has as much as a piece.
fn pieces(o: &mut Obligation, small: &Mesh) {
    let (dim, whole, ways) = match &mut o.op {
        Op::ToVarying(k) => (k.dim, &mut o.ins[0], small.ways(k.axes)),
        Op::Piece(k) => (k.dim, &mut o.ins[0], small.ways(k.axes)),
        Op::FromVarying(k) => (k.dim, &mut o.outs[0], small.ways(k.axes)),
        Op::Broadcast(k) => {
            k.from %= small.ways(k.axes);
            (k.dim, &mut o.ins[0], small.ways(k.axes))
        }
        Op::Reduce(k) => {
            k.to %= small.ways(k.axes);
            (k.dim, &mut o.outs[0], small.ways(k.axes))
        }
        _same => return,
    };
    if let Some(d) = whole.ty.dims.get_mut(dim) {
        d.size *= ways;
    }
}

/// Attributes and letters that depend on sizes of other letters.
fn tie(op: &mut Op, plan: &Plan, sizes: &mut Sizes) {
    let letter = |operand: usize, dim: Option<usize>| -> Option<Letter> {
        let dims = plan.rule.ins.iter().chain(&plan.rule.outs).nth(operand)?;
        dims.get(dim.unwrap_or(dims.len().wrapping_sub(1)))?.letters().last().copied()
    };
    let was = |l: Option<Letter>| l.and_then(|l| plan.sizes.get(&l)).copied().unwrap_or(0);
    let is = |sizes: &Sizes, l: Option<Letter>| l.and_then(|l| sizes.get(&l)).copied().unwrap_or(1);
    let set = |sizes: &mut Sizes, l: Option<Letter>, n: usize| {
        if let Some(l) = l {
            sizes.insert(l, n);
        }
    };
    let along = plan.rule.ins.first().and_then(|d| law::along(op, d.len()));
    match op {
        // What crosses may be more than a piece, and less.
        Op::Exchange(k) => k.start.0 = k.start.0.map(|s| s.clamp(-3, 3)),
        Op::Rope(_) => {
            let [d, r] = [letter(0, None), letter(1, None)];
            let rest = usize::from(was(d) > 2 * was(r));
            set(sizes, d, 2 * is(sizes, r) + rest);
        }
        Op::Narrow(k) => {
            let [d, p] = [0, 1].map(|i| letter(i, along));
            let rest = law::end(k.start, was(p), k.step.0).is_some_and(|end| was(d) > end);
            (k.start, k.step.0) = (k.start.min(1), k.step.0.min(2));
            let end = law::end(k.start, is(sizes, p), k.step.0).unwrap_or(1);
            set(sizes, d, end + usize::from(rest));
        }
        Op::Widen(k) => {
            let [p, d] = [0, 1].map(|i| letter(i, along));
            let ends = |start: i64, n: usize, step: usize| {
                let end = law::end(0, n, step).unwrap_or(1) as i64;
                end.saturating_add(start)
            };
            // What is beyond the last element, or how many of them are left out.
            let rest = (was(d) as i64).saturating_sub(ends(k.start, was(p), k.step.0));
            (k.start, k.step.0) = (k.start.clamp(-1, 1), k.step.0.min(2));
            let end = ends(k.start, is(sizes, p), k.step.0);
            // Of more than one element one may be left out.
            set(sizes, d, (end + rest.clamp(-1, 1)).max(k.start.max(0) + 1) as usize);
        }
        Op::Concat(_) => {
            let n = plan.rule.ins.len();
            let all = (0..n).map(|i| is(sizes, letter(i, along))).sum();
            set(sizes, letter(n, along), all);
        }
        Op::TopK(k) => {
            let Some((from, to, _)) = k.dims() else { return };
            let [all, few] = [letter(0, Some(from)), letter(1, Some(to))];
            let rest = usize::from(was(all) > was(few));
            set(sizes, all, is(sizes, few) + rest);
        }
        Op::Attention(_) | Op::AttentionGrad(_) => {
            // Some keys that are seen, and some that are not.
            let keys = letter(1, Some(1));
            set(sizes, keys, 3 * is(sizes, keys));
        }
        Op::Route(k) => {
            // A token's experts are different ones.
            let [t, copies, e] = [letter(0, Some(1)), letter(0, Some(2)), letter(2, Some(1))];
            set(sizes, e, is(sizes, copies).max(2));
            k.rows = is(sizes, t) * is(sizes, copies);
            k.capacity = k.capacity.map(|_| 1);
        }
        Op::GroupedDot(_) | Op::GroupedDotT(_) | Op::GroupedOuter(_) | Op::AllToAllV(_) => {
            // There is a row for every expert.
            let [c, e] = [letter(0, Some(2)), letter(1, Some(1))];
            set(sizes, c, 2 * is(sizes, e));
        }
        Op::Literal(k) => {
            let n = sizes.values().product::<usize>().min(k.values.len());
            k.values = k.values[..n].into();
            let all: BTreeSet<Letter> = sizes.keys().copied().collect();
            all.into_iter().for_each(|l| set(sizes, Some(l), n));
        }
        _free => {}
    }
}
