//! Recurrent cells, and layers of them whose steps are written out, one after the other.

use super::graph::{Arg, Node};
use super::lower::{Lower, Val};
use super::table::Arithmetic;
use super::view::View;
use shardc_ir::diag::Result;
use shardc_ir::ops::{Logistic, Tanh};

/// Most steps that are written out.
const MOST: usize = 1024;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cell {
    Tanh,
    Lstm,
    Gru,
}

/// Weights of a cell: of the input and the state, and their biases.
type Weights = (View, View, Option<(View, View)>);

impl Lower<'_> {
    fn listed(&mut self, n: &Node, name: &str) -> Result<Vec<View>> {
        let Arg::Values(all) = n.arg(name).clone() else {
            return self.data(n, name).map(|v| vec![v]);
        };
        all.iter().flatten().map(|id| self.data_of(n, *id)).collect()
    }

    fn gates(&mut self, n: &Node, x: &View, w: &View, b: Option<&View>) -> Result<View> {
        let y = self.product(n, x, w)?;
        match b {
            None => Ok(y),
            Some(b) => self.both(n, Arithmetic::Add, &y, b),
        }
    }

    /// The next state, and of an LSTM its cell.
    fn stepped(
        &mut self,
        n: &Node,
        cell: Cell,
        x: &View,
        state: &[View],
        w: &Weights,
    ) -> Result<Vec<View>> {
        let (bi, bh) = w.2.as_ref().map_or((None, None), |b| (Some(&b.0), Some(&b.1)));
        let states = if matches!(cell, Cell::Lstm) { 2 } else { 1 };
        if state.len() != states || state.iter().any(|s| s.shape.len() != 2) {
            return Err(self.refuse(n, "its state does not fit"));
        }
        let h = self.whole(n, &state[0])?;
        let (gi, gh) = (self.gates(n, x, &w.0, bi)?, self.gates(n, &h, &w.1, bh)?);
        let size = h.shape[1];
        let part = |l: &mut Self, g: &View, i: usize| l.narrowed(n, g, 1, i * size, size);
        let sigma = |l: &mut Self, v: &View| l.each(n, "gate", Logistic {}.into(), v);
        let tanh = |l: &mut Self, v: &View| l.each(n, "tanh", Tanh {}.into(), v);
        match cell {
            Cell::Tanh => {
                let sum = self.both(n, Arithmetic::Add, &gi, &gh)?;
                Ok(vec![tanh(self, &sum)?])
            }
            Cell::Lstm => {
                let g = self.both(n, Arithmetic::Add, &gi, &gh)?;
                let mut parts = vec![];
                for i in 0..4 {
                    let p = part(self, &g, i)?;
                    parts.push(if i == 2 { tanh(self, &p)? } else { sigma(self, &p)? });
                }
                let kept = self.both(n, Arithmetic::Mul, &parts[1], &state[1])?;
                let new = self.both(n, Arithmetic::Mul, &parts[0], &parts[2])?;
                let c = self.both(n, Arithmetic::Add, &kept, &new)?;
                let t = tanh(self, &c)?;
                Ok(vec![self.both(n, Arithmetic::Mul, &parts[3], &t)?, c])
            }
            Cell::Gru => {
                let mut sums = vec![];
                for i in 0..2 {
                    let (a, b) = (part(self, &gi, i)?, part(self, &gh, i)?);
                    let sum = self.both(n, Arithmetic::Add, &a, &b)?;
                    sums.push(sigma(self, &sum)?);
                }
                let (a, b) = (part(self, &gi, 2)?, part(self, &gh, 2)?);
                let b = self.both(n, Arithmetic::Mul, &sums[0], &b)?;
                let new = self.both(n, Arithmetic::Add, &a, &b)?;
                let new = tanh(self, &new)?;
                let apart = self.both(n, Arithmetic::Sub, &h, &new)?;
                let kept = self.both(n, Arithmetic::Mul, &sums[1], &apart)?;
                Ok(vec![self.both(n, Arithmetic::Add, &new, &kept)?])
            }
        }
    }

    /// One step of a cell.
    pub(super) fn cell(&mut self, n: &Node, cell: Cell) -> Result<Vec<Val>> {
        let (x, state) = (self.data(n, "input")?, self.listed(n, "hx")?);
        let biases = match n.arg("b_ih") {
            Arg::None => None,
            _given => Some((self.data(n, "b_ih")?, self.data(n, "b_hh")?)),
        };
        let w = (self.data(n, "w_ih")?, self.data(n, "w_hh")?, biases);
        if x.shape.len() != 2 || state.iter().any(|s| s.shape.len() != 2) {
            return Err(self.refuse(n, "its operands are not of rows"));
        }
        Ok(self.stepped(n, cell, &x, &state, &w)?.into_iter().map(Val::Data).collect())
    }

    /// Layers of cells over all steps, forward and, if it says so, backward.
    pub(super) fn layers(&mut self, n: &Node, cell: Cell) -> Result<Vec<Val>> {
        let (mut x, states) = (self.data(n, "input")?, self.listed(n, "hx")?);
        let weights = self.listed(n, "params")?;
        let (biases, first) = (self.flag(n, "has_biases"), self.flag(n, "batch_first"));
        let ways = 1 + usize::from(self.flag(n, "bidirectional"));
        let layers = self.int(n, "num_layers")?.and_then(|l| usize::try_from(l).ok()).unwrap_or(1);
        let each = if biases { 4 } else { 2 };
        let dropped =
            self.flag(n, "train") && layers > 1 && self.number(n, "dropout").unwrap_or(0.0) > 0.0;
        let fits = x.shape.len() == 3 && Some(weights.len()) == layers.checked_mul(ways * each);
        if !fits || dropped {
            return Err(self
                .refuse(n, "its layers have projections or dropout, or its input is not of rows"));
        }
        if !first {
            x = x.transpose(0, 1);
        }
        let steps = x.shape[1];
        if steps > MOST {
            return Err(
                self.refuse(n, &format!("{steps} steps, of which at most {MOST} are written out"))
            );
        }
        let mut ends: Vec<Vec<View>> = vec![vec![]; states.len()];
        for (i, w) in weights.chunks(ways * each).enumerate() {
            let mut sides = vec![];
            for (side, w) in w.chunks(each).enumerate() {
                let own =
                    (w[0].clone(), w[1].clone(), biases.then(|| (w[2].clone(), w[3].clone())));
                let mut state = vec![];
                for s in &states {
                    let s = self.narrowed(n, s, 0, i * ways + side, 1)?;
                    let to = s.shape[1..].to_vec();
                    state.push(self.reshaped(n, &s, &to)?);
                }
                let mut all = vec![];
                for t in 0..steps {
                    let at = if side == 1 { steps - 1 - t } else { t };
                    let xt = self.narrowed(n, &x, 1, at, 1)?;
                    let xt = self.reshaped(n, &xt, &[x.shape[0], x.shape[2]])?;
                    state = self.stepped(n, cell, &xt, &state, &own)?;
                    all.push(state[0].unsqueeze(1));
                }
                if side == 1 {
                    all.reverse();
                }
                sides.push(self.cat_of(n, all, 1)?);
                ends.iter_mut().zip(&state).for_each(|(e, s)| e.push(s.unsqueeze(0)));
            }
            x = self.cat_of(n, sides, 2)?;
        }
        let mut outs = vec![Val::Data(if first { x } else { x.transpose(0, 1) })];
        for e in ends {
            outs.push(Val::Data(self.cat_of(n, e, 0)?));
        }
        Ok(outs)
    }
}
