//! `cast`: the same numbers in another element type.

use super::*;

op! {
    /// The operand in another element type, rounded to nearest even.
    Cast = "cast" (x) { to: DType }
    facts { kind: Conversion, fusion: Some(Each), precision: Wants::AsTheyAre, gradient: Flows, linear: Linear::Together(1) }
    samples ["cast[f32] f32[3,4]", "cast[bf16] f32[3,4]", "cast[f32] bf16[3,4]"]
}

/// A value in f32: itself, or a cast of it.
pub fn in_f32(b: &mut Builder, v: Value) -> Value {
    match b.ty(v).dtype {
        DType::F32 => v,
        _other => b.push("wide", Cast { to: DType::F32 }, &[v]),
    }
}

impl OpDef for Cast {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        if ins.len() != 1 {
            return Err("one operand is needed".into());
        }
        if self.to.is_float() { Ok(()) } else { Err("a cast goes to a float type".into()) }
    }
    fn rule(&self, ranks: &[usize]) -> Cow<'_, Rule> {
        Rule::same(1, 1, ranks[0])
    }
    fn dtypes(&self, _: &[&Type], _: usize) -> SmallVec<[DType; 2]> {
        smallvec::smallvec![self.to]
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let from = b.ty(ins[0]).dtype;
        if !from.is_float() {
            return smallvec::smallvec![None];
        }
        grads_of(d, |d| b.push("cast_grad", Cast { to: from }, &[d]))
    }
    fn element(&self, _: &mut Body, x: &[usize]) -> Option<Results> {
        Some(smallvec::smallvec![x[0]])
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![ins[0].clone()]
    }
}
