//! `at_least`: 1 where an integer is at least a bound, else 0.

use super::*;

op! {
    /// 1.0 where `x >= bound`, else 0.0, as f32. For example, it counts valid labels and masks the others.
    AtLeast = "at_least" (x) { bound: f64 }
    facts { kind: Elementwise, fusion: Some(Each), precision: Wants::Same, gradient: Stops, linear: Linear::No }
    samples ["at_least[0.0] i32[3,4]"]
}

impl OpDef for AtLeast {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        if ins.len() == 1 { Ok(()) } else { Err("one operand is needed".into()) }
    }
    fn rule(&self, ranks: &[usize]) -> Cow<'_, Rule> {
        Rule::same(1, 1, ranks[0])
    }
    fn dtypes(&self, _: &[&Type], _: usize) -> SmallVec<[DType; 2]> {
        smallvec::smallvec![DType::F32]
    }
    fn grad(&self, _: &mut Builder, _: &[Value], _: &[Value], _: &[Option<Value>]) -> Grads {
        smallvec::smallvec![None]
    }
    fn element(&self, b: &mut Body, x: &[usize]) -> Option<Results> {
        let bound = b.constant(self.bound);
        Some(smallvec::smallvec![b.binary(Binary::AtLeast, x[0], bound)])
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].map(|x| if x >= self.bound { 1.0 } else { 0.0 })]
    }
}
