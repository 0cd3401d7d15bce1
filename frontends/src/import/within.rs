//! A tensor with other numbers in a part of it.

use super::folded::Folded;
use super::graph::{Arg, Node};
use super::lower::{Lower, Val};
use super::operands::dim_of;
use super::view::View;
use shardc_ir::diag::Result;
use shardc_ir::types::DType;

/// A range of a dim.
struct Part {
    dim: usize,
    start: usize,
    len: usize,
    step: usize,
    /// The part has the dim, of one element where it is an index.
    stays: bool,
}

impl Part {
    /// What is before, and from where on the rest is.
    fn end(&self) -> usize {
        self.start + self.len
    }

    /// The shape of what is written there.
    fn shape(&self, whole: &[usize]) -> Vec<usize> {
        let mut shape = whole.to_vec();
        match self.stays {
            true => shape[self.dim] = self.len,
            false => drop(shape.remove(self.dim)),
        }
        shape
    }
}

impl Lower<'_> {
    /// The part that a node writes into, of a tensor of this shape.
    fn part_of(&self, n: &Node, shape: &[usize]) -> Result<Part> {
        let dim = dim_of(self.int(n, "dim")?.unwrap_or(0), shape.len(), self, n)?;
        if *n.arg("index") != Arg::None {
            let start = dim_of(self.int(n, "index")?.unwrap_or(0), shape[dim], self, n)?;
            return Ok(Part { dim, start, len: 1, step: 1, stays: false });
        }
        let (start, len, step) = self.range(n, shape[dim])?;
        Ok(Part { dim, start, len, step, stays: true })
    }

    /// `slice_scatter` and `select_scatter` of numbers that are known.
    pub(super) fn fold_within(&self, n: &Node, x: &Folded, src: &Folded) -> Result<Folded> {
        let p = self.part_of(n, &x.shape)?;
        let own = src.expand(&p.shape(&x.shape)).and_then(|s| s.cast(x.elem));
        let mut own = self.fits(n, own)?;
        if !p.stays {
            own = own.unsqueeze(p.dim);
        }
        if p.step == 1 {
            let rest = x.shape[p.dim] - p.end();
            let all = [x.slice(p.dim, 0, p.start, 1), own, x.slice(p.dim, p.end(), rest, 1)];
            let all: Vec<Folded> = all.into_iter().filter(|f| f.shape[p.dim] > 0).collect();
            return if all.is_empty() {
                Ok(x.clone())
            } else {
                self.fits(n, Folded::concat(&all, p.dim))
            };
        }
        let one = |i: usize| match i.checked_sub(p.start).map(|k| (k % p.step, k / p.step)) {
            Some((0, k)) if k < p.len => own.slice(p.dim, k, 1, 1),
            _other => x.slice(p.dim, i, 1, 1),
        };
        let all: Vec<Folded> = (0..x.shape[p.dim]).map(one).collect();
        self.fits(n, Folded::concat(&all, p.dim))
    }

    /// The same of data.
    pub(super) fn within(&mut self, n: &Node) -> Result<Vec<Val>> {
        let shape = self.shape_of(n, "self")?;
        let p = self.part_of(n, &shape)?;
        if p.len == 0 {
            return self.data(n, "self").map(|x| vec![Val::Data(x)]);
        }
        let src = self.data(n, "src")?;
        let src = self.taken_as(n, src, "self", &p.shape(&shape))?;
        let src = if p.stays { src } else { src.unsqueeze(p.dim) };
        if (p.len, p.step) == (shape[p.dim], 1) {
            return Ok(vec![Val::Data(src)]);
        }
        if p.step != 1 {
            return Err(self.refuse(n, "it writes at steps into what is not known"));
        }
        let x = self.data(n, "self")?;
        let mut all = vec![];
        for (start, end) in [(0, p.start), (p.end(), shape[p.dim])] {
            if start == p.end() {
                all.push(src.clone());
            }
            if start < end {
                all.push(self.narrowed(n, &x, p.dim, start, end - start)?);
            }
        }
        self.cat_of(n, all, p.dim).map(|y| vec![Val::Data(y)])
    }

    /// Numbers of another tensor in the shape of one, all of which they replace: `copy`, and `fill` by a tensor.
    pub(super) fn copied(&mut self, n: &Node, name: &str) -> Result<Vec<Val>> {
        let shape = self.shape_of(n, "self")?;
        let x = self.data(n, name)?;
        self.taken_as(n, x, "self", &shape).map(|y| vec![Val::Data(y)])
    }

    /// A value in a shape, of the kind of numbers that an operand has.
    fn taken_as(&mut self, n: &Node, x: View, like: &str, shape: &[usize]) -> Result<View> {
        use super::graph::Elem;
        let whole = self.draft.ty(x.value).dtype == DType::I32;
        let x = match self.elem_of(n, like) {
            Elem::Float | Elem::Double if whole => self.float(n, &x)?,
            Elem::Int if !whole => self.truncated(n, &x)?,
            Elem::Bool => self.truth(n, &x)?,
            _same => x,
        };
        if x.shape == shape { Ok(x) } else { self.spread_to(n, &x, shape) }
    }
}
