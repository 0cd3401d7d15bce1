//! Rows of tables by whole numbers.

use super::folded::Folded;
use super::graph::{Arg, Elem, Id, Node};
use super::lower::{Lower, Val};
use super::operands::dim_of;
use super::table::Arithmetic;
use super::view::{Dim, View};
use super::written::by_distance;
use shardc_ir::attr::Padding;
use shardc_ir::diag::Result;
use shardc_ir::ops::{StopGradient, Take};

/// A table of so many pairs is looked up by their distances, if they say all.
const FEW: usize = 4;

impl Lower<'_> {
    pub(super) fn embedding(&mut self, n: &Node) -> Result<Vec<Val>> {
        if self.flag(n, "scale_grad_by_freq") {
            let what = "scale_grad_by_freq divides gradients by how often a token is in a batch";
            return Err(self.refuse(n, what).help("export with scale_grad_by_freq=False"));
        }
        let (w, padding) = (self.data(n, "weight")?, self.int(n, "padding_idx")?);
        let Arg::Value(indices) = n.arg("indices") else {
            return Err(self.refuse(n, "it has no index"));
        };
        self.looked_up(n, w, *indices, padding)
    }

    /// Rows of a table by whole numbers.
    pub(super) fn looked_up(
        &mut self,
        n: &Node,
        mut w: View,
        indices: Id,
        mut padding: Option<i64>,
    ) -> Result<Vec<Val>> {
        let known = if let Val::Folded(f) = self.val(indices) { Some(f.clone()) } else { None };
        let i = match known {
            Some(f) if f.elements() > 1 && f.is_one_number() => {
                return self.one_row(n, &w, &f, padding).map(|y| vec![Val::Data(y)]);
            }
            Some(f) if self.counted(&f).is_some_and(|c| c.0.saturating_add(c.1) <= w.shape[0]) => {
                // A range that is not of tokens is one of the table.
                let (first, len) = self.counted(&f).unwrap_or((0, 1));
                let padded = padding.and_then(|p| usize::try_from(p).ok());
                if padded.is_some_and(|p| (first..first + len).contains(&p)) {
                    return Err(self.refuse(n, "its range has the padding token's row"));
                }
                let rows = self.narrowed(n, &w, 0, first, len)?;
                let mut y = View { value: rows.value, dims: vec![], shape: f.shape.clone() };
                for d in 0..f.shape.len() {
                    y.dims.push(if f.is_same_along(d) { Dim::Virtual } else { rows.dims[0] });
                }
                y.dims.push(rows.dims[1]);
                y.shape.push(rows.shape[1]);
                return Ok(vec![Val::Data(y)]);
            }
            Some(f)
                if padding.is_none()
                    && f.shape.len() == 2
                    && let Some((line, _)) = by_distance(&f, FEW) =>
            {
                // A bias of each distance: looked up once for all pairs that have it.
                let index = self.env.push(Val::Folded(line));
                let made = self.looked_up(n, w, index, None)?;
                let Some(Val::Data(rows)) = made.into_iter().next() else {
                    return Err(self.refuse(n, "it has no rows"));
                };
                let y = self.skewed(n, &rows, [f.shape[0], f.shape[1]])?;
                self.offsets.insert(y.value, (rows, y.dims.clone()));
                return Ok(vec![Val::Data(y)]);
            }
            Some(f) => {
                // Positions that are counted from another number look into the rest of the table.
                let first = f.scalar().is_none().then(|| f.first()).flatten();
                let counts = |x: &f64| (0..f.shape.len()).any(|d| f.counts_from(d) == Some(*x));
                let first = first.filter(|x| *x > 0.0 && w.shape.len() == 2 && counts(x));
                let from = first.map_or(0, |x| x as usize);
                let seq = self.sizes.seq;
                if from > 0 && from.checked_add(seq).is_some_and(|end| end <= w.shape[0]) {
                    w = self.narrowed(n, &w, 0, from, seq)?;
                    padding = padding.and_then(|p| p.checked_sub(from as i64));
                }
                let by = if from > 0 { f.map(Elem::Int, |x| x - from as f64) } else { Some(f) };
                let by = by.ok_or_else(|| self.refuse(n, "its index is too large"))?;
                self.constant(n, &by)?
            }
            None => self.data_of(n, indices)?,
        };
        if w.shape.len() != 2 || w.real() != 2 {
            return Err(self.refuse(n, "its table has not 2 dims"));
        }
        if self.is_computed(&i) {
            let y = self.taken_by(n, &w, 0, &i)?;
            let Some(p) = padding.filter(|&p| p >= 0) else { return Ok(vec![Val::Data(y)]) };
            // The row of padding is looked up, and not trained.
            let still = y.with(self.emit(n, "still", StopGradient {}, &[y.value])?);
            let line = self.number_in(n, p as f64, &[])?;
            let is = self.both(n, Arithmetic::Equal, &i, &line)?;
            let is = is.unsqueeze(is.shape.len());
            let apart = self.both(n, Arithmetic::Sub, &still, &y)?;
            let apart = self.both(n, Arithmetic::Mul, &apart, &is)?;
            return Ok(vec![Val::Data(self.both(n, Arithmetic::Add, &y, &apart)?)]);
        }
        let (rank, i) = (i.shape.len(), self.ordered(n, &i)?);
        let li = i.letters(rank);
        let lw: String = w.letters(2).chars().map(|c| if c == 'a' { 'y' } else { 'z' }).collect();
        let rule = self.rule(n, &format!("{lw},{li}->{li}z"), &[w.value, i.value])?;
        let padding = match padding {
            Some(p) if p >= 0 && (p as usize) < w.shape[0] => Padding::Constant(p as usize),
            _ => Padding::None,
        };
        let v = self.emit(n, "embedded", Take { rule, padding }, &[w.value, i.value])?;
        let mut y = View { value: v, ..i };
        y.dims.push(Dim::Real(y.real()));
        y.shape.push(w.shape[1]);
        Ok(vec![Val::Data(y)])
    }

    /// Where a range of whole numbers that is not as long as a row of tokens begins, and its length.
    fn counted(&self, f: &Folded) -> Option<(usize, usize)> {
        let mut moving = (0..f.shape.len()).filter(|&d| !f.is_same_along(d));
        let (d, None) = (moving.next()?, moving.next()) else { return None };
        let tokens = self.g.batch().is_some_and(|b| b.1.is_some());
        let first = f.counts_from(d).filter(|x| *x >= 0.0)?;
        (!tokens || f.shape[d] != self.sizes.seq).then_some((first as usize, f.shape[d]))
    }

    /// The row of a table that every element of an index names.
    fn one_row(
        &mut self,
        n: &Node,
        w: &View,
        index: &Folded,
        padding: Option<i64>,
    ) -> Result<View> {
        let rows = w.shape.first().copied().unwrap_or(0);
        let at = dim_of(index.first().unwrap_or(0.0) as i64, rows, self, n)?;
        let row = self.narrowed(n, w, 0, at, 1)?;
        let mut y = self.reshaped(n, &row, &w.shape[1..])?;
        if padding == Some(at as i64) {
            y = y.with(self.emit(n, "padding", StopGradient {}, &[y.value])?);
        }
        for &size in index.shape.iter().rev() {
            y.dims.insert(0, Dim::Virtual);
            y.shape.insert(0, size);
        }
        Ok(y)
    }
}
