//! Rules of any number of operands, or of many ops: what each finds is a function, and lines name it.

use super::attrs::rule_of;
use super::graph::{EGraph, Term};
use super::line::{Expr, Id, Taker};
use shardc_ir::attr::Broadcast;
use shardc_ir::ops::{Add, Expand, Fill, Op, Scale};
use shardc_ir::rule::Dims;

/// The operands as they are but for number `i`.
fn with(ins: &[Id], i: usize, other: Expr) -> Vec<Expr> {
    let mut ins: Vec<Expr> = ins.iter().map(|&v| Expr::Value(v)).collect();
    ins[i] = other;
    ins
}

/// All operands of a sum have the dims of the result.
fn is_sum(op: Option<&Op>) -> bool {
    matches!(op, Some(Op::Add(Add { rule: Broadcast(None) })))
}

/// A sum whose first operand is a sum: one of all operands, from left to right as before.
pub(crate) fn flat(g: &EGraph, root: Id, t: &Term, found: Taker) {
    let Some((&first, others)) = t.ins.split_first().filter(|_| is_sum(g.op(t))) else { return };
    // What is a sum of itself and zeros would grow for ever.
    for inner in g.terms(first).iter().filter(|u| is_sum(g.op(u)) && g.find(first) != root) {
        let ins = inner.ins.iter().chain(others).map(|&v| Expr::Value(v)).collect();
        found(Expr::Op(Add::same().into(), ins));
    }
}

/// A sum, without its operands that are zeros.
pub(crate) fn without_zeros(g: &EGraph, _: Id, t: &Term, found: Taker) {
    let is_zero = |u: &Term| matches!(g.op(u), Some(Op::Fill(Fill { value: 0.0 })));
    if t.ins.len() < 2 || !is_sum(g.op(t)) {
        return;
    }
    for i in (0..t.ins.len()).filter(|&i| g.terms(t.ins[i]).iter().any(is_zero)) {
        let others = t.ins.iter().enumerate().filter(|x| x.0 != i);
        let mut ins: Vec<Expr> = others.map(|x| Expr::Value(*x.1)).collect();
        found(match ins.len() {
            1 => ins.remove(0),
            _more => Expr::Op(Add::same().into(), ins),
        });
    }
}

/// A sum or difference of what one op makes of several values: what it makes of their sum or difference.
pub(crate) fn joined(g: &EGraph, t: &Term, of: fn(&Op) -> bool, found: Taker) {
    let Some(op @ (Op::Add(_) | Op::Sub(_))) = g.op(t) else { return };
    let same = op.clone().broadcast().is_some_and(|b| *b == Broadcast::SAME);
    let Some((&first, others)) = t.ins.split_first().filter(|x| same && !x.1.is_empty()) else {
        return;
    };
    for u in g.terms(first).iter().filter(|u| u.ins.len() == 1) {
        let Some(outer) = g.op(u).filter(|o| of(o)) else { continue };
        let alike = |&v: &Id| Some(g.terms(v).iter().find(|w| w.head == u.head)?.ins[0]);
        let Some(others) = others.iter().map(alike).collect::<Option<Vec<Id>>>() else { continue };
        let ins = [u.ins[0]].into_iter().chain(others).map(Expr::Value).collect();
        found(Expr::Op(outer.clone(), vec![Expr::Op(op.clone(), ins)]));
    }
}

/// Ops of one device that are linear in each of their operands.
pub(crate) fn is_linear(op: &Op) -> bool {
    matches!(op, Op::Dot(_) | Op::ReduceSum(_) | Op::Expand(_) | Op::Transpose(_))
}

/// Ops of ranks that are linear.
pub(crate) fn is_moved(op: &Op) -> bool {
    matches!(op, Op::AllReduce(_) | Op::AllGather(_) | Op::ReduceScatter(_) | Op::Slice(_))
}

/// A linear op of a scaled operand: its result, scaled.
pub(crate) fn scale_out(g: &EGraph, t: &Term, linear: fn(&Op) -> bool, found: Taker) {
    let Some(op) = g.op(t).filter(|o| linear(o)) else { return };
    for (i, &v) in t.ins.iter().enumerate() {
        for u in g.terms(v) {
            if let Some(scale @ Op::Scale(_)) = g.op(u) {
                let ins = with(&t.ins, i, Expr::Value(u.ins[0]));
                found(Expr::Op(scale.clone(), vec![Expr::Op(op.clone(), ins)]));
            }
        }
    }
}

/// A scaled result of a linear op: its result of an operand that is scaled.
pub(crate) fn scale_in(g: &EGraph, t: &Term, linear: fn(&Op) -> bool, found: Taker) {
    let Some(scale @ Op::Scale(Scale { .. })) = g.op(t) else { return };
    for u in g.terms(t.ins[0]) {
        let Some(op) = g.op(u).filter(|o| linear(o)) else { continue };
        for (i, &v) in u.ins.iter().enumerate() {
            let scaled = Expr::Op(scale.clone(), vec![Expr::Value(v)]);
            found(Expr::Op(op.clone(), with(&u.ins, i, scaled)));
        }
    }
}

/// An element-wise op of an expanded operand: of the operand itself, by a rule.
pub(crate) fn spread_operand(g: &EGraph, _: Id, t: &Term, found: Taker) {
    let Some(op @ (Op::Add(_) | Op::Sub(_) | Op::Mul(_) | Op::Div(_))) = g.op(t) else { return };
    let mut op = op.clone();
    if op.broadcast().is_none_or(|b| *b != Broadcast::SAME) {
        return;
    }
    for (i, &v) in t.ins.iter().enumerate() {
        for u in g.terms(v) {
            let Some(Op::Expand(Expand { rule, .. })) = g.op(u) else { continue };
            let mut dims: Vec<&Dims> = vec![&rule.0.outs[0]; t.ins.len()];
            dims[i] = &rule.0.ins[0];
            if let Some(b) = op.broadcast() {
                *b = Broadcast(Some(rule_of(&dims, &rule.0.outs[0]).0));
            }
            found(Expr::Op(op.clone(), with(&t.ins, i, Expr::Value(u.ins[0]))));
        }
    }
}
