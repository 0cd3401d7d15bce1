//! Values of the ranks' own (V), and how they go around a ring.

use super::*;

/// One operand, of indices.
pub(super) fn takes_indices(ins: &[&Type]) -> Result<(), String> {
    one(ins)?;
    match ins[0].dtype {
        DType::I32 => Ok(()),
        d => Err(format!("indices are i32, not {}", d.name())),
    }
}

impl LayoutOp for Permute {
    fn change(&self, mesh: &Mesh, t: &mut Type, _: Option<&Type>) -> Result<(), TypeError> {
        if !self.axes.within(t.varying) {
            return wrong(mesh, self.axes, "varying");
        }
        Ok(())
    }
    fn mirrored(&self, b: &mut Builder, _: GradEnds, d: &[Option<Value>]) -> Grads {
        let ways = b.mesh.ways(self.axes);
        let back = (ways - self.shift % ways) % ways;
        grads_of(d, |d| b.push("permute_grad", Permute { axes: self.axes, shift: back }, &[d]))
    }
    fn group(&self, _: &[EvalCx], ins: &[Vec<&Tensor>]) -> Vec<Vec<Tensor>> {
        let n = ins.len();
        (0..n).map(|p| vec![ins[(p + n - self.shift % n) % n][0].clone()]).collect()
    }
}

/// The size of a rank's piece of a dim that axes cut, or are to cut, evenly.
pub(super) fn even(mesh: &Mesh, axes: AtomSet, size: usize) -> Result<usize, TypeError> {
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

impl LayoutOp for ToVarying {
    fn change(&self, mesh: &Mesh, t: &mut Type, _: Option<&Type>) -> Result<(), TypeError> {
        // In mesh order, which is the order of a group: so `from_varying` finds the pieces in their places.
        let cut = AtomList::collect(self.axes.iter());
        let Some(d) = t.dims.get_mut(self.dim).filter(|d| Some(d.atoms) == cut) else {
            return wrong(mesh, self.axes, &format!("split in dim {} alone", self.dim));
        };
        *d = Dim { size: even(mesh, self.axes, d.size)?, atoms: AtomList::EMPTY };
        t.varying = t.varying.union(self.axes);
        Ok(())
    }
    fn mirrored(&self, b: &mut Builder, _: GradEnds, d: &[Option<Value>]) -> Grads {
        grads_of(d, |d| b.push("joined", FromVarying { axes: self.axes, dim: self.dim }, &[d]))
    }
}

impl LayoutOp for FromVarying {
    fn change(&self, mesh: &Mesh, t: &mut Type, _: Option<&Type>) -> Result<(), TypeError> {
        if !self.axes.within(t.varying) {
            return wrong(mesh, self.axes, "varying");
        }
        let whole = t.dims.get(self.dim).filter(|d| d.atoms.is_empty());
        let size = whole.and_then(|d| d.size.checked_mul(mesh.ways(self.axes)));
        let (Some(size), Some(atoms)) = (size, AtomList::collect(self.axes.iter())) else {
            return wrong(mesh, self.axes, &format!("whole in dim {}", self.dim));
        };
        t.dims[self.dim] = Dim { size, atoms };
        t.varying = t.varying.minus(self.axes);
        Ok(())
    }
    fn mirrored(&self, b: &mut Builder, _: GradEnds, d: &[Option<Value>]) -> Grads {
        grads_of(d, |d| b.push("own", ToVarying { axes: self.axes, dim: self.dim }, &[d]))
    }
}

impl RingShard {
    /// The number of the piece that the rank with these coordinates has.
    pub fn number(&self, mesh: &Mesh, coords: &[usize]) -> usize {
        let ways = mesh.ways(self.axes);
        (mesh.place(self.axes, coords) + ways - self.shift % ways) % ways
    }
}

impl LayoutOp for RingShard {
    fn change(&self, mesh: &Mesh, t: &mut Type, _: Option<&Type>) -> Result<(), TypeError> {
        if !self.axes.within(t.replicated) {
            return wrong(mesh, self.axes, "replicated");
        }
        let Some(d) = t.dims.get_mut(self.dim).filter(|d| d.atoms.is_empty()) else {
            return wrong(mesh, self.axes, &format!("whole in dim {}", self.dim));
        };
        d.size = even(mesh, self.axes, d.size)?;
        t.replicated = t.replicated.minus(self.axes);
        t.varying = t.varying.union(self.axes);
        Ok(())
    }
    fn mirrored(&self, _: &mut Builder, _: GradEnds, _: &[Option<Value>]) -> Grads {
        smallvec::smallvec![None]
    }
    fn alone(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let len = cx.outs[0].dims[self.dim].size;
        vec![ins[0].slice(self.dim, self.number(cx.mesh, cx.coords) * len, len)]
    }
}
