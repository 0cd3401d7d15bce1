//! `sqrt`: The square root.

use super::*;

op! {
    /// The square root, element by element.
    Sqrt = "sqrt" (x) {}
    samples ["sqrt f32[3,4]"]
}

impl OpDef for Sqrt {
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
            let h = b.push("half", Scale { by: 0.5 }, &[d]);
            b.push("sqrt_grad", Div::same(), &[h, outs[0]])
        })
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].map(|x| x.sqrt())]
    }
}
