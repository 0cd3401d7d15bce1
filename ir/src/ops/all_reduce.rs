//! `all_reduce`: P → I (Megatron's g) or P → R.

use super::*;

op! {
    /// The sum (or max, min) over the ranks of the axes, folded from the left in group order. The
    /// declared type says whether the result is invariant or replicated. Several operands are
    /// reduced in one call.
    AllReduce = "all_reduce" (x) { axes: AtomSet }
    facts { kind: Layout, fusion: None, precision: Precision::AsTheyAre, gradient: Flows }
    samples []
}

/// Folds one operand of a whole group in group order.
pub(crate) fn fold_group(t: &Type, axes: AtomSet, parts: &[&Tensor]) -> Tensor {
    let first = parts[0].clone();
    let pick: fn(f64, f64) -> f64 = if axes.within(t.max) {
        f64::max
    } else if axes.within(t.min) {
        f64::min
    } else {
        |a, b| a + b
    };
    parts[1..].iter().fold(first, |a, b| a.zip(b, pick))
}

impl OpDef for AllReduce {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        if ins.is_empty() || ins.iter().any(|t| !t.dtype.is_float()) {
            return Err("float operands are needed".into());
        }
        Ok(())
    }
    fn rule(&self, ranks: &[usize]) -> Rule {
        Rule::elementwise(ranks.len(), ranks.len(), ranks[0])
    }
    fn types(
        &self,
        mesh: &Mesh,
        ins: &[&Type],
        declared: &[Option<&Type>],
    ) -> Result<SmallVec<[Type; 2]>, TypeError> {
        let one = |(i, x): (usize, &&Type)| {
            let mut t = (*x).clone();
            if ![t.sum, t.max, t.min].into_iter().any(|p| self.axes.within(p)) {
                return fan_out::wrong(mesh, self.axes, "a sum still to be taken");
            }
            t.sum = t.sum.minus(self.axes);
            t.max = t.max.minus(self.axes);
            t.min = t.min.minus(self.axes);
            if let Some(d) = declared.get(i).copied().flatten() {
                t.replicated = t.replicated.union(d.replicated.and(self.axes));
            }
            Ok(t)
        };
        ins.iter().enumerate().map(one).collect()
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn in_place(&self, result: usize) -> Option<usize> {
        Some(result)
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], outs: &[Value], d: &[Option<Value>]) -> Grads {
        // P→I: fan_out. P→R: the cotangent is a P, to be reduced to an R. Mixed: both.
        let one = |(i, d): (usize, &Option<Value>)| {
            let mut d = (*d)?;
            let r = b.ty(outs[i]).replicated.and(self.axes);
            if b.ty(ins[i]).sum.and(self.axes).is_empty() {
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
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        ins.iter().map(|&t| t.clone()).collect()
    }
    fn collective(&self) -> Option<&dyn Collective> {
        Some(self)
    }
}

impl Collective for AllReduce {
    fn atoms(&self) -> AtomSet {
        self.axes
    }
    fn kind(&self) -> &'static str {
        "all_reduce"
    }
    fn eval_group(&self, cx: &[EvalCx], ins: &[Vec<&Tensor>]) -> Vec<Vec<Tensor>> {
        let operands = ins[0].len();
        let sums: Vec<Tensor> = (0..operands)
            .map(|i| {
                fold_group(cx[0].ins[i], self.axes, &ins.iter().map(|p| p[i]).collect::<Vec<_>>())
            })
            .collect();
        ins.iter().map(|_| sums.clone()).collect()
    }
    fn ring_bytes(&self, mesh: &Mesh, input: &Type, _: &Type) -> f64 {
        let p = mesh.ways(self.axes) as f64;
        2.0 * (p - 1.0) / p * input.local_bytes(mesh) as f64
    }
}
