//! `tanh`: The hyperbolic tangent.

use super::*;

op! {
    /// The hyperbolic tangent, element by element.
    Tanh = "tanh" (x) {}
    samples ["tanh f32[3,4]"]
}

impl OpDef for Tanh {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 1)
    }
    fn rule(&self, ranks: &[usize]) -> Rule {
        Rule::elementwise(1, 1, ranks[0])
    }
    fn in_place(&self, _: usize) -> Option<usize> {
        Some(0)
    }
    fn grad(&self, b: &mut Builder, _: &[Value], outs: &[Value], d: &[Option<Value>]) -> Grads {
        grads_of(d, |d| {
            let [y, d] = [outs[0], d].map(|v| cast::in_f32(b, v));
            let y2 = b.push("y2", Mul::same(), &[y, y]);
            let m = b.push("m", Scale { by: -1.0 }, &[y2]);
            let s = b.push("s", Shift { by: 1.0 }, &[m]);
            b.push("tanh_grad", Mul::same(), &[d, s])
        })
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].map(|x| x.tanh())]
    }
}
