//! `to_partial`: what a pipeline stage has of its own, as one term of a sum over all stages.

use super::*;
use crate::mesh::PIPELINE;

op! {
    /// The operand as one term of a sum over the ranks of the pipeline. A function belongs to one
    /// rank of the pipeline and its values say nothing of the others', so this costs nothing; the
    /// sum is still to be taken.
    ToPartial = "to_partial" (x) { axes: AtomSet }
    facts { kind: Layout, fusion: Some(Each), precision: Precision::AsTheyAre, gradient: Unasked }
    samples []
}

impl OpDef for ToPartial {
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
        if mesh.axis(PIPELINE) != Some(self.axes) {
            return infer::err(
                "collective",
                format!("only {PIPELINE} has values of its own on every rank"),
                format!("write to_partial[{PIPELINE}], on a mesh that has this axis"),
            );
        }
        if t.marked().meets(self.axes) {
            return fan_out::wrong(mesh, self.axes, "invariant");
        }
        t.sum = t.sum.union(self.axes);
        Ok(smallvec::smallvec![t])
    }
    fn is_view(&self) -> bool {
        true
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, _: &mut Builder, _: &[Value], _: &[Value], _: &[Option<Value>]) -> Grads {
        smallvec::smallvec![None]
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].clone()]
    }
}
