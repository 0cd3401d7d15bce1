//! `fan_out`: I → R. Megatron's f, `pvary`, `convert(I→R)`.

use super::*;

op! {
    /// The same data, from here on used differently by the ranks of the axes. Costs nothing; its
    /// gradient is the `all_reduce` that a forgotten f would lose.
    FanOut = "fan_out" (x) { axes: AtomSet }
    facts { kind: Layout, fusion: Some(Each), precision: Precision::AsTheyAre, gradient: Flows }
    samples []
}

/// One operand, of any element type.
pub(crate) fn one(ins: &[&Type]) -> Result<(), String> {
    if ins.len() == 1 { Ok(()) } else { Err("one operand is needed".into()) }
}

/// An error that an operand is not in the state the collective starts from.
pub(crate) fn wrong<T>(mesh: &Mesh, axes: AtomSet, want: &str) -> Result<T, TypeError> {
    let n = mesh.names(axes, "*");
    infer::err(
        "collective",
        format!("the operand must be {want} over {n}"),
        format!("take {n} off the collective, or reshard its operand"),
    )
}

impl OpDef for FanOut {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        one(ins)
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
        if t.marked().meets(self.axes) {
            return wrong(mesh, self.axes, "invariant");
        }
        t.replicated = t.replicated.union(self.axes);
        Ok(smallvec::smallvec![t])
    }
    fn is_view(&self) -> bool {
        true
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let like = b.ty(ins[0]).cotangent();
        let op = AllReduce { axes: self.axes };
        let g = grads_of(d, |d| b.push_as("sum", op, &[d], &like));
        if d[0].is_some() {
            b.note("mirror of a fan_out");
        }
        g
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].clone()]
    }
}
