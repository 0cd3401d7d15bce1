//! Ops that move elements: most of them choose dims of a [`View`] and write nothing.

use super::folded::Folded;
use super::graph::Elem;
use super::graph::{Arg, Node};
use super::lower::{Lower, Val};
use super::operands::dim_of;
use super::room;
use super::view::{Dim, View, letter};
use shardc_ir::diag::Result;
use shardc_ir::ops::{Concat, Narrow, Transpose};

impl Lower<'_> {
    fn one(v: View) -> Result<Vec<Val>> {
        Ok(vec![Val::Data(v)])
    }

    fn dim(&self, n: &Node, name: &str, or: i64, rank: usize) -> Result<usize> {
        dim_of(self.int(n, name)?.unwrap_or(or), rank, self, n)
    }

    /// The operand; whole numbers that become floats are cast.
    pub(super) fn same(&mut self, n: &Node) -> Result<Val> {
        let x = self.data(n, "self")?;
        let to = match (n.arg("dtype"), n.arg("other")) {
            (Arg::Elem(e), _) => Some(*e),
            (Arg::None, Arg::Value(id)) if self.g.truths.contains(id) => Some(Elem::Bool),
            (Arg::None, Arg::Value(_)) => Some(self.elem_of(n, "other")),
            _ => None,
        };
        let float = self.draft.ty(x.value).dtype.is_float();
        Ok(Val::Data(match to {
            Some(Elem::Bool) => self.truth(n, &x)?,
            Some(Elem::Int) if float => self.truncated(n, &x)?,
            Some(Elem::Float | Elem::Double) if !float => self.float(n, &x)?,
            _ => x,
        }))
    }

    /// The operand without a gradient.
    pub(super) fn detach(&mut self, n: &Node) -> Result<Vec<Val>> {
        Ok(vec![match self.operand(n, "self") {
            Some(Val::Masked(v, _) | Val::Probs(v, ..)) if self.is_trained(v.value) => {
                return Err(self.refuse(n, "scores of attention without a gradient"));
            }
            Some(v @ (Val::Masked(..) | Val::Probs(..) | Val::Labels(_))) => v,
            Some(Val::Head(v)) => Val::Head(self.still(n, v)?),
            _ => {
                let x = self.data(n, "self")?;
                Val::Data(self.still(n, x)?)
            }
        }])
    }

    pub(super) fn size(&mut self, n: &Node) -> Result<Vec<Val>> {
        let shape = self.shape_of(n, "self")?;
        let d = self.dim(n, "dim", 0, shape.len())?;
        Ok(vec![Val::Folded(Folded::full(Elem::Int, &[], shape[d] as f64))])
    }

    pub(super) fn transpose(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let rank = x.shape.len();
        Self::one(x.transpose(self.dim(n, "dim0", 0, rank)?, self.dim(n, "dim1", 1, rank)?))
    }

    pub(super) fn turn(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        Self::one(if x.shape.len() == 2 { x.transpose(0, 1) } else { x })
    }

    pub(super) fn permute(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let order = self.order(n, x.shape.len())?;
        Self::one(x.permute(&order))
    }

    pub(super) fn unsqueeze(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let at = self.dim(n, "dim", 0, x.shape.len() + 1)?;
        Self::one(x.unsqueeze(at))
    }

    /// Without dims of one element: those that are named, or all.
    pub(super) fn squeezes(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let rank = x.shape.len();
        let named = self.ints(n, "dim")?.into_iter().map(|d| dim_of(d, rank, self, n));
        let named = named.collect::<Result<Vec<usize>>>()?;
        let all = *n.arg("dim") == Arg::None;
        let stays = |d: &usize| x.shape[*d] != 1 || !all && !named.contains(d);
        let to: Vec<usize> = (0..rank).filter(stays).map(|d| x.shape[d]).collect();
        self.reshaped(n, &x, &to).and_then(Self::one)
    }

    /// The last two dims exchanged.
    pub(super) fn turned_last(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let rank = x.shape.len();
        if rank < 2 {
            return Err(self.refuse(n, "its operand is no matrix"));
        }
        Self::one(x.transpose(rank - 2, rank - 1))
    }

    pub(super) fn squeeze(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let d = self.dim(n, "dim", 0, x.shape.len())?;
        match (x.shape[d], x.dims[d]) {
            (1, Dim::Virtual) => Self::one(x.squeeze(d)),
            (1, _) => {
                let mut to = x.shape.clone();
                to.remove(d);
                self.reshaped(n, &x, &to).and_then(Self::one)
            }
            _ => Self::one(x),
        }
    }

    pub(super) fn expand(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let to = match n.arg("other") {
            Arg::Value(_) => self.shape_of(n, "other")?,
            _sizes => self.expanded(n, &x.shape, &self.ints(n, "size")?)?,
        };
        if to.len() < x.shape.len() {
            return Err(self.refuse(n, "it has more dims than it is expanded to"));
        }
        let x = self.thinned(n, &x, &to)?;
        let more = to.len() - x.shape.len();
        let mut dims = vec![Dim::Virtual; more];
        for (d, (&own, &dim)) in x.shape.iter().zip(&x.dims).enumerate() {
            match (own, to[more + d]) {
                (a, b) if a == b => dims.push(dim),
                (1, _) if dim == Dim::Virtual => dims.push(dim),
                _ => return Err(self.refuse(n, "a dim is expanded that has more than 1 element")),
            }
        }
        Self::one(View { value: x.value, dims, shape: to })
    }

    pub(super) fn view(&mut self, n: &Node, key: &str) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let to = match n.arg("other") {
            Arg::Value(_) => self.shape_of(n, "other")?,
            _sizes => self.resolved(n, &self.ints(n, key)?, room::count(&x.shape))?,
        };
        if room::count(&to) != room::count(&x.shape) {
            return Err(self.refuse(n, "its shapes have different numbers of elements"));
        }
        self.reshaped(n, &x, &to).and_then(Self::one)
    }

    pub(super) fn flatten(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let rank = x.shape.len();
        let (a, b) = (self.dim(n, "start_dim", 0, rank)?, self.dim(n, "end_dim", -1, rank)?);
        let mut to = x.shape.clone();
        if a <= b {
            to.splice(a..=b, [room::count(&x.shape[a..=b])]);
        }
        self.reshaped(n, &x, &to).and_then(Self::one)
    }

    pub(super) fn unflatten(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let d = self.dim(n, "dim", 0, x.shape.len())?;
        let parts = self.resolved(n, &self.ints(n, "sizes")?, x.shape[d])?;
        let mut to = x.shape.clone();
        to.splice(d..=d, parts);
        self.reshaped(n, &x, &to).and_then(Self::one)
    }

    pub(super) fn slice(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let d = self.dim(n, "dim", 0, x.shape.len())?;
        let (start, len, step) = self.range(n, x.shape[d])?;
        if (start, len, step) == (0, x.shape[d], 1) {
            return Self::one(x);
        }
        if len == 0 {
            let mut shape = x.shape.clone();
            shape[d] = 0;
            return Ok(vec![Val::Folded(Folded::full(Elem::Float, &shape, 0.0))]);
        }
        let is_head = x.shape.len() == 3 && d == 1 && (start, step) == (0, 1);
        if is_head && x.shape[..2] == [self.sizes.rows, self.sizes.seq] && len + 1 == x.shape[1] {
            let mut whole = self.whole(n, &x)?;
            whole.shape[1] = len;
            return Ok(vec![Val::Head(whole)]);
        }
        if step != 1 {
            return self.every(n, &x, (d, start, len, step)).and_then(Self::one);
        }
        self.narrowed(n, &x, d, start, len).and_then(Self::one)
    }

    /// Of each `step` elements of a dim the one at `start`.
    fn every(
        &mut self,
        n: &Node,
        x: &View,
        (d, start, len, step): (usize, usize, usize, usize),
    ) -> Result<View> {
        let size = x.shape[d];
        if size % step != 0 || start >= step || len != size / step {
            return Err(self.refuse(n, "it takes elements at steps that do not divide the dim"));
        }
        let mut split = x.shape.clone();
        split.splice(d..=d, [len, step]);
        let y = self.reshaped(n, x, &split)?;
        let y = self.narrowed(n, &y, d + 1, start, 1)?;
        let mut to = x.shape.clone();
        to[d] = len;
        self.reshaped(n, &y, &to)
    }

    /// Every element of a dim so many times.
    pub(super) fn repeat_interleave(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let mut x = self.settled(n, &x)?;
        let d = self.dim(n, "dim", 0, x.shape.len())?;
        let times = self.int(n, "repeats")?.and_then(|r| usize::try_from(r).ok());
        let times = times.filter(|&r| r > 0 && *n.arg("dim") != Arg::None);
        let times = times.ok_or_else(|| self.refuse(n, "it repeats nothing, or along no dim"))?;
        match x.dims[d] {
            Dim::Real(k) if times > 1 => x.dims[d] = Dim::Each(k, times),
            _ => {}
        }
        x.shape[d] = x.shape[d].saturating_mul(times);
        Self::one(x)
    }

    pub(super) fn stack(&mut self, n: &Node) -> Result<Vec<Val>> {
        let Arg::Values(all) = n.arg("tensors") else {
            return Err(self.refuse(n, "it has no operands"));
        };
        let mut joined: Option<View> = None;
        let mut at = 0;
        for id in all.iter().flatten() {
            let x = self.data_of(n, *id)?;
            at = self.dim(n, "dim", 0, x.shape.len() + 1)?;
            let x = x.unsqueeze(at);
            joined = Some(match joined {
                None => x,
                Some(a) if a.shape.len() == x.shape.len() => self.joined(n, a, x, at)?,
                Some(_) => return Err(self.refuse(n, "its operands do not fit")),
            });
        }
        match joined {
            Some(x) if x.shape[at] > 1 => Self::one(x),
            _ => Err(self.refuse(n, "it has fewer than 2 operands")),
        }
    }

    /// Operands that are of one shape already.
    pub(super) fn broadcast(&mut self, n: &Node) -> Result<Vec<Val>> {
        let Arg::Values(all) = n.arg("tensors") else {
            return Err(self.refuse(n, "it has no operands"));
        };
        let all = all.iter().flatten().map(|id| self.data_of(n, *id));
        let all: Vec<View> = all.collect::<Result<_>>()?;
        if all.len() != n.outs.len() || all.windows(2).any(|w| w[0].shape != w[1].shape) {
            return Err(self.refuse(n, "its operands are not of one shape"));
        }
        Ok(all.into_iter().map(Val::Data).collect())
    }

    /// A range of a dim, which is last where it is taken.
    pub(super) fn narrowed(
        &mut self,
        n: &Node,
        x: &View,
        d: usize,
        start: usize,
        len: usize,
    ) -> Result<View> {
        let mut x = self.settled(n, x)?;
        if len == 0 || d >= x.dims.len() {
            return Err(self.refuse(n, "nothing is left of a dim"));
        }
        let Dim::Real(k) = x.dims[d] else {
            x.shape[d] = len;
            return Ok(x);
        };
        if (start, len) == (0, x.shape[d]) {
            return Ok(x);
        }
        if let Some(&half) = self.halves.get(&x.value).filter(|_| k + 1 == self.rank(x.value))
            && 2 * len == x.shape[d]
            && (start == 0 || start == len)
        {
            x.shape[d] = len;
            return Ok(x.with(half));
        }
        let v = self.last(n, &mut x, d, k)?;
        let v = self.emit(n, "part", Narrow::new(start, len), &[v])?;
        x.value = v;
        x.shape[d] = len;
        Ok(x)
    }

    /// The value with dim `k` of its dims, which is dim `d` of the view, put last.
    fn last(
        &mut self,
        n: &Node,
        x: &mut View,
        d: usize,
        k: usize,
    ) -> Result<shardc_ir::func::Value> {
        if k + 1 == self.rank(x.value) {
            return Ok(x.value);
        }
        let from = x.letters(x.shape.len());
        let to: String = from.chars().filter(|&c| c != letter(d)).chain([letter(d)]).collect();
        let v = self.in_order(n, x, &to)?;
        *x = View::of(v, &to, x.shape.clone());
        Ok(v)
    }

    /// The value with its dims in this order.
    fn in_order(&mut self, n: &Node, x: &View, to: &str) -> Result<shardc_ir::func::Value> {
        let from = x.letters(x.shape.len());
        if from == to {
            return Ok(x.value);
        }
        let rule = self.rule(n, &format!("{from}->{to}"), &[x.value])?;
        self.emit(n, "turned", Transpose { rule }, &[x.value])
    }

    pub(super) fn select(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let d = self.dim(n, "dim", 0, x.shape.len())?;
        let i = self.dim(n, "index", 0, x.shape[d])?;
        let x = self.narrowed(n, &x, d, i, 1)?;
        let mut to = x.shape.clone();
        to.remove(d);
        self.reshaped(n, &x, &to).and_then(Self::one)
    }

    pub(super) fn split(&mut self, n: &Node, by: &str) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let d = self.dim(n, "dim", 0, x.shape.len())?;
        let size = x.shape[d];
        // One more piece than there are results is one too many.
        let most = n.outs.len() + 1;
        let lens =
            match (by, self.ints(n, by)?.first().copied().and_then(|i| usize::try_from(i).ok())) {
                ("split_sizes", _) => {
                    let all = self.ints(n, by)?;
                    all.into_iter().map(|i| usize::try_from(i).unwrap_or(0)).collect()
                }
                ("chunks", Some(c)) if c > 0 => pieces(size, size.div_ceil(c).max(1), most),
                (_, Some(s)) if s > 0 => pieces(size, s, most),
                _ => return Err(self.refuse(n, "its pieces have no size")),
            };
        if lens.iter().fold(0usize, |a, b| a.saturating_add(*b)) != size
            || lens.len() != n.outs.len()
        {
            return Err(self.refuse(n, "its pieces are not the whole"));
        }
        let mut start = 0;
        let mut out = vec![];
        for len in lens {
            out.push(Val::Data(self.narrowed(n, &x, d, start, len)?));
            start += len;
        }
        Ok(out)
    }

    pub(super) fn cat(&mut self, n: &Node) -> Result<Vec<Val>> {
        let Arg::Values(all) = n.arg("tensors") else {
            return Err(self.refuse(n, "it has no operands"));
        };
        let mut parts = vec![];
        for id in all.iter().flatten() {
            // What is empty adds nothing.
            if !matches!(self.val(*id), Val::Folded(f) if f.elements() == 0) {
                parts.push(self.data_of(n, *id)?);
            }
        }
        let Some(first) = parts.first().cloned() else {
            return Err(self.refuse(n, "it has no operands"));
        };
        let d = self.dim(n, "dim", 0, first.shape.len())?;
        self.cat_of(n, parts, d).and_then(Self::one)
    }

    /// Parts one after the other along a dim.
    pub(super) fn cat_of(&mut self, n: &Node, parts: Vec<View>, d: usize) -> Result<View> {
        let Some(first) = parts.first().cloned() else {
            return Err(self.refuse(n, "it has no operands"));
        };
        let float = parts.iter().any(|p| self.draft.ty(p.value).dtype.is_float());
        let mut joined: Option<View> = None;
        for p in parts {
            let alike = p.shape.len() == first.shape.len()
                && (0..p.shape.len()).all(|i| i == d || p.shape[i] == first.shape[i]);
            if !alike {
                return Err(self.refuse(n, "its operands do not fit"));
            }
            let whole = !self.draft.ty(p.value).dtype.is_float();
            let p = if float && whole { self.float(n, &p)? } else { p };
            joined = Some(match joined {
                None => p,
                Some(a) => self.joined(n, a, p, d)?,
            });
        }
        joined.ok_or_else(|| self.refuse(n, "it has no operands"))
    }

    fn joined(&mut self, n: &Node, a: View, b: View, d: usize) -> Result<View> {
        // Both have the same dims in the same order, that of `d` last.
        let alike = a == b;
        let (mut a, mut b) = (self.settled(n, &a)?, self.settled(n, &b)?);
        if a.dims != b.dims || !matches!(a.dims[d], Dim::Real(_)) {
            let of = |v: &View| (0..v.dims.len()).filter(|&i| v.dims[i] != Dim::Virtual).collect();
            let (own, other): (Vec<usize>, Vec<usize>) = (of(&a), of(&b));
            let both = [own, other, vec![d]].concat();
            a = self.with_real(n, &a, &both)?;
            b = if alike { a.clone() } else { self.with_real(n, &b, &both)? };
        }
        let Dim::Real(k) = a.dims[d] else { return Err(self.refuse(n, "a repeat is joined")) };
        let va = self.last(n, &mut a, d, k)?;
        let vb = if alike { va } else { self.in_order(n, &b, &a.letters(a.shape.len()))? };
        let size = a.shape[d] + b.shape[d];
        let v = match self.raised_concat(n, va, vb)? {
            Some(v) => v,
            None => self.emit(n, "joined", Concat::new(size), &[va, vb])?,
        };
        a.shape[d] = size;
        Ok(a.with(v))
    }
}

/// Lengths of pieces of so many elements each; of more than `most` the first ones.
fn pieces(size: usize, each: usize, most: usize) -> Vec<usize> {
    (0..size.div_ceil(each).min(most)).map(|i| each.min(size - i * each)).collect()
}
