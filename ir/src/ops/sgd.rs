//! `sgd`: one step of gradient descent.

use super::*;

op! {
    /// `param - lr (grad * g_scale + decay * param)`, in place of the old parameter.
    Sgd = "sgd" (param, grad, lr, g_scale) { decay: f64 }
    facts { kind: Update, fusion: Some(Each), precision: Wants::AsTheyAre, gradient: Unasked }
    samples ["sgd[0.01] f32[3,4], f32[3,4], f32[], f32[]"]
}

impl OpDef for Sgd {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 4)?;
        let same = ins[1].rank() == ins[0].rank() && ins[2..].iter().all(|t| t.rank() == 0);
        if same {
            Ok(())
        } else {
            Err("two tensors of one shape and two scalars are needed".into())
        }
    }
    fn rule(&self, ranks: &[usize]) -> Rule {
        Rule::new("..,..,,->..", ranks)
    }
    fn in_place(&self, _: usize) -> Option<usize> {
        Some(0)
    }
    fn grad(&self, _: &mut Builder, _: &[Value], _: &[Value], _: &[Option<Value>]) -> Grads {
        smallvec::smallvec![None; 4]
    }
    fn element(&self, b: &mut Body, x: &[usize]) -> Option<Results> {
        let decay = b.constant(self.decay);
        let (g, p_decay) = (b.mul(x[1], x[3]), b.mul(x[0], decay));
        let sum = b.add(g, p_decay);
        let change = b.mul(x[2], sum);
        Some(smallvec::smallvec![b.sub(x[0], change)])
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let [lr, by] = [ins[2].data[0], ins[3].data[0]];
        vec![ins[0].zip(ins[1], |p, g| p - lr * (g * by + self.decay * p))]
    }
}
