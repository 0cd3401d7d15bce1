//! `all_to_all`: S(i) → S(j).

use super::*;

op! {
    /// The axes that split dim `from` split dim `to` instead.
    AllToAll = "all_to_all" (x) { axes: AtomSet, from: usize, to: usize }
    facts { kind: Layout, fusion: None, precision: Precision::AsTheyAre, gradient: Flows }
    samples []
}

impl OpDef for AllToAll {
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
        if self.from == self.to {
            return infer::err(
                "collective",
                format!("dim {} would be split from itself", self.from),
                "name two dims",
            );
        }
        let mut t = ins[0].clone();
        all_gather::unsplit(mesh, &mut t, self.axes, self.from)?;
        all_gather::split(mesh, &mut t, self.axes, self.to, declared)?;
        Ok(smallvec::smallvec![t])
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let like = b.ty(ins[0]).cotangent();
        let op = AllToAll { axes: self.axes, from: self.to, to: self.from };
        grads_of(d, |d| b.push_as("all_to_all_grad", op, &[d], &like))
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].clone()]
    }
    fn collective(&self) -> Option<&dyn Collective> {
        Some(self)
    }
}

impl Collective for AllToAll {
    fn atoms(&self) -> AtomSet {
        self.axes
    }
    fn kind(&self) -> &'static str {
        "all_to_all"
    }
    fn eval_group(&self, cx: &[EvalCx], ins: &[Vec<&Tensor>]) -> Vec<Vec<Tensor>> {
        let whole = all_gather::join(cx, self.from, &ins.iter().map(|p| p[0]).collect::<Vec<_>>());
        cx.iter().map(|c| vec![slice::own_piece(c, self.to, &whole)]).collect()
    }
    fn ring_bytes(&self, mesh: &Mesh, input: &Type, _: &Type) -> f64 {
        let p = mesh.ways(self.axes) as f64;
        (p - 1.0) / p * input.local_bytes(mesh) as f64
    }
}
