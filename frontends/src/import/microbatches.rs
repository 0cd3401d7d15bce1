//! Whether a loss of several microbatches is the mean of theirs: how what is added up over rows enters it.

use super::lower::Lower;
use shardc_ir::func::{Node, RoleKind, Value, ValueMap};
use shardc_ir::kernel::{Binary, Body, Scalar};
use shardc_ir::ops::FusionClass;
use shardc_ir::types::Reduction;

/// A sum over rows in a loss.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Sum {
    /// What it is multiplied by.
    factor: f64,
    /// It is over labels, and a step divides the total by all labels.
    of_labels: bool,
    /// The archive has it as a mean.
    is_mean: bool,
}

/// A loss as multiples of sums over rows.
#[derive(Debug, Default)]
pub(super) struct Parts {
    sums: Vec<Sum>,
    /// What is added to them.
    constant: f64,
    /// There are factors and numbers.
    has_numbers: bool,
}

/// What a sum over rows is that has the same factor whatever the rows are.
const SUM: &str = "it is a sum over a microbatch";

impl Parts {
    /// True of a sum over labels alone.
    pub fn is_plain(&self) -> bool {
        !self.has_numbers && self.sums.iter().all(|s| s.of_labels)
    }

    /// Why it is not the mean of the same of microbatches, of which the archive fixes the rows.
    pub fn of_fixed_rows(&self) -> Option<&'static str> {
        self.sums.iter().any(|s| !s.of_labels && !s.is_mean).then_some(SUM)
    }

    /// The same, of an archive for any rows: `other` is the loss of so many rows. Means over rows have factors as 1 over
    /// rows, and nothing else depends on them.
    pub fn of_rows(&self, rows: usize, other: (usize, &Parts)) -> Option<&'static str> {
        const OTHER: &str = "it depends on how many rows a microbatch has";
        let (other_rows, other) = other;
        // Numbers of elements' programs are f32.
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-6 * a.abs().max(b.abs());
        if self.sums.len() != other.sums.len() || !near(self.constant, other.constant) {
            return Some(OTHER);
        }
        let odd = |(a, b): &(&Sum, &Sum)| {
            let by = |s: &Sum, rows: usize| if s.of_labels { 1.0 } else { rows as f64 } * s.factor;
            !near(by(a, rows), by(b, other_rows))
        };
        let (a, b) = self.sums.iter().zip(&other.sums).find(odd)?;
        Some(if !a.of_labels && near(a.factor, b.factor) { SUM } else { OTHER })
    }
}

