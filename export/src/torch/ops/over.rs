//! Results that are written over an operand which nothing has any more.

use super::Site;
use crate::torch::dims::number;
use shardc_ir::attr::Broadcast;
use shardc_ir::func::Node;
use shardc_ir::ops::Op;

/// True of the optimizer's op, behind which nothing reads a gradient.
pub(in crate::torch) fn is_update(op: &Op) -> bool {
    matches!(op, Op::AdamW(_))
}

/// True of ops whose result is a view in which an element stands in many places.
pub(in crate::torch) fn repeats(op: &Op) -> bool {
    matches!(op, Op::Expand(_))
}

/// True of ops whose result is memory of its own.
pub(in crate::torch) fn is_fresh(op: &Op) -> bool {
    let products = matches!(op, Op::Dot(_) | Op::GroupedDot(_) | Op::GroupedDotT(_) | Op::Rope(_));
    let sums = matches!(op, Op::IndexAdd(_) | Op::Unpermute(_) | Op::Dispatch(_) | Op::Pad(_));
    let elements = matches!(op, Op::Add(_) | Op::Sub(_) | Op::Mul(_) | Op::Div(_) | Op::Select(_));
    let each = matches!(
        op,
        Op::Scale(_)
            | Op::Shift(_)
            | Op::Exp(_)
            | Op::Log(_)
            | Op::Tanh(_)
            | Op::Logistic(_)
            | Op::Silu(_)
            | Op::Gelu(_)
            | Op::Sqrt(_)
            | Op::Rsqrt(_)
    );
    products || sums || elements || each
}

/// The operands over which the result may be written, if they are of its dims.
pub(in crate::torch) fn overwritable(n: &Node) -> impl Iterator<Item = usize> {
    let (rule, many) = match &n.op {
        Op::Add(o) => (Some(&o.rule), n.ins.len()),
        Op::Mul(o) => (Some(&o.rule), 2),
        Op::Sub(o) => (Some(&o.rule), 1),
        Op::Div(o) => (Some(&o.rule), 1),
        Op::Scale(_) | Op::Shift(_) | Op::Exp(_) | Op::Tanh(_) | Op::Logistic(_) => (None, 1),
        _other => (None, 0),
    };
    let rule = rule.and_then(|r| r.0.as_ref());
    let whole = move |i: &usize| rule.is_none_or(|r| r.ins[*i] == r.outs[0]);
    (0..many).filter(whole)
}

impl Site<'_, '_> {
    /// It, written over an operand.
    pub(super) fn in_place(&self, i: usize) -> String {
        let target = &self.x[i];
        let others = |rule: &Broadcast, word: &str| {
            let all = self.spread(rule).into_iter().enumerate().filter(|(j, _)| *j != i);
            all.map(|(_, y)| format!(".{word}_({y})")).collect::<String>()
        };
        let made = match &self.n.op {
            Op::Add(o) => others(&o.rule, "add"),
            Op::Sub(o) => others(&o.rule, "sub"),
            Op::Mul(o) => others(&o.rule, "mul"),
            Op::Div(o) => others(&o.rule, "div"),
            Op::Scale(o) => format!(".mul_({})", number(o.by)),
            Op::Shift(o) => format!(".add_({})", number(o.by)),
            Op::Tanh(_) => ".tanh_()".into(),
            Op::Logistic(_) => ".sigmoid_()".into(),
            _exponential => ".exp_()".into(),
        };
        format!("{target}{made}")
    }
}
