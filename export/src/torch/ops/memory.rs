//! What torch's calls take of memory: whether a result is made, and what a call has beside its results.

use super::is_exchange;
use super::scans::Walk;
use crate::torch::seen::{Line, Seen};
use shardc_ir::func::{Func, Value, ValueMap};
use shardc_ir::ops::Op;
use shardc_ir::ops::rope::Pairs;
use shardc_ir::types::DType;

/// The operand whose memory the first result of a line has.
pub(in crate::torch) fn viewed(f: &Func, same: &ValueMap<Value>, l: &Line) -> Option<usize> {
    if l.call.is_some() || l.over.is_some() {
        return l.over;
    }
    let op = &l.n.op;
    let out = *l.outs.first()?;
    let alike = || f.ty(l.ins[0]).dtype == f.ty(out).dtype;
    let views = matches!(
        op,
        Op::Transpose(_) | Op::Expand(_) | Op::Narrow(_) | Op::Slice(_) | Op::RingShard(_)
    );
    let is =
        views || same[out] != out || op.def().is_view() || (matches!(op, Op::Cast(_)) && alike());
    is.then_some(0)
}

/// True of the op that weights are gathered by.
pub(in crate::torch) fn gathers(op: &Op) -> bool {
    matches!(op, Op::AllGather(_))
}

/// What an exchange takes, in bytes.
pub(in crate::torch) struct Exchanged {
    /// From where it begins, beside its operand.
    pub going: usize,
    /// Where it is waited for, beside that.
    pub ends: usize,
    /// Whether it has its operand until then: others have a copy.
    pub keeps: bool,
}

/// What the functions of `_exchange.py` take over gloo.
pub(in crate::torch) fn exchanged(seen: &Seen, l: &Line) -> Exchanged {
    let bytes = |v: &Value| seen.bytes(*v);
    let given: usize = l.ins.iter().map(bytes).sum();
    let out = made(seen, l);
    let (going, ends, keeps) = match &l.n.op {
        // What is gathered along another dim than the first is put together.
        Op::AllGather(o) => (out, if o.dim > 0 { out } else { 0 }, true),
        // What others send, and pieces that do not lie together, which go before they are added.
        Op::ReduceScatter(o) if o.dim > 0 => (2 * given, 0, false),
        Op::ReduceScatter(_) => (given, out, true),
        Op::AllToAll(_) | Op::Exchange(_) => (given + out, out, false),
        Op::Permute(_) => (out, 0, true),
        _copied => (out, 0, false),
    };
    Exchanged { going, ends, keeps }
}

/// Bytes of the results of a line that are not its operands.
fn made(seen: &Seen, l: &Line) -> usize {
    l.outs.iter().filter(|v| seen.same[**v] == **v).map(|v| seen.bytes(*v)).sum()
}

