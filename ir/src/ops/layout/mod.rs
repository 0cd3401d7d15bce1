//! Ops of ranks: what each rank holds of a value changes, not the value. The table below says everything of
//! them but their types, gradients and evaluation, which stand in the files beside: `marks` (nothing moves),
//! `sums`, `pieces`, `exchange`, `rows` (of experts) and `rings`.

mod exchange;
mod marks;
mod pieces;
mod rings;
mod rows;
mod sums;

use super::*;
use crate::attr::{Along, Offset};
use crate::boxes::{Boxes, Halo};
use crate::types::State;

/// An op of [`Kind::Layout`].
pub trait LayoutChange {
    /// The atoms whose ranks form the groups.
    fn atoms(&self) -> AtomSet;
    /// Name in summaries and `--format json`: that of the op.
    fn kind(&self) -> &'static str;
    /// The dim that is split, gathered or cut, if it is one.
    fn dim(&self) -> Option<usize>;
    /// What travels between the ranks of a group.
    fn sends(&self) -> Sends;
    /// What a group does, with `{sum}` (or maximum), `{ways}` and `{after}` (what is held then) to be
    /// filled in; empty if nothing travels.
    fn says(&self) -> &'static str;
    /// Ops that its gradient is made of, or whose gradient it is.
    fn mirror(&self) -> &'static [&'static str];
    /// It may be a step from one layout of a tensor to another.
    fn reshards(&self) -> bool;
    /// Evaluates a whole group: operand `i` of the rank at place `p` is `ins[p][i]`.
    fn eval_group(&self, cx: &[EvalCx], ins: &[Vec<&Tensor>]) -> Vec<Vec<Tensor>>;

    /// Bytes that one rank sends under the ring cost, for operand `i` and result of these types.
    /// Where they depend on data: those of an even load.
    fn ring_bytes(&self, mesh: &Mesh, input: &Type, output: &Type) -> f64 {
        let p = mesh.ways(self.atoms()) as f64;
        let held = |t: &Type| t.local_bytes(mesh) as f64;
        match self.sends() {
            Sends::Nothing => 0.0,
            Sends::SumToAll => 2.0 * (p - 1.0) / p * held(input),
            Sends::Share | Sends::MeanShare | Sends::Pieces => (p - 1.0) / p * held(input),
            Sends::Rows { copies } => {
                let rows = input.dims[0].size as f64 * input.dims[2].size as f64;
                let even = held(input) * copies as f64 / rows;
                ((p - 1.0) / p * even).min((p - 1.0) / p * held(input))
            }
            Sends::ShareOfResult => (p - 1.0) / p * held(output),
            Sends::Whole => held(input),
            Sends::Boxes { halo } => {
                let most = Boxes::new(mesh, self.atoms(), halo, input, output).busiest();
                (most * input.dtype.bytes()) as f64
            }
        }
    }
    /// The most that they may be, where they depend on data.
    fn max_bytes(&self, mesh: &Mesh, input: &Type, output: &Type) -> f64 {
        match self.sends() {
            Sends::Rows { .. } => {
                let p = mesh.ways(self.atoms()) as f64;
                (p - 1.0) / p * input.local_bytes(mesh) as f64
            }
            _fixed => self.ring_bytes(mesh, input, output),
        }
    }
}

/// What a rank of a group of p sends under the ring cost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sends {
    /// No data move.
    Nothing,
    /// 2 (p-1)/p of its operand: pieces of the sum, then the sums of the pieces.
    SumToAll,
    /// (p-1)/p of its operand.
    Share,
    /// The same, as the mean over the ranks: in a ring everybody but the last sends it on.
    MeanShare,
    /// (p-1)/p of its operand: all but its own piece.
    Pieces,
    /// The same of the rows that are there; a shard has so many copies of tokens.
    Rows { copies: usize },
    /// (p-1)/p of the result.
    ShareOfResult,
    /// Its operand.
    Whole,
    /// What [`Boxes`] says: of the busiest rank, the more of what it sends and receives.
    Boxes { halo: Option<Halo> },
}

