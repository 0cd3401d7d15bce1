//! Which box of a tensor each rank sends to each other when the tensor's layout changes.
//!
//! A layout gives every rank a box of the tensor, one range per dim. A rank lacks what its new box has
//! more than its old one, and nobody can receive less. Who gives it, where several ranks have it, is said
//! by a map of coordinates, so there is one box at most from one rank to another, and no table of ranks.
//! The indices of a dim may be shifted on the way: then the boxes are halos.

mod traffic;

use crate::attr::Along;
use crate::ids::IndexVec;
use crate::mesh::{Atom, AtomInfo, AtomSet, MAX_ATOMS, Mesh};
use crate::types::{AtomList, Type};
use smallvec::SmallVec;
use std::ops::Range;

/// A box of a tensor: a range of each dim, in indices of the whole tensor.
pub type Ranges = SmallVec<[Range<usize>; 4]>;

/// Index i of a dim of the result is index i + `start` of the operand; where there is none, nothing comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Halo {
    pub dim: Along,
    pub start: i64,
}

/// Most ranks of a group whose traffic is counted rank by rank.
pub const MAX_COUNTED: usize = 4096;

/// How the ranks of a group go from one layout of a tensor to another.
///
/// Over the group's atoms the operand is split, invariant or replicated, and the result split or
/// invariant. The mirror of a replicated operand is a result that is a sum, of which each element is
/// with one rank: it goes the same ways back.
pub struct Boxes {
    /// With an atom for each prime factor of the group's.
    mesh: Mesh,
    /// The new atoms of each old one.
    parts: IndexVec<Atom, SmallVec<[Atom; 4]>>,
    axes: AtomSet,
    /// The operand's layout; of a mirror the result's.
    from: Type,
    to: Type,
    mirror: bool,
    /// By how much an index of `from` is larger than that of `to`, by dim, if any is.
    shift: Option<(usize, i64)>,
    /// Atoms over which several ranks have the same of the operand, each with the atom whose coordinate
    /// of the rank that takes names the one that gives.
    copies: SmallVec<[(Atom, Atom); 4]>,
}

/// What the ranks of a group send, in elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Traffic {
    /// Of the rank that sends most.
    pub sent: usize,
    /// Of the rank that receives most.
    pub received: usize,
}

impl Traffic {
    /// Of the busiest rank, in the busier direction.
    pub fn busiest(self) -> usize {
        self.sent.max(self.received)
    }
}

/// The part of a dim's index that an atom splits: from `ways` pieces to `ways * size`.
type Digit = (usize, usize, Atom);

fn digits(mesh: &Mesh, list: AtomList, axes: AtomSet) -> SmallVec<[Digit; 4]> {
    let mut ways = 1;
    let own = list.iter().map(|a| {
        let first = ways;
        ways *= mesh.size(a);
        (first, ways, a)
    });
    own.filter(|d| axes.has(d.2)).collect()
}

/// Which atoms of the result count as holding what an atom of the operand splits now.
#[derive(Clone, Copy)]
enum Holds {
    /// Those of a digit that overlaps one of the operand's.
    Overlapping,
    /// Those of the same digit.
    Same,
    None,
}

/// A mesh some of whose atoms are cut.
struct Cut {
    mesh: Mesh,
    /// The new atoms of each old one, major to minor.
    parts: IndexVec<Atom, SmallVec<[Atom; 4]>>,
}

impl Cut {
    fn whole(mesh: &Mesh) -> Cut {
        let one = |a: Atom| SmallVec::from_slice(&[a]);
        Cut { mesh: mesh.clone(), parts: mesh.all().iter().map(one).collect() }
    }

    /// Those of the axes at their prime factors.
    fn primes(mesh: &Mesh, axes: AtomSet) -> Cut {
        let mut c = Cut { mesh: mesh.clone(), parts: IndexVec::default() };
        c.mesh.atoms = IndexVec::default();
        for (a, info) in mesh.atoms.ids().zip(&mesh.atoms) {
            let (mut pre, mut rest) = (info.pre, info.size);
            let mut parts = SmallVec::new();
            while rest > 1 || parts.is_empty() {
                let prime = (2..=rest).find(|p| rest % p == 0).unwrap_or(1);
                let size = if axes.has(a) { prime } else { rest };
                parts.push(c.mesh.atoms.push(AtomInfo { size, pre, ..*info }));
                (pre, rest) = (pre * size, rest / size);
            }
            c.parts.push(parts);
        }
        c
    }

    fn set(&self, s: AtomSet) -> AtomSet {
        s.iter().flat_map(|a| self.parts[a].iter().copied()).collect()
    }

