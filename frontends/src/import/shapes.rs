//! Ops that move elements: most of them choose dims of a [`View`] and write nothing.

use super::folded::Folded;
use super::graph::Elem;
use super::graph::{Arg, Node};
use super::lower::{Lower, Val, dim_of};
use super::view::{Dim, View, letter};
use shardc_ir::attr::Sizes;
use shardc_ir::diag::Result;
use shardc_ir::ops::{Concat, Expand, Narrow, Reshape, Transpose};
use shardc_ir::rule::Letter;

/// The letter of a size that is an attribute.
fn sized(c: char, n: usize) -> (Letter, usize) {
    (Letter(c as u8 - b'a'), n)
}

/// Dims of two shapes that hold the same elements: which of one are which of the other.
struct Group {
    from: std::ops::Range<usize>,
    to: std::ops::Range<usize>,
}

impl Lower<'_> {
    fn one(v: View) -> Result<Vec<Val>> {
        Ok(vec![Val::Data(v)])
    }

    fn dim(&self, n: &Node, name: &str, or: i64, rank: usize) -> Result<usize> {
        dim_of(self.int(n, name)?.unwrap_or(or), rank, self, n)
    }

    pub(super) fn same(&mut self, n: &Node) -> Result<Val> {
        self.data(n, "self").map(Val::Data)
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
        let to = self.expanded(n, &x.shape, &self.ints(n, "size")?)?;
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
        let to = self.resolved(n, &self.ints(n, key)?, x.shape.iter().product())?;
        self.reshaped(n, &x, &to).and_then(Self::one)
    }

    pub(super) fn flatten(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let rank = x.shape.len();
        let (a, b) = (self.dim(n, "start_dim", 0, rank)?, self.dim(n, "end_dim", -1, rank)?);
        let mut to = x.shape.clone();
        if a <= b {
            to.splice(a..=b, [x.shape[a..=b].iter().product()]);
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

    /// The view with our dims in the order of the archive's.
    pub(super) fn ordered(&mut self, n: &Node, x: &View) -> Result<View> {
        if x.is_ordered() {
            return Ok(x.clone());
        }
        let from = x.letters(x.shape.len());
        let mut to: Vec<char> = from.chars().collect();
        to.sort_unstable();
        let to: String = to.into_iter().collect();
        let rule = self.rule(n, &format!("{from}->{to}"), &[x.value])?;
        let v = self.emit(n, "turned", Transpose { rule }, &[x.value])?;
        let mut next = 0..;
        let dims = x.dims.iter().map(|d| match d {
            Dim::Real(_) => Dim::Real(next.next().unwrap_or(0)),
            Dim::Each(_, r) => Dim::Each(next.next().unwrap_or(0), *r),
            Dim::Virtual => Dim::Virtual,
        });
        Ok(View { value: v, dims: dims.collect(), shape: x.shape.clone() })
    }

    /// The view with all its dims as dims of a value, in order.
    pub(super) fn whole(&mut self, n: &Node, x: &View) -> Result<View> {
        let mut x = self.settled(n, x)?;
        x = self.ordered(n, &x)?;
        // Dims that are repeats.
        let repeats: Vec<usize> =
            (0..x.shape.len()).filter(|&d| x.dims[d] == Dim::Virtual && x.shape[d] != 1).collect();
        if !repeats.is_empty() {
            let from = x.letters(x.shape.len());
            let both = |d: &usize| from.contains(letter(*d)) || repeats.contains(d);
            let to: String = (0..x.shape.len()).filter(both).map(letter).collect();
            let rule = self.rule(n, &format!("{from}->{to}"), &[x.value])?;
            let sizes = Sizes(repeats.iter().map(|&d| sized(letter(d), x.shape[d])).collect());
            let v = self.emit(n, "repeated", Expand { rule, sizes }, &[x.value])?;
            x = View::of(v, &to, x.shape.clone());
        }
        let ones = x.dims.contains(&Dim::Virtual);
        if !ones {
            return Ok(x);
        }
        // Dims of one element stand beside a neighbour.
        let (mut from, mut to, mut sizes) = (String::new(), String::new(), vec![]);
        let mut open = String::new();
        let last = (0..x.shape.len()).rev().find(|&d| x.dims[d] != Dim::Virtual);
        let Some(last) = last else {
            return Err(self.refuse(n, "a single number stands for a tensor"));
        };
        for d in 0..x.shape.len() {
            to.push(letter(d));
            open.push(letter(d));
            if x.dims[d] == Dim::Virtual {
                sizes.push(sized(letter(d), 1));
            } else if d == last && d + 1 < x.shape.len() {
                sizes.push(sized(letter(d), x.shape[d]));
                open.extend((d + 1..x.shape.len()).map(letter));
                to.extend((d + 1..x.shape.len()).map(letter));
                sizes.extend((d + 1..x.shape.len() - 1).map(|i| sized(letter(i), 1)));
            }
            if x.dims[d] != Dim::Virtual {
                from += &if open.len() > 1 { format!("({open})") } else { open.clone() };
                open.clear();
            }
            if d == last {
                break;
            }
        }
        let rule = self.rule(n, &format!("{from}->{to}"), &[x.value])?;
        let v = self.emit(n, "split", Reshape { rule, sizes: Sizes(sizes.into()) }, &[x.value])?;
        Ok(View::plain(v, &x.shape))
    }

    /// The view without repeats of single elements: they are written out.
    pub(super) fn settled(&mut self, n: &Node, x: &View) -> Result<View> {
        if !x.has_repeats() {
            return Ok(x.clone());
        }
        let mut y = View { value: x.value, dims: vec![], shape: vec![] };
        for (d, &dim) in x.dims.iter().enumerate() {
            match dim {
                Dim::Each(k, r) => {
                    y.dims.extend([Dim::Real(k), Dim::Virtual]);
                    y.shape.extend([x.shape[d] / r.max(1), r]);
                }
                _ => {
                    y.dims.push(dim);
                    y.shape.push(x.shape[d]);
                }
            }
        }
        let repeats: Vec<usize> = (0..y.shape.len()).filter(|&i| y.shape[i] > 1).collect();
        let full = self.with_real(n, &y, &repeats)?;
        self.reshaped(n, &full, &x.shape)
    }

    /// The view with these dims as dims of a value, too; all of its dims are in order then.
    fn with_real(&mut self, n: &Node, x: &View, dims: &[usize]) -> Result<View> {
        let stays = |i: &usize| x.dims[*i] != Dim::Virtual || dims.contains(i);
        let keep: Vec<usize> = (0..x.shape.len()).filter(stays).collect();
        let small = self.whole(n, &x.permute(&keep))?;
        let mut full =
            View { value: small.value, dims: vec![Dim::Virtual; x.shape.len()], ..x.clone() };
        for (k, &i) in keep.iter().enumerate() {
            full.dims[i] = Dim::Real(k);
        }
        Ok(full)
    }

    /// The view without dims of a value that have one element here and more in `shape`, to which it is
    /// spread.
    pub(super) fn thinned(&mut self, n: &Node, x: &View, shape: &[usize]) -> Result<View> {
        let off = shape.len() - x.shape.len();
        let thin = |d: &usize| {
            matches!(x.dims[*d], Dim::Real(_)) && x.shape[*d] == 1 && shape[off + d] > 1
        };
        let thin: Vec<usize> = (0..x.shape.len()).filter(thin).collect();
        if thin.is_empty() {
            return Ok(x.clone());
        }
        let keep: Vec<usize> = (0..x.shape.len()).filter(|d| !thin.contains(d)).collect();
        let sizes: Vec<usize> = keep.iter().map(|&d| x.shape[d]).collect();
        let mut y = self.reshaped(n, x, &sizes)?;
        thin.iter().for_each(|&d| y = y.unsqueeze(d));
        Ok(y)
    }

    /// The same elements in the same order as another shape of as many.
    pub(super) fn reshaped(&mut self, n: &Node, x: &View, to: &[usize]) -> Result<View> {
        if x.shape == to {
            return Ok(x.clone());
        }
        let groups = self.groups(n, x, to)?;
        if let Some(dims) = kept(x, to, &groups) {
            return Ok(View { value: x.value, dims, shape: to.to_vec() });
        }
        let x = self.ordered(n, x)?;
        let repeats = groups.iter().any(|g| {
            let many = g.from.len() > 1 || g.to.len() > 1;
            many && g.from.clone().any(|d| x.dims[d] == Dim::Virtual && x.shape[d] > 1)
        });
        let x = if repeats || x.has_repeats() { self.whole(n, &x)? } else { x };
        self.rewritten(n, &x, to)
    }

    /// A reshape as an op.
    fn rewritten(&mut self, n: &Node, x: &View, to: &[usize]) -> Result<View> {
        let groups = self.groups(n, x, to)?;
        let (mut from, mut mid, mut out) = (String::new(), String::new(), String::new());
        let (mut join, mut split) = (vec![], vec![]);
        let mut dims = vec![Dim::Virtual; to.len()];
        // Letters of the operand, then those of the result where they differ.
        let mut fresh = (x.shape.len()..26).map(letter);
        let mut next = 0..;
        let mut two = false;
        for g in &groups {
            let real: Vec<usize> = g.from.clone().filter(|&d| x.dims[d] != Dim::Virtual).collect();
            let mut made: Vec<usize> = g.to.clone().filter(|&d| to[d] != 1).collect();
            if made.is_empty() && !real.is_empty() {
                // A dim of one element stays one, or is lost in a neighbour.
                made.extend(g.to.clone().next());
            }
            let own: String = real.iter().map(|&d| letter(d)).collect();
            for &d in &made {
                dims[d] = Dim::Real(next.next().unwrap_or(0));
            }
            match (real.len(), made.len()) {
                (0, _) => {}
                (1, 1) => [&mut from, &mut mid, &mut out].into_iter().for_each(|s| *s += &own),
                (_, 1) => {
                    from += &own;
                    mid += &format!("({own})");
                    out += &format!("({own})");
                    join.extend(
                        real[..real.len() - 1].iter().map(|&d| sized(letter(d), x.shape[d])),
                    );
                }
                (1, _) => {
                    let parts: String = fresh.by_ref().take(made.len()).collect();
                    from += &format!("({parts})");
                    mid += &format!("({parts})");
                    out += &parts;
                    let major = parts.chars().zip(&made).take(made.len().saturating_sub(1));
                    split.extend(major.map(|(c, &d)| sized(c, to[d])));
                }
                _ => two = true,
            }
        }
        if two {
            return self.through_one(n, x, to);
        }
        let rule = self.rule(n, &format!("{from}->{out}"), &[x.value])?;
        join.extend(split);
        let v = self.emit(n, "shaped", Reshape { rule, sizes: Sizes(join.into()) }, &[x.value])?;
        Ok(View { value: v, dims, shape: to.to_vec() })
    }

    /// Groups of several dims that become several others: first joined, then split.
    fn through_one(&mut self, n: &Node, x: &View, to: &[usize]) -> Result<View> {
        let mut mid = vec![];
        for g in self.groups(n, x, to)? {
            match g.from.len() > 1 && g.to.len() > 1 {
                true => mid.push(x.shape[g.from].iter().product()),
                false => mid.extend_from_slice(&to[g.to]),
            }
        }
        if mid == to || mid == x.shape {
            return Err(self.refuse(n, &format!("{:?} does not become {to:?}", x.shape)));
        }
        let x = self.reshaped(n, x, &mid)?;
        self.reshaped(n, &x, to)
    }

    /// Runs of dims with as many elements on both sides, as short as they can be.
    fn groups(&self, n: &Node, x: &View, to: &[usize]) -> Result<Vec<Group>> {
        let bad = || self.refuse(n, &format!("{:?} does not become {to:?}", x.shape));
        let from = &x.shape;
        let (mut i, mut j, mut out) = (0, 0, vec![]);
        while i < from.len() || j < to.len() {
            let (a, b) = (i, j);
            // Dims of one element that nothing pairs with.
            if from.get(i) == Some(&1) && x.dims[i] == Dim::Virtual && to.get(j) != Some(&1) {
                i += 1;
                out.push(Group { from: a..i, to: b..j });
                continue;
            }
            if to.get(j) == Some(&1) && from.get(i) != Some(&1) {
                j += 1;
                out.push(Group { from: a..i, to: b..j });
                continue;
            }
            let mut p = *from.get(i).ok_or_else(bad)?;
            let mut q = *to.get(j).ok_or_else(bad)?;
            (i, j) = (i + 1, j + 1);
            while p != q {
                let (more, at, of) =
                    if p < q { (&mut p, &mut i, &from[..]) } else { (&mut q, &mut j, to) };
                *more = of.get(*at).and_then(|d| more.checked_mul(*d)).ok_or_else(bad)?;
                *at += 1;
            }
            out.push(Group { from: a..i, to: b..j });
        }
        Ok(out)
    }

    pub(super) fn slice(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let d = self.dim(n, "dim", 0, x.shape.len())?;
        let (start, len, step) = self.range(n, x.shape[d])?;
        if (start, len, step) == (0, x.shape[d], 1) {
            return Self::one(x);
        }
        let is_head = x.shape.len() == 3 && d == 1 && (start, step) == (0, 1);
        if is_head && x.shape[..2] == [self.sizes.rows, self.sizes.seq] && len + 1 == x.shape[1] {
            let mut whole = self.whole(n, &x)?;
            whole.shape[1] = len;
            return Ok(vec![Val::Head(whole)]);
        }
        if step != 1 {
            return Err(self.refuse(n, "every second element and the like cannot be taken"));
        }
        self.narrowed(n, &x, d, start, len).and_then(Self::one)
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
        if len == 0 {
            return Err(self.refuse(n, "nothing is left of a dim"));
        }
        let Dim::Real(k) = x.dims[d] else {
            x.shape[d] = len;
            return Ok(x);
        };
        if (start, len) == (0, x.shape[d]) {
            return Ok(x);
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
        let rule = self.rule(n, &format!("{from}->{to}"), &[x.value])?;
        let v = self.emit(n, "turned", Transpose { rule }, &[x.value])?;
        *x = View::of(v, &to, x.shape.clone());
        Ok(v)
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
        let lens =
            match (by, self.ints(n, by)?.first().copied().and_then(|i| usize::try_from(i).ok())) {
                ("split_sizes", _) => {
                    let all = self.ints(n, by)?;
                    all.into_iter().map(|i| usize::try_from(i).unwrap_or(0)).collect()
                }
                ("chunks", Some(c)) if c > 0 => pieces(size, size.div_ceil(c).max(1)),
                (_, Some(s)) if s > 0 => pieces(size, s),
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
            parts.push(self.data_of(n, *id)?);
        }
        let Some(first) = parts.first().cloned() else {
            return Err(self.refuse(n, "it has no operands"));
        };
        let d = self.dim(n, "dim", 0, first.shape.len())?;
        let mut joined: Option<View> = None;
        for p in parts {
            let alike = p.shape.len() == first.shape.len()
                && (0..p.shape.len()).all(|i| i == d || p.shape[i] == first.shape[i]);
            if !alike {
                return Err(self.refuse(n, "its operands do not fit"));
            }
            joined = Some(match joined {
                None => p,
                Some(a) => self.joined(n, a, p, d)?,
            });
        }
        joined.map_or_else(|| Err(self.refuse(n, "it has no operands")), Self::one)
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
        let vb = if alike { va } else { self.last(n, &mut b, d, k)? };
        let size = a.shape[d] + b.shape[d];
        let v = match self.raised_concat(n, va, vb)? {
            Some(v) => v,
            None => self.emit(n, "joined", Concat::new(size), &[va, vb])?,
        };
        a.shape[d] = size;
        Ok(a.with(v))
    }
}

/// The dims of a reshape that writes no op: at most dims of one element come and go, and repeats of a dim
/// become one with it, as those of keys and values for groups of heads.
fn kept(x: &View, to: &[usize], groups: &[Group]) -> Option<Vec<Dim>> {
    let mut dims = vec![Dim::Virtual; to.len()];
    for g in groups {
        let real: Vec<usize> =
            g.from.clone().filter(|&d| x.dims[d] != Dim::Virtual || x.shape[d] > 1).collect();
        let made: Vec<usize> = g.to.clone().filter(|&d| to[d] != 1).collect();
        match (&real[..], &made[..]) {
            ([], []) => {}
            ([a], [b]) => dims[*b] = x.dims[*a],
            ([a], []) if x.shape[*a] == 1 => dims[g.to.clone().next()?] = x.dims[*a],
            ([a, r], [b]) => match (x.dims[*a], x.dims[*r]) {
                (Dim::Real(k), Dim::Virtual) => dims[*b] = Dim::Each(k, x.shape[*r]),
                _ => return None,
            },
            _ => return None,
        }
    }
    Some(dims)
}

/// Lengths of pieces of so many elements each.
fn pieces(size: usize, each: usize) -> Vec<usize> {
    (0..size.div_ceil(each)).map(|i| each.min(size - i * each)).collect()
}
