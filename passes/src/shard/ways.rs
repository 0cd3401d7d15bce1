//! How an op may run: every split of its loops that its types allow.

use super::factors::OpFactors;
use crate::zero::Zero;
use shardc_ir::attr::Offset;
use shardc_ir::boxes::Halo;
use shardc_ir::func::{Func, Node, Value, ValueMap};
use shardc_ir::infer::{Linear, TypeError};
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::ops::{Exchange, Op};
use shardc_ir::types::{AtomList, Type};
use smallvec::SmallVec;
use std::borrow::Cow;

/// How an op runs: per letter, the atoms its loop is split over.
#[derive(Clone, Default, PartialEq, Debug)]
pub(crate) struct Execution {
    pub lists: SmallVec<[AtomList; 8]>,
    pub atoms: AtomSet,
    /// Atoms over which ranks do the same, with operands and results that are replicated (R).
    pub spread: AtomSet,
    /// By operand, if there are any: atoms over which it is a sum that has not been taken. So is the result.
    pub parts: SmallVec<[AtomSet; 4]>,
}

impl Execution {
    pub fn whole(op: &OpFactors) -> Execution {
        let lists = op.factor_ids().map(|_| AtomList::EMPTY).collect();
        Execution { lists, ..Execution::default() }
    }

    /// Splits a loop over one more atom, if it may be.
    pub fn take(&mut self, mesh: &Mesh, op: &OpFactors, factor: u8, a: Atom) -> bool {
        let now = self.lists[factor as usize];
        let may = !self.atoms.has(a) && op.may_take(mesh, factor, now, a, &self.lists);
        let Some(new) = now.push(a).filter(|_| may) else { return false };
        self.lists[factor as usize] = new;
        self.atoms = self.atoms.with(a);
        true
    }

