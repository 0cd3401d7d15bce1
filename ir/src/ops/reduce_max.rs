//! `reduce_max`: largest over the letters missing on the right.

use super::*;
use crate::attr::RuleAttr;

op! {
    /// The largest element over the letters missing on the right; of nothing, -inf. It has no
    /// gradient: it serves to shift softmax, through `stop_gradient`.
    ReduceMax = "reduce_max" (x) { rule: RuleAttr }
    facts |o| { kind: Reduction, fusion: Some(folded(&o.rule.0)),
            precision: Precision::Wide, gradient: Stops }
    samples ["reduce_max[bsv->bs] f32[2,3,4]", "reduce_max[abc->ca] f32[3,4,3]", "reduce_max[ab->ba] f32[3,4]"]
}

impl OpDef for ReduceMax {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        reduce_sum::accepts_reduce(&self.rule, ins)
    }
    fn rule(&self, _: &[usize]) -> Rule {
        (*self.rule.0).clone()
    }
    fn linear(&self) -> Linear {
        Linear::Together(1)
    }
    fn reduction(&self) -> Reduction {
        Reduction::Max
    }
    fn grad(&self, _: &mut Builder, _: &[Value], _: &[Value], _: &[Option<Value>]) -> Grads {
        smallvec::smallvec![None]
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![reduce_sum::fold(&self.rule.0, &cx.out_shape(0), ins[0], f64::NEG_INFINITY, f64::max)]
    }
}
