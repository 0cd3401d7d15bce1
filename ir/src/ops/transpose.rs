//! `transpose`: dims in another order.

use super::*;
use crate::attr::RuleAttr;
use std::sync::Arc;

op! {
    /// The operand with its dims in a different order.
    Transpose = "transpose" (x) { rule: RuleAttr }
    facts { kind: Movement, fusion: None, precision: Wants::Moved, gradient: Flows, linear: Linear::Together(1) }
    samples ["transpose[abc->cab] f32[2,3,4]", "transpose[abc->cab] f32[3,3,3]"]
}

impl OpDef for Transpose {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        if ins.len() != 1 || self.rule.0.ins.len() != 1 || self.rule.0.ins[0].len() != ins[0].rank()
        {
            return Err("one operand with the dims of the rule is needed".into());
        }
        let (mut a, mut b) = (self.rule.0.ins[0].to_vec(), self.rule.0.outs[0].to_vec());
        let key = |g: &crate::rule::Group| g.letters().to_vec();
        a.sort_by_key(key);
        b.sort_by_key(key);
        if a != b { Err("a transpose keeps its letters".into()) } else { Ok(()) }
    }
    fn grad(&self, b: &mut Builder, _: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let r = &self.rule.0;
        let rule = RuleAttr(Arc::new(Rule::of(&[&r.outs[0]], &[&r.ins[0]])));
        grads_of(d, |d| b.push("transpose_grad", Transpose { rule }, &[d]))
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let r = &self.rule.0;
        let at: Shape =
            r.ins[0].iter().map(|g| r.outs[0].iter().position(|o| o == g).expect("kept")).collect();
        vec![ins[0].spread(&cx.out_shape(0), &at)]
    }
}
