//! `scale`: The operand times a constant.

use super::*;

op! {
    /// The operand times a constant, element by element.
    Scale = "scale" (x) { by: f64 }
    samples ["scale[-1.5] f32[3,4]"]
}

impl OpDef for Scale {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 1)
    }
    fn rule(&self, ranks: &[usize]) -> Rule {
        Rule::elementwise(1, 1, ranks[0])
    }
    fn linear(&self) -> Linear {
        Linear::Together(1)
    }
    fn in_place(&self, _: usize) -> Option<usize> {
        Some(0)
    }
    fn grad(&self, b: &mut Builder, _: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        grads_of(d, |d| b.push("scale_grad", Scale { by: self.by }, &[d]))
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].map(|x| x * self.by)]
    }
}
