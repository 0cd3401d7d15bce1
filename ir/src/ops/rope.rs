//! `rope`: rotary position embedding.

use super::*;

op! {
    /// Rotates pairs of `x`'s last dim (Su et al., 2021), element j of its first half with element j
    /// of its second half, as Hugging Face stores heads: `a cos - b sin`, `b cos + a sin`. `cos` and
    /// `sin` are [s, r]; the first 2r elements turn, the rest stay.
    Rope = "rope" (x, cos, sin) {}
    samples ["rope f32[2,3,2,4], f32[3,2], f32[3,2]", "rope f32[1,3,2,6], f32[3,2], f32[3,2]"]
}

impl OpDef for Rope {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 3)?;
        if ins[0].rank() != 4 || ins[1].rank() != 2 || ins[2].rank() != 2 {
            return Err("`x` is [b, s, n, d], `cos` and `sin` are [s, r]".into());
        }
        if ins[1].dims[1].size.saturating_mul(2) > ins[0].dims[3].size {
            return Err("`cos` is at most half as wide as `x`".into());
        }
        Ok(())
    }
    fn rule(&self, _: &[usize]) -> Rule {
        Rule::new("bsn!d,s!r,s!r->bsnd", &[4, 2, 2])
    }
    fn linear(&self) -> Linear {
        Linear::Each(1)
    }
    fn flops(&self, loops: &[(Letter, f64)]) -> f64 {
        3.0 * loops.iter().filter(|l| l.0.name() != 'r').map(|l| l.1).product::<f64>()
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        // The inverse rotation.
        let g = d[0].map(|d| {
            let back = b.push("sin_neg", Scale { by: -1.0 }, &[ins[2]]);
            b.push("rope_grad", Rope {}, &[d, ins[1], back])
        });
        smallvec::smallvec![g, None, None]
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let r = ins[1].shape[1];
        vec![Tensor::from_fn(&ins[0].shape, |i| {
            let at = |d: usize| ins[0].at(&[i[0], i[1], i[2], d]);
            let (c, s) = (|j: usize| ins[1].at(&[i[1], j]), |j: usize| ins[2].at(&[i[1], j]));
            match i[3] {
                d if d < r => at(d) * c(d) - at(d + r) * s(d),
                d if d < 2 * r => at(d) * c(d - r) + at(d - r) * s(d - r),
                d => at(d),
            }
        })]
    }
}
