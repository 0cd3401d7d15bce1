//! `adamw`: one step of AdamW.

use super::*;

op! {
    /// One step of AdamW (Loshchilov and Hutter, 2019) as torch computes it: the gradient is first multiplied
    /// by `g_scale`, weight decay is decoupled, and `eps` is added to √(v/(1-β2^step)). Results: the new
    /// parameter and moments, in place of the old ones. An optional last operand `applies` is a scalar: if it
    /// is 0, parameter and moments do not change.
    AdamW = "adamw" (param, grad, exp_avg, exp_avg_sq, lr, step, g_scale, applies) { beta1: f64, beta2: f64, eps: f64, decay: f64 }
    facts { kind: Update, fusion: Some(Each), precision: Wants::AsTheyAre, gradient: Unasked, linear: Linear::No }
    samples ["adamw[0.9; beta2=0.999; eps=1e-8; decay=0.01] f32[3,4], f32[3,4], f32[3,4], f32[3,4], f32[], f32[], f32[]",
             "adamw[0.9; beta2=0.999; eps=1e-8; decay=0.01] f32[3,4], f32[3,4], f32[3,4], f32[3,4], f32[], f32[], f32[], f32[]"] positive ["exp_avg_sq", "lr", "step", "g_scale"]
}

/// The decaying means of gradients and of their squares, as torch calls them.
const STATES: [StateName; 2] = [StateName::new("exp_avg"), StateName::new("exp_avg_sq")];

impl OpDef for AdamW {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, ins.len().clamp(7, 8))?;
        let same = ins[..4].iter().all(|t| t.rank() == ins[0].rank())
            && ins[4..].iter().all(|t| t.rank() == 0);
        if same {
            Ok(())
        } else {
            Err("four tensors of one shape and three or four scalars are needed".into())
        }
    }
    fn rule(&self, ranks: &[usize]) -> Cow<'_, Rule> {
        let has_scale = ranks.len() > 7;
        Rule::known(
            if has_scale { "..,..,..,..,,,,->..,..,.." } else { "..,..,..,..,,,->..,..,.." },
            ranks,
        )
    }
    fn flops(&self, loops: &[(Letter, f64)]) -> f64 {
        12.0 * loops.iter().map(|l| l.1).product::<f64>()
    }
    fn in_place(&self, result: usize) -> Option<usize> {
        [Some(0), Some(2), Some(3)][result]
    }
    fn states(&self) -> &'static [StateName] {
        &STATES
    }
    fn grad(&self, _: &mut Builder, ins: &[Value], _: &[Value], _: &[Option<Value>]) -> Grads {
        smallvec::smallvec![None; ins.len()]
    }
    /// One step of AdamW: `param - lr (decay · param + m / c1 / (√(v / c2) + eps))`.
    fn element(&self, b: &mut Body, x: &[usize]) -> Option<Results> {
        let (p, m, v, lr, step) = (x[0], x[2], x[3], x[4], x[5]);
        let g = b.mul(x[1], x[6]);
        let moment = |b: &mut Body, old, beta: f64, new| {
            let log = b.constant(beta.ln());
            let (beta, rest) = (b.constant(beta), b.constant(1.0 - beta));
            let (x, y) = (b.mul(old, beta), b.mul(new, rest));
            // 1 - beta^step, without the cancellation of the first steps.
            let exponent = b.mul(step, log);
            let (power, minus) = (b.unary(Unary::ExpM1, exponent), b.constant(-1.0));
            (b.add(x, y), b.mul(power, minus))
        };
        let (m, c1) = moment(b, m, self.beta1, g);
        let g2 = b.mul(g, g);
        let (v, c2) = moment(b, v, self.beta2, g2);
        let (m_hat, v_hat) = (b.div(m, c1), b.div(v, c2));
        let (root, eps) = (b.unary(Unary::Sqrt, v_hat), b.constant(self.eps));
        let below = b.add(root, eps);
        let update = b.div(m_hat, below);
        let decay = b.constant(self.decay);
        let decayed = b.mul(p, decay);
        let sum = b.add(decayed, update);
        let change = b.mul(lr, sum);
        let new = smallvec::smallvec![b.sub(p, change), m, v];
        Some(sgd::applied(b, x.get(7), new, &[x[0], x[2], x[3]]))
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let [lr, step, by] = [ins[4].data[0], ins[5].data[0], ins[6].data[0]];
        let m = ins[2].zip(ins[1], |m, g| self.beta1 * m + (1.0 - self.beta1) * g * by);
        let v = ins[3].zip(ins[1], |v, g| self.beta2 * v + (1.0 - self.beta2) * g * by * g * by);
        let (c1, c2) = (1.0 - self.beta1.powf(step), 1.0 - self.beta2.powf(step));
        let update = m.zip(&v, |m, v| (m / c1) / ((v / c2).sqrt() + self.eps));
        let p = ins[0].zip(&update, |p, u| p - lr * self.decay * p - lr * u);
        if ins.get(7).is_some_and(|applies| applies.data[0] == 0.0) {
            return [0, 2, 3].map(|i| ins[i].clone()).into();
        }
        vec![p, m, v]
    }
}
