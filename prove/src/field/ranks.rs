//! All ranks of a plan, in lockstep, over the field: what each node makes of the pieces that ranks hold.

use super::functions::{Begins, defined, number, results};
use super::tensor::{Tensor, einsum, times};
use crate::fun::Fun;
use crate::meaning::{function, letters, rule};
use crate::number::{P, add, inverse, neg};
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::{Exchange, Op};
use shardc_ir::rule::Dims;
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
struct Step<'a> {
    r: &'a Ranks,
    op: &'a Op,
    of: &'a [&'a Type],
    to: &'a [&'a Type],
    x: &'a [&'a Pieces],
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

    fn begin(&self, t: &Type, dim: usize, rank: usize) -> usize {
        t.extent(&self.mesh, dim, &self.coords[rank]).offset
    }

    fn shape(&self, t: &Type, rank: usize) -> Vec<usize> {
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
        let made = Step { r: self, op, of, to, x }.run()?;
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

impl Step<'_> {
    fn run(&self) -> Result<Vec<Pieces>, String> {
        match self.op {
            Op::FanOut(_)
            | Op::StopGradient(_)
            | Op::ToPartial(_)
            | Op::ToVarying(_)
            | Op::FromVarying(_) => Ok(self.x.iter().map(|&p| p.clone()).collect()),
            Op::AllReduce(k) => {
                let one = |i: usize| self.all(|rank| self.reduced(k.axes, i, rank));
                Ok((0..self.x.len()).map(one).collect())
            }
            Op::AllGather(k) => self.one(|rank| self.gathered(k.axes, k.dim, rank)),
            Op::ReduceScatter(k) => self.one(|rank| {
                self.own(&self.reduced(k.axes, 0, rank), k.dim, rank, self.begin(k.dim, rank))
            }),
            Op::Slice(k) => {
                self.one(|rank| self.own(&self.x[0][rank], k.dim, rank, self.begin(k.dim, rank)))
            }
            Op::Place(k) => self.one(|rank| {
                let from = self.begin(k.dim, rank) - self.r.begin(self.to[0], k.dim, rank);
                self.x[0][rank].among_zeros(&self.r.shape(self.to[0], rank), k.dim, from)
            }),
            Op::AllToAll(k) => self.one(|rank| self.moved(k.axes, k.from, k.to, rank)),
            Op::Exchange(k) => {
                let all = (0..self.r.count()).map(|rank| self.exchanged(k, rank));
                Ok(vec![all.collect::<Option<_>>().ok_or("a box that no rank of the group has")?])
            }
            Op::AllToAllV(k) => {
                // Rows that the sender's counts do not name stay behind.
                let sent = self.all(|rank| defined(&self.x[0][rank], &self.x[1][rank]));
                let x: Vec<&Pieces> =
                    std::iter::once(&sent).chain(self.x[1..].iter().copied()).collect();
                let step = Step { x: &x, ..*self };
                self.one(|rank| defined(&step.moved(k.axes, k.from, k.to, rank), &self.x[2][rank]))
            }
            Op::Permute(k) => self.one(|rank| {
                let (group, place) = self.group(k.axes, rank);
                let n = group.len();
                self.x[0][group[(place + n - k.shift % n) % n]].clone()
            }),
            Op::Piece(k) => self.one(|rank| {
                let (group, place) = self.group(k.axes, rank);
                let (n, len) = (group.len(), self.to[0].dims[k.dim].size);
                self.x[0][rank].slice(k.dim, (place + n - k.shift % n) % n * len, len)
            }),
            Op::Broadcast(k) => self.one(|rank| {
                let (mut group, _) = self.group(k.axes, rank);
                group.sort_by_key(|&r| self.r.begin(self.of[0], k.dim, r));
                self.x[0][group[k.from]].clone()
            }),
            Op::Reduce(k) => self.one(|rank| {
                let (mut group, _) = self.group(k.axes, rank);
                group.sort_by_key(|&r| self.r.begin(self.to[0], k.dim, r));
                match group[k.to] == rank {
                    true => self.reduced(k.axes, 0, rank),
                    false => Tensor::full(&self.r.shape(self.to[0], rank), 0),
                }
            }),
            _of_one_rank => self.local(),
        }
    }

    fn all(&self, f: impl Fn(usize) -> Tensor) -> Pieces {
        (0..self.r.count()).map(f).collect()
    }
    fn one(&self, f: impl Fn(usize) -> Tensor) -> Result<Vec<Pieces>, String> {
        Ok(vec![self.all(f)])
    }

    /// Where the first operand's piece begins.
    fn begin(&self, dim: usize, rank: usize) -> usize {
        self.r.begin(self.of[0], dim, rank)
    }

    /// The ranks of a group in its order, and the place of this one.
    fn group(&self, axes: AtomSet, rank: usize) -> (Vec<usize>, usize) {
        let group = self.r.mesh.group(axes, rank);
        let place = group.iter().position(|&r| r == rank).expect("a rank is in its group");
        (group, place)
    }

    fn reduced(&self, axes: AtomSet, operand: usize, rank: usize) -> Tensor {
        let (t, pieces) = (self.of[operand], self.x[operand]);
        let pick = |a: u64, b: u64| match (t.max.meets(axes), t.min.meets(axes)) {
            (true, _) => a.max(b),
            (_, true) => a.min(b),
            _sum => add(a, b, P),
        };
        let (group, _) = self.group(axes, rank);
        group[1..].iter().fold(pieces[group[0]].clone(), |a, &r| a.zip(&pieces[r], pick))
    }

    fn gathered(&self, axes: AtomSet, dim: usize, rank: usize) -> Tensor {
        let (mut group, _) = self.group(axes, rank);
        let pieces = self.x[0];
        group.sort_by_key(|&r| (self.begin(dim, r), pieces[r].shape[dim] == 0));
        Tensor::concat(dim, &group.iter().map(|&r| &pieces[r]).collect::<Vec<_>>())
    }

    /// The rank's piece of a tensor that begins at `base` of a dim.
    fn own(&self, t: &Tensor, dim: usize, rank: usize, base: usize) -> Tensor {
        let e = self.to[0].extent(&self.r.mesh, dim, &self.r.coords[rank]);
        t.slice(dim, e.offset - base, e.len)
    }

    fn moved(&self, axes: AtomSet, from: usize, to: usize, rank: usize) -> Tensor {
        let whole = self.gathered(axes, from, rank);
        self.own(&whole, to, rank, self.begin(to, rank))
    }

    /// A rank's box of what the ranks of its group have together, 0 where indices that are shifted are none of the
    /// operand's; a sum is whole on the first rank.
    fn exchanged(&self, op: &Exchange, rank: usize) -> Option<Tensor> {
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
    fn local(&self) -> Result<Vec<Pieces>, String> {
        let f = function(self.op, self.of)?;
        let mut out: Vec<Pieces> = vec![vec![]; self.to.len()];
        for rank in 0..self.r.count() {
            let x: Vec<&Tensor> = self.x.iter().map(|p| &p[rank]).collect();
            let shape = self.r.shape(self.to[0], rank);
            let made = match &f {
                Some(f) => {
                    let at = Begins {
                        operand: &|i, d| self.r.begin(self.of[i], d, rank),
                        result: &|d| self.r.begin(self.to[0], d, rank),
                    };
                    match f {
                        Fun::Both(_) | Fun::Select => {
                            let all = self.spread(&x, &shape)?;
                            results(f, &all.iter().collect::<Vec<_>>(), &shape, &at)?
                        }
                        _other => results(f, &x, &shape, &at)?,
                    }
                }
                None => self.taken_apart(&x, &shape)?,
            };
            for (pieces, t) in out.iter_mut().zip(made) {
                pieces.push(t);
            }
        }
        Ok(out)
    }

    /// Each operand with the dims of the result.
    fn spread(&self, x: &[&Tensor], shape: &[usize]) -> Result<Vec<Tensor>, String> {
        let r = rule(self.op, self.of);
        let to = letters(&r.outs[0])?;
        let one = |(t, d): (&&Tensor, &Dims)| Ok(einsum(&[(*t, &letters(d)?[..])], &to, shape));
        x.iter().zip(&r.ins).map(one).collect()
    }

    fn taken_apart(&self, x: &[&Tensor], shape: &[usize]) -> Result<Vec<Tensor>, String> {
        let r = rule(self.op, self.of);
        let of = || -> Result<Vec<Vec<u32>>, String> { r.ins.iter().map(letters).collect() };
        let spread = || self.spread(x, shape);
        let fold = |all: Vec<Tensor>, f: &dyn Fn(u64, u64) -> u64| {
            let mut all = all.into_iter();
            let first = all.next().expect("an operand");
            all.fold(first, |a, b| a.zip(&b, f))
        };
        Ok(vec![match self.op {
            Op::Cast(_) => x[0].clone(),
            Op::Add(_) => fold(spread()?, &|a, b| add(a, b, P)),
            Op::Sub(_) => fold(spread()?, &|a, b| add(a, neg(b, P), P)),
            Op::Mul(_) => fold(spread()?, &times),
            Op::Div(_) => fold(spread()?, &|a, b| times(a, inverse(b, P))),
            Op::Scale(k) => x[0].map(|v| times(v, number(k.by))),
            Op::Shift(k) => x[0].map(|v| add(v, number(k.by), P)),
            Op::Fill(k) => Tensor::full(shape, number(k.value)),
            Op::Reshape(_) => x[0].reshaped(shape),
            Op::Dot(_) | Op::ReduceSum(_) | Op::Transpose(_) | Op::Expand(_) => {
                let of = of()?;
                let factors: Vec<(&Tensor, &[u32])> =
                    x.iter().zip(&of).map(|(t, l)| (*t, &l[..])).collect();
                einsum(&factors, &letters(&r.outs[0])?, shape)
            }
            Op::MergeAttention(_) => {
                return results(&Fun::Merge, x, shape, &Begins::WHOLE);
            }
            other => return Err(format!("`{}` has no meaning over a field", other.mnemonic())),
        }])
    }
}
