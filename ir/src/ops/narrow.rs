//! `narrow`: elements of a dim at equal distances; the mirror of `pad`.

use super::*;
use crate::attr::{Along, Sizes, Spacing};

op! {
    /// A slice of a dim: as many elements as the first attribute says, from `start`: `narrow[p=4; start=2]` of
    /// the last dim, `narrow[p=4; start=2; dim=1]` of another dim, `narrow[p=4; start=2; step=3]` every third
    /// element.
    Narrow = "narrow" (x) { sizes: Sizes, start: usize, dim: Along, step: Spacing }
    facts { kind: Movement, fusion: None, precision: Wants::Same, gradient: Flows, linear: Linear::Together(1) }
    samples ["narrow[p=2; start=3] f32[2,3,6]", "narrow[p=3; start=1; dim=1] f32[2,5,3]",
             "narrow[p=2; start=1; dim=0; step=3] f32[6,2]", "narrow[p=3; start=0; step=2] f32[2,5]"]
}

impl Narrow {
    /// Of the last dim, one after the other.
    pub fn new(start: usize, len: usize) -> Narrow {
        let sizes = Sizes(smallvec::smallvec![(Letter(b'p' - b'a'), len)]);
        Narrow { sizes, start, dim: Along::LAST, step: crate::attr::Usual(1) }
    }
    /// Of any dim.
    pub fn along(dim: usize, start: usize, len: usize, step: usize) -> Narrow {
        let [dim, step] = [dim, step];
        Narrow {
            dim: crate::attr::Usual(dim),
            step: crate::attr::Usual(step),
            ..Narrow::new(start, len)
        }
    }
}

/// The place behind the last of `n` elements from `start`, `step` apart.
pub(crate) fn end(start: usize, n: usize, step: usize) -> Option<usize> {
    match n.checked_sub(1) {
        None => Some(start),
        Some(m) => m.checked_mul(step)?.checked_add(start)?.checked_add(1),
    }
}

impl OpDef for Narrow {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        if ins.len() != 1 {
            return Err("one operand is needed".into());
        }
        let dim = self.dim.of(ins[0].rank()).filter(|_| ins[0].rank() <= concat::MOST_OTHERS + 1);
        match (dim, &self.sizes.0[..]) {
            (Some(dim), &[(l, n)])
                if l.name() == 'p'
                    && self.step.0 > 0
                    && end(self.start, n, self.step.0)
                        .is_some_and(|e| e <= ins[0].dims[dim].size) =>
            {
                Ok(())
            }
            _ => Err("one operand is needed, and a range of one of its dims, as in `p=4; start=2`"
                .into()),
        }
    }
    fn rule(&self, ranks: &[usize]) -> Cow<'_, Rule> {
        let dim = self.dim.of(ranks[0]).unwrap_or(0);
        Cow::Owned(Rule::along(ranks[0], dim, &[Letter(b'd' - b'a')], Letter(b'p' - b'a')))
    }
    fn halo(&self) -> Option<crate::boxes::Halo> {
        (self.step.0 == 1).then_some(crate::boxes::Halo { dim: self.dim, start: self.start as i64 })
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let t = b.ty(ins[0]);
        let size = t.dims[self.dim.of(t.rank()).expect("accepted")].size;
        let widen = Pad { dim: self.dim, step: self.step, ..Pad::new(self.start as i64, size) };
        grads_of(d, |d| b.push("narrow_grad", widen, &[d]))
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let dim = self.dim.of(ins[0].shape.len()).expect("accepted");
        vec![Tensor::from_fn(&cx.out_shape(0), |i| {
            let mut j: Shape = i.into();
            j[dim] = self.start + self.step.0 * i[dim];
            ins[0].at(&j)
        })]
    }
}
