//! From any layout over some axes to any other.

use super::*;
use crate::mesh::Atom;

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

impl Change for Exchange {
    fn change(&self, mesh: &Mesh, t: &mut Type, declared: Option<&Type>) -> Result<(), TypeError> {
        let Some(to) = declared.filter(|to| to.dtype == t.dtype && to.sizes() == t.sizes()) else {
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
            let kept = f.atoms.iter().take_while(|&a| !self.axes.has(a)).count();
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
            let mut coarse = t.clone();
            coarse.dims[dim].atoms = outer;
            super::pieces::nested(mesh, &coarse, t, dim)?;
            super::pieces::nested(mesh, &coarse, to, dim)?;
        }
        *t = to.clone();
        Ok(())
    }
    /// The same ways back: what was the same everywhere comes from one of those that have it, and the
    /// mirror of what was replicated is a sum of which each element is with one rank.
    fn mirrored(&self, b: &mut Builder, (ins, _): Ends, d: &[Option<Value>]) -> Grads {
        let like = b.ty(ins[0]).cotangent();
        noted(b, d, "mirror of an exchange", |b, d| {
            b.push_as("exchange_grad", self.clone(), &[d], &like)
        })
    }
    /// Joins all pieces of the group, and cuts each rank's own out. A sum is whole on the first rank, and 0 on
    /// the others.
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
        let own = |c: &EvalCx| {
            let parts = c.outs[0].sum.and(self.axes);
            if parts.iter().any(|a| c.coords[a.0 as usize] > 0) {
                return vec![Tensor::full(&c.out_shape(0), 0.0)];
            }
            vec![(0..rank).fold(whole.clone(), |t, d| {
                let e = c.out_extent(0, d);
                if e.len == t.shape[d] { t } else { t.slice(d, e.offset - first[d], e.len) }
            })]
        };
        cx.iter().map(own).collect()
    }
}
