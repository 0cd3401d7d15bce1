//! Updates of parameters on one rank in f64, written by hand: AdamW, SGD, Lion and Muon.
//! Of any other rule its text is run.

use shardc_ir::diag::Result;
use shardc_ir::func::RoleKind;
use shardc_ir::interp::{Precision, call};
use shardc_ir::mesh::Mesh;
use shardc_ir::tensor::Tensor;
use shardc_ir::text::update::{Update, built_in};
use std::sync::Arc;

/// What an update is given.
pub(super) struct Given<'a> {
    pub u: &'a Update,
    pub param: &'a Tensor,
    /// Clipped.
    pub grad: Tensor,
    pub states: &'a [Tensor],
    pub lr: f64,
    pub step: usize,
    pub grad_norm: f64,
}

/// A gradient below this share of its tensor's mean size has a sign by rounding.
const VAGUE: f64 = 1e-9;

/// What an update makes: the parameter, its states, and how far the parameter may be off where
/// signs are rounding's.
pub(super) struct Made {
    pub param: Tensor,
    pub states: Vec<Tensor>,
    pub slack: f64,
}

impl Given<'_> {
    pub fn update(self) -> Result<Made> {
        let plain = |param, states| Ok(Made { param, states, slack: 0.0 });
        let own = !built_in().named(&self.u.rule.name).any(|r| Arc::ptr_eq(r, &self.u.rule));
        match &*self.u.rule.name {
            _ if own => self.text(),
            "adamw" => {
                let (param, states) = self.adamw();
                plain(param, states)
            }
            "sgd" => {
                let by = self.grad.zip(self.param, |g, p| g + self.n("decay") * p);
                plain(self.param.zip(&by, |p, by| p - self.lr * by), vec![])
            }
            "lion" => Ok(self.lion()),
            "muon" | "muon_heads" => {
                let (param, states) = self.muon();
                plain(param, states)
            }
            _other => self.text(),
        }
    }

    fn n(&self, name: &str) -> f64 {
        self.u.numbers_of(name)[0]
    }

    /// Loshchilov and Hutter, 2019.
    fn adamw(&self) -> (Tensor, Vec<Tensor>) {
        let [beta1, beta2, eps, decay] = ["beta1", "beta2", "eps", "decay"].map(|n| self.n(n));
        let m = self.states[0].zip(&self.grad, |m, g| beta1 * m + (1.0 - beta1) * g);
        let v = self.states[1].zip(&self.grad, |v, g| beta2 * v + (1.0 - beta2) * g * g);
        let unbiased = |x: f64, beta: f64| x / (1.0 - beta.powi(self.step as i32));
        let by = m.zip(&v, |m, v| unbiased(m, beta1) / (unbiased(v, beta2).sqrt() + eps));
        let kept = self.param.map(|p| p - self.lr * decay * p);
        (kept.zip(&by, |p, by| p - self.lr * by), vec![m, v])
    }

    /// Chen et al., 2023.
    fn lion(&self) -> Made {
        let [beta1, beta2, decay] = ["beta1", "beta2", "decay"].map(|n| self.n(n));
        let m = &self.states[0];
        let c = m.zip(&self.grad, |m, g| beta1 * m + (1.0 - beta1) * g);
        let mean = c.data.iter().map(|x| x.abs()).sum::<f64>() / c.data.len().max(1) as f64;
        let vague = c.data.iter().filter(|x| x.abs() <= VAGUE * mean.max(1e-6)).count();
        let sign = c.map(|x| if x == 0.0 { 0.0 } else { x.signum() });
        let kept = self.param.map(|p| p - self.lr * decay * p);
        let new = m.zip(&self.grad, |m, g| beta2 * m + (1.0 - beta2) * g);
        let slack = 2.0 * self.lr * (vague as f64).sqrt();
        Made { param: kept.zip(&sign, |p, s| p - self.lr * s), states: vec![new], slack }
    }

    /// As torch.optim.Muon, matrix by matrix.
    fn muon(&self) -> (Tensor, Vec<Tensor>) {
        let [mu, nesterov, decay] = ["momentum", "nesterov", "decay"].map(|n| self.n(n));
        let b = self.states[0].zip(&self.grad, |b, g| b + (1.0 - mu) * (g - b));
        let u = self.grad.zip(&b, |g, b| g + nesterov * (b - g));
        let shape = &self.param.shape;
        let [rows, cols] = [shape[shape.len() - 2], shape[shape.len() - 1]];
        // Of heads each has its rows.
        let rows = if self.u.rule.by_heads() { rows / self.n("heads") as usize } else { rows };
        let mut by = Vec::with_capacity(u.data.len());
        for one in u.data.chunks(rows * cols) {
            by.extend(self.orthogonal(one, rows, cols));
        }
        let by = Tensor::new(shape, by);
        let scale = self.n("scale");
        let kept = self.param.map(|p| p * (1.0 - self.lr * decay));
        (kept.zip(&by, |p, x| p - self.lr * scale * x), vec![b])
    }

    /// The Newton-Schulz iteration of one matrix.
    fn orthogonal(&self, u: &[f64], rows: usize, cols: usize) -> Vec<f64> {
        let wide = rows <= cols;
        let (n, m) = if wide { (rows, cols) } else { (cols, rows) };
        let turned = |x: &[f64]| -> Vec<f64> {
            (0..n * m).map(|k| if wide { x[k] } else { x[k % m * n + k / m] }).collect()
        };
        let mut x = turned(u);
        let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt().max(self.n("eps"));
        x.iter_mut().for_each(|x| *x /= norm);
        let all = self.u.numbers_of("coefficients");
        for i in 0..self.n("steps") as usize {
            let [a, b, c] = [0, 1, 2].map(|k| all[(3 * i + k) % all.len()]);
            let gram = product(&x, n, m, n, |r, k| r * m + k, &x);
            let square = product(&gram, n, n, n, |r, k| k * n + r, &gram);
            let poly: Vec<f64> = gram.iter().zip(&square).map(|(g, s)| b * g + c * s).collect();
            let more = product(&poly, n, n, m, |r, k| k * m + r, &x);
            x = x.iter().zip(more).map(|(x, y)| a * x + y).collect();
        }
        match wide {
            true => x,
            false => (0..n * m).map(|k| x[k % n * m + k / n]).collect(),
        }
    }

    /// What the rule's text says.
    fn text(&self) -> Result<Made> {
        let f = self.u.func(&self.param.shape)?;
        let mut states = self.states.iter();
        let args = f.args.iter().filter_map(|a| {
            let role = a.role.as_ref()?;
            Some(vec![match role.kind {
                RoleKind::Param => self.param.clone(),
                RoleKind::Grad => self.grad.clone(),
                RoleKind::State(_) => states.next()?.clone(),
                _scalar => Tensor::scalar(match &*role.name {
                    "lr" => self.lr,
                    "step" => self.step as f64,
                    _norm => self.grad_norm,
                }),
            }])
        });
        let args: Vec<Vec<Tensor>> = args.collect();
        let mut made = call(&Mesh::default(), &f, &args, Precision::F64)?
            .into_iter()
            .map(|mut t| t.swap_remove(0));
        let param = made.next().expect("a rule returns its parameter");
        Ok(Made { param, states: made.collect(), slack: 0.0 })
    }
}

/// `x`, of rows of `k` numbers, times another matrix, of which `at` says where column and number
/// are.
fn product(
    x: &[f64],
    rows: usize,
    k: usize,
    cols: usize,
    at: impl Fn(usize, usize) -> usize,
    y: &[f64],
) -> Vec<f64> {
    let mut out = vec![0.0; rows * cols];
    for r in 0..rows {
        for c in 0..cols {
            out[r * cols + c] = (0..k).map(|i| x[r * k + i] * y[at(c, i)]).sum();
        }
    }
    out
}
