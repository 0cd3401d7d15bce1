//! `select`: one of two elements, by a third.

use super::*;
use crate::attr::Broadcast;

op! {
    /// `a` where `m` is not 0, else `b`; a rule broadcasts smaller operands. The element that is not selected
    /// has no effect, even if it is NaN, and its gradient is 0; no gradient flows to `m`. Of integers, which
    /// have no gradients, either is selected as f32, which is exact below 2^24.
    Select = "select" (m, a, b) { rule: Broadcast }
    facts { kind: Elementwise, fusion: Some(Each), precision: Wants::Same, gradient: Flows, linear: Linear::Together(0b110) }
    samples ["select f32[3,4], f32[3,4], f32[3,4]", "select[bs,bsh,->bsh] f32[2,3], f32[2,3,4], f32[]",
             "select[ab,ba,a->ba] f32[3,3], f32[3,3], f32[3]",
             "select[bs,bsk,bs->bsk] f32[2,3], i32[2,3,2], i32[2,3]"]
}

impl Select {
    /// Of operands of the same dims.
    pub fn same() -> Select {
        Select { rule: Broadcast::SAME }
    }
}

impl OpDef for Select {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        let [m, _, _] = ins else {
            return Err(format!("3 operands are needed, not {}", ins.len()));
        };
        floats(&[m], 1)?;
        if ins[1].dtype != ins[2].dtype {
            return Err("both that are selected from have one element type".into());
        }
        self.rule.accepts(&[ins[0].rank(), ins[1].rank(), ins[2].rank()])
    }
    fn dtypes(&self, ins: &[&Type], _: usize) -> SmallVec<[DType; 2]> {
        smallvec::smallvec![ins[1].dtype]
    }
    fn in_place(&self, _: usize) -> Option<usize> {
        Some(2)
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let float = b.ty(ins[1]).dtype.is_float();
        let Some(d) = d[0].filter(|_| float) else { return smallvec::smallvec![None, None, None] };
        let r = self.rule(&[0, 1, 2].map(|i| b.ty(ins[i]).rank()));
        let of = Rule::of(&[&r.ins[0], &r.outs[0], &r.outs[0]], &[&r.outs[0]]);
        let select = Select { rule: Broadcast(Some(std::sync::Arc::new(of))) };
        let zero = b.ty(d).clone();
        let zero = b.push_as("zero", Fill { value: 0.0 }, &[], &zero);
        let mut one = |i: usize, from: [Value; 2]| {
            b.wants(ins[i]).then(|| {
                let g = b.push("select_grad", select.clone(), &[ins[0], from[0], from[1]]);
                mul::reduce_to(b, g, &r.outs[0], &r.ins[i])
            })
        };
        smallvec::smallvec![None, one(1, [d, zero]), one(2, [zero, d])]
    }
    fn element(&self, b: &mut Body, x: &[usize]) -> Option<Results> {
        Some(smallvec::smallvec![b.push(Scalar::Select(x[0], x[1], x[2]))])
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let parts = mul::spread(cx, &self.rule(&mul::ranks(ins)), ins);
        let pick = |(i, &m): (usize, &f64)| parts[if m != 0.0 { 1 } else { 2 }].data[i];
        let data = parts[0].data.iter().enumerate().map(pick).collect();
        vec![Tensor::new(&parts[0].shape, data)]
    }
}
