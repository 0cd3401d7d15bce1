//! Losses beside the plain cross-entropy, and arithmetic on it: means over labels stay sums of
//! which a step divides the total by all labels, so that microbatches and ranks are right; what is
//! made of them otherwise is made within a microbatch.

use super::graph::{Id, Node};
use super::lower::{Lower, Val};
use super::table::Arithmetic;
use super::view::View;
use shardc_ir::diag::Result;
use shardc_ir::func::Value;
use shardc_ir::ops::{Abs, Add, AtLeast, Clamp, Div, Exp, Log, ReduceSum, Scale, Softplus};
use shardc_ir::types::DType;

/// A mean over labels, times a factor, plus what a microbatch adds to it.
#[derive(Clone, Debug)]
pub(super) struct Mean {
    /// The sum of which it is the mean.
    pub sum: Value,
    /// The labels that count are those which are not negative.
    pub targets: Value,
    pub added: Option<View>,
}

/// What a loss of each element becomes, in PyTorch's numbers: any other is their sum.
pub(super) const NONE: i64 = 0;
pub(super) const MEAN: i64 = 1;

impl Lower<'_> {
    /// Makes numbers of the means over labels that a node takes; which they were.
    pub(super) fn numbers_of_means(&mut self, n: &Node) -> Result<Vec<(Id, Mean)>> {
        let mut means = vec![];
        for id in n.ids() {
            if let Val::Mean(m) = self.val(id).clone() {
                let number = self.number_of(n, &m)?;
                self.set(id, Val::Data(number));
                means.push((id, m));
            }
        }
        Ok(means)
    }

    /// A mean of a mean and numbers, or of it and what a microbatch adds.
    pub(super) fn arithmetic_of_mean(&mut self, n: &Node) -> Result<Option<Mean>> {
        let name = n.op.split('.').next().unwrap_or(&n.op);
        let (a, b) = (self.operand(n, "self"), self.operand(n, "other"));
        let (by, of) = (self.number(n, "other"), self.number(n, "self"));
        if self.number(n, "alpha").unwrap_or(1.0) != 1.0 {
            return Ok(None);
        }
        match (name, a, b) {
            ("clone" | "alias" | "contiguous" | "to" | "_to_copy", Some(Val::Mean(m)), None) => {
                Ok(Some(m))
            }
            ("neg", Some(Val::Mean(m)), _) => self.times(n, &m, -1.0).map(Some),
            ("mul", Some(Val::Mean(m)), _) if by.is_some() => {
                self.times(n, &m, by.unwrap_or(1.0)).map(Some)
            }
            ("mul", _, Some(Val::Mean(m))) if of.is_some() => {
                self.times(n, &m, of.unwrap_or(1.0)).map(Some)
            }
            ("div", Some(Val::Mean(m)), _) if by.is_some() => {
                self.times(n, &m, 1.0 / by.unwrap_or(1.0)).map(Some)
            }
            ("add" | "sub", Some(Val::Mean(m)), None) if by.is_some() => {
                let by = by.unwrap_or(0.0) * if name == "sub" { -1.0 } else { 1.0 };
                let more = self.everywhere(n, by, DType::F32, &[])?;
                self.plus(n, m, &View::plain(more, &[])).map(Some)
            }
            ("rsub", Some(Val::Mean(m)), _) if by.is_some() => {
                let more = self.everywhere(n, by.unwrap_or(0.0), DType::F32, &[])?;
                let m = self.times(n, &m, -1.0)?;
                self.plus(n, m, &View::plain(more, &[])).map(Some)
            }
            ("add" | "sub", Some(Val::Mean(x)), Some(Val::Mean(y))) if x.targets == y.targets => {
                let y = if name == "sub" { self.times(n, &y, -1.0)? } else { y };
                let sum = self.emit(n, "loss", Add::same(), &[x.sum, y.sum])?;
                let added = match (x.added, y.added) {
                    (Some(a), Some(b)) => Some(self.both(n, Arithmetic::Add, &a, &b)?),
                    (a, b) => a.or(b),
                };
                Ok(Some(Mean { sum, added, ..x }))
            }
            ("add", Some(Val::Mean(m)), Some(Val::Data(v)))
            | ("add", Some(Val::Data(v)), Some(Val::Mean(m)))
                if v.shape.is_empty() && self.rank(v.value) == 0 =>
            {
                self.plus(n, m, &v).map(Some)
            }
            ("sub", Some(Val::Data(v)), Some(Val::Mean(m)))
                if v.shape.is_empty() && self.rank(v.value) == 0 =>
            {
                let m = self.times(n, &m, -1.0)?;
                self.plus(n, m, &v).map(Some)
            }
            ("sub", Some(Val::Mean(m)), Some(Val::Data(v)))
                if v.shape.is_empty() && self.rank(v.value) == 0 =>
            {
                let v = self.scaled(n, &v, -1.0)?;
                self.plus(n, m, &v).map(Some)
            }
            _other => Ok(None),
        }
    }

    fn times(&mut self, n: &Node, m: &Mean, by: f64) -> Result<Mean> {
        let sum = self.emit(n, "loss", Scale { by }, &[m.sum])?;
        let added = m.added.as_ref().map(|v| self.scaled(n, v, by)).transpose()?;
        Ok(Mean { sum, targets: m.targets, added })
    }

    fn plus(&mut self, n: &Node, m: Mean, v: &View) -> Result<Mean> {
        let added = match &m.added {
            None => v.clone(),
            Some(a) => self.both(n, Arithmetic::Add, a, v)?,
        };
        Ok(Mean { added: Some(added), ..m })
    }

    /// The mean over the labels of a microbatch.
    fn number_of(&mut self, n: &Node, m: &Mean) -> Result<View> {
        let valid = self.emit(n, "valid", AtLeast { bound: 0.0 }, &[m.targets])?;
        let letters = &"bs"[..self.rank(valid)];
        let rule = self.rule(n, &format!("{letters}->"), &[valid])?;
        let count = self.emit(n, "labels", ReduceSum { rule }, &[valid])?;
        let mean = View::plain(self.emit(n, "mean", Div::same(), &[m.sum, count])?, &[]);
        match &m.added {
            None => Ok(mean),
            Some(v) => self.both(n, Arithmetic::Add, &mean, v),
        }
    }

    /// The mean of all elements, their sum, or they themselves, as a node's `reduction` says.
    pub(super) fn reduced_loss(&mut self, n: &Node, each: &View) -> Result<Vec<Val>> {
        let reduction = self.int(n, "reduction")?.unwrap_or(MEAN);
        if reduction == NONE {
            return Ok(vec![Val::Data(each.clone())]);
        }
        let dims: Vec<usize> = (0..each.shape.len()).collect();
        let real: f64 = each.shape.iter().map(|&s| s as f64).product();
        let whole = self.whole(n, each)?;
        let sum = self.sum_over(n, &whole, &dims, false)?;
        let by = if reduction == MEAN { 1.0 / real } else { 1.0 };
        let y = self.scaled(n, &sum, by)?;
        if reduction == MEAN {
            self.means.insert(y.value);
        }
        Ok(vec![Val::Data(y)])
    }

    /// Squares of differences.
    pub(super) fn mse(&mut self, n: &Node) -> Result<Vec<Val>> {
        let (x, y) = (self.data(n, "self")?, self.data(n, "target")?);
        let d = self.both(n, Arithmetic::Sub, &x, &y)?;
        let square = self.both(n, Arithmetic::Mul, &d, &d)?;
        self.reduced_loss(n, &square)
    }

    /// Distances d, and from a bound on, if there is one, where they are squares below it: with c
    /// the smaller one of d and the bound c (d - c/2), divided by the bound if `over` says so.
    pub(super) fn distance(
        &mut self,
        n: &Node,
        bound: Option<&str>,
        over: bool,
    ) -> Result<Vec<Val>> {
        let (x, y) = (self.data(n, "self")?, self.data(n, "target")?);
        let d = self.both(n, Arithmetic::Sub, &x, &y)?;
        let d = self.each(n, "distance", Abs {}.into(), &d)?;
        let bound = bound.map(|key| self.number(n, key).unwrap_or(1.0)).filter(|&b| b > 0.0);
        let Some(b) = bound else { return self.reduced_loss(n, &d) };
        let c = self.each(n, "near", Clamp { lo: 0.0, hi: b }.into(), &d)?;
        let half = self.scaled(n, &c, 0.5)?;
        let rest = self.both(n, Arithmetic::Sub, &d, &half)?;
        let y = self.both(n, Arithmetic::Mul, &c, &rest)?;
        let y = self.scaled(n, &y, if over { 1.0 / b } else { 1.0 })?;
        self.reduced_loss(n, &y)
    }

    /// softplus(-x) + (1 - y) x of logits x, where a weight p of what is true makes (1 + (p - 1) y)
    /// softplus(-x) of the first term.
    pub(super) fn bce_logits(&mut self, n: &Node) -> Result<Vec<Val>> {
        let (x, y) = (self.data(n, "self")?, self.data(n, "target")?);
        let minus = self.scaled(n, &x, -1.0)?;
        let mut first = self.each(n, "softplus", Softplus {}.into(), &minus)?;
        if self.operand(n, "pos_weight").is_some() {
            let p = self.data(n, "pos_weight")?;
            let more = self.shifted(n, &p, -1.0)?;
            let more = self.both(n, Arithmetic::Mul, &y, &more)?;
            let by = self.shifted(n, &more, 1.0)?;
            first = self.both(n, Arithmetic::Mul, &first, &by)?;
        }
        let untrue = self.untrue(n, &y)?;
        let second = self.both(n, Arithmetic::Mul, &untrue, &x)?;
        let both = self.both(n, Arithmetic::Add, &first, &second)?;
        self.weighted(n, &both)
    }

    /// -y log p - (1 - y) log(1 - p) of probabilities, of logarithms not below -100.
    pub(super) fn bce(&mut self, n: &Node) -> Result<Vec<Val>> {
        let (p, y) = (self.data(n, "self")?, self.data(n, "target")?);
        let log = |l: &mut Self, x: &View| -> Result<View> {
            let x = l.each(n, "log", Log {}.into(), x)?;
            l.each(n, "log", Clamp { lo: -100.0, hi: f64::INFINITY }.into(), &x)
        };
        let (one, other) = (log(self, &p)?, self.untrue(n, &p)?);
        let (other, untrue) = (log(self, &other)?, self.untrue(n, &y)?);
        let one = self.both(n, Arithmetic::Mul, &y, &one)?;
        let other = self.both(n, Arithmetic::Mul, &untrue, &other)?;
        let sum = self.both(n, Arithmetic::Add, &one, &other)?;
        let sum = self.scaled(n, &sum, -1.0)?;
        self.weighted(n, &sum)
    }

    fn untrue(&mut self, n: &Node, y: &View) -> Result<View> {
        let minus = self.scaled(n, y, -1.0)?;
        self.shifted(n, &minus, 1.0)
    }

    /// Losses of elements times their weights, if there are any.
    fn weighted(&mut self, n: &Node, each: &View) -> Result<Vec<Val>> {
        if self.operand(n, "weight").is_none() {
            return self.reduced_loss(n, each);
        }
        let w = self.data(n, "weight")?;
        let each = self.both(n, Arithmetic::Mul, each, &w)?;
        self.reduced_loss(n, &each)
    }

    /// t (log t - x) of targets t, which is 0 where t is, or of their logarithms.
    pub(super) fn kl_div(&mut self, n: &Node) -> Result<Vec<Val>> {
        let (x, t) = (self.data(n, "self")?, self.data(n, "target")?);
        let (t, log) = match self.flag(n, "log_target") {
            true => (self.each(n, "exp", Exp {}.into(), &t)?, t),
            false => {
                let least = f64::from(f32::MIN_POSITIVE);
                let own = self.each(n, "log", Clamp { lo: least, hi: f64::INFINITY }.into(), &t)?;
                (t, self.each(n, "log", Log {}.into(), &own)?)
            }
        };
        let apart = self.both(n, Arithmetic::Sub, &log, &x)?;
        let each = self.both(n, Arithmetic::Mul, &t, &apart)?;
        self.reduced_loss(n, &each)
    }
}
