//! `exp`: The exponential.

use super::*;

op! {
    /// The exponential, element by element.
    Exp = "exp" (x) {}
    samples ["exp f32[3,4]"]
}

impl OpDef for Exp {
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
        grads_of(d, |d| b.push("exp_grad", Mul::same(), &[d, outs[0]]))
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].map(|x| x.exp())]
    }
}
