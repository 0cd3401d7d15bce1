//! `gelu`: GELU in its tanh form, x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))) (Hendrycks and Gimpel, 2016).

use super::*;

op! {
    /// GELU in its tanh form, x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))) (Hendrycks and Gimpel, 2016), element by element.
    Gelu = "gelu" (x) {}
    samples ["gelu f32[3,4]"]
}

/// √(2/π).
const ROOT: f64 = 0.797_884_560_802_865_4;
const CUBE: f64 = 0.044715;

impl OpDef for Gelu {
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
        // y' = (1 + t)/2 + x (1 - t²)/2 · √(2/π) (1 + 3·0.044715 x²), t the tanh above; in f32, since
        // each step would be rounded and 1 - t² has few digits.
        grads_of(d, |d| {
            let [x, d] = [ins[0], d].map(|v| cast::in_f32(b, v));
            let x2 = b.push("x2", Mul::same(), &[x, x]);
            let c = b.push("c", Scale { by: CUBE * ROOT }, &[x2]);
            let c = b.push("c", Shift { by: ROOT }, &[c]);
            let u = b.push("u", Mul::same(), &[x, c]);
            let t = b.push("t", Tanh {}, &[u]);
            let t1 = b.push("t1", Shift { by: 1.0 }, &[t]);
            let cdf = b.push("cdf", Scale { by: 0.5 }, &[t1]);
            let t2 = b.push("t2", Mul::same(), &[t, t]);
            let q = b.push("q", Scale { by: -0.5 }, &[t2]);
            let q = b.push("q", Shift { by: 0.5 }, &[q]);
            let du = b.push("du", Scale { by: 3.0 * CUBE * ROOT }, &[x2]);
            let du = b.push("du", Shift { by: ROOT }, &[du]);
            let xdu = b.push("xdu", Mul::same(), &[x, du]);
            let pdf = b.push("pdf", Mul::same(), &[q, xdu]);
            let s = b.push("s", Add::same(), &[cdf, pdf]);
            b.push("gelu_grad", Mul::same(), &[d, s])
        })
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].map(|x| 0.5 * x * (1.0 + (ROOT * (x + CUBE * x * x * x)).tanh()))]
    }
}
