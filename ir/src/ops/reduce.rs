//! `reduce`: P → one piece of S.

use super::*;

op! {
    /// The sum over the ranks of the axes as piece number `to` of a dim that the axes cut, zeros as all
    /// other pieces: the dim of the operand has the size of a piece. Summed over all `to`, the results
    /// are the whole.
    Reduce = "reduce" (x) { axes: AtomSet, dim: usize, to: usize }
    facts { kind: Layout, fusion: None, precision: Precision::AsTheyAre, gradient: Flows }
    samples []
}

impl OpDef for Reduce {
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
        let ways = mesh.ways(self.axes);
        if !self.axes.within(t.sum) {
            return fan_out::wrong(mesh, self.axes, "a sum still to be taken");
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
        all_gather::split(mesh, &mut t, self.axes, self.dim, declared)?;
        Ok(smallvec::smallvec![t])
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, b: &mut Builder, _: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let op = Broadcast { axes: self.axes, dim: self.dim, from: self.to };
        let g = grads_of(d, |d| b.push("sent", op, &[d]));
        if d[0].is_some() {
            b.note("mirror of a reduce");
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

impl Collective for Reduce {
    fn atoms(&self) -> AtomSet {
        self.axes
    }
    fn kind(&self) -> &'static str {
        "reduce"
    }
    fn eval_group(&self, cx: &[EvalCx], ins: &[Vec<&Tensor>]) -> Vec<Vec<Tensor>> {
        let root = broadcast::holder(cx, self.to, |c| c.out_extent(0, self.dim));
        let parts: Vec<&Tensor> = ins.iter().map(|p| p[0]).collect();
        let sum = all_reduce::fold_group(cx[0].ins[0], self.axes, &parts);
        let one = |(p, c): (usize, &EvalCx)| match p == root {
            true => vec![sum.clone()],
            false => vec![Tensor::full(&c.out_shape(0), 0.0)],
        };
        cx.iter().enumerate().map(one).collect()
    }
    /// The mean over all pieces: in a ring everybody but the last sends its sum on.
    fn ring_bytes(&self, mesh: &Mesh, input: &Type, _: &Type) -> f64 {
        let p = mesh.ways(self.axes) as f64;
        (p - 1.0) / p * input.local_bytes(mesh) as f64
    }
}
