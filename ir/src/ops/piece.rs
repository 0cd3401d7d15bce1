//! `piece`: R → V: the piece of another rank, of numbers that all ranks have.

use super::*;

op! {
    /// The piece of a dim of the rank `shift` places before, around the ring: what `permute` would
    /// bring of `to_varying` pieces, but no data moves, since all ranks have all of it. For indices
    /// (positions of the tokens of a block); they have no gradient.
    Piece = "piece" (x) { axes: AtomSet, dim: usize, shift: usize }
    facts { kind: Layout, fusion: None, precision: Precision::AsTheyAre, gradient: Unasked }
    samples []
}

impl Piece {
    /// The number of the piece that the rank with these coordinates has.
    pub fn number(&self, mesh: &Mesh, coords: &[usize]) -> usize {
        let ways = mesh.ways(self.axes);
        (mesh.place(self.axes, coords) + ways - self.shift % ways) % ways
    }
}

impl OpDef for Piece {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        fan_out::one(ins)?;
        match ins[0].dtype {
            DType::I32 => Ok(()),
            d => Err(format!("indices are i32, not {}", d.name())),
        }
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
        if !self.axes.within(t.replicated) {
            return fan_out::wrong(mesh, self.axes, "replicated");
        }
        let Some(d) = t.dims.get_mut(self.dim).filter(|d| d.atoms.is_empty()) else {
            return fan_out::wrong(mesh, self.axes, &format!("whole in dim {}", self.dim));
        };
        d.size = to_varying::even(mesh, self.axes, d.size)?;
        t.replicated = t.replicated.minus(self.axes);
        t.varying = t.varying.union(self.axes);
        Ok(smallvec::smallvec![t])
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, _: &mut Builder, _: &[Value], _: &[Value], _: &[Option<Value>]) -> Grads {
        smallvec::smallvec![None]
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let len = cx.outs[0].dims[self.dim].size;
        vec![ins[0].slice(self.dim, self.number(cx.mesh, cx.coords) * len, len)]
    }
}
