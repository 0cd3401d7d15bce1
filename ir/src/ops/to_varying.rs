//! `to_varying`: S → V: a rank's piece of a dim as a value of its own.

use super::*;

op! {
    /// This rank's piece of a dim, no longer seen as part of the whole: what a ring hands around.
    /// The axes split the dim alone and evenly. No data moves; `from_varying` is the way back.
    ToVarying = "to_varying" (x) { axes: AtomSet, dim: usize }
    facts { kind: Layout, fusion: None, precision: Precision::AsTheyAre, gradient: Flows }
    samples []
}

/// The size of a rank's piece of a dim that axes cut, or are to cut, evenly.
pub(crate) fn even(mesh: &Mesh, axes: AtomSet, size: usize) -> Result<usize, TypeError> {
    let ways = mesh.ways(axes);
    if size % ways == 0 {
        return Ok(size / ways);
    }
    infer::err(
        "uneven",
        format!("{size} cut {ways} ways gives pieces of different sizes"),
        format!("make it a multiple of {ways}, for example {}", size.next_multiple_of(ways)),
    )
}

impl OpDef for ToVarying {
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
        // In mesh order, which is the order of a group: so `from_varying` finds the pieces in their places.
        let cut = AtomList::collect(self.axes.iter());
        let Some(d) = t.dims.get_mut(self.dim).filter(|d| Some(d.atoms) == cut) else {
            return fan_out::wrong(mesh, self.axes, &format!("split in dim {} alone", self.dim));
        };
        *d = Dim { size: even(mesh, self.axes, d.size)?, atoms: AtomList::EMPTY };
        t.varying = t.varying.union(self.axes);
        Ok(smallvec::smallvec![t])
    }
    fn is_view(&self) -> bool {
        true
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, b: &mut Builder, _: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        grads_of(d, |d| b.push("joined", FromVarying { axes: self.axes, dim: self.dim }, &[d]))
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].clone()]
    }
}
