//! Folds over the letters missing on the right, all by one mechanism: what a fold starts from and how it goes
//! on is that of the [`Reduction`] of its name.

use super::*;
use crate::attr::{Broadcast, RuleAttr, Sizes};
use crate::rule::has_letter;
use crate::tensor::{each_offset, strides};
use std::sync::Arc;

/// Declares folds; `passes` says how the cotangent goes back: to every element, or to none.
macro_rules! reductions {
    ($($(#[doc = $doc:literal])* $op:ident = $name:literal $fold:ident, $gradient:ident, samples [$($sample:literal),*]
       |$o:ident, $b:ident, $x:ident, $y:ident, $d:ident| $grad:expr;)*) => {$(
        op! {
            $(#[doc = $doc])*
            $op = $name (x) { rule: RuleAttr }
            facts |o| { kind: Reduction, fusion: Some(folded(&o.rule.0)), precision: Wants::Wide, gradient: $gradient, linear: Linear::Together(1) }
            samples [$($sample),*]
        }
        impl OpDef for $op {
            fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
                accepts(&self.rule, ins)
            }
            fn element(&self, _: &mut Body, x: &[usize]) -> Option<Results> {
                Some(smallvec::smallvec![x[0]])
            }
            fn reduction(&self) -> Reduction {
                Reduction::$fold
            }
            fn grad(&self, $b: &mut Builder, ins: &[Value], _outs: &[Value], d: &[Option<Value>]) -> Grads {
                let ($o, $x, $y) = (self, ins[0], _outs[0]);
                smallvec::smallvec![d[0].and_then(|$d| $grad)]
            }
            fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
                vec![fold(&self.rule.0, &cx.out_shape(0), ins[0], Reduction::$fold)]
            }
        }
    )*};
}

reductions! {
    /// The sum over the letters missing on the right; an empty sum is 0.
    ReduceSum = "reduce_sum" Sum, Flows,
    samples ["reduce_sum[bsh->bs] f32[2,3,4]", "reduce_sum[bsh->h] f32[2,3,4]", "reduce_sum[bs->] f32[2,3]", "reduce_sum[abc->ca] f32[3,4,3]", "reduce_sum[ab->ba] f32[3,4]"]
    |o, b, x, _y, d| Some(spread(&o.rule.0, b, x, d));

    /// The largest element over the letters missing on the right; -inf if there are none. Equal largest
    /// elements share the gradient.
    ReduceMax = "reduce_max" Max, Flows,
    samples ["reduce_max[bsv->bs] f32[2,3,4]", "reduce_max[abc->ca] f32[3,4,3]", "reduce_max[ab->ba] f32[3,4]"]
    |o, b, x, y, d| Some(shared(&o.rule.0, b, x, y, d));

    /// The smallest element over the letters missing on the right; inf if there are none. Equal smallest
    /// elements share the gradient.
    ReduceMin = "reduce_min" Min, Flows,
    samples ["reduce_min[bsv->bs] f32[2,3,4]", "reduce_min[abc->ca] f32[3,4,3]", "reduce_min[ab->ba] f32[3,4]"]
    |o, b, x, y, d| Some(shared(&o.rule.0, b, x, y, d));
}

/// One operand whose letters all are plain, with some missing on the right.
fn accepts(rule: &RuleAttr, ins: &[&Type]) -> Result<(), String> {
    floats(ins, 1)?;
    let r = &rule.0;
    if r.ins.len() != 1 || r.ins[0].len() != ins[0].rank() || r.outs.len() != 1 {
        return Err("one operand with the dims of the rule is needed".into());
    }
    if r.outs[0].iter().any(|g| !r.ins[0].contains(g)) {
        return Err("a reduction makes no new letters".into());
    }
    Ok(())
}

/// Folds the operand into the result, in row-major order.
fn fold(rule: &Rule, shape: &[usize], x: &Tensor, by: Reduction) -> Tensor {
    let at: Shape = rule.outs[0]
        .iter()
        .map(|g| rule.ins[0].iter().position(|i| i == g).expect("kept"))
        .collect();
    let mut out = Tensor::full(shape, by.start());
    let steps = [out.steps(&x.shape, &at), strides(&x.shape)];
    each_offset(&x.shape, [&steps[0], &steps[1]], |[o, x_at]| {
        out.data[o] = by.of(out.data[o], x.data[x_at]);
    });
    out
}

/// The cotangent of a sum, which is that of each of its terms.
fn spread(r: &Rule, b: &mut Builder, x: Value, d: Value) -> Value {
    let rule = RuleAttr(Arc::new(Rule::of(&[&r.outs[0]], &[&r.ins[0]])));
    let like = b.ty(x).cotangent();
    let sizes = lost_sizes(r, &like);
    b.push_as("reduce_sum_grad", Expand { rule, sizes }, &[d], &like)
}

/// The cotangent of a largest or smallest element, in equal shares to those that are it.
fn shared(r: &Rule, b: &mut Builder, x: Value, y: Value, d: Value) -> Value {
    let (ins, out) = (&r.ins[0], &r.outs[0]);
    let broadcast = |rule: Rule| Broadcast(Some(Arc::new(rule)));
    let [x, y] = [x, y].map(|v| over_ranks(b, v));
    let rule = broadcast(Rule::of(&[ins, out], &[ins]));
    let equal = b.push("equal", Equal { rule }, &[x, y]);
    let rule = RuleAttr(Arc::new(Rule::of(&[ins], &[out])));
    let count = b.push("count", ReduceSum { rule }, &[equal]);
    let (count, d) = (over_ranks(b, count), cast::in_f32(b, d));
    let share = b.push("share", Div::same(), &[d, count]);
    dot::product(b, "reduce_grad", (share, out), (equal, ins), ins)
}

/// What is still to be reduced over ranks, replicated.
fn over_ranks(b: &mut Builder, v: Value) -> Value {
    let axes = b.ty(v).partial();
    if axes.is_empty() {
        return v;
    }
    let mut like = b.ty(v).clone();
    for r in [Reduction::Sum, Reduction::Max, Reduction::Min] {
        *like.pending_mut(r) = AtomSet::EMPTY;
    }
    like.replicated = like.replicated.union(axes);
    b.push_as("whole", AllReduce { axes }, &[v], &like)
}

/// Sizes of the letters that an operand of these dims loses on the right.
pub(crate) fn lost_sizes(rule: &Rule, t: &Type) -> Sizes {
    let lost = rule.ins[0]
        .iter()
        .zip(&t.dims)
        .filter(|(g, _)| g.letters().iter().any(|&l| !has_letter(&rule.outs[0], l)));
    Sizes(lost.filter_map(|(g, d)| Some((g.single()?, d.size))).collect())
}
