//! Collectives, and what only changes how a value is seen: each goes from one state to another
//! (`docs/types.md`, "Collectives") and leaves everything else as it is.

use super::{Block, Fault, Held, wrong};
use crate::ops::{Between, Law};
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::ops::Exchange;
use shardc_ir::types::{AtomList, Dim, Type};

/// A change of a type that is being followed.
pub(crate) struct Change<'a> {
    pub mesh: &'a Mesh,
    axes: AtomSet,
    /// What the type is by now.
    pub t: Type,
    /// What the result is said to be: the order of axes that come to a dim is taken from it.
    to: &'a Type,
    pub blocks: Vec<Block>,
}

/// The blocks of the results.
pub(crate) fn check<L: Law + Between>(
    mesh: &Mesh,
    law: &L,
    held: &[&Held],
    outs: &[&Type],
) -> Result<Vec<Vec<Block>>, Fault> {
    let axes = law.axes();
    let ranks: Vec<usize> = held.iter().map(|h| h.ty.rank()).collect();
    if law.letters(&ranks).is_none_or(|r| r.outs.len() != outs.len()) {
        return wrong("it has other operands or results".into());
    }
    if axes.is_empty() || !axes.within(mesh.all()) {
        return wrong("it is over no axes".into());
    }
    law.fits(mesh, held)?;
    let one = |(h, to): (&&Held, &&Type)| {
        let mut c = Change { mesh, axes, t: h.ty.clone(), to, blocks: h.blocks.clone() };
        law.follow(&mut c)?;
        let dims = c.t.rank();
        if !c.blocks.iter().all(|b| b.dim < dims && c.t.dims[b.dim].atoms.is_empty()) {
            return Err(Fault::Unknown("a block that is cut further".into()));
        }
        match c.t == **to {
            true => Ok(c.blocks),
            false => wrong(format!(
                "the result is {} and not {}",
                shardc_ir::text::type_text(mesh, &c.t),
                shardc_ir::text::type_text(mesh, to)
            )),
        }
    };
    held.iter().zip(outs).map(one).collect()
}

