//! What torch's calls take of memory: whether a result is made, and what a call has beside its results.

use super::written_over;
use crate::export::torch::seen::{Line, Seen};
use shardc_ir::func::Value;
use shardc_ir::ops::Op;
use shardc_ir::types::DType;

/// True of a result that shares the memory of the first operand.
pub(in crate::export::torch) fn is_alias(seen: &Seen, l: &Line, result: usize) -> bool {
    if l.call.is_some() {
        return false;
    }
    let op = &l.n.op;
    let same = || seen.f.ty(l.ins[0]).dtype == seen.f.ty(l.outs[0]).dtype;
    let views = matches!(
        op,
        Op::Transpose(_) | Op::Expand(_) | Op::Narrow(_) | Op::Slice(_) | Op::RingShard(_)
    );
    let over = written_over(op, result).is_some();
    views || over || op.def().is_view() || (matches!(op, Op::Cast(_)) && same())
}

/// The most bytes that a line takes beside its operands, its results with them.
pub(in crate::export::torch) fn beside(
    seen: &Seen,
    l: &Line,
    bytes: &dyn Fn(&Value) -> usize,
) -> usize {
    let ins = |i: usize| l.ins.get(i).map_or(0, bytes);
    let out: usize = l.outs.iter().filter(|v| seen.same[**v] == **v).map(bytes).sum();
    let wide = |v: &Value| bytes(v) * DType::F32.bytes() / seen.f.ty(*v).dtype.bytes();
    // Indices are of 8 bytes, and there are two of each and a mark.
    let indices = |i: usize| l.ins.get(i).map_or(0, |v| wide(v) / 4 * 17);
    if l.call.is_some() {
        return out;
    }
    let repeated = |k: usize| {
        let groups = seen.f.ty(l.ins[k]).dims[2].size;
        let times = seen.f.ty(l.ins[0]).dims[2].size / groups.max(1);
        if times > 1 { times * (ins(k) + ins(k + 1)) } else { 0 }
    };
    let op = &l.n.op;
    if let Op::Dot(o) = op {
        let (a, b, to) = (&o.rule.0.ins[0], &o.rule.0.ins[1], &o.rule.0.outs[0]);
        // Two operands of the same dims are multiplied, and then summed, but along rows.
        let rows = a.split_last().is_some_and(|(_, rows)| rows == &to[..]);
        let summed = a == b && !to.is_empty() && !rows && to.iter().all(|g| a.contains(g));
        return if summed { out + ins(0) } else { out };
    }
    // The sum so far, or what is gathered before it is put together.
    let twice = (matches!(op, Op::Add(_)) && l.ins.len() > 2)
        || (matches!(op, Op::AllReduce(_)) && l.ins.len() > 1)
        || matches!(op, Op::AllGather(o) if o.dim > 0)
        || matches!(op, Op::Take(_) | Op::Rope(_) | Op::AllToAll(_) | Op::Exchange(_));
    let more = if matches!(op, Op::Take(_)) {
        indices(1)
    } else if matches!(op, Op::IndexAdd(_)) {
        wide(&l.ins[0]) + indices(1)
    } else if matches!(op, Op::Attention(_)) {
        repeated(1)
    } else if matches!(op, Op::AttentionGrad(_)) {
        // The output is made up for the kernel; repeated heads have gradients of their own.
        wide(&l.ins[4]) + 2 * repeated(1)
    } else if matches!(op, Op::AdamW(_) | Op::Sgd(_)) {
        wide(&l.ins[1])
    } else if matches!(op, Op::AllToAll(_) | Op::Exchange(_))
        || matches!(op, Op::ReduceScatter(o) if o.dim > 0)
    {
        ins(0)
    } else {
        0
    };
    out + more + if twice { out } else { 0 }
}
