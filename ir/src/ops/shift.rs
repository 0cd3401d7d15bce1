//! `shift`: The operand plus a constant.

use super::*;

op! {
    /// The operand plus a constant, element by element.
    Shift = "shift" (x) { by: f64 }
    samples ["shift[0.5] f32[3,4]"]
}

impl OpDef for Shift {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 1)
    }
    fn rule(&self, ranks: &[usize]) -> Rule {
        Rule::elementwise(1, 1, ranks[0])
    }
    fn in_place(&self, _: usize) -> Option<usize> {
        Some(0)
    }
    fn grad(&self, _: &mut Builder, _: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        grads_of(d, |d| d)
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].map(|x| x + self.by)]
    }
}
