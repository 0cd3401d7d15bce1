//! `reduce_scatter`: P → S.

use super::*;

op! {
    /// This rank's piece of the sum over the ranks of the axes.
    ReduceScatter = "reduce_scatter" (x) { axes: AtomSet, dim: usize }
    facts { kind: Layout, fusion: None, precision: Precision::AsTheyAre, gradient: Flows }
    samples []
}

impl OpDef for ReduceScatter {
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
        declared: &[Option<&Type>],
    ) -> Result<SmallVec<[Type; 2]>, TypeError> {
        let mut t = ins[0].clone();
        if !self.axes.within(t.sum) {
            return fan_out::wrong(mesh, self.axes, "a sum still to be taken");
        }
        t.sum = t.sum.minus(self.axes);
        all_gather::split(mesh, &mut t, self.axes, self.dim, declared)?;
        Ok(smallvec::smallvec![t])
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, b: &mut Builder, _: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let g =
            grads_of(d, |d| b.push("gathered", AllGather { axes: self.axes, dim: self.dim }, &[d]));
        if d[0].is_some() {
            b.note("mirror of a reduce_scatter");
        }
        g
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].clone()]
    }
    fn collective(&self) -> Option<&dyn Collective> {
        Some(self)
    }
}

impl Collective for ReduceScatter {
    fn atoms(&self) -> AtomSet {
        self.axes
    }
    fn kind(&self) -> &'static str {
        "reduce_scatter"
    }
    fn eval_group(&self, cx: &[EvalCx], ins: &[Vec<&Tensor>]) -> Vec<Vec<Tensor>> {
        let sum = all_reduce::fold_group(
            cx[0].ins[0],
            self.axes,
            &ins.iter().map(|p| p[0]).collect::<Vec<_>>(),
        );
        cx.iter().map(|c| vec![slice::own_piece(c, self.dim, &sum)]).collect()
    }
    fn ring_bytes(&self, mesh: &Mesh, input: &Type, _: &Type) -> f64 {
        let p = mesh.ways(self.axes) as f64;
        (p - 1.0) / p * input.local_bytes(mesh) as f64
    }
}
