//! Pieces of a dim: gathered, given, cut, put among zeros, exchanged.

use super::*;
use crate::types::MAX_LISTED;

/// Takes `axes` off the minor end of a dim's split.
pub(super) fn unsplit(
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
    let keep = d.atoms.len().checked_sub(axes.len()).filter(|_| !d.atoms.is_turned());
    match keep.filter(|&k| d.atoms.iter().skip(k).all(|a| axes.has(a))) {
        Some(k) => {
            let fine = t.clone();
            t.dims[dim].atoms = t.dims[dim].atoms.take(k);
            nested(mesh, t, &fine, dim)
        }
        None => wrong(mesh, axes, &format!("split in dim {dim}, minor-most,")),
    }
}

/// Adds `axes` at the minor end of a dim's split, in mesh order unless the declared result has them
/// in another.
pub(super) fn split(
    mesh: &Mesh,
    t: &mut Type,
    axes: AtomSet,
    dim: usize,
    declared: Option<&Type>,
) -> Result<(), TypeError> {
    let Some(d) = t.dims.get_mut(dim) else {
        return infer::err(
            "collective",
            format!("the operand has no dim {dim}"),
            "name one of its dims",
        );
    };
    let wanted = declared.and_then(|w| w.dims.get(dim)).map(|w| w.atoms);
    let wanted = wanted.filter(|w| {
        w.starts_with(d.atoms)
            && !w.is_turned()
            && w.len() == d.atoms.len() + axes.len()
            && w.iter().skip(d.atoms.len()).collect::<AtomSet>() == axes
    });
    match wanted.or_else(|| axes.iter().try_fold(d.atoms, crate::types::AtomList::push)) {
        Some(l) if l.is_turned() => infer::err(
            "collective",
            format!("dim {dim} has its pieces in the opposite order"),
            "use exchange",
        ),
        Some(l) => {
            let coarse = t.clone();
            t.dims[dim].atoms = l;
            nested(mesh, &coarse, t, dim)
        }
        None => infer::err(
            "collective",
            format!("dim {dim} would be split over more than {MAX_LISTED} parts of axes"),
            "use fewer axes on it",
        ),
    }
}

/// Pieces of a group in the order of their offsets (a dim may be split over axes in any order).
pub(super) fn join(cx: &[EvalCx], dim: usize, parts: &[&Tensor]) -> Tensor {
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by_key(|&p| (cx[p].in_extent(0, dim).offset, parts[p].shape[dim] == 0));
    Tensor::concat(dim, &order.iter().map(|&p| parts[p]).collect::<Vec<_>>())
}

