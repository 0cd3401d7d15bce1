//! `permute`: V → V: data moves around a ring.

use super::*;

op! {
    /// Each rank of a group receives the value of the rank `shift` places before it, around the ring.
    Permute = "permute" (x) { axes: AtomSet, shift: usize }
    facts { kind: Layout, fusion: None, precision: Precision::AsTheyAre, gradient: Flows }
    samples []
}

impl OpDef for Permute {
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
        _: &[Option<&Type>],
    ) -> Result<SmallVec<[Type; 2]>, TypeError> {
        if !self.axes.within(ins[0].varying) {
            return fan_out::wrong(mesh, self.axes, "varying");
        }
        Ok(smallvec::smallvec![ins[0].clone()])
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, b: &mut Builder, _: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let ways = b.mesh.ways(self.axes);
        let back = (ways - self.shift % ways) % ways;
        grads_of(d, |d| b.push("permute_grad", Permute { axes: self.axes, shift: back }, &[d]))
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].clone()]
    }
    fn collective(&self) -> Option<&dyn Collective> {
        Some(self)
    }
}

impl Collective for Permute {
    fn atoms(&self) -> AtomSet {
        self.axes
    }
    fn kind(&self) -> &'static str {
        "permute"
    }
    fn eval_group(&self, _: &[EvalCx], ins: &[Vec<&Tensor>]) -> Vec<Vec<Tensor>> {
        let n = ins.len();
        (0..n).map(|p| vec![ins[(p + n - self.shift % n) % n][0].clone()]).collect()
    }
    fn ring_bytes(&self, mesh: &Mesh, input: &Type, _: &Type) -> f64 {
        input.local_bytes(mesh) as f64
    }
}
