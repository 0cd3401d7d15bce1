//! Sums and means over dims.

use super::graph::Node;
use super::lower::{Lower, Val};
use super::operands::dim_of;
use super::view::{Dim, View, letter};
use shardc_ir::attr::Broadcast;
use shardc_ir::diag::Result;
use shardc_ir::func::Value;
use shardc_ir::ops::{Dot, Op, ReduceSum};

impl Lower<'_> {
    /// Dims that are reduced, and whether they stay as dims of one element.
    pub(super) fn reduced(&self, n: &Node, rank: usize) -> Result<(Vec<usize>, bool)> {
        let all = self.ints(n, "dim")?;
        let dims: Vec<usize> = match all.is_empty() {
            true => (0..rank).collect(),
            false => all.iter().map(|&d| dim_of(d, rank, self, n)).collect::<Result<_>>()?,
        };
        Ok((dims, self.flag(n, "keepdim")))
    }

    /// The mean or sum over dims.
    pub(super) fn mean(&mut self, n: &Node, is_mean: bool) -> Result<Vec<Val>> {
        let x = self.float_data(n, "self")?;
        let (dims, keep) = self.reduced(n, x.shape.len())?;
        let count: f64 = dims.iter().map(|&d| x.shape[d] as f64).product();
        let y = self.sum_over(n, &x, &dims, keep)?;
        // Along a repeat a sum is a multiple.
        let summed: f64 = dims
            .iter()
            .filter(|&&d| x.dims[d] != Dim::Virtual)
            .map(|&d| x.shape[d] as f64)
            .product();
        let by = if is_mean { 1.0 / summed } else { count / summed };
        let y = self.scaled(n, &y, by)?;
        if is_mean {
            self.means.insert(y.value);
        }
        Ok(vec![Val::Data(y)])
    }

    /// The sum over dims, of those along which something changes.
    pub(super) fn sum_over(
        &mut self,
        n: &Node,
        x: &View,
        dims: &[usize],
        keep: bool,
    ) -> Result<View> {
        let x = self.settled(n, x)?;
        let rank = x.shape.len();
        let from = x.letters(rank);
        let gone = |d: usize| dims.contains(&d);
        let to: String =
            from.chars().filter(|&c| !(0..rank).any(|d| letter(d) == c && gone(d))).collect();
        let v = if from == to {
            x.value
        } else {
            match self.square_of(x.value) {
                Some(y) if self.raise.norms => {
                    let rule = self.rule(n, &format!("{from},{from}->{to}"), &[y, y])?;
                    self.emit(n, "squares", Dot { rule }, &[y, y])?
                }
                _ => {
                    let rule = self.rule(n, &format!("{from}->{to}"), &[x.value])?;
                    self.emit(n, "total", ReduceSum { rule }, &[x.value])?
                }
            }
        };
        let shape = (0..rank).map(|d| if gone(d) { 1 } else { x.shape[d] }).collect();
        let mut y = View::of(v, &to, shape);
        if !keep {
            for d in (0..rank).rev().filter(|&d| gone(d)) {
                y = y.squeeze(d);
            }
        }
        Ok(y)
    }

    /// x where the value is x times x.
    fn square_of(&self, v: Value) -> Option<Value> {
        match self.maker(v)? {
            (Op::Mul(m), &[a, b]) if a == b && m.rule == Broadcast::SAME => Some(a),
            _ => None,
        }
    }
}
