//! Rotations of pairs of elements.

use super::*;
use shardc_ir::ops::rope::Pairs;

/// Pairs are adjacent elements, or else halves.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Rope {
    pub adjacent: bool,
}

impl Function for Rope {
    fn name(&self) -> String {
        if self.adjacent { "rope[adjacent]" } else { "rope" }.into()
    }
    fn results(&self, x: &[&Tensor], _: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        let shape = &x[1].shape;
        let (own, turns) = (3 - shape.len(), shape[shape.len() - 1]);
        let mut out = x[0].clone();
        each(&x[0].shape[..3], |i| {
            for j in 0..turns {
                let pair = if self.adjacent { [2 * j, 2 * j + 1] } else { [j, j + turns] };
                let [p, q] = pair.map(|d| out.place(&[i[0], i[1], i[2], d]));
                let (a, b) = (x[0].data[p], x[0].data[q]);
                let (c, s) = (x[1].at(&[i[0], i[1], j][own..]), x[2].at(&[i[0], i[1], j][own..]));
                out.data[p] = add(times(a, c), neg(times(b, s), P), P);
                out.data[q] = add(times(b, c), times(a, s), P);
            }
        });
        Ok(vec![out])
    }
}

impl Law for ops::Rope {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        known("bsn!d,bs!r,bs!r->bsnd", &[4, 3, 3], ranks)
            .or_else(|| known("bsn!d,s!r,s!r->bsnd", &[4, 2, 2], ranks))
    }
    fn typing(&self) -> Option<Typing> {
        Some(Typing { linear: Linear::Each(&[0]), ..NONLINEAR })
    }
    fn tied(&self, own: &[usize]) -> bool {
        matches!(own, &[d, r, s, _] if r == s && r.checked_mul(2).is_some_and(|n| n <= d))
    }
    fn shrink(&mut self, small: &mut Small) {
        let [d, r] = [0, 1].map(|i| small.letter(i, None));
        let rest = usize::from(small.was(d) > 2 * small.was(r));
        small.set(d, 2 * small.is(r) + rest);
    }
    fn multiples(&self, ins: &[&Type]) -> Result<Vec<Multiple>, String> {
        let last = ins[1].rank() - 1;
        match ins[0].dims[3].size == 2 * ins[1].dims[last].size {
            true => Ok(vec![([0, 3], 2, [1, last])]),
            false => Err("to make a rotation of a part of a head smaller".into()),
        }
    }
    fn function(&self, _: &[&Type]) -> Result<Option<Fun>, String> {
        let ops::Rope { pairs } = self;
        Ok(Some(Rope { adjacent: *pairs == Pairs::Adjacent }.into()))
    }
    /// The rotation by the opposite angle.
    fn back(&self, at: &mut At) -> Result<Back, String> {
        let (d, shape) = (at.d()?, at.shape(0));
        let f = self.function(&at.types)?.ok_or("a rotation is a function")?;
        let sin = at.s.scale(Coef::ONE.minus(), at.x[2]);
        Ok(vec![Some(at.s.apply(f, &[d, at.x[1], sin], 0, &shape)), None, None])
    }
}