    /// The type over the new atoms; `None` if there are more than a list or a set has room for.
    fn ty(&self, t: &Type) -> Option<Type> {
        let mut new = t.clone();
        if self.mesh.atoms.len() > MAX_ATOMS {
            return None;
        }
        for set in [&mut new.replicated, &mut new.varying, &mut new.sum, &mut new.max, &mut new.min]
        {
            *set = self.set(*set);
        }
        for d in &mut new.dims {
            let parts = d.atoms.iter().flat_map(|a| self.parts[a].iter().copied());
            let all = AtomList::collect(parts)?;
            d.atoms = if d.atoms.is_turned() { all.turned() } else { all };
        }
        Some(new)
    }
}

impl Boxes {
    /// The ways from an operand's layout to a result's, which differ in `axes` only, and in size only where
    /// indices are shifted. Of three maps of who gives, that with the least busy sender.
    pub fn new(
        mesh: &Mesh,
        axes: AtomSet,
        shift: Option<Halo>,
        operand: &Type,
        result: &Type,
    ) -> Boxes {
        let mirror = result.sum.meets(axes);
        let shift = shift.and_then(|s| {
            Some((s.dim.of(operand.rank())?, if mirror { -s.start } else { s.start }))
        });
        let whole = Cut::whole(mesh);
        let primes = Cut::primes(mesh, axes);
        let cut = |c: &Cut| Some([c.ty(operand)?, c.ty(result)?]);
        // Few pieces of few axes are named by their primes; more than a list has room for, by their axes.
        let (cut, [mut from, mut to]) = match cut(&primes) {
            Some(types) => (primes, types),
            None => (whole, [operand.clone(), result.clone()]),
        };
        let (mesh, axes) = (cut.mesh.clone(), cut.set(axes));
        if mirror {
            std::mem::swap(&mut from, &mut to);
            let parts = from.sum.and(axes);
            from.sum = from.sum.minus(parts);
            from.replicated = from.replicated.union(parts);
        }
        let parts = cut.parts;
        let mut b = Boxes { mesh, parts, axes, from, to, mirror, shift, copies: SmallVec::new() };
        b.copies = b.map(Holds::Overlapping);
        if b.mesh.ways(axes) > MAX_COUNTED || b.by_digits().is_some() {
            return b;
        }
        let mut best = b.traffic();
        for how in [Holds::Same, Holds::None] {
            // What readers get is what they lack, whoever has it.
            let [chosen, least] =
                if mirror { [best.received, best.sent] } else { [best.sent, best.received] };
            if chosen <= least {
                break;
            }
            let other = b.map(how);
            let before = std::mem::replace(&mut b.copies, other);
            let t = b.traffic();
            if t.busiest() < best.busiest() {
                best = t;
            } else {
                b.copies = before;
            }
        }
        b
    }

    /// Whose coordinate names the giver: where several have the same, the one at the taker's own place if it
    /// can be, else at its place over an atom that holds nothing which moves.
    fn map(&self, holds: Holds) -> SmallVec<[(Atom, Atom); 4]> {
        let mut held = AtomSet::EMPTY;
        for (f, t) in self.from.dims.iter().zip(&self.to.dims) {
            let old = digits(&self.mesh, f.atoms, self.axes);
            for new in digits(&self.mesh, t.atoms, self.axes) {
                let meets = |o: &Digit| match holds {
                    Holds::Overlapping => o.0 < new.1 && new.0 < o.1,
                    Holds::Same => (o.0, o.1) == (new.0, new.1),
                    Holds::None => false,
                };
                if old.iter().any(meets) {
                    held = held.with(new.2);
                }
            }
        }
        let copies = self.axes.minus(self.from.sharded());
        let mut left = self.axes.minus(held);
        let own = copies.and(left);
        left = left.minus(own);
        let other = |a: Atom| {
            let size = self.mesh.size(a);
            let found = left.iter().find(|&u| self.mesh.size(u) == size).or(left.iter().next());
            left = left.minus(found.map_or(AtomSet::EMPTY, AtomSet::one));
            (a, found.unwrap_or(a))
        };
        let mut all: SmallVec<[(Atom, Atom); 4]> = own.iter().map(|a| (a, a)).collect();
        all.extend(copies.minus(own).iter().map(other));
        all
    }

    /// What the rank at `taker` gets from the rank at `giver` (coordinates that differ in the axes only),
    /// itself included, in indices of the operand; `None` if nothing.
    pub fn between(&self, giver: &[usize], taker: &[usize]) -> Option<Ranges> {
        let part = self.given(&self.cut(giver), &self.cut(taker))?;
        Some(if self.mirror { self.behind(part) } else { part })
    }

    /// The same in indices of the result.
    pub fn landed(&self, giver: &[usize], taker: &[usize]) -> Option<Ranges> {
        let part = self.given(&self.cut(giver), &self.cut(taker))?;
        Some(if self.mirror { part } else { self.behind(part) })
    }

    /// Whether something comes to every element that the rank at `taker` has of the result.
    pub fn fills(&self, taker: &[usize]) -> bool {
        let taker = self.cut(taker);
        !self.mirror
            && self.shift.is_none_or(|(dim, _)| {
                let e = self.to.extent(&self.mesh, dim, &taker);
                self.wanted(dim, &taker).len() == e.len
            })
    }