/// The most bytes that a line takes beside its operands, its results with them.
pub(in crate::torch) fn beside(seen: &Seen, l: &Line) -> usize {
    let bytes = &|v: &Value| seen.bytes(*v);
    let ins = |i: usize| l.ins.get(i).map_or(0, bytes);
    let out = made(seen, l);
    let wide = |v: &Value| bytes(v) * DType::F32.bytes() / seen.f.ty(*v).dtype.bytes();
    // Indices are of 8 bytes, and there are two of each and a mark.
    let indices = |i: usize| l.ins.get(i).map_or(0, |v| wide(v) / 4 * 17);
    if l.over.is_some() {
        return l.outs.iter().skip(1).map(bytes).sum();
    }
    if let Some(call) = l.call {
        // Of the chosen logits, and of what the gradient has for each row.
        let indices = if call.is_of("cross_entropy(") { indices(1) } else { 0 };
        return out + indices + if call.is_of("rms_norm_grad(") { 3 * ins(3) } else { 0 };
    }
    if is_exchange(&l.n.op) {
        let e = exchanged(seen, l);
        return e.going + e.ends;
    }
    let last = |i: usize| {
        let dims = l.ins.get(i).map(|v| &seen.f.ty(*v).dims);
        dims.and_then(|d| d.last()).map_or(0, |d| d.size)
    };
    let repeated = |k: usize| {
        let groups = seen.f.ty(l.ins[k]).dims[2].size;
        let times = seen.f.ty(l.ins[0]).dims[2].size / groups.max(1);
        if times > 1 { times * (ins(k) + ins(k + 1)) } else { 0 }
    };
    let padded = |k: usize| ins(k) / last(k).max(1) * last(0);
    let padded_out = l.outs.first().map_or(0, bytes) / last(2).max(1) * last(0);
    // Copies of tokens, of which slots say where they go.
    let copies = |slots: usize, rows: usize| {
        let size = seen.f.ty(l.ins[rows]).dtype.bytes();
        ins(slots) / DType::I32.bytes() * last(rows) * size
    };
    let op = &l.n.op;
    if let Op::Dot(o) = op {
        let (a, b, to) = (&o.rule.0.ins[0], &o.rule.0.ins[1], &o.rule.0.outs[0]);
        // Two operands of the same dims are multiplied, and then summed.
        let summed = a == b && !to.is_empty() && to.iter().all(|g| a.contains(g));
        return if summed { out + ins(0) } else { out };
    }
    let twice = matches!(op, Op::Rope(o) if o.pairs == Pairs::Adjacent || 2 * last(1) < last(0));
    let more = if matches!(op, Op::Take(_)) {
        indices(1)
    } else if let Op::IndexAdd(o) = op {
        // Where the new dim is the first, rows are added as they are.
        let (x, to) = (&o.rule.0.ins[0], &o.rule.0.outs[0]);
        let rows = to.first().is_some_and(|g| !x.contains(g) && !o.rule.0.ins[1].contains(g))
            && to.iter().all(|g| !o.rule.0.ins[1].contains(g));
        let kept = rows && seen.f.ty(l.ins[0]).dtype == DType::F32;
        indices(1) + if kept { 0 } else { wide(&l.ins[0]) }
    } else if let Op::Attention(o) = op
        && (o.softcap.is_some() || o.behind().end > 5)
    {
        all_scores(seen.f, l, bytes, 1) - out
    } else if let Op::AttentionGrad(o) = op
        && (o.softcap.is_some() || o.behind().end > 8)
    {
        all_scores_grad(seen.f, l, bytes, 2 + usize::from(o.softcap.is_some())) - out
    } else if let Op::Scan(o) = op {
        Walk::of(seen, l, o.behind()).forward() - out
    } else if let Op::ScanGrad(o) = op {
        Walk::of(seen, l, o.behind()).backward(out) - out
    } else if matches!(op, Op::Attention(_)) {
        // Where values are narrower than keys, they and the output are padded.
        let padded = if last(2) < last(0) { padded(2) + padded_out } else { 0 };
        repeated(1) + padded
    } else if matches!(op, Op::AttentionGrad(_)) {
        // The output is made up for the kernel. Gradients of repeated heads and of what is padded are larger.
        let own = if repeated(1) > 0 { 2 * repeated(1) - ins(1) - ins(2) } else { 0 };
        let narrow = last(2) < last(0);
        own + if narrow { 2 * padded(2) + 2 * padded(4) - ins(2) } else { wide(&l.ins[4]) }
    } else if matches!(op, Op::Dispatch(_) | Op::Unpermute(_) | Op::CombineGatesGrad(_)) {
        copies(1, 0)
    } else if matches!(op, Op::AdamW(_)) && l.spent {
        0
    } else if matches!(op, Op::AdamW(_) | Op::Sgd(_)) {
        wide(&l.ins[1])
    } else {
        0
    };
    out + more + if twice { out } else { 0 }
}

/// What attention takes that computes all scores: `n` tensors of them, and copies of operands for products.
fn all_scores(f: &Func, l: &Line, bytes: &dyn Fn(&Value) -> usize, n: usize) -> usize {
    let copied = |i: usize| copied(f, &l.ins[i], bytes);
    let out: usize = l.outs.iter().map(|v| wide_of(f, v, bytes)).sum();
    n * scores(f, l, bytes) + (copied(0) + copied(1)).max(copied(2) + out)
}

/// The same of its gradient.
fn all_scores_grad(f: &Func, l: &Line, bytes: &dyn Fn(&Value) -> usize, n: usize) -> usize {
    let copied = |i: usize| copied(f, &l.ins[i], bytes);
    let cast = |i: usize| copied(i) - wide_of(f, &l.ins[i], bytes);
    let out: usize = l.outs.iter().map(|v| wide_of(f, v, bytes)).sum();
    let d = wide_of(f, &l.ins[4], bytes);
    let most = (d + copied(2)).max(copied(1) + wide_of(f, &l.ins[0], bytes)).max(out + d);
    n * scores(f, l, bytes) + cast(4) + most
}

/// Bytes of a value in f32.
fn wide_of(f: &Func, v: &Value, bytes: &dyn Fn(&Value) -> usize) -> usize {
    bytes(v) / f.ty(*v).dtype.bytes() * DType::F32.bytes()
}

/// Of an operand as a product takes it: in another order, and in f32 before that.
fn copied(f: &Func, v: &Value, bytes: &dyn Fn(&Value) -> usize) -> usize {
    let wide = wide_of(f, v, bytes);
    if f.ty(*v).dtype == DType::F32 { wide } else { 2 * wide }
}

/// Of all scores of queries and keys.
fn scores(f: &Func, l: &Line, bytes: &dyn Fn(&Value) -> usize) -> usize {
    let width = f.ty(l.ins[0]).dims.last().map_or(1, |d| d.size);
    wide_of(f, &l.ins[0], bytes) / width.max(1) * f.ty(l.ins[1]).dims[1].size
}
