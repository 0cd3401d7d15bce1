//! All ranks of a plan, in lockstep, over the field: what each node makes of the pieces that ranks hold.

use super::functions::{Begins, Field};
use super::tensor::Tensor;
use crate::number::{P, add};
use crate::ops::{Law, law};
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::{Exchange, Op};
use shardc_ir::types::Type;

/// One tensor per rank.
pub type Pieces = Vec<Tensor>;

/// The ranks of one rank of the pipeline.
pub struct Ranks {
    pub mesh: Mesh,
    coords: Vec<Vec<usize>>,
}

/// The index of the operand of an exchange that an index of its result is; `None` if it is none of its indices.
pub(crate) fn before(op: &Exchange, mut at: Vec<usize>, sizes: &[usize]) -> Option<Vec<usize>> {
    if let Some(start) = op.start.0 {
        let dim = op.dim.of(sizes.len())?;
        at[dim] = usize::try_from(at[dim] as i64 + start).ok().filter(|&i| i < sizes[dim])?;
    }
    Some(at)
}

/// A node at work on all ranks.
pub(crate) struct NodeStep<'a> {
    pub r: &'a Ranks,
    pub of: &'a [&'a Type],
    pub to: &'a [&'a Type],
    pub x: &'a [&'a Pieces],
}

impl Ranks {
    pub fn new(mesh: &Mesh) -> Ranks {
        let mesh = mesh.one_stage();
        let coords = (0..mesh.ranks()).map(|r| mesh.coords(r)).collect();
        Ranks { mesh, coords }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.coords.len()
    }

    pub fn begin(&self, t: &Type, dim: usize, rank: usize) -> usize {
        t.extent(&self.mesh, dim, &self.coords[rank]).offset
    }

    pub fn shape(&self, t: &Type, rank: usize) -> Vec<usize> {
        t.lens(&self.mesh, &self.coords[rank]).to_vec()
    }

    /// The pieces that ranks hold of a whole tensor.
    pub fn scatter(&self, t: &Type, whole: &Tensor) -> Pieces {
        let piece = |rank: usize| {
            (0..t.rank()).fold(whole.clone(), |x, d| {
                let e = t.extent(&self.mesh, d, &self.coords[rank]);
                x.slice(d, e.offset, e.len)
            })
        };
        (0..self.count()).map(piece).collect()
    }

    /// What a node makes on all ranks, by result.
    ///
    /// # Errors
    /// Names what has no meaning over a field.
    pub fn node(
        &self,
        op: &Op,
        types: [&[&Type]; 2],
        x: &[&Pieces],
    ) -> Result<Vec<Pieces>, String> {
        let [of, to] = types;
        let (law, step) = (law(op), NodeStep { r: self, of, to, x });
        let made = match law.between() {
            Some(between) => between.deal(&step)?,
            None => step.local(law)?,
        };
        for (t, pieces) in to.iter().zip(&made) {
            let wrong = (0..self.count()).find(|&r| pieces[r].shape != self.shape(t, r));
            if let Some(r) = wrong {
                let (is, want) = (&pieces[r].shape, self.shape(t, r));
                return Err(format!("`{}`: {is:?}, not {want:?}, on rank {r}", op.mnemonic()));
            }
        }
        Ok(made)
    }
}

