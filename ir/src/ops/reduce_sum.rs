//! `reduce_sum`: sums over the letters missing on the right.

use super::*;
use crate::attr::{RuleAttr, Sizes};
use crate::rule::has_letter;
use crate::tensor::each_index;
use std::sync::Arc;

op! {
    /// The sum over the letters missing on the right; the sum of nothing is 0.
    ReduceSum = "reduce_sum" (x) { rule: RuleAttr }
    facts |o| { kind: Reduction, fusion: Some(folded(&o.rule.0)),
            precision: Precision::Wide, gradient: Flows }
    samples ["reduce_sum[bsh->bs] f32[2,3,4]", "reduce_sum[bsh->h] f32[2,3,4]", "reduce_sum[bs->] f32[2,3]", "reduce_sum[abc->ca] f32[3,4,3]", "reduce_sum[ab->ba] f32[3,4]"]
}

/// One operand whose letters all are plain, with some missing on the right.
pub(crate) fn accepts_reduce(rule: &RuleAttr, ins: &[&Type]) -> Result<(), String> {
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
pub(crate) fn fold(
    rule: &Rule,
    shape: &[usize],
    x: &Tensor,
    start: f64,
    f: impl Fn(f64, f64) -> f64,
) -> Tensor {
    let at: Shape = rule.outs[0]
        .iter()
        .map(|g| rule.ins[0].iter().position(|i| i == g).expect("kept"))
        .collect();
    let mut out = Tensor::full(shape, start);
    each_index(&x.shape, |i| {
        let j: Shape = at.iter().map(|&p| i[p]).collect();
        let o = out.at_mut(&j);
        *o = f(*o, x.at(i));
    });
    out
}

/// Sizes of the letters that an operand of these dims loses on the right.
pub(crate) fn lost_sizes(rule: &Rule, t: &Type) -> Sizes {
    let lost = rule.ins[0]
        .iter()
        .zip(&t.dims)
        .filter(|(g, _)| g.letters().iter().any(|&l| !has_letter(&rule.outs[0], l)));
    Sizes(lost.filter_map(|(g, d)| Some((g.single()?, d.size))).collect())
}

impl OpDef for ReduceSum {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        accepts_reduce(&self.rule, ins)
    }
    fn rule(&self, _: &[usize]) -> Rule {
        (*self.rule.0).clone()
    }
    fn linear(&self) -> Linear {
        Linear::Together(1)
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let r = &self.rule.0;
        let rule = RuleAttr(Arc::new(Rule::of(&[&r.outs[0]], &[&r.ins[0]])));
        let like = b.ty(ins[0]).cotangent();
        let sizes = lost_sizes(r, &like);
        grads_of(d, |d| b.push_as("reduce_sum_grad", Expand { rule, sizes }, &[d], &like))
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![fold(&self.rule.0, &cx.out_shape(0), ins[0], 0.0, |a, b| a + b)]
    }
}
