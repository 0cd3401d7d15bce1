//! Norms and softmax, as the sums, products and roots that they are.

use super::graph::{Arg, Node};
use super::lower::{Lower, Val};
use super::operands::dim_of;
use super::table::Arithmetic;
use super::view::{Dim, View, letter};
use shardc_ir::attr::Broadcast;
use shardc_ir::diag::Result;
use shardc_ir::func::Value;
use shardc_ir::ops::{Div, Exp, Log, ReduceMax, ReduceSum, Rsqrt, StopGradient, Sub};

impl Lower<'_> {
    pub(super) fn layer_norm(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "input")?;
        let several = self.ints(n, "normalized_shape")?.len();
        if several > 1 && several < x.shape.len() {
            return self.norm_of_several(n, &x, several);
        }
        let last = self.normed_dim(n, &x)?;
        let mean = self.mean_of(n, &x, last)?;
        let centered = self.both(n, Arithmetic::Sub, &x, &mean)?;
        self.normed(n, &centered, last, 1e-5)
    }

    pub(super) fn rms_norm(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "input")?;
        let last = self.normed_dim(n, &x)?;
        self.normed(n, &x, last, f64::from(f32::EPSILON))
    }

    /// Each index of a dim of a weight over the root of its sum of squares, times a number of its own.
    pub(super) fn weight_norm(&mut self, n: &Node) -> Result<Vec<Val>> {
        let (v, g) = (self.data(n, "v")?, self.data(n, "g")?);
        let rank = v.shape.len();
        let d = dim_of(self.int(n, "dim")?.unwrap_or(0), rank, self, n)?;
        let others: Vec<usize> = (0..rank).filter(|&k| k != d).collect();
        let square = self.both(n, Arithmetic::Mul, &v, &v)?;
        let sum = self.sum_over(n, &square, &others, true)?;
        let rstd = self.each(n, "rstd", Rsqrt {}.into(), &sum)?;
        let by = self.both(n, Arithmetic::Mul, &g, &rstd)?;
        Ok(vec![Val::Data(self.both(n, Arithmetic::Mul, &v, &by)?)])
    }

    /// A norm over the last dims together.
    fn norm_of_several(&mut self, n: &Node, x: &View, several: usize) -> Result<Vec<Val>> {
        let outer = &x.shape[..x.shape.len() - several];
        let many = x.shape[outer.len()..].iter().product();
        let y = self.whole(n, x)?;
        let y = self.reshaped(n, &y, &[outer, &[many]].concat())?;
        let mean = self.mean_of(n, &y, outer.len())?;
        let y = self.both(n, Arithmetic::Sub, &y, &mean)?;
        let y = self.over_root(n, &y, outer.len(), 1e-5)?;
        let mut y = self.reshaped(n, &y, &x.shape)?;
        if *n.arg("weight") != Arg::None {
            let w = self.data(n, "weight")?;
            y = self.both(n, Arithmetic::Mul, &y, &w)?;
        }
        self.biased(n, y, "bias")
    }

    fn normed_dim(&self, n: &Node, x: &View) -> Result<usize> {
        match (self.ints(n, "normalized_shape")?.len(), x.shape.len()) {
            (1, rank) if rank > 0 => Ok(rank - 1),
            _ => Err(self.refuse(n, "a norm over several dims")),
        }
    }

    pub(super) fn mean_of(&mut self, n: &Node, x: &View, d: usize) -> Result<View> {
        let sum = self.sum_over(n, x, &[d], true)?;
        let by = if x.dims[d] == Dim::Virtual { 1.0 } else { 1.0 / x.shape[d] as f64 };
        self.scaled(n, &sum, by)
    }

    /// x over the root of its mean square and of an epsilon, times the weight, plus the bias; an archive leaves out an
    /// epsilon that is PyTorch's `default`.
    fn normed(&mut self, n: &Node, x: &View, d: usize, default: f64) -> Result<Vec<Val>> {
        let mut y = self.over_root(n, x, d, default)?;
        if *n.arg("weight") != Arg::None {
            let w = self.data(n, "weight")?;
            y = self.both(n, Arithmetic::Mul, &y, &w)?;
        }
        self.biased(n, y, "bias")
    }

    /// x over the root of its mean square and of an epsilon.
    pub(super) fn over_root(&mut self, n: &Node, x: &View, d: usize, default: f64) -> Result<View> {
        let eps = self.number(n, "eps").unwrap_or(default);
        let square = self.both(n, Arithmetic::Mul, x, x)?;
        let mean = self.mean_of(n, &square, d)?;
        let mean = self.shifted(n, &mean, eps)?;
        let rstd = self.each(n, "rstd", Rsqrt {}.into(), &mean)?;
        self.both(n, Arithmetic::Mul, x, &rstd)
    }

    /// exp(x - max) over its sum, along one dim.
    pub(super) fn softmax(&mut self, n: &Node) -> Result<Vec<Val>> {
        if let Some(Val::Masked(v, mask)) = self.operand(n, "self") {
            let d = dim_of(self.int(n, "dim")?.unwrap_or(-1), v.shape.len(), self, n)?;
            if d + 1 != v.shape.len() {
                return Err(self.refuse(n, "a mask is not along the last dim"));
            }
            return Ok(vec![Val::Probs(v, mask, 0.0)]);
        }
        let x = self.data(n, "self")?;
        let d = dim_of(self.int(n, "dim")?.unwrap_or(-1), x.shape.len(), self, n)?;
        let x = if x.dims[d] == Dim::Virtual { self.whole(n, &x)? } else { x };
        let (x, [_, e, sum], by) = self.exponentials(n, &x, d)?;
        let y = self.emit(n, "probs", Div { rule: by }, &[e, sum])?;
        Ok(vec![Val::Data(x.with(y))])
    }

    /// The logarithm of a softmax, along the dim that a node says.
    pub(super) fn log_softmax_of(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let d = dim_of(self.int(n, "dim")?.unwrap_or(-1), x.shape.len(), self, n)?;
        Ok(vec![Val::Data(self.log_softmax(n, &x, d)?)])
    }

    /// x - max - log Σ exp(x - max), along one dim.
    pub(super) fn log_softmax(&mut self, n: &Node, x: &View, d: usize) -> Result<View> {
        let (x, [z, _, sum], by) = self.exponentials(n, x, d)?;
        let lse = self.emit(n, "lse", Log {}, &[sum])?;
        let y = self.emit(n, "logs", Sub { rule: by }, &[z, lse])?;
        Ok(x.with(y))
    }

    /// x - max, its exponentials and their sum along one dim; and how that one spreads over the others.
    fn exponentials(
        &mut self,
        n: &Node,
        x: &View,
        d: usize,
    ) -> Result<(View, [Value; 3], Broadcast)> {
        let x = self.settled(n, x)?;
        let from = x.letters(x.shape.len());
        let to: String = from.chars().filter(|&c| c != letter(d)).collect();
        if from == to {
            return Err(self.refuse(n, "a softmax over a single number"));
        }
        let rule = self.rule(n, &format!("{from}->{to}"), &[x.value])?;
        let max = self.emit(n, "max", ReduceMax { rule: rule.clone() }, &[x.value])?;
        let max = self.emit(n, "max", StopGradient {}, &[max])?;
        let by = self.spread(n, &[&from, &to], &from, &[x.value, max])?;
        let z = self.emit(n, "z", Sub { rule: by.clone() }, &[x.value, max])?;
        let e = self.emit(n, "exp", Exp {}, &[z])?;
        let sum = self.emit(n, "total", ReduceSum { rule }, &[e])?;
        Ok((x, [z, e, sum], by))
    }
}
