//! Marks: the ranks hold what they held, and its type says something else of it.

use super::*;
use crate::mesh::PIPELINE;

impl LayoutOp for FanOut {
    fn change(&self, mesh: &Mesh, t: &mut Type, _: Option<&Type>) -> Result<(), TypeError> {
        if t.marked().meets(self.axes) {
            return wrong(mesh, self.axes, "invariant");
        }
        t.replicated = t.replicated.union(self.axes);
        Ok(())
    }
    fn mirrored(&self, b: &mut Builder, (ins, _): GradEnds, d: &[Option<Value>]) -> Grads {
        let like = b.ty(ins[0]).cotangent();
        let op = AllReduce { axes: self.axes };
        noted(b, d, "mirror of a fan_out", |b, d| b.push_as("sum", op, &[d], &like))
    }
}

impl LayoutOp for ToPartial {
    fn change(&self, mesh: &Mesh, t: &mut Type, _: Option<&Type>) -> Result<(), TypeError> {
        if mesh.axis(PIPELINE) != Some(self.axes) {
            return infer::err(
                "collective",
                format!("only {PIPELINE} has values of its own on every rank"),
                format!("write to_partial[{PIPELINE}], on a mesh that has this axis"),
            );
        }
        if t.marked().meets(self.axes) {
            return wrong(mesh, self.axes, "invariant");
        }
        t.sum = t.sum.union(self.axes);
        Ok(())
    }
    fn mirrored(&self, _: &mut Builder, _: GradEnds, _: &[Option<Value>]) -> Grads {
        smallvec::smallvec![None]
    }
}
