//! `reshape`: joins or splits dims.

use super::*;
use crate::attr::{RuleAttr, Sizes};
use std::sync::Arc;

op! {
    /// The same elements in the same order, with dims joined or split: `reshape[bs(nd)->bsnd; n=4]`.
    Reshape = "reshape" (x) { rule: RuleAttr, sizes: Sizes }
    facts { kind: Movement, fusion: None, precision: Wants::Moved, gradient: Flows, linear: Linear::Together(1) }
    samples ["reshape[s(nd)->snd; n=2] f32[3,4]", "reshape[snd->s(nd); n=2] f32[3,2,4]"]
}

impl OpDef for Reshape {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        if ins.len() != 1 || self.rule.0.ins.len() != 1 || self.rule.0.ins[0].len() != ins[0].rank()
        {
            return Err("one operand with the dims of the rule is needed".into());
        }
        let flat =
            |d: &crate::rule::Dims| d.iter().flat_map(|g| g.letters().to_vec()).collect::<Vec<_>>();
        if flat(&self.rule.0.ins[0]) != flat(&self.rule.0.outs[0]) {
            return Err("a reshape keeps the letters and their order".into());
        }
        Ok(())
    }
    fn is_view(&self) -> bool {
        true
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let r = &self.rule.0;
        let rule = RuleAttr(Arc::new(Rule::of(&[&r.outs[0]], &[&r.ins[0]])));
        // The mirror cannot see the sizes that the operand's own dims gave.
        let known = infer::sizes(r, &[b.ty(ins[0])], &self.sizes.0).unwrap_or_default();
        let joined = r.ins[0].iter().chain(&r.outs[0]).filter(|g| g.single().is_none());
        let major: SmallVec<[Letter; 4]> =
            joined.flat_map(|g| g.letters()[..g.letters().len() - 1].to_vec()).collect();
        let sizes = known.0.iter().map(|x| (x.letter, x.size));
        let sizes = Sizes(sizes.filter(|s| major.contains(&s.0)).collect());
        grads_of(d, |d| b.push("reshape_grad", Reshape { rule, sizes }, &[d]))
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].reshape(&cx.out_shape(0))]
    }
}
