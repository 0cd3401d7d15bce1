//! Obligations by evaluation: operands are dealt to all ranks as their types say, with parts at random;
//! the op runs on all ranks over the field; what ranks hold of the results must be what the results'
//! types say of the op on whole tensors.
//!
//! Where a value varies, ranks of different places are worlds of their own: each has its tensors.

use super::inputs::{noise, operands};
use super::shrink::mesh_of;
use super::{Fault, Held, Obligation, wrong};
use crate::field::ranks::{Pieces, Ranks};
use crate::field::tensor::Tensor;
use crate::number::{P, add, neg};
use crate::ops::law;
use shardc_ir::mesh::{Atom, AtomSet, Mesh};
use shardc_ir::types::Type;

/// One evaluation.
struct Evaluation<'a> {
    o: &'a Obligation,
    mesh: &'a Mesh,
    ranks: Ranks,
    /// The same ops on whole tensors: one rank.
    one: Ranks,
    coords: Vec<Vec<usize>>,
    /// Axes over which something varies.
    worlds: AtomSet,
}

/// Whether an obligation holds for these numbers.
///
/// # Errors
/// Says which rank holds something else.
pub fn holds(o: &Obligation, mesh: &Mesh) -> Result<(), Fault> {
    let varying = o.ins.iter().chain(&o.outs).map(|h| h.ty.varying);
    let mut worlds = varying.fold(AtomSet::EMPTY, AtomSet::union);
    worlds = worlds.union(law(&o.op).between().map_or(AtomSet::EMPTY, |b| b.worlds()));
    let run = Evaluation {
        o,
        mesh,
        ranks: Ranks::new(mesh),
        one: Ranks::new(&mesh_of(mesh.atoms.iter().map(|_| 1))),
        coords: (0..mesh.ranks()).map(|r| mesh.coords(r)).collect(),
        worlds,
    };
    run.compare()
}