    /// The op that a node runs as: where it shifts the indices of a dim that is split, an exchange of what
    /// crosses from piece to piece.
    pub fn op<'a>(&self, n: &'a Node, op: &OpFactors) -> Cow<'a, Op> {
        let split = |&(g, _): &(u8, Halo)| !self.lists[g as usize].is_empty();
        match op.shifted().filter(split) {
            None => Cow::Borrowed(&n.op),
            Some((g, Halo { dim, start })) => {
                let (axes, start) = (self.lists[g as usize].set(), Offset(Some(start)));
                Cow::Owned(Exchange { axes, start, dim }.into())
            }
        }
    }

    /// The op that node `u` runs as, and what it makes of operands of these types.
    ///
    /// # Errors
    /// As [`Op::check`].
    pub fn check<'a>(
        &self,
        mesh: &Mesh,
        f: &'a Func,
        op: &OpFactors,
        u: usize,
        given: &[&Type],
    ) -> Result<(Cow<'a, Op>, SmallVec<[Type; 2]>), TypeError> {
        let n = &f.nodes[u];
        let runs = self.op(n, op);
        let mut hints: SmallVec<[Type; 2]> =
            (0..n.outs.len()).map(|o| self.hint(f, op, u, o)).collect();
        if runs.layout().is_some() {
            // Over other axes it is as it was.
            hints[0] = Type { dims: hints[0].dims.clone(), ..given[0].clone() };
        }
        let wanted: SmallVec<[Option<&Type>; 2]> = hints.iter().map(Some).collect();
        let outs = runs.check(mesh, given, &wanted)?;
        Ok((runs, outs))
    }

    /// The type that node `u` needs of its operand `j`.
    pub fn required(&self, f: &Func, op: &OpFactors, u: usize, j: usize) -> Type {
        let mut t = plain(f.ty(f.nodes[u].ins[j]));
        for (d, dim) in t.dims.iter_mut().enumerate() {
            dim.atoms = op.dim_atoms(j, d, &self.lists);
        }
        t.sum = self.parts.get(j).copied().unwrap_or_default();
        let cuts = self.atoms.union(self.pending());
        t.replicated = cuts.minus(t.sharded()).minus(t.sum).union(self.spread);
        t
    }

    /// Atoms over which some operand is a sum that has not been taken.
    pub fn pending(&self) -> AtomSet {
        self.parts.iter().fold(AtomSet::EMPTY, |s, p| s.union(*p))
    }

    /// The same with a sum over `atoms` still to be taken of these operands (bit i = operand i), and no loop
    /// split over them.
    pub fn of_parts(&self, operands: u32, atoms: AtomSet) -> Execution {
        let mut e = self.clone();
        for l in &mut e.lists {
            *l = AtomList::collect(l.iter().filter(|a| !atoms.has(*a))).expect("fewer than were");
        }
        (e.atoms, e.spread) = (e.atoms.minus(atoms), e.spread.minus(atoms));
        let count = e.parts.len().max(u32::BITS as usize - operands.leading_zeros() as usize);
        e.parts.resize(count, AtomSet::EMPTY);
        for (_, p) in e.parts.iter_mut().enumerate().filter(|(j, _)| operands >> j & 1 == 1) {
            *p = p.union(atoms);
        }
        e
    }

    /// The same with all of a loop on every rank.
    pub fn whole_in(&self, factor: u8) -> Execution {
        let mut e = self.clone();
        let list = std::mem::replace(&mut e.lists[factor as usize], AtomList::EMPTY);
        e.atoms = e.atoms.minus(list.set());
        e
    }

    /// Where it has an atom.
    pub fn place(&self, a: Atom) -> Place {
        let parts = self.parts.iter().enumerate().filter(|(_, p)| p.has(a));
        match parts.fold(0, |mask, (j, _)| mask | 1 << j) {
            0 if self.spread.has(a) => Place::Spread,
            0 => self
                .lists
                .iter()
                .position(|l| l.iter().any(|b| b == a))
                .map_or(Place::Alike, |g| Place::Split(g as u8)),
            mask => Place::Parts(mask),
        }
    }

    /// The type of result `o` as far as letters say it.
    pub fn hint(&self, f: &Func, op: &OpFactors, u: usize, o: usize) -> Type {
        let n = &f.nodes[u];
        let mut t = plain(f.ty(n.outs[o]));
        for (d, dim) in t.dims.iter_mut().enumerate() {
            dim.atoms = op.dim_atoms(n.ins.len() + o, d, &self.lists);
        }
        if n.ins.is_empty() {
            t.replicated = self.spread;
        }
        t
    }
}

/// A type of which nothing counts but element type and sizes.
fn plain(t: &Type) -> Type {
    Type { dims: SmallVec::from_slice(&t.dims), ..Type::new(t.dtype, &[]) }
}

/// Where a parameter lies.
#[derive(Clone)]
pub(crate) struct Stored {
    /// What its uses agree on, or what it is asked to be.
    pub ty: Type,
    pub zero: Zero,
    /// What it is split over beside that, if `zero` splits.
    pub over: AtomSet,
}

/// How everything runs and lies.
#[derive(Clone)]
pub(crate) struct Chosen {
    /// By node.
    pub run: Vec<Execution>,
    /// By value: its own layout, from which uses take theirs.
    pub own: ValueMap<Type>,
    /// By value, of parameters.
    pub stored: ValueMap<Option<Stored>>,
}

impl Chosen {
    /// The type of a value in its own layout, made as `made`: with no sum still to be taken, but one that its
    /// user takes.
    pub fn settled(&self, v: Value, made: &Type) -> Type {
        let mut to = self.own[v].clone();
        to.replicated = to.replicated.union(made.replicated).minus(to.sharded()).minus(to.sum);
        to
    }
}

/// A way to run an op, with the types that it needs and gives.
#[derive(Clone, Debug)]
pub(crate) struct Way {
    pub run: Execution,
    pub op: Op,
    pub ins: SmallVec<[Type; 4]>,
    pub outs: SmallVec<[Type; 2]>,
}

