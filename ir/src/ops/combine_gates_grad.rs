//! `combine_gates_grad`: products of a token's row with the rows of its copies: the gradient of gates.

use super::*;

op! {
    /// For each copy of a token, the dot product of its row in `rows` `[g,z,c,h]` with the token's row in `x`
    /// `[z,t,h]`, summed over h: f32 `[z,t,k]`; 0 for a copy without a row (slot -1).
    CombineGatesGrad = "combine_gates_grad" (rows, slot, x) {}
    facts { kind: Copies, fusion: None, precision: Wants::Half, gradient: Flows, linear: Linear::Each(0b101) }
    samples ["combine_gates_grad f32[2,2,3,4], i32[2,3,2], f32[2,3,4]"]
}

impl OpDef for CombineGatesGrad {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        dispatch::accepts(ins, [4, 3, 3])
    }
    fn rule(&self, _: &[usize]) -> Cow<'_, Rule> {
        Rule::known("!gz!ch,z!t!k,zth->ztk", &[4, 3, 3])
    }
    fn dtypes(&self, _: &[&Type], _: usize) -> SmallVec<[DType; 2]> {
        smallvec::smallvec![DType::F32]
    }
    fn flops(&self, loops: &[(Letter, f64)]) -> f64 {
        Unpermute {}.flops(loops)
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let Some(d) = d[0] else { return smallvec::smallvec![None; 3] };
        let [groups, rows] = [0, 2].map(|i| b.ty(ins[0]).dims[i].size);
        let back = Dispatch::new(groups, rows);
        let rows = b.wants(ins[0]).then(|| b.push("rows", back, &[ins[2], ins[1], d]));
        let x = b.wants(ins[2]).then(|| b.push("x", Unpermute {}, &[ins[0], ins[1], d]));
        smallvec::smallvec![rows, None, x]
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let mut out = Tensor::full(&cx.out_shape(0), 0.0);
        dispatch::each_copy(ins[1], &ins[0].shape, |z, t, k, g, c| {
            let pairs = ins[0].row(&[g, z, c]).iter().zip(ins[2].row(&[z, t]));
            *out.at_mut(&[z, t, k]) = pairs.map(|(x, y)| x * y).sum();
        });
        vec![out]
    }
}
