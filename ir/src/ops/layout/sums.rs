//! Sums over ranks: P → I (Megatron's g), P → R, P → S.

use super::pieces::{holder, own_piece, split};
use super::*;

/// Folds one operand of a whole group in group order.
pub(super) fn fold_group(t: &Type, axes: AtomSet, parts: &[&Tensor]) -> Tensor {
    let first = parts[0].clone();
    let by = t.reduction(axes).expect("checked by its type");
    parts[1..].iter().fold(first, |a, b| a.zip(b, |x, y| by.of(x, y)))
}

impl LayoutOp for AllReduce {
    fn change(&self, mesh: &Mesh, t: &mut Type, declared: Option<&Type>) -> Result<(), TypeError> {
        let Some(by) = t.reduction(self.axes) else {
            return wrong(mesh, self.axes, "a sum still to be taken");
        };
        let pending = t.pending_mut(by);
        *pending = pending.minus(self.axes);
        if let Some(d) = declared {
            t.replicated = t.replicated.union(d.replicated.and(self.axes));
        }
        Ok(())
    }
    fn mirrored(&self, b: &mut Builder, (ins, outs): GradEnds, d: &[Option<Value>]) -> Grads {
        // P→I: fan_out. P→R: the cotangent is a P, to be reduced to an R. Mixed: both.
        let one = |(i, d): (usize, &Option<Value>)| {
            let mut d = (*d)?;
            let r = b.ty(outs[i]).replicated.and(self.axes);
            if b.ty(ins[i]).partial().and(self.axes).is_empty() {
                return None;
            }
            if !r.is_empty() {
                let mut like = b.ty(d).clone();
                like.sum = like.sum.minus(r);
                like.replicated = like.replicated.union(r);
                d = b.push_as("sum", AllReduce { axes: r }, &[d], &like);
                b.note("mirror of an all_reduce to replicated");
            }
            let rest = self.axes.minus(r);
            if !rest.is_empty() {
                d = b.push("f", FanOut { axes: rest }, &[d]);
            }
            Some(d)
        };
        d.iter().enumerate().map(one).collect()
    }
    fn group(&self, cx: &[EvalCx], ins: &[Vec<&Tensor>]) -> Vec<Vec<Tensor>> {
        let operands = ins[0].len();
        let sums: Vec<Tensor> = (0..operands)
            .map(|i| {
                fold_group(cx[0].ins[i], self.axes, &ins.iter().map(|p| p[i]).collect::<Vec<_>>())
            })
            .collect();
        ins.iter().map(|_| sums.clone()).collect()
    }
}

impl LayoutOp for ReduceScatter {
    fn change(&self, mesh: &Mesh, t: &mut Type, declared: Option<&Type>) -> Result<(), TypeError> {
        if !self.axes.within(t.sum) {
            return wrong(mesh, self.axes, "a sum still to be taken");
        }
        t.sum = t.sum.minus(self.axes);
        split(mesh, t, self.axes, self.dim, declared)
    }
    fn mirrored(&self, b: &mut Builder, _: GradEnds, d: &[Option<Value>]) -> Grads {
        noted(b, d, "mirror of a reduce_scatter", |b, d| {
            b.push("gathered", AllGather { axes: self.axes, dim: self.dim }, &[d])
        })
    }
    fn group(&self, cx: &[EvalCx], ins: &[Vec<&Tensor>]) -> Vec<Vec<Tensor>> {
        let sum =
            fold_group(cx[0].ins[0], self.axes, &ins.iter().map(|p| p[0]).collect::<Vec<_>>());
        cx.iter().map(|c| vec![own_piece(c, self.dim, &sum)]).collect()
    }
}

impl LayoutOp for Reduce {
    fn change(&self, mesh: &Mesh, t: &mut Type, declared: Option<&Type>) -> Result<(), TypeError> {
        let ways = mesh.ways(self.axes);
        if !self.axes.within(t.sum) {
            return wrong(mesh, self.axes, "a sum still to be taken");
        }
        let Some(d) = t.dims.get_mut(self.dim).filter(|d| d.atoms.is_empty() && d.size > 0) else {
            return infer::err(
                "collective",
                format!("the operand has no whole dim {}", self.dim),
                "name a dim that nothing splits",
            );
        };
        let Some(size) = d.size.checked_mul(ways).filter(|_| self.to < ways) else {
            return infer::err(
                "collective",
                format!("{ways} pieces of {} have no piece {}", d.size, self.to),
                format!("name piece 0 to {}", ways.max(1) - 1),
            );
        };
        d.size = size;
        t.sum = t.sum.minus(self.axes);
        split(mesh, t, self.axes, self.dim, declared)
    }
    fn mirrored(&self, b: &mut Builder, _: GradEnds, d: &[Option<Value>]) -> Grads {
        let op = Broadcast { axes: self.axes, dim: self.dim, from: self.to };
        noted(b, d, "mirror of a reduce", |b, d| b.push("sent", op, &[d]))
    }
    fn group(&self, cx: &[EvalCx], ins: &[Vec<&Tensor>]) -> Vec<Vec<Tensor>> {
        let root = holder(cx, self.to, |c| c.out_extent(0, self.dim));
        let parts: Vec<&Tensor> = ins.iter().map(|p| p[0]).collect();
        let sum = fold_group(cx[0].ins[0], self.axes, &parts);
        let one = |(p, c): (usize, &EvalCx)| match p == root {
            true => vec![sum.clone()],
            false => vec![Tensor::full(&c.out_shape(0), 0.0)],
        };
        cx.iter().enumerate().map(one).collect()
    }
}