impl Evaluation<'_> {
    fn world(&self, rank: usize) -> usize {
        self.mesh.place(self.worlds, &self.coords[rank])
    }

    fn compare(&self) -> Result<(), Fault> {
        let types = |all: &'_ [Held]| -> Vec<Type> { all.iter().map(|h| h.ty.clone()).collect() };
        let [of, to] = [types(&self.o.ins), types(&self.o.outs)];
        let [of, to]: [Vec<&Type>; 2] = [of.iter().collect(), to.iter().collect()];
        // By world, then operand.
        let count = self.mesh.ways(self.worlds);
        let mut whole: Vec<Vec<Tensor>> = vec![vec![]; count];
        for rank in 0..self.coords.len() {
            if whole[self.world(rank)].is_empty() {
                whole[self.world(rank)] = operands(self.o, |axes| self.place_of(axes, rank));
            }
        }
        for (i, h) in self.o.ins.iter().enumerate().filter(|(_, h)| !h.blocks.is_empty()) {
            // What the blocks are of: one tensor.
            let all = self.source(h, &whole[0][i]);
            for rank in 0..self.coords.len() {
                whole[self.world(rank)][i] = self.block(h, &all, rank);
            }
        }
        let dealt: Vec<Pieces> =
            of.iter().enumerate().map(|(i, t)| self.deal(t, i, &whole)).collect();
        let dealt: Vec<&Pieces> = dealt.iter().collect();
        let made = self.ranks.node(&self.o.op, [&of, &to], &dealt).map_err(Fault::Wrong)?;
        let mut known: Vec<Option<Vec<Tensor>>> = vec![None; count];
        for rank in 0..self.coords.len() {
            let world = self.world(rank);
            if known[world].is_none() {
                known[world] = Some(self.want(rank, &whole, [&of, &to])?);
            }
        }
        for rank in 0..self.coords.len() {
            for (k, t) in to.iter().enumerate() {
                // Where the result does not vary there is one tensor, whatever the world.
                let first = self.place_of(t.varying, rank);
                let want = known[first].as_ref().map(|all| &all[k]);
                let want = want.map(|whole| self.piece(t, whole, rank));
                if want != Some(self.together(t, &made[k], rank)) {
                    return wrong(format!("rank {rank} does not hold what result {k} is"));
                }
            }
        }
        Ok(())
    }

    /// The world of the first rank with the same place on these axes.
    fn place_of(&self, axes: AtomSet, rank: usize) -> usize {
        let coords = self.coords[rank].iter().enumerate();
        let kept = coords.map(|(a, c)| if axes.has(Atom(a as u8)) { *c } else { 0 });
        self.mesh.place(self.worlds, &kept.collect::<Vec<_>>())
    }

    /// What the op makes of whole tensors in the world of a rank.
    fn want(
        &self,
        rank: usize,
        whole: &[Vec<Tensor>],
        [of, to]: [&[&Type]; 2],
    ) -> Result<Vec<Tensor>, Fault> {
        let own = &whole[self.world(rank)];
        if let Some(between) = law(&self.o.op).between() {
            return between.want(&World { run: self, rank, whole, to });
        }
        let x: Vec<Pieces> = own.iter().map(|t| vec![t.clone()]).collect();
        let x: Vec<&Pieces> = x.iter().collect();
        let made = self.one.node(&self.o.op, [of, to], &x).map_err(Fault::Unknown)?;
        Ok(made.into_iter().map(|mut p| p.swap_remove(0)).collect())
    }

    /// A tensor of which a value's blocks are, made of one that has the size of a block.
    fn source(&self, h: &Held, like: &Tensor) -> Tensor {
        let mut shape = like.shape.clone();
        for b in &h.blocks {
            shape[b.dim] *= self.mesh.ways(b.axes);
        }
        noise("blocks", &shape)
    }

    /// A rank's blocks of a tensor.
    fn block(&self, h: &Held, all: &Tensor, rank: usize) -> Tensor {
        h.blocks.iter().fold(all.clone(), |t, b| {
            let ways = self.mesh.ways(b.axes);
            let place = self.mesh.place(b.axes, &self.coords[rank]);
            let n = t.shape[b.dim] / ways;
            t.slice(b.dim, (place + ways - b.shift % ways) % ways * n, n)
        })
    }

    /// A rank's piece of a tensor.
    fn piece(&self, t: &Type, whole: &Tensor, rank: usize) -> Tensor {
        (0..t.rank()).fold(whole.clone(), |x, d| {
            let e = t.extent(self.mesh, d, &self.coords[rank]);
            x.slice(d, e.offset, e.len)
        })
    }

    /// What all ranks hold of an operand.
    fn deal(&self, t: &Type, operand: usize, whole: &[Vec<Tensor>]) -> Pieces {
        let ranks = 0..self.coords.len();
        let part = |rank: usize| {
            let world = self.world(rank);
            self.piece(t, &self.part(t, operand, &whole[world][operand], world, rank), rank)
        };
        ranks.map(part).collect()
    }

    /// A rank's part of a sum, or of a largest or smallest element: the last rank has what is left.
    fn part(&self, t: &Type, operand: usize, whole: &Tensor, world: usize, rank: usize) -> Tensor {
        let mut out = whole.clone();
        for (axes, kind) in [(t.sum, 0), (t.max, 1), (t.min, 2)] {
            let (n, place) = (self.mesh.ways(axes), self.mesh.place(axes, &self.coords[rank]));
            let random = |k: usize| noise(&format!("{operand} {world} {kind} {k}"), &out.shape);
            out = match kind {
                _ if axes.is_empty() => out,
                0 if place + 1 < n => random(place),
                0 => (0..n - 1)
                    .fold(out.clone(), |s, k| s.zip(&random(k), |a, b| add(a, neg(b, P), P))),
                1 if place > 0 => out.zip(&random(place), u64::min),
                2 if place > 0 => out.zip(&random(place), u64::max),
                _first => out,
            };
        }
        out
    }

    /// What the ranks that have parts of a rank's piece hold together.
    fn together(&self, t: &Type, pieces: &Pieces, rank: usize) -> Tensor {
        let reduced = |axes: AtomSet,
                       of: &dyn Fn(usize) -> Tensor,
                       rank: usize,
                       f: &dyn Fn(u64, u64) -> u64| {
            let group = self.mesh.group(axes, rank);
            group[1..].iter().fold(of(group[0]), |a, r| a.zip(&of(*r), f))
        };
        let own = |r: usize| pieces[r].clone();
        let sum = |r: usize| reduced(t.sum, &own, r, &|a, b| add(a, b, P));
        let max = |r: usize| reduced(t.max, &sum, r, &|a, b| a.max(b));
        reduced(t.min, &max, rank, &|a, b| a.min(b))
    }
}

/// Whole tensors in the world of a rank, for an op between ranks.
pub(crate) struct World<'a> {
    run: &'a Evaluation<'a>,
    rank: usize,
    whole: &'a [Vec<Tensor>],
    pub to: &'a [&'a Type],
}

impl World<'_> {
    /// The operands.
    pub fn own(&self) -> &[Tensor] {
        &self.whole[self.run.world(self.rank)]
    }
    /// The first operand in the world of another rank.
    pub fn first_of(&self, rank: usize) -> &Tensor {
        &self.whole[self.run.world(rank)][0]
    }
    pub fn group(&self, axes: AtomSet) -> Vec<usize> {
        self.run.mesh.group(axes, self.rank)
    }
    pub fn place(&self, axes: AtomSet) -> usize {
        self.run.mesh.place(axes, &self.run.coords[self.rank])
    }
    pub fn ways(&self, axes: AtomSet) -> usize {
        self.run.mesh.ways(axes)
    }
    /// The result.
    pub fn out(&self) -> &Held {
        &self.run.o.outs[0]
    }
    /// The blocks of a tensor that the result is.
    pub fn result_of(&self, all: &Tensor) -> Tensor {
        self.run.block(self.out(), all, self.rank)
    }
    /// The tensor of which the operand is blocks, if it is some.
    pub fn source(&self) -> Option<Tensor> {
        let h = &self.run.o.ins[0];
        (!h.blocks.is_empty()).then(|| self.run.source(h, &self.own()[0]))
    }
    /// The blocks of a tensor that the operand is, but for those around these axes.
    pub fn without(&self, axes: AtomSet, all: &Tensor) -> Tensor {
        let mut h = self.run.o.ins[0].clone();
        h.blocks.retain(|b| !b.axes.meets(axes));
        self.run.block(&h, all, self.rank)
    }
}
