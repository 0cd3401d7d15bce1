//! `widen`: the last dim among zeros; the mirror of `narrow`.

use super::*;
use crate::attr::Sizes;

op! {
    /// The last dim from `start` of a larger one, which is 0 elsewhere: `widen[d=6; start=3]`.
    Widen = "widen" (x) { sizes: Sizes, start: usize }
    facts { kind: Movement, fusion: None, precision: Wants::Same, gradient: Flows }
    samples ["widen[d=6; start=3] f32[2,3,2]"]
}

impl Widen {
    pub fn new(start: usize, size: usize) -> Widen {
        Widen { sizes: Sizes(smallvec::smallvec![(Letter(b'd' - b'a'), size)]), start }
    }
}

impl OpDef for Widen {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 1)?;
        match (ins[0].dims.last(), &self.sizes.0[..]) {
            (Some(p), &[(l, n)])
                if l.name() == 'd' && self.start.checked_add(p.size).is_some_and(|e| e <= n) =>
            {
                Ok(())
            }
            _ => Err(
                "one operand is needed, and a size that holds its last dim, as in `d=6; start=3`"
                    .into(),
            ),
        }
    }
    fn rule(&self, ranks: &[usize]) -> Rule {
        Rule::new("..!p->..!d", ranks)
    }
    fn sizes(&self) -> &[(Letter, usize)] {
        &self.sizes.0
    }
    fn linear(&self) -> Linear {
        Linear::Together(1)
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let len = b.ty(ins[0]).dims.last().map_or(0, |d| d.size);
        grads_of(d, |d| b.push("widen_grad", Narrow::new(self.start, len), &[d]))
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let shape = cx.out_shape(0);
        let last = shape.len() - 1;
        let end = self.start + ins[0].shape[last];
        vec![Tensor::from_fn(&shape, |i| {
            if i[last] < self.start || i[last] >= end {
                return 0.0;
            }
            let mut j: Shape = i.into();
            j[last] -= self.start;
            ins[0].at(&j)
        })]
    }
}
