//! Cross-entropies of labels that are no column of the data by itself: computed, known, or of more dims than tokens; and of
//! logarithms of probabilities. They are made within a microbatch.

use super::folded::Folded;
use super::graph::Node;
use super::losses;
use super::lower::{Lower, Val};
use super::table::Arithmetic;
use super::view::View;
use shardc_ir::diag::Result;
use shardc_ir::ops::AtLeast;

impl Lower<'_> {
    pub(super) fn nll(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        self.scored_by(n, x, 0.0)
    }

    /// A cross-entropy of labels by ops that others have too.
    pub(super) fn plain_cross_entropy(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let class = usize::from(x.shape.len() > 1);
        let x = self.log_softmax(n, &x, class)?;
        self.scored_by(n, x, self.number(n, "label_smoothing").unwrap_or(0.0))
    }

    /// The loss of logarithms [rows, classes, …] and labels [rows, …].
    fn scored_by(&mut self, n: &Node, x: View, smoothing: f64) -> Result<Vec<Val>> {
        let class = usize::from(x.shape.len() > 1);
        let classes = x.shape.get(class).copied().unwrap_or(1);
        let y = self.data(n, "target")?;
        let mut others = x.shape.clone();
        others.remove(class);
        if y.shape != others {
            return Err(self.refuse(n, "logits and labels do not pair"));
        }
        let own = self.picked(n, &x, class, &y)?;
        let mut each = self.scaled(n, &own, -1.0)?;
        // Labels below 0 are not scored, whichever of them PyTorch is told, nor the one that is ignored.
        let float = if self.is_computed(&y) { y.clone() } else { self.float(n, &y)? };
        let float = self.whole(n, &float)?;
        let mut valid =
            float.with(self.emit(n, "valid", AtLeast { bound: 0.0 }, &[float.value])?);
        let ignored = self.int(n, "ignore_index")?.unwrap_or(-100);
        if ignored >= 0 {
            let line = self.number_in(n, ignored as f64, &[])?;
            let is = self.both(n, Arithmetic::Equal, &float, &line)?;
            let not = self.without(n, &is)?;
            valid = self.both(n, Arithmetic::Mul, &valid, &not)?;
        }
        let weight = match self.operand(n, "weight") {
            None => None,
            Some(_) => {
                let w = self.data(n, "weight")?;
                let behind = x.shape.len() - 1 - class;
                Some((0..behind).fold(w, |w, _| w.unsqueeze(w.shape.len())))
            }
        };
        let mut weighs = valid.clone();
        if let Some(w) = &weight {
            let all = self.spread_to(n, w, &x.shape)?;
            let own = self.picked(n, &all, class, &y)?;
            each = self.both(n, Arithmetic::Mul, &each, &own)?;
            weighs = self.both(n, Arithmetic::Mul, &valid, &own)?;
        }
        if smoothing > 0.0 {
            let all = match &weight {
                None => x,
                Some(w) => self.both(n, Arithmetic::Mul, &x, w)?,
            };
            let all = self.sum_over(n, &all, &[class], false)?;
            let all = self.scaled(n, &all, -smoothing / classes as f64)?;
            each = self.scaled(n, &each, 1.0 - smoothing)?;
            each = self.both(n, Arithmetic::Add, &each, &all)?;
        }
        let each = self.both(n, Arithmetic::Mul, &each, &valid)?;
        match self.int(n, "reduction")?.unwrap_or(losses::MEAN) {
            losses::MEAN => {
                let dims: Vec<usize> = (0..each.shape.len()).collect();
                let sum = self.sum_over(n, &each, &dims, false)?;
                let by = self.sum_over(n, &weighs, &dims, false)?;
                let scored = |f: &Folded| {
                    f.numbers().is_some_and(|y| y.iter().all(|&y| y >= 0.0 && y != ignored as f64))
                };
                let all = matches!(self.operand(n, "target"), Some(Val::Folded(f)) if scored(&f));
                if all && weight.is_none() {
                    let count: f64 = others.iter().map(|&d| d as f64).product();
                    let y = self.scaled(n, &sum, 1.0 / count)?;
                    self.means.insert(y.value);
                    return Ok(vec![Val::Data(y)]);
                }
                Ok(vec![Val::Data(self.both(n, Arithmetic::Div, &sum, &by)?)])
            }
            _other => self.reduced_loss(n, &each),
        }
    }

    /// By how much others come near the score of the label, or above it.
    pub(super) fn multi_margin(&mut self, n: &Node) -> Result<Vec<Val>> {
        let (x, y) = (self.data(n, "self")?, self.data(n, "target")?);
        let (margin, p) =
            (self.number(n, "margin").unwrap_or(1.0), self.number(n, "p").unwrap_or(1.0));
        if x.shape.len() != 2 || p != 1.0 || self.operand(n, "weight").is_some() {
            return Err(self.refuse(n, "its scores are not of rows, or are squared or weighed"));
        }
        let own = self.picked(n, &x, 1, &y)?.unsqueeze(1);
        let above = self.both(n, Arithmetic::Sub, &x, &own)?;
        let above = self.shifted(n, &above, margin)?;
        let above = self.bounded(n, Arithmetic::Max, 0.0, &above)?;
        let is = self.one_hot_of(n, &y, x.shape[1])?;
        let not = self.without(n, &is)?;
        let above = self.both(n, Arithmetic::Mul, &above, &not)?;
        let each = self.sum_over(n, &above, &[1], false)?;
        let each = self.scaled(n, &each, 1.0 / x.shape[1] as f64)?;
        self.reduced_loss(n, &each)
    }
}
