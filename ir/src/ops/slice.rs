//! `slice`: R → S or I → S: a rank keeps its piece of a dim.

use super::*;

op! {
    /// This rank's piece of a dim, along axes over which the operand is the same everywhere. No
    /// data moves.
    Slice = "slice" (x) { axes: AtomSet, dim: usize }
    facts { kind: Layout, fusion: None, precision: Precision::AsTheyAre, gradient: Flows }
    samples []
}

/// The piece of the operand that the result's type gives this rank.
pub(crate) fn own_piece(cx: &EvalCx, dim: usize, whole: &Tensor) -> Tensor {
    let (from, to) = (cx.in_extent(0, dim), cx.out_extent(0, dim));
    whole.slice(dim, to.offset - from.offset, to.len)
}

impl OpDef for Slice {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        fan_out::one(ins)
    }
    fn rule(&self, ranks: &[usize]) -> Rule {
        Rule::elementwise(1, 1, ranks[0])
    }
    fn types(
        &self,
        mesh: &Mesh,
        ins: &[&Type],
        declared: &[Option<&Type>],
    ) -> Result<SmallVec<[Type; 2]>, TypeError> {
        let mut t = ins[0].clone();
        if !self.axes.within(t.replicated) && t.marked().meets(self.axes) {
            return fan_out::wrong(mesh, self.axes, "replicated, or invariant,");
        }
        t.replicated = t.replicated.minus(self.axes);
        all_gather::split(mesh, &mut t, self.axes, self.dim, declared)?;
        Ok(smallvec::smallvec![t])
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let like = b.ty(ins[0]).cotangent();
        let (axes, dim) = (self.axes, self.dim);
        let replicated = axes.within(b.ty(ins[0]).replicated);
        grads_of(d, |d| {
            if replicated {
                b.push("placed", Place { axes, dim }, &[d])
            } else {
                b.push_as("gathered", AllGather { axes, dim }, &[d], &like)
            }
        })
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![own_piece(cx, self.dim, ins[0])]
    }
}

/// Checks that the pieces of `fine` lie inside the pieces of `coarse`: a dim that is cut unevenly
/// cannot be cut again, since `ceil(ceil(n/a)/b)` is not `ceil(n/(a b))` in general.
pub(crate) fn nested(mesh: &Mesh, coarse: &Type, fine: &Type, dim: usize) -> Result<(), TypeError> {
    let (c, f) = (coarse.pieces(mesh, dim), fine.pieces(mesh, dim));
    let n = fine.dims[dim].size;
    if c == 1 || n.div_ceil(f) * (f / c) == n.div_ceil(c) || n % f == 0 {
        return Ok(());
    }
    infer::err(
        "uneven",
        format!("{n} cut {c} ways cannot be cut further, {f} ways in all: pieces would overlap"),
        format!("pad {n} to a multiple of {f}"),
    )
}