/// Which operands may be sums still to be taken, together (bit i = operand i), so that the result is one. None
/// if the result has another element type: a sum is taken in that in which its parts were made.
pub(crate) fn linear_in(f: &Func, n: &Node) -> SmallVec<[u32; 4]> {
    let same = |mask: u32| {
        let mut of = n.ins.iter().enumerate().filter(|(j, _)| mask >> j & 1 == 1);
        n.outs.len() == 1 && of.all(|(_, v)| f.ty(*v).dtype == f.ty(n.outs[0]).dtype)
    };
    let all: SmallVec<[u32; 4]> = match n.op.def().linear() {
        Linear::No => SmallVec::new(),
        Linear::Each(mask) => (0..u32::BITS).map(|j| 1 << j).filter(|b| mask & b != 0).collect(),
        Linear::Together(mask) => SmallVec::from_slice(&[mask]),
    };
    all.into_iter().filter(|&m| m != 0 && same(m)).collect()
}

/// Where an op or a value has some axes: of an op, at the loops of a number; of a value, at the dims.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    Split(u8),
    /// Ranks do the same, of what is invariant.
    Alike,
    /// Of what is replicated.
    Spread,
    /// Of parts of a sum, in these operands (bit i = operand i).
    Parts(u32),
}

/// Atoms that have one place together, and which, if it is known.
pub(crate) type PlacedAtoms = (AtomSet, Option<Place>);

/// All ways to run a node over these groups of atoms. Over each: a loop is split, evenly; or the ranks do the same, of
/// what is invariant, or of what is replicated; or of parts of a sum. The first are preferred. Never empty if no place
/// is known: ranks may always do the same.
pub(crate) fn ways(
    mesh: &Mesh,
    f: &Func,
    u: usize,
    op: &OpFactors,
    over: &[PlacedAtoms],
) -> Vec<Way> {
    let mut out = vec![];
    let mut more = |e: Execution| out.extend(way(mesh, f, u, op, e));
    let linear = linear_in(f, &f.nodes[u]);
    each(mesh, op, over, &linear, Execution::whole(op), &mut more);
    out
}

fn each(
    mesh: &Mesh,
    op: &OpFactors,
    over: &[PlacedAtoms],
    linear: &[u32],
    e: Execution,
    f: &mut impl FnMut(Execution),
) {
    let Some((&(atoms, place), rest)) = over.split_first() else { return f(e) };
    let may = |p: Place| place.is_none_or(|own| own == p);
    for factor in op.factor_ids().filter(|&g| !op.is_whole(g) && may(Place::Split(g))) {
        let mut split = e.clone();
        let pieces: usize = e.lists[factor as usize].iter().map(|b| mesh.size(b)).product();
        let even = op.size(factor) % (pieces * mesh.ways(atoms)) == 0;
        if even && atoms.iter().all(|a| split.take(mesh, op, factor, a)) {
            each(mesh, op, rest, linear, split, f);
        }
    }
    if may(Place::Alike) {
        each(mesh, op, rest, linear, e.clone(), f);
    }
    if may(Place::Spread) {
        let spread = Execution { spread: e.spread.union(atoms), ..e.clone() };
        each(mesh, op, rest, linear, spread, f);
    }
    for &operands in linear.iter().filter(|&&l| may(Place::Parts(l))) {
        each(mesh, op, rest, linear, e.of_parts(operands, atoms), f);
    }
}

/// The way, if types allow it.
pub(crate) fn way(mesh: &Mesh, f: &Func, u: usize, op: &OpFactors, run: Execution) -> Option<Way> {
    let n = &f.nodes[u];
    let ins: SmallVec<[Type; 4]> = (0..n.ins.len()).map(|j| run.required(f, op, u, j)).collect();
    let given: SmallVec<[&Type; 4]> = ins.iter().collect();
    let (runs, outs) = run.check(mesh, f, op, u, &given).ok()?;
    let op = runs.into_owned();
    drop(given);
    Some(Way { run, op, ins, outs })
}
