//! `narrow`: a range of the last dim; the mirror of `widen`.

use super::*;
use crate::attr::Sizes;

op! {
    /// Elements of the last dim from `start`, as many as the attribute says: `narrow[p=4; start=2]`.
    Narrow = "narrow" (x) { sizes: Sizes, start: usize }
    facts { kind: Movement, fusion: None, precision: Wants::Same, gradient: Flows }
    samples ["narrow[p=2; start=3] f32[2,3,6]"]
}

impl Narrow {
    pub fn new(start: usize, len: usize) -> Narrow {
        Narrow { sizes: Sizes(smallvec::smallvec![(Letter(b'p' - b'a'), len)]), start }
    }
}

impl OpDef for Narrow {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 1)?;
        match (ins[0].dims.last(), &self.sizes.0[..]) {
            (Some(d), &[(l, n)])
                if l.name() == 'p' && self.start.checked_add(n).is_some_and(|e| e <= d.size) =>
            {
                Ok(())
            }
            _ => {
                Err("one operand is needed, and a range of its last dim, as in `p=4; start=2`"
                    .into())
            }
        }
    }
    fn rule(&self, ranks: &[usize]) -> Rule {
        Rule::new("..!d->..!p", ranks)
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
        let size = b.ty(ins[0]).dims.last().map_or(0, |d| d.size);
        grads_of(d, |d| b.push("narrow_grad", Widen::new(self.start, size), &[d]))
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let last = ins[0].shape.len() - 1;
        vec![ins[0].slice(last, self.start, cx.out_shape(0)[last])]
    }
}
