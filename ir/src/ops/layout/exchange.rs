//! From any layout over some axes to any other, with indices shifted along a dim.

use super::*;
use crate::mesh::Atom;

impl Exchange {
    /// Of the same tensor.
    pub fn over(axes: AtomSet) -> Exchange {
        Exchange { axes, start: Offset(None), dim: Along::LAST }
    }

    /// Index i of dim `dim` of the result is index i + `start` of the operand.
    pub fn shifted(axes: AtomSet, dim: usize, start: i64) -> Exchange {
        Exchange { axes, start: Offset(Some(start)), dim: crate::attr::Usual(dim) }
    }

    /// How indices are shifted, if they are.
    pub fn halo(&self) -> Option<Halo> {
        self.start.0.map(|start| Halo { dim: self.dim, start })
    }

    /// The dim that is shifted of a tensor with so many.
    fn along(&self, rank: usize) -> Option<usize> {
        self.dim.of(rank).filter(|_| self.start.0.is_some())
    }

    pub(super) fn takes(&self, ins: &[&Type]) -> Result<(), String> {
        one(ins)?;
        match (self.start.0, self.dim) {
            (None, Along::LAST) => Ok(()),
            (None, _) => Err("a dim is shifted from a `start`".into()),
            (Some(_), dim) if dim.of(ins[0].rank()).is_some() => Ok(()),
            (Some(_), _) => Err("the operand has no such dim".into()),
        }
    }
}

/// Says what is wrong with the states that an operand and a result have over one of the axes.
fn changes(mesh: &Mesh, a: Atom, from: State, to: State) -> Result<(), TypeError> {
    use State::{Invariant, Partial, Replicated, Sharded};
    let wrong = |what: &str, help: &str| {
        let name = mesh.names(AtomSet::one(a), "*");
        infer::err("collective", format!("over {name} {what}"), help)
    };
    match (from, to) {
        (Sharded(_) | Invariant | Replicated, Sharded(_))
        | (Sharded(_), Invariant | Partial(Reduction::Sum)) => Ok(()),
        (Sharded(_), Replicated) => {
            wrong("the result is replicated", "let it be invariant, and fan it out")
        }
        (Partial(_), _) => wrong("the operand is still to be reduced", "reduce it before"),
        _ => wrong(
            "neither the operand nor the result is split",
            "name axes that split one of them, and leave others as they are",
        ),
    }
}

