//! `log`: The natural logarithm.

use super::*;

op! {
    /// The natural logarithm, element by element.
    Log = "log" (x) {}
    samples ["log f32[3,4]"]
}

impl OpDef for Log {
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
        grads_of(d, |d| b.push("log_grad", Div::same(), &[d, ins[0]]))
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].map(|x| x.ln())]
    }
}