impl Lower<'_> {
    /// A loss as multiples of sums over rows.
    ///
    /// # Errors
    /// Says why it is none.
    pub(super) fn parts_of(&self, loss: Value) -> Result<Parts, &'static str> {
        let f = &self.draft;
        let (rows, reduces) = self.rows();
        let mut parts = Parts::default();
        // What each value is multiplied by in the loss, and what means are made of.
        let (mut by, mut of_mean) = (f.per_value(0.0), f.per_value(false));
        by[loss] = 1.0;
        for (n, reduces) in f.nodes.iter().zip(reduces).rev() {
            let factor: f64 = n.outs.iter().map(|v| by[v]).sum();
            if factor == 0.0 {
                continue;
            }
            let mean = n.outs.iter().any(|v| of_mean[v] || self.means.contains(v));
            if reduces {
                let of_labels = n.outs.iter().any(|v| self.of_labels.contains(v));
                parts.sums.push(Sum { factor, of_labels, is_mean: mean });
                continue;
            }
            let (factors, constant) = match self.affine(n) {
                Some(made) => made,
                None if n.ins.iter().any(|v| rows[v] == Some(0)) => {
                    return Err(
                        "it is made of sums over a microbatch otherwise than by adding them",
                    );
                }
                // What is made of parameters alone.
                None => (vec![], 1.0),
            };
            parts.constant += factor * constant;
            parts.has_numbers |= constant != 0.0 || factors.iter().any(|x| x.abs() != 1.0);
            if let [x] = n.ins[..] {
                of_mean[x] = mean;
            }
            for (&v, own) in n.ins.iter().zip(factors) {
                by[v] += factor * own;
                // A parameter by itself.
                if self.makers[v].is_none() && rows[v].is_none() {
                    parts.constant += factor * own;
                }
            }
        }
        Ok(parts)
    }

    /// The factors of a node's operands and the number of its result, if it is the sum of their multiples.
    fn affine(&self, n: &Node) -> Option<(Vec<f64>, f64)> {
        let f = &self.draft;
        let sizes = f.ty(n.outs[0]).sizes();
        match n.op.facts().fusion? {
            FusionClass::Fold if n.op.def().reduction() == Reduction::Sum => {}
            FusionClass::Each if n.ins.iter().all(|&v| f.ty(v).sizes() == sizes) => {}
            _other => return None,
        }
        let mut body = Body((0..n.ins.len()).map(Scalar::Load).collect());
        let loads: Vec<usize> = (0..n.ins.len()).collect();
        let out = n.op.def().element(&mut body, &loads)?[0];
        // Of each instruction so far.
        let mut all: Vec<Option<(Vec<f64>, f64)>> = vec![];
        for s in &body.0 {
            let sum = |x: usize, y: usize, sign: f64| {
                let ((x, a), (y, b)) = (all[x].as_ref()?, all[y].as_ref()?);
                Some((x.iter().zip(y).map(|(x, y)| x + sign * y).collect(), a + sign * b))
            };
            let number = |x: usize| {
                let (x, a) = all[x].as_ref()?;
                x.iter().all(|x| *x == 0.0).then_some(*a)
            };
            let times = |x: usize, by: f64| {
                let (x, a) = all[x].as_ref()?;
                Some((x.iter().map(|x| x * by).collect(), a * by))
            };
            all.push(match *s {
                Scalar::Load(i) => {
                    Some((loads.iter().map(|&l| f64::from(u8::from(l == i))).collect(), 0.0))
                }
                Scalar::Const(x) => Some((vec![0.0; loads.len()], f64::from(x))),
                Scalar::Binary(Binary::Add, x, y) => sum(x, y, 1.0),
                Scalar::Binary(Binary::Sub, x, y) => sum(x, y, -1.0),
                Scalar::Binary(Binary::Mul, x, y) => match (number(x), number(y)) {
                    (_, Some(by)) => times(x, by),
                    (Some(by), None) => times(y, by),
                    (None, None) => None,
                },
                _other => None,
            });
        }
        all.swap_remove(out)
    }

    /// Of values made of the inputs' rows, the dims that are rows, by bit; and whether each node adds up rows.
    fn rows(&self) -> (ValueMap<Option<u32>>, Vec<bool>) {
        let f = &self.draft;
        let mut rows = f.per_value(None);
        for (role, v) in &self.inputs {
            if matches!(role.kind, RoleKind::Input(own) if own.batch) {
                rows[*v] = Some(1u32);
            }
        }
        let mut reduces = vec![false; f.nodes.len()];
        for (i, n) in f.nodes.iter().enumerate() {
            if !n.ins.iter().any(|v| rows[v].is_some()) {
                continue;
            }
            let ranks: Vec<usize> = n.ins.iter().map(|&v| f.ty(v).rank()).collect();
            let rule = n.op.def().rule(&ranks);
            let mut outs = vec![0u32; n.outs.len()];
            for (v, dims) in n.ins.iter().zip(&rule.ins) {
                let is_row = |d: &usize| rows[v].is_some_and(|bits| bits >> d & 1 == 1);
                for d in (0..dims.len().min(32)).filter(is_row) {
                    let mut stays = false;
                    for (bits, own) in outs.iter_mut().zip(&rule.outs) {
                        for (at, group) in own.iter().enumerate().take(32) {
                            if group.letters().iter().any(|l| dims[d].letters().contains(l)) {
                                (*bits, stays) = (*bits | 1 << at, true);
                            }
                        }
                    }
                    reduces[i] |= !stays;
                }
            }
            n.outs.iter().zip(outs).for_each(|(v, bits)| rows[v] = Some(bits));
        }
        (rows, reduces)
    }
}
