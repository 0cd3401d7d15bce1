//! The same obligation on a small mesh at small sizes: every axis that it names has two or three ranks,
//! every letter as many pieces as before has axes, of one to three elements each.

use super::letters::{self, Sizes};
use super::{Fault, Obligation};
use crate::meaning;
use crate::ops::{Counts, Law, law, law_mut};
use shardc_ir::mesh::{Atom, AtomInfo, AtomSet, Axis, Mesh};
use shardc_ir::rule::{Group, Letter, Rule};
use shardc_ir::types::Type;

/// An obligation with its mesh.
pub struct Variant {
    pub o: Obligation,
    pub mesh: Mesh,
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
pub fn variants(o: &Obligation, mesh: &Mesh, ways: usize) -> Result<Vec<Variant>, Fault> {
    let types = || o.ins.iter().chain(&o.outs).map(|h| &h.ty);
    let between = law(&o.op).between();
    let axes = between.map_or(AtomSet::EMPTY, |b| b.axes());
    let named = types().fold(axes, |s, t| s.union(t.marked()));
    let kept = between.filter(|b| b.counts() == Counts::Ring).map_or(AtomSet::EMPTY, |b| b.axes());
    let size = |a: Atom| match (kept.has(a), named.has(a)) {
        (true, _) => mesh.size(a),
        (_, true) => ways,
        _unnamed => 1,
    };
    let small = mesh_of((0..mesh.atoms.len() as u8).map(|a| size(Atom(a))));
    let plan = plan(o, mesh)?;
    let odd = plan.letters.iter().filter(|l| !l.1.is_empty() && !l.2).map(|l| Some(l.0));
    let one =
        |odd: Option<Letter>| Variant { o: resized(o, &plan, &small, odd), mesh: small.clone() };
    Ok(std::iter::once(None).chain(odd).map(one).collect())
}

fn plan(o: &Obligation, mesh: &Mesh) -> Result<Plan, Fault> {
    let ins: Vec<&Type> = o.ins.iter().map(|h| &h.ty).collect();
    let outs: Vec<&Type> = o.outs.iter().map(|h| &h.ty).collect();
    let law = law(&o.op);
    let (rule, sizes) = match (law.between(), ins.is_empty()) {
        // Each dim for itself.
        (None, true) => (Rule::elementwise(0, outs.len(), outs[0].rank()), Sizes::new()),
        (Some(_), _) => {
            (meaning::rule(law, &ins).map_err(Fault::Wrong)?.into_owned(), Sizes::new())
        }
        (None, false) => {
            let rule = letters::rule(law, &ins, &outs)?;
            let sizes = letters::sizes(&o.op, &rule, &ins, &outs)?;
            (rule, sizes)
        }
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
    let (rule, was) = (&plan.rule, &plan.sizes);
    law_mut(&mut out.op).shrink(&mut Small { rule, was, sizes: &mut sizes, mesh: small });
    for (l, n) in out.op.sizes_mut().map_or(&mut [][..], |s| &mut s.0) {
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
    let Some(between) = law(&o.op).between() else { return };
    let (Some((dim, operand)), ways) = (between.whole(), small.ways(between.axes())) else {
        return;
    };
    let whole = if operand { &mut o.ins[0] } else { &mut o.outs[0] };
    if let Some(d) = whole.ty.dims.get_mut(dim) {
        d.size *= ways;
    }
}

/// Sizes of letters that are being chosen.
pub(crate) struct Small<'a> {
    pub rule: &'a Rule,
    was: &'a Sizes,
    pub sizes: &'a mut Sizes,
    pub mesh: &'a Mesh,
}

impl Small<'_> {
    /// The dim that the first operand and the result of an op do not share.
    pub fn along(&self, law: &dyn Law) -> Option<usize> {
        self.rule.ins.first().and_then(|d| law.along(d.len()))
    }
    /// The minor letter of a dim, or of the last, of an operand or, behind these, of a result.
    pub fn letter(&self, operand: usize, dim: Option<usize>) -> Option<Letter> {
        let dims = self.rule.ins.iter().chain(&self.rule.outs).nth(operand)?;
        dims.get(dim.unwrap_or(dims.len().wrapping_sub(1)))?.letters().last().copied()
    }
    /// The size of a letter as it was.
    pub fn was(&self, l: Option<Letter>) -> usize {
        l.and_then(|l| self.was.get(&l)).copied().unwrap_or(0)
    }
    /// The size of a letter as it is chosen.
    pub fn is(&self, l: Option<Letter>) -> usize {
        l.and_then(|l| self.sizes.get(&l)).copied().unwrap_or(1)
    }
    pub fn set(&mut self, l: Option<Letter>, n: usize) {
        if let Some(l) = l {
            self.sizes.insert(l, n);
        }
    }
}
