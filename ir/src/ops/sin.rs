//! `sin`: The sine.

use super::*;

op! {
    /// The sine, element by element.
    Sin = "sin" (x) {}
    samples ["sin f32[3,4]"]
}

impl OpDef for Sin {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 1)
    }
    fn rule(&self, ranks: &[usize]) -> Rule {
        Rule::elementwise(1, 1, ranks[0])
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        grads_of(d, |d| {
            let c = b.push("c", Cos {}, &[ins[0]]);
            b.push("sin_grad", Mul::same(), &[d, c])
        })
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].map(|x| x.sin())]
    }
}
