//! `logistic`: The logistic function 1 / (1 + exp(-x)).

use super::*;

op! {
    /// The logistic function 1 / (1 + exp(-x)), element by element.
    Logistic = "logistic" (x) {}
    samples ["logistic f32[3,4]"]
}

impl OpDef for Logistic {
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
            let m = b.push("m", Scale { by: -1.0 }, &[y]);
            let s = b.push("s", Shift { by: 1.0 }, &[m]);
            let ys = b.push("ys", Mul::same(), &[y, s]);
            b.push("logistic_grad", Mul::same(), &[d, ys])
        })
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].map(|x| 1.0 / (1.0 + (-x).exp()))]
    }
}
