//! `from_varying`: V → S: the ranks' own values as the pieces of a dim.

use super::*;

op! {
    /// The ranks' own values, seen as the pieces of a dim in group order. No data moves; it undoes
    /// `to_varying`.
    FromVarying = "from_varying" (x) { axes: AtomSet, dim: usize }
    facts { kind: Layout, fusion: None, precision: Precision::AsTheyAre, gradient: Flows }
    samples []
}

impl OpDef for FromVarying {
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
        let mut t = ins[0].clone();
        if !self.axes.within(t.varying) {
            return fan_out::wrong(mesh, self.axes, "varying");
        }
        let whole = t.dims.get(self.dim).filter(|d| d.atoms.is_empty());
        let size = whole.and_then(|d| d.size.checked_mul(mesh.ways(self.axes)));
        let (Some(size), Some(atoms)) = (size, AtomList::collect(self.axes.iter())) else {
            return fan_out::wrong(mesh, self.axes, &format!("whole in dim {}", self.dim));
        };
        t.dims[self.dim] = Dim { size, atoms };
        t.varying = t.varying.minus(self.axes);
        Ok(smallvec::smallvec![t])
    }
    fn is_view(&self) -> bool {
        true
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, b: &mut Builder, _: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        grads_of(d, |d| b.push("own", ToVarying { axes: self.axes, dim: self.dim }, &[d]))
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].clone()]
    }
}
