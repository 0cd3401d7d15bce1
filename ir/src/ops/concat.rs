//! `concat`: two tensors one after the other along their last dim.

use super::*;
use crate::attr::Sizes;

op! {
    /// The last dim of `a` followed by that of `b`; all other dims are the same. The attribute is the
    /// new size: `concat[d=6]`.
    Concat = "concat" (a, b) { sizes: Sizes }
    facts { kind: Movement, fusion: None, precision: Wants::Same, gradient: Flows }
    samples ["concat[d=6] f32[2,3,4], f32[2,3,2]"]
}

impl Concat {
    pub fn new(size: usize) -> Concat {
        Concat { sizes: Sizes(smallvec::smallvec![(Letter(b'd' - b'a'), size)]) }
    }
}

impl OpDef for Concat {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 2)?;
        let last = |t: &Type| t.dims.last().map(|d| d.size);
        match (last(ins[0]), last(ins[1]), &self.sizes.0[..]) {
            (Some(a), Some(b), &[(l, n)])
                if l.name() == 'd' && a.checked_add(b) == Some(n) && ins[0].rank() == ins[1].rank() =>
            {
                Ok(())
            }
            _ => Err("two operands with as many dims are needed, and the sum of their last sizes, as in `d=6`".into()),
        }
    }
    fn rule(&self, ranks: &[usize]) -> Rule {
        Rule::new("..!p,..!q->..!d", ranks)
    }
    fn sizes(&self) -> &[(Letter, usize)] {
        &self.sizes.0
    }
    fn linear(&self) -> Linear {
        Linear::Together(3)
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let Some(d) = d[0] else { return smallvec::smallvec![None, None] };
        let last = |b: &Builder, v: Value| b.ty(v).dims.last().map_or(0, |d| d.size);
        let (p, q) = (last(b, ins[0]), last(b, ins[1]));
        let part = |start, len| Narrow::new(start, len);
        let a = b.wants(ins[0]).then(|| b.push("concat_grad", part(0, p), &[d]));
        let c = b.wants(ins[1]).then(|| b.push("concat_grad", part(p, q), &[d]));
        smallvec::smallvec![a, c]
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![Tensor::concat(ins[0].shape.len() - 1, ins)]
    }
}
