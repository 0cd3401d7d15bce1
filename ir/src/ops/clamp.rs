//! `clamp`: The operand, at most `hi` and at least `lo`; no gradient flows through it.

use super::*;

op! {
    /// The operand, at most `hi` and at least `lo`; no gradient flows through it, element by element.
    Clamp = "clamp" (x) { lo: f64, hi: f64 }
    samples ["clamp[-0.5; hi=0.5] f32[3,4]"]
}

impl OpDef for Clamp {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 1)
    }
    fn rule(&self, ranks: &[usize]) -> Rule {
        Rule::elementwise(1, 1, ranks[0])
    }
    fn in_place(&self, _: usize) -> Option<usize> {
        Some(0)
    }
    fn grad(&self, _: &mut Builder, _: &[Value], _: &[Value], _: &[Option<Value>]) -> Grads {
        smallvec::smallvec![None]
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].map(|x| x.max(self.lo).min(self.hi))]
    }
}
