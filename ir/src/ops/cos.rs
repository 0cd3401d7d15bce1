//! `cos`: The cosine.

use super::*;

op! {
    /// The cosine, element by element.
    Cos = "cos" (x) {}
    samples ["cos f32[3,4]"]
}

impl OpDef for Cos {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 1)
    }
    fn rule(&self, ranks: &[usize]) -> Rule {
        Rule::elementwise(1, 1, ranks[0])
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        grads_of(d, |d| {
            let s = b.push("s", Sin {}, &[ins[0]]);
            let m = b.push("m", Scale { by: -1.0 }, &[s]);
            b.push("cos_grad", Mul::same(), &[d, m])
        })
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].map(|x| x.cos())]
    }
}
