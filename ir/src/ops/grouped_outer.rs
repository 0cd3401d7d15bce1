//! `grouped_outer`: sums of outer products by expert: the gradient of the experts' weights.

use super::*;

op! {
    /// For each expert, the sum over its rows of the outer products of `y` `[g,z,c,o]` and `x` `[g,z,c,i]`:
    /// `[(g e),o,i]`. Rows and counts are as in `grouped_dot`.
    GroupedOuter = "grouped_outer" (y, counts, x) {}
    facts { kind: GroupedProduct, fusion: None, precision: Wants::Half, gradient: Flows }
    samples ["grouped_outer f32[2,2,3,4], i32[2,2,2], f32[2,2,3,5]"]
}

impl OpDef for GroupedOuter {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        grouped_dot::accepts(ins, [4, 4])
    }
    fn rule(&self, _: &[usize]) -> Cow<'_, Rule> {
        Rule::known("gz!co,g!ez,gzci->(ge)oi", &[4, 3, 4])
    }
    fn linear(&self) -> Linear {
        Linear::Each(0b101)
    }
    fn flops(&self, loops: &[(Letter, f64)]) -> f64 {
        grouped_dot::flops(loops)
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let Some(d) = d[0] else { return smallvec::smallvec![None; 3] };
        let [y, n, x] = [ins[0], ins[1], ins[2]];
        let d_y = b.wants(y).then(|| b.push("grouped_grad", GroupedDot {}, &[x, n, d]));
        let d_x = b.wants(x).then(|| b.push("grouped_grad", GroupedDotT {}, &[y, n, d]));
        smallvec::smallvec![d_y, None, d_x]
    }
    fn workspace(&self, mesh: &Mesh, ins: &[&Type], outs: &[&Type]) -> usize {
        grouped_dot::workspace(mesh, ins[0], ins[2], outs[0])
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let [y, counts, x] = [ins[0], ins[1], ins[2]];
        let mut out = Tensor::full(&cx.out_shape(0), 0.0);
        let experts = counts.shape[1];
        grouped_dot::each_row(counts, y.shape[2], |g, e, z, c| {
            let row = x.row(&[g, z, c]);
            for (o, y) in y.row(&[g, z, c]).iter().enumerate() {
                let to = out.row_mut(&[g * experts + e, o]);
                to.iter_mut().zip(row).for_each(|(to, x)| *to += y * x);
            }
        });
        vec![out]
    }
}
