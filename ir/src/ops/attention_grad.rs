//! `attention_grad`: gradients of `attention`, from its log-sum-exp.

use super::attention::Behind;
use super::*;

op! {
    /// The gradients of q, k and v of `attention`, and of its bias if it has one, computed from its log-sum-exp, the cotangent `d_o` of the
    /// output and `delta` = rowsum(d_o * o) - d_lse (Dao, 2023, algorithm 2). Linear in (`d_o`, `delta`).
    AttentionGrad = "attention_grad" (q, k, v, lse, d_o, delta, q_pos, k_pos, slopes, bias, q_seg, k_seg, run, place) { scale: f64, mask: Mask, softcap: Option<f64>, slopes: bool, bias: bool, segments: bool, kept: Option<AttentionDropout> }
    facts { kind: Attention, fusion: None, precision: Wants::AsTheyAre, gradient: Unasked, linear: Linear::Together(1 << 4 | 1 << 5) }
    samples [
        "attention_grad[0.5; mask=causal] f32[2,3,4,2], f32[2,3,2,2], f32[2,3,2,2], f32[2,3,4], f32[2,3,4,2], f32[2,3,4], i32[3], i32[3]",
        "attention_grad[0.5; mask=causal; softcap=1.5] f32[2,3,4,2], f32[2,3,2,2], f32[2,3,2,2], f32[2,3,4], f32[2,3,4,2], f32[2,3,4], i32[3], i32[3]",
        "attention_grad[0.5; mask=causal; softcap=1.5; slopes=true] f32[1,3,4,2], f32[1,3,2,2], f32[1,3,2,2], f32[1,3,4], f32[1,3,4,2], f32[1,3,4], i32[3], i32[3], f32[4]",
        "attention_grad[0.5; mask=-1..1/3] f32[1,4,2,2], f32[1,5,1,2], f32[1,5,1,3], f32[1,4,2], f32[1,4,2,3], f32[1,4,2], i32[4], i32[5]",
        "attention_grad[0.5; mask=causal; kept=0.5 a.0] f32[2,3,4,2], f32[2,3,2,2], f32[2,3,2,2], f32[2,3,4], f32[2,3,4,2], f32[2,3,4], i32[3], i32[3], i32[3], i32[2,3]",
        "attention_grad[0.5; mask=causal; segments=true] f32[2,4,4,2], f32[2,4,2,2], f32[2,4,2,2], f32[2,4,4], f32[2,4,4,2], f32[2,4,4], i32[4], i32[4], i32[2,4], i32[2,4]",
        "attention_grad[0.5; mask=full; softcap=1.5; slopes=true; segments=true; kept=0.7 a.1] f32[2,3,4,2], f32[2,5,2,2], f32[2,5,2,3], f32[2,3,4], f32[2,3,4,3], f32[2,3,4], i32[3], i32[5], f32[4], i32[2,3], i32[2,5], i32[3], i32[2,3]",
        "attention_grad[0.5; mask=full; softcap=1.5; slopes=true; kept=0.7 a.1] f32[1,3,4,2], f32[1,5,2,2], f32[1,5,2,3], f32[1,3,4], f32[1,3,4,3], f32[1,3,4], i32[3], i32[5], f32[4], i32[3], i32[1,3]",
        "attention_grad[0.5; mask=full; bias=true] f32[2,4,4,2], f32[2,4,2,2], f32[2,4,2,2], f32[2,4,4], f32[2,4,4,2], f32[2,4,4], i32[4], i32[4], f32[4,7]",
        "attention_grad[0.5; mask=full; softcap=1.5; bias=true; segments=true; kept=0.7 a.1] f32[2,3,4,2], f32[2,5,2,2], f32[2,5,2,3], f32[2,3,4], f32[2,3,4,3], f32[2,3,4], i32[3], i32[5], f32[4,3], i32[2,3], i32[2,5], i32[3], i32[2,3]",
    ]
}

impl AttentionGrad {
    /// Where the operands behind positions stand.
    pub fn behind(&self) -> Behind {
        Behind::new(8, &self.forward())
    }
    /// The attention whose gradients these are.
    pub fn forward(&self) -> Attention {
        let AttentionGrad { scale, mask, softcap, slopes, bias, segments, kept } = self.clone();
        Attention { scale, mask, softcap, slopes, bias, segments, kept }
    }
}

