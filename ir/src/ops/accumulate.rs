//! `accumulate`: a sum that is written over its first term.

use super::*;

op! {
    /// `sum + x + …`, from left to right, written over `sum`, which nothing may read afterwards: what
    /// microbatches, or several uses of a weight, add to a gradient.
    Accumulate = "accumulate" (sum, x) {}
    facts { kind: Elementwise, fusion: Some(Each), precision: Wants::Same, gradient: Unasked, linear: Linear::Together(!0) }
    samples ["accumulate f32[3,4], f32[3,4]", "accumulate f32[5], f32[5], f32[5]",
        "accumulate f32[2,3,4], f32[2,3,4]"]
}

impl OpDef for Accumulate {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        if ins.len() < 2 {
            return Err("what is added to and one term or more are needed".into());
        }
        Add::same().accepts(ins)
    }
    fn rule(&self, ranks: &[usize]) -> Cow<'_, Rule> {
        Rule::same(ranks.len(), 1, ranks.first().copied().unwrap_or(0))
    }
    fn grad(&self, _: &mut Builder, ins: &[Value], _: &[Value], _: &[Option<Value>]) -> Grads {
        ins.iter().map(|_| None).collect()
    }
    fn element(&self, b: &mut Body, x: &[usize]) -> Option<Results> {
        Add::same().element(b, x)
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        Add::same().eval(cx, ins)
    }
    fn in_place(&self, _: usize) -> Option<usize> {
        Some(0)
    }
}