impl LayoutOp for Exchange {
    fn change(&self, mesh: &Mesh, t: &mut Type, declared: Option<&Type>) -> Result<(), TypeError> {
        let along = self.along(t.rank());
        let same = |to: &Type| {
            let sizes = to.rank() == t.rank()
                && (0..t.rank()).all(|d| along == Some(d) || to.dims[d].size == t.dims[d].size);
            to.dtype == t.dtype && sizes
        };
        let Some(to) = declared.filter(|&to| same(to)) else {
            return infer::err(
                "collective",
                "the layout of the result is not given".into(),
                "give the result the operand's element type and sizes, and its new layout",
            );
        };
        let mut mirrors = [false; 2];
        for a in mesh.all().iter() {
            let (old, new) = (t.state(a), to.state(a));
            if self.axes.has(a) {
                changes(mesh, a, old, new)?;
                mirrors[0] |= old == State::Replicated;
                mirrors[1] |= new == State::Partial(Reduction::Sum);
            } else if old != new {
                let name = mesh.names(AtomSet::one(a), "*");
                return infer::err(
                    "collective",
                    format!("the layout changes over {name}, too"),
                    format!("name {name} with the axes"),
                );
            }
        }
        if mirrors == [true; 2] {
            return infer::err(
                "collective",
                "the operand is replicated over some axes and the result a sum over others".into(),
                "take two steps",
            );
        }
        for (dim, (f, n)) in t.dims.iter().zip(&to.dims).enumerate() {
            // What is outside of the axes is major to them, and its pieces are whole numbers of theirs.
            // Of what is shifted there is none.
            let kept = match along == Some(dim) {
                true => 0,
                false => f.atoms.iter().take_while(|&a| !self.axes.has(a)).count(),
            };
            let outer = f.atoms.take(kept);
            let moved = |l: AtomList| l.iter().skip(kept).all(|a| self.axes.has(a));
            let alike = n.atoms.starts_with(outer) && moved(f.atoms) && moved(n.atoms);
            if !alike {
                return infer::err(
                    "collective",
                    format!("dim {dim} is split over other axes, too, after some of these"),
                    "name all axes of the dim that follow one of those that change",
                );
            }
            if kept > 0 {
                if f.atoms.is_turned() || n.atoms.is_turned() {
                    return infer::err(
                        "collective",
                        format!("dim {dim} has its pieces in the opposite order"),
                        "name all axes that split it",
                    );
                }
                let mut coarse = t.clone();
                coarse.dims[dim].atoms = outer;
                super::pieces::nested(mesh, &coarse, t, dim)?;
                super::pieces::nested(mesh, &coarse, to, dim)?;
            }
        }
        *t = to.clone();
        Ok(())
    }
    fn letters(&self, ranks: &[usize]) -> Cow<'_, Rule> {
        match self.along(ranks[0]) {
            Some(dim) => {
                let [d, p] = [b'd', b'p'].map(|l| Letter(l - b'a'));
                Cow::Owned(Rule::along(ranks[0], dim, &[d], p))
            }
            None => Rule::same(1, 1, ranks[0]),
        }
    }
    /// The same ways back, with indices shifted back: what was the same everywhere comes from one of those that
    /// have it, and the mirror of what was replicated is a sum of which each element is with one rank.
    fn mirrored(&self, b: &mut Builder, (ins, _): GradEnds, d: &[Option<Value>]) -> Grads {
        let like = b.ty(ins[0]).cotangent();
        noted(b, d, "mirror of an exchange", |b, d| {
            let start = Offset(self.start.0.map(|s| -s));
            b.push_as("exchange_grad", Exchange { start, ..self.clone() }, &[d], &like)
        })
    }
    /// Joins all pieces of the group, and cuts each rank's own out, with 0 where there is none. A sum is whole on
    /// the first rank, and 0 on the others.
    fn group(&self, cx: &[EvalCx], ins: &[Vec<&Tensor>]) -> Vec<Vec<Tensor>> {
        let rank = cx[0].ins[0].rank();
        let all = |f: &dyn Fn(&EvalCx, usize) -> usize, fold: fn(usize, usize) -> usize| {
            let one = |d| cx.iter().map(|c| f(c, d)).reduce(fold).expect("a group has ranks");
            (0..rank).map(one).collect::<Shape>()
        };
        let first = all(&|c, d| c.in_extent(0, d).offset, usize::min);
        let end = |c: &EvalCx, d: usize| c.in_extent(0, d).offset + c.in_extent(0, d).len;
        let last = all(&end, usize::max);
        let shape: Shape = last.iter().zip(&first).map(|(l, f)| l - f).collect();
        let mut whole = Tensor::full(&shape, 0.0);
        for (c, x) in cx.iter().zip(ins) {
            crate::tensor::each_index(&x[0].shape, |i| {
                let place = |(d, &i): (usize, &usize)| i + c.in_extent(0, d).offset - first[d];
                let at: Shape = i.iter().enumerate().map(place).collect();
                *whole.at_mut(&at) = x[0].at(i);
            });
        }
        let along = self.along(rank);
        let own = |c: &EvalCx| {
            let parts = c.outs[0].sum.and(self.axes);
            let shape = c.out_shape(0);
            if parts.iter().any(|a| c.coords[a.0 as usize] > 0) {
                return vec![Tensor::full(&shape, 0.0)];
            }
            let begins: SmallVec<[i64; 4]> = (0..rank)
                .map(|d| {
                    let start = if along == Some(d) { self.start.0.unwrap_or(0) } else { 0 };
                    c.out_extent(0, d).offset as i64 - first[d] as i64 + start
                })
                .collect();
            vec![Tensor::from_fn(&shape, |i| {
                let at = i.iter().zip(&begins).map(|(&i, b)| usize::try_from(i as i64 + b).ok());
                let at: Option<Shape> = at.collect();
                let inside = |at: &Shape| at.iter().zip(&whole.shape).all(|(i, n)| i < n);
                at.filter(inside).map_or(0.0, |at| whole.at(&at))
            })]
        };
        cx.iter().map(own).collect()
    }
}
