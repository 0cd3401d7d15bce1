//! Updates of parameters: functions of all their operands, element by element.

use super::*;

/// New parameter and moments, in this order.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct AdamW {
    pub beta1: Real,
    pub beta2: Real,
    pub eps: Real,
    pub decay: Real,
}

/// The new parameter.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Sgd {
    pub decay: Real,
}

impl Function for AdamW {
    fn name(&self) -> String {
        let AdamW { beta1, beta2, eps, decay } = self;
        format!("adamw[{beta1:?}; {beta2:?}; {eps:?}; {decay:?}]")
    }
    fn results(&self, x: &[&Tensor], _: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        Ok((0..3).map(|k| update(self, k, x)).collect())
    }
}

impl Function for Sgd {
    fn name(&self) -> String {
        format!("sgd[{:?}]", self.decay)
    }
    fn results(&self, x: &[&Tensor], _: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        Ok(vec![update(self, 0, x)])
    }
}

/// A result of the optimizer: an oracle of all its operands, element by element.
fn update(f: &dyn Function, result: u64, x: &[&Tensor]) -> Tensor {
    let name = mix(seed(&f.name()), result);
    let n = x[0].data.len();
    let element = |k: usize| {
        let of = |t: &&Tensor| if t.shape.is_empty() { t.data[0] } else { t.data[k] };
        oracle(name, &x.iter().map(of).collect::<Vec<_>>())
    };
    Tensor { shape: x[0].shape.clone(), data: (0..n).map(element).collect() }
}

/// Letters of `tensors` operands alike, numbers behind them, and results like the operands.
fn updates(
    tensors: usize,
    numbers: [usize; 2],
    results: usize,
    ranks: &[usize],
) -> Option<Cow<'static, Rule>> {
    let (all, scalars) = ranks.split_at_checked(tensors)?;
    let fits = numbers.contains(&scalars.len())
        && scalars.iter().all(|r| *r == 0)
        && all.iter().all(|r| *r == all[0]);
    let mut rule = Rule::elementwise(tensors, results, all[0]);
    rule.ins.extend(scalars.iter().map(|_| Dims::new()));
    fits.then_some(Cow::Owned(rule))
}

impl Law for ops::AdamW {
    /// Parameter, gradient and two moments; numbers behind them.
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        updates(4, [3, 4], 3, ranks)
    }
    fn typing(&self) -> Option<Typing> {
        Some(NONLINEAR)
    }
    fn function(&self, _: &[&Type]) -> Result<Option<Fun>, String> {
        let ops::AdamW { beta1, beta2, eps, decay } = self;
        let [beta1, beta2, eps, decay] = [beta1, beta2, eps, decay].map(|x| Real::new(*x));
        Ok(Some(AdamW { beta1, beta2, eps, decay }.into()))
    }
}

impl Law for ops::Sgd {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        updates(2, [2, 3], 1, ranks)
    }
    fn typing(&self) -> Option<Typing> {
        Some(NONLINEAR)
    }
    fn function(&self, _: &[&Type]) -> Result<Option<Fun>, String> {
        let ops::Sgd { decay } = self;
        Ok(Some(Sgd { decay: Real::new(*decay) }.into()))
    }
}
