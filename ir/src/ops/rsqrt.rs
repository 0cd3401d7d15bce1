//! `rsqrt`: One over the square root.

use super::*;

op! {
    /// One over the square root, element by element.
    Rsqrt = "rsqrt" (x) {}
    samples ["rsqrt f32[3,4]"]
}

impl OpDef for Rsqrt {
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
        // d/dx x^(-1/2) = -1/2 y^3
        grads_of(d, |d| {
            let y2 = b.push("y2", Mul::same(), &[outs[0], outs[0]]);
            let y3 = b.push("y3", Mul::same(), &[y2, outs[0]]);
            let h = b.push("half", Scale { by: -0.5 }, &[y3]);
            b.push("rsqrt_grad", Mul::same(), &[d, h])
        })
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].map(|x| 1.0 / x.sqrt())]
    }
}
