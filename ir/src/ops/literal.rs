//! `literal`: a short list of numbers written in the program.

use super::*;
use std::sync::Arc;

op! {
    /// A vector of f32 constants, such as the inverse frequencies of rotary embeddings.
    Literal = "literal" () { values: Arc<[f32]> }
    facts { kind: Constant, fusion: None, precision: Wants::AsTheyAre, gradient: Unasked, linear: Linear::No }
    samples ["literal[1.0, 0.5, 0.25]"]
}

impl OpDef for Literal {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        if ins.is_empty() { Ok(()) } else { Err("no operand is needed".into()) }
    }
    fn rule(&self, _: &[usize]) -> Cow<'_, Rule> {
        Rule::known("->a", &[])
    }
    fn types(
        &self,
        _: &Mesh,
        _: &[&Type],
        _: &[Option<&Type>],
    ) -> Result<SmallVec<[Type; 2]>, TypeError> {
        Ok(smallvec::smallvec![Type::f32(&[self.values.len()])])
    }
    fn grad(&self, _: &mut Builder, _: &[Value], _: &[Value], _: &[Option<Value>]) -> Grads {
        Grads::new()
    }
    fn eval(&self, _: &EvalCx, _: &[&Tensor]) -> Vec<Tensor> {
        vec![Tensor::new(&[self.values.len()], self.values.iter().map(|&x| x as f64).collect())]
    }
}
