//! `silu`: SiLU, x * logistic(x) (Elfwing et al., 2017).

use super::*;

op! {
    /// SiLU, x * logistic(x) (Elfwing et al., 2017), element by element.
    Silu = "silu" (x) {}
    samples ["silu f32[3,4]"]
}

impl OpDef for Silu {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 1)
    }
    fn rule(&self, ranks: &[usize]) -> Rule {
        Rule::elementwise(1, 1, ranks[0])
    }
    fn in_place(&self, _: usize) -> Option<usize> {
        Some(0)
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        // y' = s + y (1 - s), s = logistic(x); in f32, since each step would be rounded.
        grads_of(d, |d| {
            let [x, d] = [ins[0], d].map(|v| cast::in_f32(b, v));
            let s = b.push("s", Logistic {}, &[x]);
            let y = b.push("y", Mul::same(), &[x, s]);
            let ys = b.push("ys", Mul::same(), &[y, s]);
            let m = b.push("m", Sub::same(), &[y, ys]);
            let p = b.push("p", Add::same(), &[s, m]);
            b.push("silu_grad", Mul::same(), &[d, p])
        })
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].map(|x| x / (1.0 + (-x).exp()))]
    }
}
