//! `grouped_dot_t`: every row times the transposed weight of its expert.

use super::*;

op! {
    /// Rows `[g,z,c,o]` times the weights `[(g e),o,i]` of their experts, summed over o: `[g,z,c,i]`. Rows and
    /// counts are as in `grouped_dot`.
    GroupedDotT = "grouped_dot_t" (x, counts, w) {}
    facts { kind: GroupedProduct, fusion: None, precision: Wants::Half, gradient: Flows }
    samples ["grouped_dot_t f32[2,2,3,4], i32[2,2,2], f32[4,4,5]"]
}

impl OpDef for GroupedDotT {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        grouped_dot::accepts(ins, [4, 3])
    }
    fn rule(&self, _: &[usize]) -> Cow<'_, Rule> {
        Rule::known("gz!co,g!ez,(ge)oi->gzci", &[4, 3, 3])
    }
    fn linear(&self) -> Linear {
        Linear::Each(0b101)
    }
    fn flops(&self, loops: &[(Letter, f64)]) -> f64 {
        grouped_dot::flops(loops)
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let Some(d) = d[0] else { return smallvec::smallvec![None; 3] };
        let [x, n, w] = [ins[0], ins[1], ins[2]];
        let d_x = b.wants(x).then(|| b.push("grouped_grad", GroupedDot {}, &[d, n, w]));
        let d_w = b.wants(w).then(|| b.push("grouped_grad", GroupedOuter {}, &[x, n, d]));
        smallvec::smallvec![d_x, None, d_w]
    }
    fn workspace(&self, mesh: &Mesh, ins: &[&Type], outs: &[&Type]) -> usize {
        grouped_dot::workspace(mesh, ins[0], outs[0], ins[2])
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let [x, counts, w] = [ins[0], ins[1], ins[2]];
        // NaN is what nobody may read.
        let mut out = Tensor::full(&cx.out_shape(0), f64::NAN);
        let experts = counts.shape[1];
        grouped_dot::each_row(counts, x.shape[2], |g, e, z, c| {
            let to = out.row_mut(&[g, z, c]);
            to.fill(0.0);
            for (o, x) in x.row(&[g, z, c]).iter().enumerate() {
                let weights = w.row(&[g * experts + e, o]);
                to.iter_mut().zip(weights).for_each(|(to, w)| *to += x * w);
            }
        });
        vec![out]
    }
}
