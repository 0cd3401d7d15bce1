//! `place`: S → P: a rank's piece among zeros.

use super::*;

op! {
    /// This rank's piece of a dim in its place, zeros elsewhere: the gradient of `slice` from a
    /// replicated operand. No data moves.
    Place = "place" (x) { axes: AtomSet, dim: usize }
    facts { kind: Layout, fusion: None, precision: Precision::AsTheyAre, gradient: Flows }
    samples []
}

impl OpDef for Place {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 1)
    }
    fn rule(&self, ranks: &[usize]) -> Rule {
        Rule::elementwise(1, 1, ranks[0])
    }
    fn types(
        &self,
        mesh: &Mesh,
        ins: &[&Type],
        _: &[Option<&Type>],
    ) -> Result<SmallVec<[Type; 2]>, TypeError> {
        let mut t = ins[0].clone();
        all_gather::unsplit(mesh, &mut t, self.axes, self.dim)?;
        t.sum = t.sum.union(self.axes);
        Ok(smallvec::smallvec![t])
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let like = b.ty(ins[0]).cotangent();
        grads_of(d, |d| b.push_as("piece", Slice { axes: self.axes, dim: self.dim }, &[d], &like))
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let (piece, whole) = (cx.in_extent(0, self.dim), cx.out_extent(0, self.dim));
        let from = piece.offset - whole.offset;
        vec![Tensor::from_fn(&cx.out_shape(0), |i| {
            let mut j: Shape = i.into();
            match i[self.dim].checked_sub(from).filter(|&k| k < piece.len) {
                Some(k) => {
                    j[self.dim] = k;
                    ins[0].at(&j)
                }
                None => 0.0,
            }
        })]
    }
}
