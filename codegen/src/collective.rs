//! Collectives: which elements of a piece go to which member of the group.

use crate::layout::Layout;
use shardc_ir::boxes::Boxes;
use shardc_ir::kernel::{
    Block, Collective, Exchange, Gathered, Kernel, Ragged, Reduced, Scattered, View,
};
use shardc_ir::mesh::AtomSet;
use shardc_ir::ops::{self, AllToAllV, Sends};
use shardc_ir::types::{Extent, Reduction, Type};

/// Coordinates of every member of this rank's group, in group order.
fn members(l: &Layout, axes: AtomSet) -> Vec<Vec<usize>> {
    let group = l.mesh.group(axes, l.mesh.rank(l.coords));
    group.into_iter().map(|r| l.mesh.coords(r)).collect()
}

fn kernel(axes: AtomSet, exchange: Exchange) -> Kernel {
    Kernel::Collective(Collective { axes, exchange })
}

/// The part of `operand` that lies where another tensor has the piece `piece` of dim `dim`.
fn overlap(l: &Layout, operand: usize, dim: usize, piece: Extent) -> Block {
    let (offset, len) = common(l.extent(operand, dim), piece);
    l.part(operand, dim, offset, len)
}

/// Where in `own` what it has in common with `piece` begins, and how long it is.
fn common(own: Extent, piece: Extent) -> (usize, usize) {
    let first = piece.offset.max(own.offset);
    let last = (piece.offset + piece.len).min(own.offset + own.len);
    (first - own.offset, last.saturating_sub(first))
}

/// The piece of dim `dim` that each member has in a tensor of type `t`.
fn pieces(l: &Layout, axes: AtomSet, t: &Type, dim: usize) -> Vec<Extent> {
    members(l, axes).iter().map(|c| t.extent(l.mesh, dim, c)).collect()
}

fn blocks(l: &Layout, operand: usize, dim: usize, pieces: &[Extent]) -> Vec<Block> {
    pieces.iter().map(|&p| overlap(l, operand, dim, p)).collect()
}

pub(crate) fn all_reduce(l: &Layout, axes: AtomSet) -> Kernel {
    let one = |i: usize| {
        let t = l.types[i];
        let fold = t.reduction(axes).expect("checked by its type");
        Reduced { fold, from: l.whole(i), to: l.whole(l.ins + i) }
    };
    kernel(axes, Exchange::AllReduce { tensors: (0..l.ins).map(one).collect() })
}

/// Of an operand and its result.
fn gathered(l: &Layout, axes: AtomSet, dim: usize, [from, to]: [usize; 2]) -> Gathered {
    let pieces = pieces(l, axes, l.types[from], dim);
    Gathered { from: l.whole(from), to: blocks(l, to, dim, &pieces) }
}

/// Of an operand and its result.
fn scattered(l: &Layout, axes: AtomSet, dim: usize, [from, to]: [usize; 2]) -> Scattered {
    let pieces = pieces(l, axes, l.types[to], dim);
    let from = blocks(l, from, dim, &pieces);
    Scattered { fold: Reduction::Sum, from, to: l.whole(to) }
}

pub(crate) fn all_gather(l: &Layout, axes: AtomSet, dim: usize) -> Kernel {
    kernel(axes, Exchange::AllGather { tensors: vec![gathered(l, axes, dim, [0, 1])] })
}

pub(crate) fn reduce_scatter(l: &Layout, axes: AtomSet, dim: usize) -> Kernel {
    kernel(axes, Exchange::ReduceScatter { tensors: vec![scattered(l, axes, dim, [0, 1])] })
}

/// Several gathers, or several scattered sums, of one group in one call: by tensor its op, and where its
/// operand and its result are among those of the launch.
pub(crate) fn together(l: &Layout, all: &[(&dyn ops::LayoutChange, [usize; 2])]) -> Kernel {
    let axes = all[0].0.atoms();
    let dim = |op: &dyn ops::LayoutChange| op.dim().expect("it gathers or scatters a dim");
    kernel(
        axes,
        match all[0].0.sends() {
            Sends::ShareOfResult => Exchange::AllGather {
                tensors: all.iter().map(|&(op, at)| gathered(l, axes, dim(op), at)).collect(),
            },
            _share => Exchange::ReduceScatter {
                tensors: all.iter().map(|&(op, at)| scattered(l, axes, dim(op), at)).collect(),
            },
        },
    )
}