/// What the table does not say of an op.
trait LayoutOp {
    /// The type of a result, from that of the operand, in whose place it is.
    fn change(&self, mesh: &Mesh, t: &mut Type, declared: Option<&Type>) -> Result<(), TypeError>;
    /// Types of all results; a result for each operand.
    fn changed(
        &self,
        mesh: &Mesh,
        ins: &[&Type],
        declared: &[Option<&Type>],
    ) -> Result<SmallVec<[Type; 2]>, TypeError> {
        let one = |(i, &t): (usize, &&Type)| {
            let mut t = t.clone();
            self.change(mesh, &mut t, declared.get(i).copied().flatten())?;
            Ok(t)
        };
        ins.iter().enumerate().map(one).collect()
    }
    /// For the shape alone: types say more.
    fn letters(&self, ranks: &[usize]) -> Cow<'_, Rule> {
        Rule::same(ranks.len(), ranks.len(), ranks[0])
    }
    fn mirrored(&self, b: &mut Builder, ends: GradEnds, d: &[Option<Value>]) -> Grads;
    /// What a rank has of its own operands, without its group.
    fn alone(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        ins.iter().map(|&t| t.clone()).collect()
    }
    /// What the ranks of a group have; operands as in [`LayoutChange::eval_group`].
    fn group(&self, cx: &[EvalCx], ins: &[Vec<&Tensor>]) -> Vec<Vec<Tensor>> {
        cx.iter().zip(ins).map(|(c, ins)| self.alone(c, ins)).collect()
    }
}

/// Operands and results of the op whose gradient is made.
type GradEnds<'a> = (&'a [Value], &'a [Value]);

/// Declares ops of ranks. `takes` says what is wrong with operands, `dim` names one.
macro_rules! layouts {
    ($($(#[doc = $doc:literal])* $op:ident = $name:literal ($($operand:ident),*) {$($field:ident : $ty:ty),*}
       fusion: $fusion:expr, gradient: $gradient:ident, view: $view:literal, takes: |$t:pat_param, $x:ident| $takes:expr, dim: |$o:pat_param| $dim:expr,
       sends: |$s:pat_param| $sends:expr, says: $says:literal, mirror: [$($mirror:literal),*], reshards: |$r:pat_param| $reshards:expr;)*) => {$(
        op! {
            $(#[doc = $doc])*
            $op = $name ($($operand),*) { $($field: $ty),* }
            facts { kind: Layout, fusion: $fusion, precision: Wants::AsTheyAre, gradient: $gradient, linear: Linear::No }
            samples []
        }
        impl OpDef for $op {
            fn accepts(&self, $x: &[&Type]) -> Result<(), String> {
                let $t = self;
                $takes
            }
            fn rule(&self, ranks: &[usize]) -> Cow<'_, Rule> {
                self.letters(ranks)
            }
            fn types(
                &self,
                mesh: &Mesh,
                ins: &[&Type],
                declared: &[Option<&Type>],
            ) -> Result<SmallVec<[Type; 2]>, TypeError> {
                self.changed(mesh, ins, declared)
            }
            /// Of what is part of rows: the same.
            fn element(&self, _: &mut Body, x: &[usize]) -> Option<Results> {
                self.facts().fusion.map(|_| smallvec::smallvec![x[0]])
            }
            fn is_view(&self) -> bool {
                $view
            }
            fn flops(&self, _: &[(Letter, f64)]) -> f64 {
                0.0
            }
            /// A sum over ranks may lie on its operand.
            fn in_place(&self, result: usize) -> Option<usize> {
                (self.sends() == Sends::SumToAll).then_some(result)
            }
            fn grad(&self, b: &mut Builder, ins: &[Value], outs: &[Value], d: &[Option<Value>]) -> Grads {
                self.mirrored(b, (ins, outs), d)
            }
            fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
                self.alone(cx, ins)
            }
            fn layout(&self) -> Option<&dyn LayoutChange> {
                Some(self)
            }
        }
        impl LayoutChange for $op {
            fn atoms(&self) -> AtomSet {
                self.axes
            }
            fn kind(&self) -> &'static str {
                $name
            }
            fn dim(&self) -> Option<usize> {
                let $o = self;
                $dim
            }
            fn sends(&self) -> Sends {
                let $s = self;
                $sends
            }
            fn says(&self) -> &'static str {
                $says
            }
            fn mirror(&self) -> &'static [&'static str] {
                &[$($mirror),*]
            }
            fn reshards(&self) -> bool {
                let $r = self;
                $reshards
            }
            fn eval_group(&self, cx: &[EvalCx], ins: &[Vec<&Tensor>]) -> Vec<Vec<Tensor>> {
                self.group(cx, ins)
            }
        }
    )*};
}

