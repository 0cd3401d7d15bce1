//! `sub`: difference, element by element.

use super::*;
use crate::attr::Broadcast;

op! {
    /// `a - b`; a rule broadcasts a smaller operand.
    Sub = "sub" (a, b) { rule: Broadcast }
    facts { kind: Elementwise, fusion: Some(Each), precision: Wants::Same, gradient: Flows, linear: Linear::Together(!0) }
    samples ["sub f32[3,4], f32[3,4]", "sub[bsv,bs->bsv] f32[2,3,4], f32[2,3]", "sub[ab,ab->ba] f32[3,3], f32[3,3]", "sub[b,abc->cab] f32[3], f32[2,3,4]"]
}

impl Sub {
    pub fn same() -> Sub {
        Sub { rule: Broadcast::SAME }
    }
}

impl OpDef for Sub {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        mul::binary(&self.rule, ins)
    }
    fn in_place(&self, _: usize) -> Option<usize> {
        Some(0)
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let Some(d) = d[0] else { return smallvec::smallvec![None, None] };
        let r = self.rule(&[b.ty(ins[0]).rank(), b.ty(ins[1]).rank()]);
        let first = b.wants(ins[0]).then(|| mul::reduce_to(b, d, &r.outs[0], &r.ins[0]));
        let second = b.wants(ins[1]).then(|| {
            let s = mul::reduce_to(b, d, &r.outs[0], &r.ins[1]);
            b.push("neg", Scale { by: -1.0 }, &[s])
        });
        smallvec::smallvec![first, second]
    }
    fn element(&self, b: &mut Body, x: &[usize]) -> Option<Results> {
        Some(smallvec::smallvec![b.chain(Binary::Sub, x)])
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let parts = mul::spread(cx, &self.rule(&mul::ranks(ins)), ins);
        vec![parts[0].zip(&parts[1], |x, y| x - y)]
    }
}