/// Members split dim `from` before and dim `to` after: what a member gives is its piece, cut where
/// the receiver's new piece is.
pub(crate) fn all_to_all(l: &Layout, axes: AtomSet, from: usize, to: usize) -> Kernel {
    let (old, new) = (pieces(l, axes, l.types[0], from), pieces(l, axes, l.types[1], to));
    let (from, to) = (blocks(l, 0, to, &new), blocks(l, 1, from, &old));
    kernel(axes, Exchange::AllToAll { clear: None, from, to })
}

/// The boxes that this rank gives to each member, and gets from it.
pub(crate) fn exchange(l: &Layout, op: &ops::Exchange) -> Kernel {
    let axes = op.axes;
    let boxes = Boxes::new(l.mesh, axes, op.halo(), l.types[0], l.types[1]);
    let all = members(l, axes);
    let from = all.iter().map(|c| l.boxed(0, boxes.between(l.coords, c))).collect();
    let to = all.iter().map(|c| l.boxed(1, boxes.landed(c, l.coords))).collect();
    let clear = (!boxes.fills(l.coords)).then(|| l.whole(1));
    kernel(axes, Exchange::AllToAll { clear, from, to })
}

/// As [`all_to_all`], with the counts of what is given and of what comes. Groups are dim 0 of rows
/// and of counts, shards dim 1 of rows and dim 2 of counts.
pub(crate) fn all_to_all_v(l: &Layout, op: &AllToAllV) -> Kernel {
    let (axes, from, to) = (op.axes, op.from, op.to);
    let (old, new) = (pieces(l, axes, l.types[0], from), pieces(l, axes, l.types[3], to));
    let given = new.iter().map(|&p| ragged(l, [0, 1], to, p)).collect();
    let taken = old.iter().map(|&p| ragged(l, [3, 2], from, p)).collect();
    kernel(axes, Exchange::AllToAllV { from: given, to: taken })
}

/// The part of rows and their counts that lies where another tensor has a piece of dim `dim`.
fn ragged(l: &Layout, [rows, counts]: [usize; 2], dim: usize, piece: Extent) -> Ragged {
    let part = |operand: usize, at: usize| {
        let (offset, len) = common(l.extent(rows, dim), piece);
        let (mut extents, strides) = (l.lens(operand), l.strides(operand));
        extents[at] = len;
        let offset = offset * strides[at];
        Block { extents, view: View { operand, offset, strides }, elem: l.elem(operand) }
    };
    Ragged { rows: part(rows, dim), counts: part(counts, 2 * dim) }
}

pub(crate) fn permute(l: &Layout, axes: AtomSet, shift: usize) -> Kernel {
    let shift = shift % l.mesh.ways(axes);
    kernel(axes, Exchange::Permute { shift, from: l.whole(0), to: l.whole(1) })
}

/// The place in the group of the member that holds piece `number` of a dim of a tensor of type `t`.
fn holder(l: &Layout, axes: AtomSet, t: &Type, dim: usize, number: usize) -> usize {
    let all = pieces(l, axes, t, dim);
    let holds = |e: &Extent| e.offset == number * e.chunk;
    all.iter().position(holds).expect("every piece has a holder")
}

/// This rank's place in its group.
fn place(l: &Layout, axes: AtomSet) -> usize {
    l.mesh.place(axes, l.coords)
}

pub(crate) fn broadcast(l: &Layout, axes: AtomSet, dim: usize, from: usize) -> Kernel {
    let root = holder(l, axes, l.types[0], dim, from);
    let own = (root == place(l, axes)).then(|| l.whole(0));
    kernel(axes, Exchange::Broadcast { root, own, to: l.whole(1) })
}

pub(crate) fn reduce(l: &Layout, axes: AtomSet, dim: usize, to: usize) -> Kernel {
    let root = holder(l, axes, l.types[1], dim, to);
    let mine = root == place(l, axes);
    // A member that receives nothing is given nothing.
    let given = |operand: usize, all: bool| match all {
        true => l.whole(operand),
        false => l.part(operand, dim, 0, 0),
    };
    let exchange = Exchange::Reduce {
        clear: (!mine).then(|| l.whole(1)),
        from: (0..l.mesh.ways(axes)).map(|p| given(0, p == root)).collect(),
        to: given(1, mine),
    };
    kernel(axes, exchange)
}
