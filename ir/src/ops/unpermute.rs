//! `unpermute`: what experts made of a token's copies, summed; the mirror of `dispatch`.

use super::*;

op! {
    /// The sum over the copies of a token of their rows times their gates: from rows `[g,z,c,h]` and `slot`
    /// `[z,t,k]` to `[z,t,h]`. A copy without a row (slot -1) adds nothing.
    Unpermute = "unpermute" (rows, slot, gates) {}
    facts { kind: Copies, fusion: None, precision: Wants::Gated, gradient: Flows, linear: Linear::Each(0b101) }
    samples ["unpermute f32[2,2,3,4], i32[2,3,2], f32[2,3,2]"]
}

impl OpDef for Unpermute {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        dispatch::accepts(ins, [4, 3, 3])
    }
    fn rule(&self, _: &[usize]) -> Cow<'_, Rule> {
        Rule::known("!gz!ch,z!t!k,ztk->zth", &[4, 3, 3])
    }
    fn flops(&self, loops: &[(Letter, f64)]) -> f64 {
        let of = |c: char| loops.iter().find(|l| l.0.name() == c).map_or(1.0, |l| l.1);
        2.0 * of('z') * of('t') * of('k') * of('h')
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let Some(d) = d[0] else { return smallvec::smallvec![None; 3] };
        let [groups, rows] = [0, 2].map(|i| b.ty(ins[0]).dims[i].size);
        let back = Dispatch::new(groups, rows);
        let rows = b.wants(ins[0]).then(|| b.push("combine_grad", back, &[d, ins[1], ins[2]]));
        let gates =
            b.wants(ins[2]).then(|| b.push("gates", CombineGatesGrad {}, &[ins[0], ins[1], d]));
        smallvec::smallvec![rows, None, gates]
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let mut out = Tensor::full(&cx.out_shape(0), 0.0);
        let width = ins[0].shape[3];
        dispatch::each_copy(ins[1], &ins[0].shape, |z, t, k, g, c| {
            for h in 0..width {
                *out.at_mut(&[z, t, h]) += ins[0].at(&[g, z, c, h]) * ins[2].at(&[z, t, k]);
            }
        });
        // A copy without a row (see `route`) leaves nothing that could be used.
        crate::tensor::each_index(&ins[1].shape, |i| {
            if ins[1].at(i).is_nan() {
                (0..width).for_each(|h| *out.at_mut(&[i[0], i[1], h]) = f64::NAN);
            }
        });
        vec![out]
    }
}
