//! `expand`: repeats a tensor along new dims.

use super::*;
use crate::attr::{RuleAttr, Sizes};
use std::sync::Arc;

op! {
    /// The operand repeated along new dims, whose sizes are attributes: `expand[bs->bsh; h=64]`.
    Expand = "expand" (x) { rule: RuleAttr, sizes: Sizes }
    facts { kind: Movement, fusion: Some(Each), precision: Wants::Same, gradient: Flows, linear: Linear::Together(1) }
    samples ["expand[bs->bsh; h=4] f32[2,3]", "expand[bs->shb; h=3] f32[3,3]"]
}

impl OpDef for Expand {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        if ins.len() != 1 || self.rule.0.ins.len() != 1 || self.rule.0.ins[0].len() != ins[0].rank()
        {
            return Err("one operand with the dims of the rule is needed".into());
        }
        let kept = self.rule.0.ins[0].iter().all(|g| self.rule.0.outs[0].contains(g));
        if kept { Ok(()) } else { Err("an expand keeps the operand's letters".into()) }
    }
    fn grad(&self, b: &mut Builder, _: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let r = &self.rule.0;
        let rule = RuleAttr(Arc::new(Rule::of(&[&r.outs[0]], &[&r.ins[0]])));
        grads_of(d, |d| b.push("expand_grad", ReduceSum { rule }, &[d]))
    }
    fn element(&self, _: &mut Body, x: &[usize]) -> Option<Results> {
        Some(smallvec::smallvec![x[0]])
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let r = &self.rule.0;
        let at: Shape =
            r.ins[0].iter().map(|g| r.outs[0].iter().position(|o| o == g).expect("kept")).collect();
        vec![ins[0].spread(&cx.out_shape(0), &at)]
    }
}
