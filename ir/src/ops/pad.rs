//! `pad`: elements of a dim among zeros, or shifted past its ends; the mirror of `narrow`.

use super::*;
use crate::attr::{Along, Sizes, Spacing};

op! {
    /// Places the elements of a dim from `start` in a larger dim that is 0 elsewhere: `pad[d=6; start=3]`
    /// along the last dim, `pad[d=6; start=3; dim=1]` along another dim, `pad[d=9; start=0; step=3]` with a
    /// distance of three. Without a distance some elements may come to lie before the first or after the last
    /// place, and are left out: of six, `pad[d=6; start=2]` is a shift by two, `pad[d=6; start=-2]` back.
    Pad = "pad" (x) { sizes: Sizes, start: i64, dim: Along, step: Spacing }
    facts { kind: Movement, fusion: None, precision: Wants::Same, gradient: Flows, linear: Linear::Together(1) }
    samples ["pad[d=6; start=3] f32[2,3,2]", "pad[d=5; start=1; dim=1] f32[2,3,3]",
             "pad[d=6; start=1; dim=0; step=3] f32[2,2]", "pad[d=7; start=0; step=2] f32[2,3]",
             "pad[d=6; start=2; dim=1] f32[2,6,2]", "pad[d=5; start=-1] f32[2,3]",
             "pad[d=2; start=-1; dim=0] f32[4,2]"]
}

impl Pad {
    /// Along the last dim, one after the other.
    pub fn new(start: i64, size: usize) -> Pad {
        let sizes = Sizes(smallvec::smallvec![(Letter(b'd' - b'a'), size)]);
        Pad { sizes, start, dim: Along::LAST, step: crate::attr::Usual(1) }
    }

    /// Where the first of `n` elements comes to lie, if all have a place among so many.
    fn inside(&self, n: usize, places: usize) -> Option<usize> {
        let start = usize::try_from(self.start).ok()?;
        narrow::end(start, n, self.step.0).is_some_and(|e| e <= places).then_some(start)
    }

    /// Some of `n` elements have a place among so many.
    fn meets(&self, n: usize, places: usize) -> bool {
        self.start < places as i64 && self.start.saturating_add(n as i64) > 0
    }
}

impl OpDef for Pad {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 1)?;
        let dim = self.dim.of(ins[0].rank()).filter(|_| ins[0].rank() <= concat::MOST_OTHERS + 1);
        let own = |dim: usize| ins[0].dims[dim].size;
        match (dim, &self.sizes.0[..]) {
            (Some(dim), &[(l, n)])
                if l.name() == 'd'
                    && self.step.0 > 0
                    && (self.inside(own(dim), n).is_some()
                        || self.step.0 == 1 && self.meets(own(dim), n)) =>
            {
                Ok(())
            }
            _ => Err("one operand is needed, and a size that holds one of its dims, or without a `step` some of it, \
                      as in `d=6; start=3`"
                .into()),
        }
    }
    fn rule(&self, ranks: &[usize]) -> Cow<'_, Rule> {
        let dim = self.dim.of(ranks[0]).unwrap_or(0);
        Cow::Owned(Rule::along(ranks[0], dim, &[Letter(b'p' - b'a')], Letter(b'd' - b'a')))
    }
    fn halo(&self) -> Option<crate::boxes::Halo> {
        (self.step.0 == 1).then_some(crate::boxes::Halo { dim: self.dim, start: -self.start })
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let t = b.ty(ins[0]);
        let len = t.dims[self.dim.of(t.rank()).expect("accepted")].size;
        let places = self.sizes.0[0].1;
        grads_of(d, |d| match self.inside(len, places) {
            Some(start) => {
                let narrow = Narrow { dim: self.dim, step: self.step, ..Narrow::new(start, len) };
                b.push("widen_grad", narrow, &[d])
            }
            None => {
                let back = Pad { dim: self.dim, ..Pad::new(-self.start, len) };
                b.push("widen_grad", back, &[d])
            }
        })
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let (shape, step) = (cx.out_shape(0), self.step.0);
        let dim = self.dim.of(shape.len()).expect("accepted");
        vec![Tensor::from_fn(&shape, |i| {
            let far = usize::try_from(i[dim] as i64 - self.start).ok();
            let Some(k) = far.filter(|k| k % step == 0) else { return 0.0 };
            let mut j: Shape = i.into();
            j[dim] = k / step;
            if j[dim] < ins[0].shape[dim] { ins[0].at(&j) } else { 0.0 }
        })]
    }
}
