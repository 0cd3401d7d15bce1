//! `sgd`: one step of gradient descent.

use super::*;

op! {
    /// `param - lr (grad * g_scale + decay * param)`, in place of the old parameter. An optional last operand
    /// `applies` is a scalar: if it is 0, the parameter does not change.
    Sgd = "sgd" (param, grad, lr, g_scale, applies) { decay: f64 }
    facts { kind: Update, fusion: Some(Each), precision: Wants::AsTheyAre, gradient: Unasked, linear: Linear::No }
    samples ["sgd[0.01] f32[3,4], f32[3,4], f32[], f32[]", "sgd[0.01] f32[3,4], f32[3,4], f32[], f32[], f32[]"]
}

/// New elements, or old ones where an optimizer's step does not apply.
pub(super) fn applied(
    b: &mut Body,
    applies: Option<&usize>,
    new: Results,
    old: &[usize],
) -> Results {
    let Some(&applies) = applies else { return new };
    new.into_iter().zip(old).map(|(new, &old)| b.push(Scalar::Select(applies, new, old))).collect()
}

impl OpDef for Sgd {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, ins.len().clamp(4, 5))?;
        let same = ins[1].rank() == ins[0].rank() && ins[2..].iter().all(|t| t.rank() == 0);
        if same {
            Ok(())
        } else {
            Err("two tensors of one shape and two or three scalars are needed".into())
        }
    }
    fn rule(&self, ranks: &[usize]) -> Cow<'_, Rule> {
        Rule::known(if ranks.len() > 4 { "..,..,,,->.." } else { "..,..,,->.." }, ranks)
    }
    fn in_place(&self, _: usize) -> Option<usize> {
        Some(0)
    }
    fn grad(&self, _: &mut Builder, ins: &[Value], _: &[Value], _: &[Option<Value>]) -> Grads {
        smallvec::smallvec![None; ins.len()]
    }
    fn element(&self, b: &mut Body, x: &[usize]) -> Option<Results> {
        let decay = b.constant(self.decay);
        let (g, p_decay) = (b.mul(x[1], x[3]), b.mul(x[0], decay));
        let sum = b.add(g, p_decay);
        let change = b.mul(x[2], sum);
        let new = smallvec::smallvec![b.sub(x[0], change)];
        Some(applied(b, x.get(4), new, &x[..1]))
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let [lr, by] = [ins[2].data[0], ins[3].data[0]];
        if ins.get(4).is_some_and(|applies| applies.data[0] == 0.0) {
            return vec![ins[0].clone()];
        }
        vec![ins[0].zip(ins[1], |p, g| p - lr * (g * by + self.decay * p))]
    }
}