impl Change<'_> {
    /// Blocks of the axes, which must be the own ones of the dim, are put together.
    pub fn joined(&mut self, dim: usize) -> Result<(), Fault> {
        let own = |b: &Block| b.axes == self.axes && b.dim == dim;
        match self.blocks.iter().filter(|b| b.axes.meets(self.axes)).collect::<Vec<_>>()[..] {
            [b] if own(b) && b.shift == 0 => {}
            [b] if own(b) => {
                let far = b.shift;
                return wrong(format!("the blocks are those of {far} places before"));
            }
            _ => return wrong("the values are not blocks of the dim".into()),
        }
        self.blocks.retain(|b| !b.axes.meets(self.axes));
        Ok(())
    }

    pub fn dim(&mut self, dim: usize) -> Result<&mut Dim, Fault> {
        match self.t.dims.get_mut(dim) {
            Some(d) => Ok(d),
            None => wrong(format!("there is no dim {dim}")),
        }
    }

    pub fn invariant(&self) -> Result<(), Fault> {
        match self.t.marked().meets(self.axes) {
            false => Ok(()),
            true => wrong("the operand is not invariant over the axes".into()),
        }
    }

    pub fn varying(&self) -> Result<(), Fault> {
        match self.axes.within(self.t.varying) {
            true => Ok(()),
            false => wrong("the operand does not vary over the axes".into()),
        }
    }

    /// A reduction over the axes is taken; `sum`: it must be a sum.
    pub fn reduced(&mut self, sum: bool) -> Result<(), Fault> {
        let all = [&mut self.t.sum, &mut self.t.max, &mut self.t.min];
        let most = if sum { 1 } else { 3 };
        match all.into_iter().take(most).find(|s| self.axes.within(**s)) {
            Some(s) => {
                *s = s.minus(self.axes);
                Ok(())
            }
            None => wrong("nothing is to be reduced over the axes".into()),
        }
    }

    /// All ranks have the same: invariant or replicated, over each axis as the result says.
    pub fn same_everywhere(&mut self) {
        self.t.replicated = self.t.replicated.union(self.axes.and(self.to.replicated));
    }

    /// The axes, the minor ones of a dim, cut it no more.
    pub fn leaves(&mut self, dim: usize) -> Result<(), Fault> {
        let (axes, mesh) = (self.axes, self.mesh);
        let d = self.dim(dim)?;
        in_order(d.atoms)?;
        let rest = d.atoms.len().checked_sub(axes.len()).map(|n| d.atoms.take(n));
        let Some(rest) = rest.filter(|r| r.set().union(axes) == d.atoms.set()) else {
            return wrong("the axes are not the minor ones of the dim".into());
        };
        even(mesh, d.size, rest, d.atoms)?;
        d.atoms = rest;
        Ok(())
    }

    /// The axes cut a dim, as its minor ones.
    pub fn comes(&mut self, dim: usize) -> Result<(), Fault> {
        let (axes, mesh) = (self.axes, self.mesh);
        let new = self.to.dims.get(dim).map(|d| d.atoms);
        let d = self.dim(dim)?;
        let own = d.atoms.len();
        let fits = |l: &AtomList| {
            l.starts_with(d.atoms) && l.iter().skip(own).collect::<AtomSet>() == axes
        };
        let Some(new) = new.filter(fits).filter(|l| l.len() == own + axes.len()) else {
            return wrong("the axes do not come to the dim of the result as its minor ones".into());
        };
        in_order(new)?;
        even(mesh, d.size, d.atoms, new)?;
        d.atoms = new;
        Ok(())
    }

    pub fn moves(&mut self, from: usize, to: usize) -> Result<(), Fault> {
        if from == to {
            return wrong("it leads from a dim to the same".into());
        }
        self.leaves(from)?;
        self.comes(to)
    }

    /// Every rank has its box of the result among those that its group has of the operand.
    pub fn exchanged(&mut self, op: &Exchange) -> Result<(), Fault> {
        let Exchange { axes: _, start, dim } = op;
        let along = start.0.and_then(|_| dim.of(self.t.rank()));
        if along.is_some() != start.0.is_some() {
            return wrong("there is no dim that is shifted".into());
        }
        let alike = self.to.rank() == self.t.rank()
            && (0..self.t.rank())
                .all(|d| along == Some(d) || self.t.dims[d].size == self.to.dims[d].size);
        if self.to.dtype != self.t.dtype || !alike {
            return wrong("the result is another tensor".into());
        }
        let held = |t: &Type, a: Atom| t.dims.iter().any(|d| d.atoms.set().has(a));
        let (sums, marked) = (self.to.sum, self.t.partial().union(self.t.varying));
        let reduced = self.to.max.union(self.to.min).union(self.to.varying);
        for a in self.mesh.all().iter() {
            let (old, new) = (held(&self.t, a), held(self.to, a));
            let fine = match self.axes.has(a) {
                false => self.t.state(a) == self.to.state(a),
                true => {
                    (old || (new && !marked.has(a)))
                        && !reduced.has(a)
                        && (!self.to.replicated.has(a))
                        && (old || !sums.has(a))
                }
            };
            if !fine {
                return wrong("an axis goes from a state that it cannot have to another".into());
            }
        }
        for (dim, (old, new)) in self.t.dims.iter().zip(&self.to.dims).enumerate() {
            if along == Some(dim) && !old.atoms.set().union(new.atoms.set()).within(self.axes) {
                return wrong("axes outside of the group cut the dim that is shifted".into());
            }
            let outer = |l: AtomList| {
                AtomList::collect(l.iter().take_while(|&a| !self.axes.has(a))).unwrap_or(l)
            };
            let kept = outer(old.atoms);
            let inner = |l: AtomList| l.iter().skip(kept.len()).all(|a| self.axes.has(a));
            let moves = old.atoms != kept || new.atoms != kept;
            // What is outside of the group is cut before and after in one order.
            if !kept.is_empty() && moves {
                in_order(old.atoms).and(in_order(new.atoms))?;
            }
            if kept != outer(new.atoms) || !inner(old.atoms) || !inner(new.atoms) {
                return wrong("axes outside of the group lie between those that move".into());
            }
            if moves {
                even(self.mesh, old.size, kept, old.atoms)?;
                even(self.mesh, old.size, kept, new.atoms)?;
            }
        }
        self.t = self.to.clone();
        Ok(())
    }

    /// The axes alone cut the dim, evenly; `ordered`: in the order of the group.
    pub fn alone(&mut self, dim: usize, ordered: bool) -> Result<(), Fault> {
        let list = self.dim(dim)?.atoms;
        self.alone_in(list, ordered)?;
        self.dim(dim)?.atoms = AtomList::EMPTY;
        Ok(())
    }

    pub fn alone_in(&self, list: AtomList, ordered: bool) -> Result<(), Fault> {
        in_order(list)?;
        let order = !ordered || list.iter().eq(self.axes.iter());
        match list.set() == self.axes && order {
            true => Ok(()),
            false => wrong("the axes do not cut the dim alone and in order".into()),
        }
    }

    /// A piece is what there is.
    pub fn shrinks(&mut self, dim: usize) -> Result<(), Fault> {
        let ways = self.mesh.ways(self.axes);
        let d = self.dim(dim)?;
        if d.size % ways != 0 {
            return wrong("the dim is not cut evenly".into());
        }
        d.size /= ways;
        Ok(())
    }

    pub fn grows(&mut self, dim: usize) -> Result<(), Fault> {
        let ways = self.mesh.ways(self.axes);
        let d = self.dim(dim)?;
        match d.size.checked_mul(ways).filter(|_| d.atoms.is_empty()) {
            Some(n) => {
                d.size = n;
                Ok(())
            }
            None => wrong("the dim is cut by other axes".into()),
        }
    }

    pub fn number(&self, piece: usize) -> Result<(), Fault> {
        match piece < self.mesh.ways(self.axes) {
            true => Ok(()),
            false => wrong(format!("there is no piece {piece}")),
        }
    }

    pub fn varies(&mut self, dim: usize, shift: usize) {
        let shift = shift % self.mesh.ways(self.axes);
        self.t.varying = self.t.varying.union(self.axes);
        self.blocks.push(Block { dim, axes: self.axes, shift });
    }
}

/// All but an exchange deal pieces in the order of ranks.
fn in_order(list: AtomList) -> Result<(), Fault> {
    match list.is_turned() {
        false => Ok(()),
        true => wrong("the dim has its pieces in the opposite order".into()),
    }
}

/// Pieces of a piece must be pieces of the whole.
fn even(mesh: &Mesh, size: usize, major: AtomList, all: AtomList) -> Result<(), Fault> {
    let ways = |l: AtomList| l.iter().map(|a| mesh.size(a)).product::<usize>();
    let [outer, inner] = [ways(major), ways(all)];
    let whole = size.div_ceil(outer) == size.div_ceil(inner) * (inner / outer);
    match major.is_empty() || whole {
        true => Ok(()),
        false => wrong(format!("a dim of {size} is cut unevenly, and again")),
    }
}