impl NodeStep<'_> {
    /// What ranks have of the operands.
    pub fn same(&self) -> Result<Vec<Pieces>, String> {
        Ok(self.x.iter().map(|&p| p.clone()).collect())
    }

    pub fn all(&self, f: impl Fn(usize) -> Tensor) -> Pieces {
        (0..self.r.count()).map(f).collect()
    }
    pub fn one(&self, f: impl Fn(usize) -> Tensor) -> Result<Vec<Pieces>, String> {
        Ok(vec![self.all(f)])
    }

    /// Where the first operand's piece begins.
    pub fn begin(&self, dim: usize, rank: usize) -> usize {
        self.r.begin(self.of[0], dim, rank)
    }

    /// The ranks of a group in its order, and the place of this one.
    pub fn group(&self, axes: AtomSet, rank: usize) -> (Vec<usize>, usize) {
        let group = self.r.mesh.group(axes, rank);
        let place = group.iter().position(|&r| r == rank).expect("a rank is in its group");
        (group, place)
    }

    pub fn reduced(&self, axes: AtomSet, operand: usize, rank: usize) -> Tensor {
        let (t, pieces) = (self.of[operand], self.x[operand]);
        let pick = |a: u64, b: u64| match (t.max.meets(axes), t.min.meets(axes)) {
            (true, _) => a.max(b),
            (_, true) => a.min(b),
            _sum => add(a, b, P),
        };
        let (group, _) = self.group(axes, rank);
        group[1..].iter().fold(pieces[group[0]].clone(), |a, &r| a.zip(&pieces[r], pick))
    }

    pub fn gathered(&self, axes: AtomSet, dim: usize, rank: usize) -> Tensor {
        let (mut group, _) = self.group(axes, rank);
        let pieces = self.x[0];
        group.sort_by_key(|&r| (self.begin(dim, r), pieces[r].shape[dim] == 0));
        Tensor::concat(dim, &group.iter().map(|&r| &pieces[r]).collect::<Vec<_>>())
    }

    /// The rank's piece of a tensor that begins at `base` of a dim.
    pub fn own(&self, t: &Tensor, dim: usize, rank: usize, base: usize) -> Tensor {
        let e = self.to[0].extent(&self.r.mesh, dim, &self.r.coords[rank]);
        t.slice(dim, e.offset - base, e.len)
    }

    pub fn moved(&self, axes: AtomSet, from: usize, to: usize, rank: usize) -> Tensor {
        let whole = self.gathered(axes, from, rank);
        self.own(&whole, to, rank, self.begin(to, rank))
    }

    /// A rank's box of what the ranks of its group have together, 0 where indices that are shifted are none of the
    /// operand's; a sum is whole on the first rank.
    pub fn exchanged(&self, op: &Exchange, rank: usize) -> Option<Tensor> {
        let axes = op.axes;
        let own = self.r.shape(self.to[0], rank);
        let coords = self.r.mesh.coords(rank);
        if self.to[0].sum.and(axes).iter().any(|a| coords[a.0 as usize] > 0) {
            return Some(Tensor::full(&own, 0));
        }
        let (group, _) = self.group(axes, rank);
        let first = |t: &Type, r: usize, i: &[usize]| -> Vec<usize> {
            i.iter().enumerate().map(|(d, i)| i + self.r.begin(t, d, r)).collect()
        };
        let mut there = true;
        let made = Tensor::from_fn(&own, |i| {
            let at = before(op, first(self.to[0], rank, i), &self.of[0].sizes());
            let Some(at) = at else { return 0 };
            let place = |&r: &usize| {
                let here = at.iter().enumerate().map(|(d, i)| i.checked_sub(self.begin(d, r)));
                let here: Vec<usize> = here.collect::<Option<_>>()?;
                let inside = here.iter().zip(&self.x[0][r].shape).all(|(i, n)| i < n);
                inside.then(|| self.x[0][r].at(&here))
            };
            let found = group.iter().find_map(place);
            there &= found.is_some();
            found.unwrap_or(0)
        });
        there.then_some(made)
    }

    /// What every rank makes of its own pieces.
    fn local(&self, law: &dyn Law) -> Result<Vec<Pieces>, String> {
        let mut out: Vec<Pieces> = vec![vec![]; self.to.len()];
        for rank in 0..self.r.count() {
            let x: Vec<&Tensor> = self.x.iter().map(|p| &p[rank]).collect();
            let at = Begins {
                operand: &|i, d| self.r.begin(self.of[i], d, rank),
                result: &|d| self.r.begin(self.to[0], d, rank),
            };
            let shape = self.r.shape(self.to[0], rank);
            let made = law.results(&Field { x: &x, types: self.of, shape: &shape, at: &at })?;
            for (pieces, t) in out.iter_mut().zip(made) {
                pieces.push(t);
            }
        }
        Ok(out)
    }
}