impl LayoutOp for AllGather {
    fn change(&self, mesh: &Mesh, t: &mut Type, declared: Option<&Type>) -> Result<(), TypeError> {
        unsplit(mesh, t, self.axes, self.dim)?;
        let r = declared.map_or(self.axes, |d| d.replicated.and(self.axes));
        t.replicated = t.replicated.union(r);
        Ok(())
    }
    fn mirrored(&self, b: &mut Builder, (ins, outs): GradEnds, d: &[Option<Value>]) -> Grads {
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
    fn group(&self, cx: &[EvalCx], ins: &[Vec<&Tensor>]) -> Vec<Vec<Tensor>> {
        let whole = join(cx, self.dim, &ins.iter().map(|p| p[0]).collect::<Vec<_>>());
        ins.iter().map(|_| vec![whole.clone()]).collect()
    }
}

/// The place in the group of the rank that holds piece `number` of the split tensor; `extent` is a
/// rank's piece.
pub(super) fn holder<'a>(
    cx: &[EvalCx<'a>],
    number: usize,
    extent: impl Fn(&EvalCx<'a>) -> Extent,
) -> usize {
    let holds = |c: &EvalCx<'a>| {
        let e = extent(c);
        e.offset == number * e.chunk
    };
    cx.iter().position(holds).expect("every piece has a holder")
}

impl LayoutOp for Broadcast {
    fn change(&self, mesh: &Mesh, t: &mut Type, _: Option<&Type>) -> Result<(), TypeError> {
        let ways = mesh.ways(self.axes);
        let Some(d) =
            t.dims.get_mut(self.dim).filter(|d| d.atoms.set() == self.axes && !d.atoms.is_turned())
        else {
            return wrong(mesh, self.axes, &format!("all that splits dim {}", self.dim));
        };
        if d.size % ways != 0 || self.from >= ways || d.size == 0 {
            return infer::err(
                "collective",
                format!("{} in {ways} equal pieces has no piece {}", d.size, self.from),
                format!("name piece 0 to {} of a multiple of {ways}", ways.max(1) - 1),
            );
        }
        *d = crate::types::Dim { size: d.size / ways, atoms: crate::types::AtomList::EMPTY };
        t.replicated = t.replicated.union(self.axes);
        Ok(())
    }
    fn mirrored(&self, b: &mut Builder, (ins, _): GradEnds, d: &[Option<Value>]) -> Grads {
        let like = b.ty(ins[0]).cotangent();
        let op = Reduce { axes: self.axes, dim: self.dim, to: self.from };
        noted(b, d, "mirror of a broadcast", |b, d| b.push_as("reduced", op, &[d], &like))
    }
    fn group(&self, cx: &[EvalCx], ins: &[Vec<&Tensor>]) -> Vec<Vec<Tensor>> {
        let root = holder(cx, self.from, |c| c.in_extent(0, self.dim));
        ins.iter().map(|_| vec![ins[root][0].clone()]).collect()
    }
}

/// The piece of the operand that the result's type gives this rank.
pub(super) fn own_piece(cx: &EvalCx, dim: usize, whole: &Tensor) -> Tensor {
    let (from, to) = (cx.in_extent(0, dim), cx.out_extent(0, dim));
    whole.slice(dim, to.offset - from.offset, to.len)
}

/// Checks that the pieces of `fine` lie inside the pieces of `coarse`: a dim that is cut unevenly
/// cannot be cut again, since `ceil(ceil(n/a)/b)` is not `ceil(n/(a b))` in general.
pub(super) fn nested(mesh: &Mesh, coarse: &Type, fine: &Type, dim: usize) -> Result<(), TypeError> {
    let (c, f) = (coarse.pieces(mesh, dim), fine.pieces(mesh, dim));
    let n = fine.dims[dim].size;
    if c == 1 || n.div_ceil(f) * (f / c) == n.div_ceil(c) || n % f == 0 {
        return Ok(());
    }
    infer::err(
        "uneven",
        format!("{n} cut {c} ways cannot be cut further, {f} ways in all: pieces would overlap"),
        format!("pad {n} to a multiple of {f}"),
    )
}

impl LayoutOp for Slice {
    fn change(&self, mesh: &Mesh, t: &mut Type, declared: Option<&Type>) -> Result<(), TypeError> {
        if !self.axes.within(t.replicated) && t.marked().meets(self.axes) {
            return wrong(mesh, self.axes, "replicated, or invariant,");
        }
        t.replicated = t.replicated.minus(self.axes);
        split(mesh, t, self.axes, self.dim, declared)
    }
    fn mirrored(&self, b: &mut Builder, (ins, _): GradEnds, d: &[Option<Value>]) -> Grads {
        let like = b.ty(ins[0]).cotangent();
        let (axes, dim) = (self.axes, self.dim);
        let replicated = axes.within(b.ty(ins[0]).replicated);
        grads_of(d, |d| {
            if replicated {
                b.push("placed", PadToPartial { axes, dim }, &[d])
            } else {
                b.push_as("gathered", AllGather { axes, dim }, &[d], &like)
            }
        })
    }
    fn alone(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![own_piece(cx, self.dim, ins[0])]
    }
}

impl LayoutOp for PadToPartial {
    fn change(&self, mesh: &Mesh, t: &mut Type, _: Option<&Type>) -> Result<(), TypeError> {
        unsplit(mesh, t, self.axes, self.dim)?;
        t.sum = t.sum.union(self.axes);
        Ok(())
    }
    fn mirrored(&self, b: &mut Builder, (ins, _): GradEnds, d: &[Option<Value>]) -> Grads {
        let like = b.ty(ins[0]).cotangent();
        grads_of(d, |d| b.push_as("piece", Slice { axes: self.axes, dim: self.dim }, &[d], &like))
    }
    fn alone(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let (piece, whole) = (cx.in_extent(0, self.dim), cx.out_extent(0, self.dim));
        let from = piece.offset - whole.offset;
        vec![Tensor::from_fn(&cx.out_shape(0), |i| {
            let mut j: Shape = i.into();
            match i[self.dim].checked_sub(from).filter(|&k| k < piece.len) {
                Some(k) => {
                    j[self.dim] = k;
                    ins[0].at(&j)
                }
                None => 0.0,
            }
        })]
    }
}

impl LayoutOp for AllToAll {
    fn change(&self, mesh: &Mesh, t: &mut Type, declared: Option<&Type>) -> Result<(), TypeError> {
        if self.from == self.to {
            return infer::err(
                "collective",
                format!("dim {} would be split from itself", self.from),
                "name two dims",
            );
        }
        unsplit(mesh, t, self.axes, self.from)?;
        split(mesh, t, self.axes, self.to, declared)
    }
    fn mirrored(&self, b: &mut Builder, (ins, _): GradEnds, d: &[Option<Value>]) -> Grads {
        let like = b.ty(ins[0]).cotangent();
        let op = AllToAll { axes: self.axes, from: self.to, to: self.from };
        grads_of(d, |d| b.push_as("all_to_all_grad", op, &[d], &like))
    }
    fn group(&self, cx: &[EvalCx], ins: &[Vec<&Tensor>]) -> Vec<Vec<Tensor>> {
        let whole = join(cx, self.from, &ins.iter().map(|p| p[0]).collect::<Vec<_>>());
        cx.iter().map(|c| vec![own_piece(c, self.to, &whole)]).collect()
    }
}
