//! The gradients of attention.

use super::*;

/// Of queries, keys and values, and of a bias.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct AttentionGrad(pub Scores);

impl Function for AttentionGrad {
    fn name(&self) -> String {
        self.0.name("attention_grad")
    }
    fn results(&self, x: &[&Tensor], _: &[usize], at: &Begins) -> Result<Vec<Tensor>, String> {
        let (c, first) = (&self.0, (at.result)(2));
        let [q, k, v, sum, d_o, delta] = [x[0], x[1], x[2], x[3], x[4], x[5]];
        let [mut d_q, mut d_k, mut d_v] = [q, k, v].map(|t| Tensor::full(&t.shape, 0));
        let mut d_bias = c.bias.then(|| Tensor::full(&x[8].shape, 0));
        let scale = number(c.scale.get());
        let by = sum.map(|z| inverse(z, P));
        c.pairs(x, 7, |b, s, h, g, t| {
            let [w, slope] = c.weight(x, 7, [b, s, h], [b, t, g]);
            let p = times(w, by.at(&[b, s, h]));
            let mut d_p = neg(delta.at(&[b, s, h]), P);
            let kept = c.factor(x, 7, [b, s, first + h], t);
            for e in 0..v.shape[3] {
                let d = times(kept, d_o.at(&[b, s, h, e]));
                d_p = add(d_p, times(d, v.at(&[b, t, g, e])), P);
                d_v.add_at(&[b, t, g, e], times(p, d));
            }
            if let Some(to) = &mut d_bias {
                to.add_at(&[h, c.offset(x, 7, s, t)], times(p, d_p));
            }
            let d_x = times(times(scale, slope), times(p, d_p));
            for d in 0..q.shape[3] {
                d_q.add_at(&[b, s, h, d], times(d_x, k.at(&[b, t, g, d])));
                d_k.add_at(&[b, t, g, d], times(d_x, q.at(&[b, s, h, d])));
            }
        });
        Ok([d_q, d_k, d_v].into_iter().chain(d_bias).collect())
    }
}

impl Law for ops::AttentionGrad {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        let ins = "bs(gr)!d,b!tg!d,b!tg!e,bs(gr),bs(gr)e,bs(gr),s,!t";
        let takes = [4, 4, 4, 3, 4, 3, 1, 1];
        let outs = if self.bias { "bs(gr)d,btgd,btge,(gr)o" } else { "bs(gr)d,btgd,btge" };
        scores(self).letters([ins, outs], &takes, ranks)
    }
    /// Linear in the cotangent of the output and delta.
    fn typing(&self) -> Option<Typing> {
        let ins = if self.slopes || self.bias { "nnnnnniini" } else { "nnnnnniii" };
        let linear = Linear::Together(&[4, 5]);
        Some(Typing { linear, lost: SUM, kinds: [ins, "nnnn"], ..NONLINEAR })
    }
    fn shrink(&mut self, small: &mut Small) {
        attention::longer(small);
    }
    fn operands(&self, x: &mut Operands) {
        scores(self).draw(x, 7);
    }
    fn function(&self, _: &[&Type]) -> Result<Option<Fun>, String> {
        Ok(Some(AttentionGrad(scores(self)).into()))
    }
}

/// The constants of the attention whose gradients these are.
fn scores(k: &ops::AttentionGrad) -> Scores {
    let ops::AttentionGrad { scale, mask, softcap, slopes, bias, segments, kept } = k.clone();
    Scores::of(&ops::Attention { scale, mask, softcap, slopes, bias, segments, kept })
}