impl OpDef for AttentionGrad {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        self.behind().accepts(ins)?;
        self.mask.accepts()?;
        attention::accepts_softcap(self.softcap)?;
        attention::accepts_qkv(ins, [6, 7])?;
        if ins[3].rank() != 3
            || ins[4].rank() != 4
            || ins[5].rank() != 3
            || [ins[3], ins[5]].iter().any(|t| t.dtype != DType::F32)
            || ins[4].dtype != ins[0].dtype
        {
            let what = "`lse` and `delta` are f32 [b, s, n], `d_o` is [b, s, n, e] of q's elements";
            return Err(what.into());
        }
        Ok(())
    }
    fn rule(&self, _: &[usize]) -> Cow<'_, Rule> {
        let ins = "bs(gr)!d,b!tg!d,b!tg!e,bs(gr),bs(gr)e,bs(gr),s,!t";
        let outs = if self.bias { "bs(gr)d,btgd,btge,(gr)o" } else { "bs(gr)d,btgd,btge" };
        self.behind().letters(ins, &[4, 4, 4, 3, 4, 3, 1, 1], outs)
    }
    fn flops(&self, loops: &[(Letter, f64)]) -> f64 {
        attention::pair_flops(loops, 5.0)
    }
    fn grad(&self, _: &mut Builder, ins: &[Value], _: &[Value], _: &[Option<Value>]) -> Grads {
        smallvec::smallvec![None; ins.len()]
    }
    fn workspace(&self, mesh: &Mesh, ins: &[&Type], _: &[&Type]) -> usize {
        attention::score_bytes(mesh, [ins[0], ins[1], ins[2]], true)
    }
    fn dtypes(&self, ins: &[&Type], _: usize) -> SmallVec<[DType; 2]> {
        let of_bias = self.bias.then_some(DType::F32);
        std::iter::repeat_n(ins[0].dtype, 3).chain(of_bias).collect()
    }
    /// Log-sum-exp and row sums are those of the attention of these q, k, v.
    fn settle(&self, types: &[Type], drawn: &mut [Tensor]) {
        self.behind().settle(drawn);
        let attention = Op::from(self.forward());
        let at = || [0, 1, 2].into_iter().chain(6..drawn.len());
        let types: Vec<&Type> = at().map(|i| &types[i]).collect();
        let own: Vec<&Tensor> = at().map(|i| &drawn[i]).collect();
        let made = crate::samples::eval(&attention, &types, &[], &own);
        let d_o = drawn[4].zip(&made[0], |a, b| a * b);
        let e = d_o.shape[3];
        drawn[5] = Tensor::from_fn(&made[1].shape, |i| {
            (0..e).map(|j| d_o.at(&[i[0], i[1], i[2], j])).sum()
        });
        drawn[3] = made[1].clone();
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let behind = self.behind();
        let first = cx.out_extent(0, 2).offset;
        let factors = attention::factors(self.kept.as_ref(), behind, ins, [ins[6], ins[7]], first);
        let [q, k, v, lse, d_o, delta] = [ins[0], ins[1], ins[2], ins[3], ins[4], ins[5]];
        let (mut dq, mut dk, mut dv) =
            (Tensor::full(&q.shape, 0.0), Tensor::full(&k.shape, 0.0), Tensor::full(&v.shape, 0.0));
        let mut d_bias = behind.bias.map(|i| Tensor::full(&ins[i].shape, 0.0));
        let seeing = behind.seeing(ins, [6, 7]);
        attention::each_pair([q, k], seeing, self.mask, |b, s, h, g, t| {
            let (row, key) = ([b, s, h], [b, t, g]);
            let product = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
            let add = |to: &mut [f64], by: f64, x: &[f64]| {
                to.iter_mut().zip(x).for_each(|(to, x)| *to += by * x);
            };
            let dot = product(q.row(&row), k.row(&key));
            let score = attention::capped(self.scale * dot, self.softcap);
            // d (c tanh(x / c)) / dx = 1 - tanh²(x / c)
            let slope = self.softcap.map_or(1.0, |c| 1.0 - (score / c).powi(2));
            let score = score + behind.added(ins, [6, 7], [s, t, h]);
            let p = (score - lse.at(&row)).exp();
            let dp = product(d_o.row(&row), v.row(&key));
            let kept = factors.as_ref().map_or(1.0, |f| f.at(&[b, s, h, t]));
            let d_score = p * (kept * dp - delta.at(&row));
            if let (Some(to), Some(i)) = (&mut d_bias, behind.bias) {
                let far = ins[7].data[t] - ins[6].data[s];
                *to.at_mut(&[h, attention::offset(far as i64, ins[i].shape[1])]) += d_score;
            }
            let ds = self.scale * slope * d_score;
            add(dv.row_mut(&key), kept * p, d_o.row(&row));
            add(dq.row_mut(&row), ds, k.row(&key));
            add(dk.row_mut(&key), ds, q.row(&row));
        });
        [dq, dk, dv].into_iter().chain(d_bias).collect()
    }
}
