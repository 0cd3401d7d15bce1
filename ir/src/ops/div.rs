//! `div`: quotient, element by element.

use super::*;
use crate::attr::Broadcast;

op! {
    /// `a / b`; a rule broadcasts a smaller operand.
    Div = "div" (a, b) { rule: Broadcast }
    facts { kind: Elementwise, fusion: Some(Each), precision: Wants::Wide, gradient: Flows, linear: Linear::Each(1) }
    samples ["div f32[3,4], f32[3,4]", "div[bs,b->bs] f32[3,4], f32[3]", "div[ab,ab->ba] f32[3,3], f32[3,3]", "div[b,abc->cab] f32[3], f32[2,3,4]"] positive ["b"]
}

impl Div {
    pub fn same() -> Div {
        Div { rule: Broadcast::SAME }
    }
}

impl OpDef for Div {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        mul::binary(&self.rule, ins)
    }
    fn in_place(&self, _: usize) -> Option<usize> {
        Some(0)
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], outs: &[Value], d: &[Option<Value>]) -> Grads {
        let Some(d) = d[0] else { return smallvec::smallvec![None, None] };
        let r = self.rule(&[b.ty(ins[0]).rank(), b.ty(ins[1]).rank()]);
        let rule =
            Broadcast(Some(std::sync::Arc::new(Rule::of(&[&r.outs[0], &r.ins[1]], &[&r.outs[0]]))));
        // d/da = d / b, d/db = - d y / b
        let q = b.push("q", Div { rule }, &[d, ins[1]]);
        let first = b.wants(ins[0]).then(|| mul::reduce_to(b, q, &r.outs[0], &r.ins[0]));
        let second = b.wants(ins[1]).then(|| {
            let m = b.push("m", Mul::same(), &[q, outs[0]]);
            let s = mul::reduce_to(b, m, &r.outs[0], &r.ins[1]);
            b.push("neg", Scale { by: -1.0 }, &[s])
        });
        smallvec::smallvec![first, second]
    }
    fn element(&self, b: &mut Body, x: &[usize]) -> Option<Results> {
        Some(smallvec::smallvec![b.chain(Binary::Div, x)])
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let parts = mul::spread(cx, &self.rule(&mul::ranks(ins)), ins);
        vec![parts[0].zip(&parts[1], |x, y| x / y)]
    }
}