    /// A box of `from` in indices of `to`.
    fn behind(&self, mut part: Ranges) -> Ranges {
        if let Some((dim, by)) = self.shift {
            let moved = |i: usize| usize::try_from(i as i64 - by).expect("an index of both");
            part[dim] = moved(part[dim].start)..moved(part[dim].end);
        }
        part
    }

    /// What a rank's piece of `to` has of a dim, in indices of `from`.
    fn wanted(&self, dim: usize, coords: &[usize]) -> Range<usize> {
        let e = self.to.extent(&self.mesh, dim, coords);
        let by = self.shift.filter(|s| s.0 == dim).map_or(0, |s| s.1);
        let at = |i: usize| (i as i64 + by).clamp(0, self.from.dims[dim].size as i64) as usize;
        at(e.offset)..at(e.offset + e.len)
    }

    /// Coordinates over the new atoms.
    fn cut(&self, coords: &[usize]) -> SmallVec<[usize; 16]> {
        let mut out: SmallVec<[usize; 16]> = smallvec::smallvec![0; self.mesh.atoms.len()];
        for (parts, &c) in self.parts.iter().zip(coords) {
            let mut rest = c;
            for a in parts.iter().rev() {
                out[a.0 as usize] = rest % self.mesh.size(*a);
                rest /= self.mesh.size(*a);
            }
        }
        out
    }

    fn given(&self, giver: &[usize], taker: &[usize]) -> Option<Ranges> {
        let (holder, reader) = if self.mirror { (taker, giver) } else { (giver, taker) };
        let part = self.common(holder, reader)?;
        let same = |a: Atom| holder[a.0 as usize] == reader[a.0 as usize];
        let split = self.from.sharded().and(self.axes);
        let own = split.iter().all(same);
        let named = |&(a, u): &(Atom, Atom)| {
            let at = reader[if own { a } else { u }.0 as usize];
            holder[a.0 as usize] == at % self.mesh.size(a)
        };
        if !self.mirror {
            return self.copies.iter().all(named).then_some(part);
        }
        // What was the same everywhere comes to all, from one of those that have it.
        let whole = self.axes.minus(self.to.sharded()).and(split);
        let parts = self.copies.iter().filter(|c| self.from.replicated.has(c.0));
        (whole.iter().all(same) && parts.into_iter().all(named)).then_some(part)
    }

    /// The box that the operand's piece of one rank and the result's of another have in common, in indices of
    /// `from`.
    fn common(&self, holder: &[usize], reader: &[usize]) -> Option<Ranges> {
        let of = |d: usize| {
            let a = self.from.extent(&self.mesh, d, holder);
            let b = self.wanted(d, reader);
            let range = a.offset.max(b.start)..(a.offset + a.len).min(b.end);
            (!range.is_empty()).then_some(range)
        };
        (0..self.from.rank()).map(of).collect()
    }

    /// Elements that the busiest rank sends or receives.
    pub fn busiest(&self) -> usize {
        self.by_digits().unwrap_or_else(|| self.traffic().busiest())
    }

    /// The same in closed form, where nothing is shifted, all pieces are equal and all new atoms have one size:
    /// then both layouts cut an index into the same digits. If one of them is on two atoms before and after, some rank has
    /// nothing of its new piece; else it has what it shares with those that the operand alone splits.
    fn by_digits(&self) -> Option<usize> {
        let sizes = self.axes.iter().map(|a| self.mesh.size(a));
        let one = self.axes.iter().next().map(|a| self.mesh.size(a))?;
        if self.shift.is_some() {
            return None;
        }
        let even = |t: &Type| {
            let one = |d: usize| t.dims[d].size % t.pieces(&self.mesh, d) == 0;
            (0..t.rank()).all(|d| one(d) && !t.dims[d].atoms.is_turned())
        };
        if sizes.into_iter().any(|n| n != one) || !even(&self.from) || !even(&self.to) {
            return None;
        }
        let piece: usize = self.to.chunks(&self.mesh).iter().product();
        let mut shared = piece;
        for (f, t) in self.from.dims.iter().zip(&self.to.dims) {
            let new = digits(&self.mesh, t.atoms, self.axes);
            for (w, _, a) in digits(&self.mesh, f.atoms, self.axes) {
                match new.iter().find(|n| n.0 == w) {
                    Some(n) if n.2 != a => return Some(piece),
                    Some(_) => {}
                    None => shared /= self.mesh.size(a),
                }
            }
        }
        Some(piece - shared)
    }

    /// Sets the coordinates of place number `place` over some atoms.
    fn stand(&self, mut place: usize, over: AtomSet, coords: &mut [usize]) {
        for a in over.iter().collect::<SmallVec<[Atom; 8]>>().into_iter().rev() {
            coords[a.0 as usize] = place % self.mesh.size(a);
            place /= self.mesh.size(a);
        }
    }
}
