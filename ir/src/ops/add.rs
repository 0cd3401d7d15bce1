//! `add`: sum of any number of operands, from left to right.

use super::*;
use crate::attr::Broadcast;
use crate::ops::mul::reduce_to;

op! {
    /// The sum of all operands, from left to right; a rule broadcasts smaller operands.
    Add = "add" (a, b) { rule: Broadcast }
    facts { kind: Elementwise, fusion: Some(Each), precision: Wants::Same, gradient: Flows, linear: Linear::Together(!0) }
    samples ["add f32[3,4], f32[3,4]", "add f32[5], f32[5], f32[5]", "add[bsh,h->bsh] f32[2,3,4], f32[4]", "add[bsh,bsh->hbs] f32[2,3,4], f32[2,3,4]", "add[ab,ba,b->ba] f32[3,3], f32[3,3], f32[3]"]
}

impl Add {
    /// The sum of operands of the same dims.
    pub fn same() -> Add {
        Add { rule: Broadcast::SAME }
    }
}

impl OpDef for Add {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        if ins.is_empty() || ins.len() > 1 << 20 {
            return Err("one operand or more is needed".into());
        }
        floats(ins, ins.len())?;
        if ins.iter().any(|t| t.dtype != ins[0].dtype) {
            return Err("operands of one element type are needed".into());
        }
        let ranks: SmallVec<[usize; 4]> = ins.iter().map(|t| t.rank()).collect();
        self.rule.accepts(&ranks)
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let Some(d) = d[0] else { return ins.iter().map(|_| None).collect() };
        let ranks: SmallVec<[usize; 4]> = ins.iter().map(|&v| b.ty(v).rank()).collect();
        let rule = self.rule(&ranks);
        let one = |(i, &v): (usize, &Value)| {
            b.wants(v).then(|| reduce_to(b, d, &rule.outs[0], &rule.ins[i]))
        };
        ins.iter().enumerate().map(one).collect()
    }
    fn element(&self, b: &mut Body, x: &[usize]) -> Option<Results> {
        Some(smallvec::smallvec![b.chain(Binary::Add, x)])
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let parts = mul::spread(cx, &self.rule(&mul::ranks(ins)), ins);
        let mut parts = parts.into_iter();
        let first = parts.next().expect("an operand");
        vec![parts.fold(first, |a, b| a.zip(&b, |x, y| x + y))]
    }
    fn in_place(&self, _: usize) -> Option<usize> {
        Some(0)
    }
}
