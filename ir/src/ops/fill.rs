//! `fill`: one number everywhere.

use super::*;

op! {
    /// A tensor of the declared type with all elements equal. Zeros may have any type, including a pending sum;
    /// any other number only an invariant, replicated or sharded type.
    Fill = "fill" () { value: f64 }
    facts { kind: Constant, fusion: Some(Each), precision: Wants::AsTheyAre, gradient: Unasked, linear: Linear::No }
    samples ["fill[0.0] -> f32[3,4]", "fill[1.0] -> f32[]"]
}

impl OpDef for Fill {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        if ins.is_empty() { Ok(()) } else { Err("no operand is needed".into()) }
    }
    fn rule(&self, _: &[usize]) -> Cow<'_, Rule> {
        Rule::known("->", &[])
    }
    fn types(
        &self,
        _: &Mesh,
        _: &[&Type],
        declared: &[Option<&Type>],
    ) -> Result<SmallVec<[Type; 2]>, TypeError> {
        match declared.first().copied().flatten() {
            None => infer::err(
                "operands",
                "the type of `fill` must be declared".into(),
                "write `: f32[...]` after it",
            ),
            Some(t) if self.value != 0.0 && !t.partial().is_empty() => infer::err(
                "partial",
                format!("every rank would add {}", self.value),
                "only zeros may be a sum still to be taken",
            ),
            Some(t) => Ok(smallvec::smallvec![t.clone()]),
        }
    }
    fn grad(&self, _: &mut Builder, _: &[Value], _: &[Value], _: &[Option<Value>]) -> Grads {
        Grads::new()
    }
    fn element(&self, b: &mut Body, _: &[usize]) -> Option<Results> {
        Some(smallvec::smallvec![b.constant(self.value)])
    }
    fn eval(&self, cx: &EvalCx, _: &[&Tensor]) -> Vec<Tensor> {
        vec![Tensor::full(&cx.out_shape(0), self.value)]
    }
}
