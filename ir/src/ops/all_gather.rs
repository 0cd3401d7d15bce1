//! `all_gather`: S → R or S → I.

use super::*;

op! {
    /// All pieces of a dim along its minor-most axes. The declared type says whether the result is
    /// replicated (the default) or invariant.
    AllGather = "all_gather" (x) { axes: AtomSet, dim: usize }
    facts { kind: Layout, fusion: None, precision: Precision::AsTheyAre, gradient: Flows }
    samples []
}

/// Takes `axes` off the minor end of a dim's split.
pub(crate) fn unsplit(
    mesh: &Mesh,
    t: &mut Type,
    axes: AtomSet,
    dim: usize,
) -> Result<(), TypeError> {
    let Some(d) = t.dims.get_mut(dim) else {
        return infer::err(
            "collective",
            format!("the operand has no dim {dim}"),
            "name one of its dims",
        );
    };
    let keep = d.atoms.len().checked_sub(axes.len());
    match keep.filter(|&k| d.atoms.iter().skip(k).all(|a| axes.has(a))) {
        Some(k) => {
            let fine = t.clone();
            t.dims[dim].atoms = t.dims[dim].atoms.take(k);
            slice::nested(mesh, t, &fine, dim)
        }
        None => fan_out::wrong(mesh, axes, &format!("split in dim {dim}, minor-most,")),
    }
}

/// Adds `axes` at the minor end of a dim's split, in mesh order unless the declared result has them
/// in another.
pub(crate) fn split(
    mesh: &Mesh,
    t: &mut Type,
    axes: AtomSet,
    dim: usize,
    declared: &[Option<&Type>],
) -> Result<(), TypeError> {
    let Some(d) = t.dims.get_mut(dim) else {
        return infer::err(
            "collective",
            format!("the operand has no dim {dim}"),
            "name one of its dims",
        );
    };
    let wanted = declared.first().copied().flatten().and_then(|w| w.dims.get(dim)).map(|w| w.atoms);
    let wanted = wanted.filter(|w| {
        w.starts_with(d.atoms)
            && w.len() == d.atoms.len() + axes.len()
            && w.iter().skip(d.atoms.len()).collect::<AtomSet>() == axes
    });
    match wanted.or_else(|| axes.iter().try_fold(d.atoms, crate::types::AtomList::push)) {
        Some(l) => {
            let coarse = t.clone();
            t.dims[dim].atoms = l;
            slice::nested(mesh, &coarse, t, dim)
        }
        None => infer::err(
            "collective",
            format!("dim {dim} would be split over more than 7 parts of axes"),
            "use fewer axes on it",
        ),
    }
}

impl OpDef for AllGather {
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
        let mut t = ins[0].clone();
        unsplit(mesh, &mut t, self.axes, self.dim)?;
        let r =
            declared.first().copied().flatten().map_or(self.axes, |d| d.replicated.and(self.axes));
        t.replicated = t.replicated.union(r);
        Ok(smallvec::smallvec![t])
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], outs: &[Value], d: &[Option<Value>]) -> Grads {
        let r = b.ty(outs[0]).replicated.and(self.axes);
        assert!(r == self.axes || r.is_empty(), "a gather to part R, part I is two gathers");
        let (axes, dim) = (self.axes, self.dim);
        let like = b.ty(ins[0]).cotangent();
        let g = grads_of(d, |d| {
            if r.is_empty() {
                b.push_as("piece", Slice { axes, dim }, &[d], &like)
            } else {
                b.push_as("scattered", ReduceScatter { axes, dim }, &[d], &like)
            }
        });
        if d[0].is_some() {
            b.note("mirror of an all_gather");
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

impl Collective for AllGather {
    fn atoms(&self) -> AtomSet {
        self.axes
    }
    fn kind(&self) -> &'static str {
        "all_gather"
    }
    fn eval_group(&self, cx: &[EvalCx], ins: &[Vec<&Tensor>]) -> Vec<Vec<Tensor>> {
        let whole = join(cx, self.dim, &ins.iter().map(|p| p[0]).collect::<Vec<_>>());
        ins.iter().map(|_| vec![whole.clone()]).collect()
    }
    fn ring_bytes(&self, mesh: &Mesh, _: &Type, output: &Type) -> f64 {
        let p = mesh.ways(self.axes) as f64;
        (p - 1.0) / p * output.local_bytes(mesh) as f64
    }
}

/// Pieces of a group in the order of their offsets (a dim may be split over axes in any order).
pub(crate) fn join(cx: &[EvalCx], dim: usize, parts: &[&Tensor]) -> Tensor {
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by_key(|&p| (cx[p].in_extent(0, dim).offset, parts[p].shape[dim] == 0));
    Tensor::concat(dim, &order.iter().map(|&p| parts[p]).collect::<Vec<_>>())
}
