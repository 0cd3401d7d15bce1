//! `stop_gradient`: The operand, through which no gradient flows.

use super::*;

op! {
    /// The operand, element by element; no gradient flows through it.
    StopGradient = "stop_gradient" (x) {}
    facts { kind: Elementwise, fusion: Some(Each), precision: Wants::Same, gradient: Stops, linear: Linear::Together(1) }
    samples ["stop_gradient f32[3,4]"]
}

impl OpDef for StopGradient {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 1)
    }
    fn rule(&self, ranks: &[usize]) -> Cow<'_, Rule> {
        Rule::same(1, 1, ranks[0])
    }
    fn is_view(&self) -> bool {
        true
    }
    fn grad(&self, _: &mut Builder, _: &[Value], _: &[Value], _: &[Option<Value>]) -> Grads {
        smallvec::smallvec![None]
    }
    fn element(&self, _: &mut Body, x: &[usize]) -> Option<Results> {
        Some(smallvec::smallvec![x[0]])
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].map(|x| x)]
    }
}
