//! Products of matrices, by rules whose letters the views choose.

use super::folded::spread;
use super::graph::{Arg, Node};
use super::lower::{Lower, Val};
use super::table::Arithmetic;
use super::view::{Dim, View, letter};
use shardc_ir::diag::Result;
use shardc_ir::ops::{Dot, Mul};

impl Lower<'_> {
    pub(super) fn linear(&mut self, n: &Node) -> Result<Vec<Val>> {
        let (x, w) = (self.data(n, "input")?, self.data(n, "weight")?);
        let y = self.product(n, &x, &w)?;
        self.biased(n, y, "bias")
    }

    pub(super) fn addmm(&mut self, n: &Node) -> Result<Vec<Val>> {
        let (x, w) = (self.data(n, "mat1")?, self.data(n, "mat2")?);
        let plain = ["alpha", "beta"].iter().all(|k| self.number(n, k).unwrap_or(1.0) == 1.0);
        if !plain || w.shape.len() != 2 {
            return Err(self.refuse(n, "its factors are not 1"));
        }
        let y = self.product(n, &x, &w.transpose(0, 1))?;
        self.biased(n, y, "self")
    }

    pub(super) fn biased(&mut self, n: &Node, y: View, name: &str) -> Result<Vec<Val>> {
        let y = match n.arg(name) {
            Arg::None => y,
            _ => {
                let b = self.data(n, name)?;
                self.both(n, Arithmetic::Add, &y, &b)?
            }
        };
        Ok(vec![Val::Data(y)])
    }

    /// x [.., c] times a weight [o, c].
    pub(super) fn product(&mut self, n: &Node, x: &View, w: &View) -> Result<View> {
        let mut x = self.settled(n, x)?;
        let rank = x.shape.len();
        if rank > 0 && x.dims[rank - 1] == Dim::Virtual {
            x = self.whole(n, &x)?;
        }
        // A weight that was made may have its dims in any order, or one of a single element.
        let w = &if w.real() == w.shape.len() { w.clone() } else { self.whole(n, w)? };
        let last = rank.checked_sub(1).map(|d| x.dims[d]);
        let fits = w.shape.len() == 2 && w.real() == 2 && matches!(last, Some(Dim::Real(_)));
        if !fits || x.shape[rank - 1] != w.shape[1] {
            return Err(self.refuse(n, "its operands do not fit"));
        }
        let c = letter(rank - 1);
        let (lx, lw) = (x.letters(rank), w.letters(2));
        let lw: String = lw.chars().map(|l| if l == 'a' { 'z' } else { c }).collect();
        let out: String = lx.chars().filter(|&l| l != c).chain(['z']).collect();
        let rule = self.rule(n, &format!("{lx},{lw}->{out}"), &[x.value, w.value])?;
        let v = self.emit(n, "linear", Dot { rule }, &[x.value, w.value])?;
        let mut shape = x.shape.clone();
        shape[rank - 1] = w.shape[0];
        let out: String = out.chars().map(|l| if l == 'z' { c } else { l }).collect();
        Ok(View::of(v, &out, shape))
    }

    /// Products of matrices in the last two dims, batched over the others.
    pub(super) fn matmul(&mut self, n: &Node, other: &str) -> Result<Vec<Val>> {
        if let Some(v) = self.raised_probs(n, other)? {
            return Ok(vec![Val::Data(v)]);
        }
        let (mut a, mut b) = (self.data(n, "self")?, self.data(n, other)?);
        // Vectors are matrices of one row, or one column.
        let (row, column) = (a.shape.len() == 1, b.shape.len() == 1);
        if row {
            a = a.unsqueeze(0);
        }
        if column {
            b = b.unsqueeze(1);
        }
        let mut y = self.product_of(n, a, b)?;
        let mut to = y.shape.clone();
        let rank = to.len();
        if column {
            to.remove(rank - 1);
        }
        if row {
            to.remove(rank - 2);
        }
        y = self.reshaped(n, &y, &to)?;
        Ok(vec![Val::Data(y)])
    }

    /// A product of matrices with a factor, plus another: scores with what is added to them, if that is known.
    pub(super) fn baddbmm(&mut self, n: &Node) -> Result<Vec<Val>> {
        let by = |l: &Lower, name: &str| l.number(n, name).unwrap_or(1.0);
        let (alpha, beta) = (by(self, "alpha"), by(self, "beta"));
        let (a, b) = (self.data(n, "batch1")?, self.data(n, "batch2")?);
        let y = self.product_of(n, a, b)?;
        let y = self.scaled(n, &y, alpha)?;
        if beta == 0.0 {
            return Ok(vec![Val::Data(y)]);
        }
        if let Some(c) = self.cells(self.operand(n, "self").as_ref()) {
            let f = c.map(|f| f.map(f.elem, |x| x * beta));
            let f = f.ok_or_else(|| self.refuse(n, "what is added is too large"))?;
            return Ok(vec![Val::Masked(y, f)]);
        }
        let x = self.data(n, "self")?;
        let x = self.scaled(n, &x, beta)?;
        Ok(vec![Val::Data(self.both(n, Arithmetic::Add, &x, &y)?)])
    }

    /// The product of matrices in the last two dims.
    fn product_of(&mut self, n: &Node, a: View, b: View) -> Result<View> {
        let (ra, rb) = (a.shape.len(), b.shape.len());
        if ra < 2 || rb < 2 || a.shape[ra - 1] != b.shape[rb - 2] {
            return Err(self.refuse(n, "its operands are not matrices that fit"));
        }
        let (m, c) = (a.shape[ra - 2], b.shape[rb - 1]);
        let outer = spread(&a.shape[..ra - 2], &b.shape[..rb - 2]);
        let mut shape = outer.ok_or_else(|| self.refuse(n, "its operands do not fit"))?;
        shape.extend([m, c]);
        let given = (a.clone(), b.clone());
        let (mut a, mut b) = (self.settled(n, &a)?, self.settled(n, &b)?);
        // What is repeated, or has one element, where the other has what is summed over.
        let gone = [a.dims[ra - 1], b.dims[rb - 2]].map(|d| d == Dim::Virtual);
        if gone != [true; 2] || a.shape[ra - 1] != 1 {
            a = if gone[0] { self.whole(n, &a)? } else { a };
            b = if gone[1] { self.whole(n, &b)? } else { b };
        }
        // Dims: those of the result, and behind them the one that is summed over.
        let rank = shape.len();
        let put = |v: &View, keep: usize, sum: usize, at: usize| {
            let mut dims = vec![Dim::Virtual; rank + 1];
            let off = rank - v.shape.len();
            let outer = v.shape.len() - 2;
            dims[off..off + outer].copy_from_slice(&v.dims[..outer]);
            (dims[at], dims[rank]) = (v.dims[keep], v.dims[sum]);
            View { value: v.value, dims, shape: vec![1; rank + 1] }
        };
        let pa = put(&a, ra - 2, ra - 1, rank - 2);
        let pb = put(&b, rb - 1, rb - 2, rank - 1);
        let (la, lb) = (pa.letters(rank + 1), pb.letters(rank + 1));
        let out: String =
            (0..rank).map(letter).filter(|&l| la.contains(l) || lb.contains(l)).collect();
        let ins = [a.value, b.value];
        let summed = letter(rank);
        let v = match (la.contains(summed), lb.contains(summed)) {
            (true, true) => {
                let rule = self.rule(n, &format!("{la},{lb}->{out}"), &ins)?;
                self.emit(n, "scores", Dot { rule }, &ins)?
            }
            (false, false) if a.shape[ra - 1] == 1 => {
                let rule = self.spread(n, &[&la, &lb], &out, &ins)?;
                self.emit(n, "product", Mul { rule }, &ins)?
            }
            _ => {
                return Err(
                    self.refuse(n, "one of its operands is repeated where it is summed over")
                );
            }
        };
        self.products.insert(v, (given.0, given.1.transpose(rb - 2, rb - 1)));
        Ok(View::of(v, &out, shape))
    }
}
