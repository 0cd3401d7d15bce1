//! `cumsum`: sums along a dim up to each of its elements.

use super::*;

op! {
    /// The inclusive cumulative sum along a dim, `cumsum[1]`; with `reverse=true` from the end.
    Cumsum = "cumsum" (x) { dim: usize, reverse: bool }
    facts { kind: Reduction, fusion: None, precision: Wants::Wide, gradient: Flows, linear: Linear::Together(1) }
    samples ["cumsum[1] f32[3,4]", "cumsum[0] f32[3,4]", "cumsum[1; reverse=true] f32[2,5,3]",
             "cumsum[2; reverse=true] f32[2,3,4]"]
}

impl OpDef for Cumsum {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 1)?;
        let rank = ins[0].rank();
        match self.dim < rank && rank <= concat::MOST_OTHERS + 1 {
            true => Ok(()),
            false => Err(format!("a tensor of {rank} dims has no dim {}", self.dim)),
        }
    }
    fn rule(&self, ranks: &[usize]) -> Cow<'_, Rule> {
        let n = Letter(b'n' - b'a');
        Cow::Owned(Rule::along(ranks[0], self.dim, &[n], n))
    }
    fn grad(&self, b: &mut Builder, _: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let back = Cumsum { reverse: !self.reverse, ..*self };
        grads_of(d, |d| b.push("cumsum_grad", back, &[d]))
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let mut out = ins[0].clone();
        let n = out.shape[self.dim];
        let place = |i: &[usize], k: usize| -> Shape {
            let mut j: Shape = i.into();
            j[self.dim] = if self.reverse { n - 1 - k } else { k };
            j
        };
        // In row-major order an element's index along the dim counts from its beginning, or its end.
        crate::tensor::each_index(&ins[0].shape, |i| {
            let k = i[self.dim];
            if k > 0 {
                let before = out.at(&place(i, k - 1));
                *out.at_mut(&place(i, k)) += before;
            }
        });
        vec![out]
    }
}
