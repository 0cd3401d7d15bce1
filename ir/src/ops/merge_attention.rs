//! `merge_attention`: attention over two sets of keys, from attention over each.

use super::*;

op! {
    /// Merges the results of `attention` over the keys of a and over those of b into the result over all of
    /// them, by online softmax (Milakov and Gimelshein, 2018): lse = ln(e^lse_a + e^lse_b), out = out_a
    /// e^(lse_a - lse) + out_b e^(lse_b - lse). An lse of -inf, where no key was seen, has no weight; if both
    /// are -inf, the output is 0. It has no gradient, because rings are made of programs that are already
    /// differentiated.
    MergeAttention = "merge_attention" (out_a, lse_a, out_b, lse_b) {}
    facts { kind: Elementwise, fusion: Some(Each),
            precision: Wants::AsTheyAre, gradient: Unasked, linear: Linear::No }
    samples ["merge_attention f32[2,3,4,2], f32[2,3,4], f32[2,3,4,2], f32[2,3,4]"]
}

impl OpDef for MergeAttention {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 4)?;
        let ranks = ins.iter().map(|t| t.rank());
        if ranks.ne([4, 3, 4, 3]) {
            return Err("outputs are [b, s, n, e], each followed by its lse [b, s, n]".into());
        }
        Ok(())
    }
    fn rule(&self, _: &[usize]) -> Cow<'_, Rule> {
        Rule::known("bsn!e,bsn,bsn!e,bsn->bsne,bsn", &[4, 3, 4, 3])
    }
    /// Outputs as they are, in f32 or bf16; a log-sum-exp is f32.
    fn dtypes(&self, ins: &[&Type], _: usize) -> SmallVec<[DType; 2]> {
        smallvec::smallvec![ins[0].dtype, ins[1].dtype]
    }
    fn in_place(&self, result: usize) -> Option<usize> {
        // A row's lse is read once for every element of the row.
        (result == 0).then_some(0)
    }
    fn grad(&self, _: &mut Builder, _: &[Value], _: &[Value], _: &[Option<Value>]) -> Grads {
        smallvec::smallvec![None; 4]
    }
    /// Operands out and lse over some keys, then over others; results out and lse over all of them. The
    /// larger lse is bounded from below: then one of -inf weighs 0, and no difference of infinities
    /// arises. The weights sum to at least 1 but where both are -inf, and there the output is 0.
    fn element(&self, b: &mut Body, x: &[usize]) -> Option<Results> {
        let (out_a, lse_a, out_b, lse_b) = (x[0], x[1], x[2], x[3]);
        let lowest = b.constant(f64::from(f32::MIN));
        let most = b.binary(Binary::Max, lse_a, lse_b);
        let most = b.binary(Binary::Max, most, lowest);
        let [weight_a, weight_b] = [lse_a, lse_b].map(|lse| {
            let below = b.sub(lse, most);
            b.unary(Unary::Exp, below)
        });
        let sum = b.add(weight_a, weight_b);
        let (part_a, part_b) = (b.mul(out_a, weight_a), b.mul(out_b, weight_b));
        let (parts, one) = (b.add(part_a, part_b), b.constant(1.0));
        let by = b.binary(Binary::Max, sum, one);
        let log = b.unary(Unary::Log, sum);
        Some(smallvec::smallvec![b.div(parts, by), b.add(most, log)])
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let (lse_a, lse_b) = (ins[1], ins[3]);
        let lse = lse_a.zip(lse_b, |a, b| {
            let most = a.max(b);
            if most == f64::NEG_INFINITY {
                most
            } else {
                most + ((a - most).exp() + (b - most).exp()).ln()
            }
        });
        let out = Tensor::from_fn(&ins[0].shape.clone(), |i| {
            let row = &i[..3];
            let weight = |own: f64| {
                if own == f64::NEG_INFINITY { 0.0 } else { (own - lse.at(row)).exp() }
            };
            ins[0].at(i) * weight(lse_a.at(row)) + ins[2].at(i) * weight(lse_b.at(row))
        });
        vec![out, lse]
    }
}