layouts! {
    /// The same data, which the ranks of the axes use differently from here on (Megatron's f). Costs nothing;
    /// its gradient is an `all_reduce`.
    FanOut = "fan_out" (x) { axes: AtomSet }
    fusion: Some(Each), gradient: Flows, view: true, takes: |_, x| one(x), dim: |_| None,
    sends: |_| Sends::Nothing, says: "", mirror: ["all_reduce"], reshards: |_| true;

    /// The sum (or max, min) over the ranks of the axes, folded from the left in group order. The declared type
    /// says whether the result is invariant or replicated. Several operands are reduced in one call.
    AllReduce = "all_reduce" (x) { axes: AtomSet }
    fusion: None, gradient: Flows, view: false, takes: |_, x| several_floats(x), dim: |_| None,
    sends: |_| Sends::SumToAll, says: "takes the {sum} of {ways} ranks' parts; the result is {after}",
    mirror: ["fan_out", "all_reduce"], reshards: |_| true;

    /// The shards of a dim along its minor-most axes, concatenated. The declared type says whether the result
    /// is replicated (the default) or invariant.
    AllGather = "all_gather" (x) { axes: AtomSet, dim: usize }
    fusion: None, gradient: Flows, view: false, takes: |_, x| one(x), dim: |o| Some(o.dim),
    sends: |_| Sends::ShareOfResult, says: "puts the pieces of {ways} ranks together; the result is {after}",
    mirror: ["reduce_scatter", "slice"], reshards: |_| true;

    /// This rank's shard of the sum over the ranks of the axes.
    ReduceScatter = "reduce_scatter" (x) { axes: AtomSet, dim: usize }
    fusion: None, gradient: Flows, view: false, takes: |_, x| floats(x, 1), dim: |o| Some(o.dim),
    sends: |_| Sends::Share, says: "takes the {sum} of {ways} ranks' parts; each rank keeps its piece",
    mirror: ["all_gather"], reshards: |_| true;

    /// Piece number `from` of a dim that the axes split evenly, on all ranks of the axes: the dim of the result
    /// has the size of a piece. The rank that holds the piece sends it.
    Broadcast = "broadcast" (x) { axes: AtomSet, dim: usize, from: usize }
    fusion: None, gradient: Flows, view: false, takes: |_, x| one(x), dim: |o| Some(o.dim),
    sends: |_| Sends::MeanShare, says: "one of {ways} ranks gives its piece to all; the result is {after}",
    mirror: ["reduce"], reshards: |_| false;

    /// The sum over the ranks of the axes, as piece number `to` of a dim that the axes split; all other pieces
    /// are zeros, and the dim of the operand has the size of a piece. Added up over all `to`, the results are
    /// the whole tensor.
    Reduce = "reduce" (x) { axes: AtomSet, dim: usize, to: usize }
    fusion: None, gradient: Flows, view: false, takes: |_, x| floats(x, 1), dim: |o| Some(o.dim),
    sends: |_| Sends::MeanShare, says: "takes the {sum} of {ways} ranks' parts, as the piece of one of them",
    mirror: ["broadcast"], reshards: |_| false;

    /// This rank's shard of a dim, along axes over which the operand is the same everywhere. Moves no data.
    Slice = "slice" (x) { axes: AtomSet, dim: usize }
    fusion: None, gradient: Flows, view: false, takes: |_, x| one(x), dim: |o| Some(o.dim),
    sends: |_| Sends::Nothing, says: "", mirror: ["pad_to_partial", "all_gather"], reshards: |_| true;

    /// This rank's shard of a dim at its place, with zeros elsewhere: the gradient of `slice` from a replicated
    /// operand. Moves no data.
    PadToPartial = "pad_to_partial" (x) { axes: AtomSet, dim: usize }
    fusion: None, gradient: Flows, view: false, takes: |_, x| floats(x, 1), dim: |o| Some(o.dim),
    sends: |_| Sends::Nothing, says: "", mirror: ["slice"], reshards: |_| false;

    /// The axes that split dim `from` split dim `to` instead.
    AllToAll = "all_to_all" (x) { axes: AtomSet, from: usize, to: usize }
    fusion: None, gradient: Flows, view: false, takes: |_, x| one(x), dim: |_| None,
    sends: |_| Sends::Pieces, says: "{ways} ranks exchange pieces: another dim is split afterwards",
    mirror: ["all_to_all"], reshards: |_| true;

    /// From any layout over the axes to any other: split dims change places, order and axes. Each of the axes
    /// splits a dim of the operand or of the result; if it splits none of the operand, the operand is invariant
    /// or replicated over it; if it splits none of the result, the result is invariant (or, as the mirror of
    /// replicated, a sum). No rank receives what it already has. Other axes that split the same dim are major
    /// to these. With a `start`, index i of the result is index i + `start` of the operand, along the last dim or
    /// along `dim`, and 0 where the operand has no such index: `exchange[tp; start=-1]`. That dim may change its
    /// size, and no other axes split it. So a `narrow` or `pad` of a split dim moves only what crosses.
    Exchange = "exchange" (x) { axes: AtomSet, start: Offset, dim: Along }
    fusion: None, gradient: Flows, view: false, takes: |o, x| o.takes(x), dim: |_| None,
    sends: |o| Sends::Boxes { halo: o.halo() },
    says: "{ways} ranks exchange boxes, each what it lacks; the result is {after}",
    mirror: ["exchange"], reshards: |o| o.start.0.is_none();

    /// Like `all_to_all`, for rows `[g,z,c,h]` of which only a few are used: the axes that split groups split
    /// shards of tokens instead, or the reverse, and only the rows that the counts `[g,e,z]` name are sent: in
    /// each group and shard the first rows, as many as its experts have. Other rows of the result are
    /// undefined. `sent` are the counts split as `x` is, `received` split as the result is. A shard has
    /// `copies` copies of tokens; if all groups are used equally, each gets its share of them.
    AllToAllV = "all_to_all_v" (x, sent, received) { axes: AtomSet, from: usize, to: usize, copies: usize }
    fusion: None, gradient: Flows, view: false, takes: |o, x| o.takes(x), dim: |_| None,
    sends: |o| Sends::Rows { copies: o.copies },
    says: "{ways} ranks exchange the rows that the counts name: another dim is split afterwards",
    mirror: ["all_to_all_v"], reshards: |_| false;

    /// Each rank of a group receives the value of the rank `shift` places before it in the ring.
    Permute = "permute" (x) { axes: AtomSet, shift: usize }
    fusion: None, gradient: Flows, view: false, takes: |_, x| one(x), dim: |_| None,
    sends: |_| Sends::Whole, says: "each of {ways} ranks hands its piece to another",
    mirror: ["permute"], reshards: |_| false;

    /// The operand as one term of a sum over the pipeline ranks. A function belongs to one pipeline rank and
    /// its values say nothing about the others, so this costs nothing; the sum is still pending.
    ToPartial = "to_partial" (x) { axes: AtomSet }
    fusion: Some(Each), gradient: Unasked, view: true, takes: |_, x| floats(x, 1), dim: |_| None,
    sends: |_| Sends::Nothing, says: "", mirror: [], reshards: |_| false;

    /// This rank's shard of a dim, no longer treated as part of a whole: what a ring passes around. The axes
    /// split the dim alone and evenly. Moves no data; `from_varying` is the inverse.
    ToVarying = "to_varying" (x) { axes: AtomSet, dim: usize }
    fusion: None, gradient: Flows, view: true, takes: |_, x| one(x), dim: |o| Some(o.dim),
    sends: |_| Sends::Nothing, says: "", mirror: ["from_varying"], reshards: |_| false;

    /// The ranks' own values as the shards of a dim, in group order. Moves no data; it is the inverse of
    /// `to_varying`.
    FromVarying = "from_varying" (x) { axes: AtomSet, dim: usize }
    fusion: None, gradient: Flows, view: true, takes: |_, x| one(x), dim: |o| Some(o.dim),
    sends: |_| Sends::Nothing, says: "", mirror: ["to_varying"], reshards: |_| false;

    /// The shard of a dim that the rank `shift` places before in the ring would have: what `permute` of
    /// `to_varying` shards would receive, but without moving data, since all ranks have the whole tensor. For
    /// indices (positions of the tokens of a block), which have no gradient.
    RingShard = "ring_shard" (x) { axes: AtomSet, dim: usize, shift: usize }
    fusion: None, gradient: Unasked, view: false, takes: |_, x| rings::takes_indices(x), dim: |o| Some(o.dim),
    sends: |_| Sends::Nothing, says: "", mirror: [], reshards: |_| false;
}

/// One operand, of any element type.
fn one(ins: &[&Type]) -> Result<(), String> {
    if ins.len() == 1 { Ok(()) } else { Err("one operand is needed".into()) }
}

fn several_floats(ins: &[&Type]) -> Result<(), String> {
    if ins.is_empty() || ins.iter().any(|t| !t.dtype.is_float()) {
        return Err("float operands are needed".into());
    }
    Ok(())
}

/// An error that an operand is not in the state the collective starts from.
fn wrong<T>(mesh: &Mesh, axes: AtomSet, want: &str) -> Result<T, TypeError> {
    let n = mesh.names(axes, "*");
    infer::err(
        "collective",
        format!("the operand must be {want} over {n}"),
        format!("take {n} off the collective, or reshard its operand"),
    )
}

/// The gradient of an op with one operand, if it has a cotangent, with a note on what it mirrors.
fn noted(
    b: &mut Builder,
    d: &[Option<Value>],
    note: &'static str,
    f: impl FnOnce(&mut Builder, Value) -> Value,
) -> Grads {
    let g = grads_of(d, |d| f(b, d));
    if d[0].is_some() {
        b.note(note);
    }
    g
}
