//! Views as values: dims in order, virtual dims made real, and elements in another shape.

use super::folded::Folded;
use super::graph::{Arg, Node};
use super::lower::Lower;
use super::operands::dim_of;
use super::room;
use super::view::{Dim, View, letter};
use shardc_ir::attr::Sizes;
use shardc_ir::diag::Result;
use shardc_ir::func::Value;
use shardc_ir::ops::{Expand, Fill, Reshape, Transpose};
use shardc_ir::rule::Letter;
use shardc_ir::types::{DType, Type};

/// The letter of a size that is an attribute.
pub(super) fn sized(c: char, n: usize) -> (Letter, usize) {
    (Letter(c as u8 - b'a'), n)
}

/// Dims of two shapes that hold the same elements: which of one are which of the other.
struct Group {
    from: std::ops::Range<usize>,
    to: std::ops::Range<usize>,
}

impl Lower<'_> {
    /// Without dims of size 1: those that are named, or all.
    pub(super) fn fold_squeeze(&self, n: &Node, x: Folded) -> Result<Folded> {
        let rank = x.shape.len();
        let mut at: Vec<usize> = match n.arg("dim") {
            Arg::None => (0..rank).collect(),
            Arg::Ints(_) => {
                let all = self.ints(n, "dim")?.into_iter();
                all.map(|d| dim_of(d, rank, self, n)).collect::<Result<_>>()?
            }
            _ => vec![dim_of(self.int(n, "dim")?.unwrap_or(0), rank, self, n)?],
        };
        at.retain(|&d| x.shape[d] == 1);
        at.sort_unstable_by(|a, b| b.cmp(a));
        at.dedup();
        Ok(at.into_iter().fold(x, |x, d| x.select(d, 0)))
    }

    /// One number as a value of a shape.
    pub(super) fn everywhere(
        &mut self,
        n: &Node,
        value: f64,
        dtype: DType,
        shape: &[usize],
    ) -> Result<Value> {
        let ty = Type::new(dtype, &[]);
        let one = self.emit_n(n, &["number"], Fill { value }, &[], Some(&ty))?[0];
        let to: String = (0..shape.len()).map(letter).collect();
        let rule = self.rule(n, &format!("->{to}"), &[one])?;
        let sizes = Sizes(shape.iter().enumerate().map(|(d, &s)| sized(letter(d), s)).collect());
        self.emit(n, "numbers", Expand { rule, sizes }, &[one])
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
            // A single number stands for a tensor.
            let to: String = (0..x.shape.len()).map(letter).collect();
            let rule = self.rule(n, &format!("->{to}"), &[x.value])?;
            let sizes = Sizes(to.chars().map(|c| sized(c, 1)).collect());
            let v = self.emit(n, "number", Expand { rule, sizes }, &[x.value])?;
            return Ok(View::plain(v, &x.shape));
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
        let out = self.reshaped(n, &full, &x.shape)?;
        if let Some(Dim::Each(1, 2)) = x.dims.last()
            && x.is_ordered()
            && self.rank(x.value) == 2
        {
            self.pairs.insert(out.value, x.value);
        }
        Ok(out)
    }

    /// The view with these dims as dims of a value, too: beside the dim that they follow, so that nothing is
    /// moved.
    pub(super) fn with_real(&mut self, n: &Node, x: &View, dims: &[usize]) -> Result<View> {
        let stays = |i: &usize| x.dims[*i] != Dim::Virtual || dims.contains(i);
        let mut keep: Vec<usize> = (0..x.shape.len()).filter(stays).collect();
        let mut before = 0;
        let mut place = vec![0; x.shape.len()];
        for (p, d) in place.iter_mut().zip(&x.dims) {
            if let Dim::Real(k) | Dim::Each(k, _) = d {
                before = k + 1;
            }
            *p = before;
        }
        keep.sort_by_key(|&i| (place[i], i));
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
        if room::count(&x.shape) == 1 && x.real() > 0 && room::count(shape) > 1 {
            let all: Vec<usize> = (0..x.shape.len()).collect();
            return self.sum_over(n, x, &all, true);
        }
        let off = shape.len() - x.shape.len();
        let thin = |d: &usize| {
            matches!(x.dims[*d], Dim::Real(_)) && x.shape[*d] == 1 && shape[off + d] > 1
        };
        let thin: Vec<usize> = (0..x.shape.len()).filter(thin).collect();
        if thin.is_empty() {
            return Ok(x.clone());
        }
        // What does not change along a dim has none of the value's dims in another shape either.
        let real: Vec<usize> = (0..x.dims.len()).filter(|&d| x.dims[d] != Dim::Virtual).collect();
        let dims = real.iter().map(|&d| x.dims[d]).collect();
        let shape = real.iter().map(|&d| x.shape[d]).collect();
        let small = View { value: x.value, dims, shape };
        let keep: Vec<usize> = real.into_iter().filter(|d| !thin.contains(d)).collect();
        let sizes: Vec<usize> = keep.iter().map(|&d| x.shape[d]).collect();
        let mut y = self.reshaped(n, &small, &sizes)?;
        for d in (0..x.dims.len()).filter(|d| !keep.contains(d)) {
            y.dims.insert(d, Dim::Virtual);
            y.shape.insert(d, x.shape[d]);
        }
        Ok(y)
    }

    /// The same elements in the same order as another shape of as many.
    pub(super) fn reshaped(&mut self, n: &Node, x: &View, to: &[usize]) -> Result<View> {
        if x.shape == to {
            return Ok(x.clone());
        }
        // One element is a number.
        if to.is_empty() && x.real() > 0 && room::count(&x.shape) == 1 {
            let all: Vec<usize> = (0..x.shape.len()).collect();
            return self.sum_over(n, x, &all, false);
        }
        // Back to what it was made of.
        if let Some(before) = self.before.get(&x.value).filter(|b| b.shape == to && x.is_plain()) {
            return Ok(before.clone());
        }
        let groups = self.groups(n, x, to)?;
        if let Some(dims) = kept(x, to, &groups) {
            return Ok(View { value: x.value, dims, shape: to.to_vec() });
        }
        let repeats = groups.iter().any(|g| {
            let many = g.from.len() > 1 || g.to.len() > 1;
            many && g.from.clone().any(|d| x.dims[d] == Dim::Virtual && x.shape[d] > 1)
        });
        let own = x;
        let x = match repeats || x.has_repeats() {
            true => self.whole(n, x)?,
            false if self.runs_of(x, &groups).is_none() => self.ordered(n, x)?,
            false => x.clone(),
        };
        let y = self.rewritten(n, &x, to)?;
        if y.is_plain() && own.real() == own.shape.len() && !own.has_repeats() {
            self.before.insert(y.value, own.clone());
        }
        Ok(y)
    }

    /// The groups with dims of ours, in the order of these; nothing if those of a group are apart.
    fn runs_of<'g>(&self, x: &View, groups: &'g [Group]) -> Option<Vec<(&'g Group, Vec<usize>)>> {
        let mut all = vec![];
        for g in groups {
            let real: Vec<(usize, usize)> = g
                .from
                .clone()
                .filter_map(|d| if let Dim::Real(k) = x.dims[d] { Some((k, d)) } else { None })
                .collect();
            if real.windows(2).any(|w| w[0].0 + 1 != w[1].0) {
                return None;
            }
            if let Some(first) = real.first() {
                all.push((first.0, g, real.iter().map(|r| r.1).collect()));
            }
        }
        all.sort_by_key(|r: &(usize, &Group, Vec<usize>)| r.0);
        Some(all.into_iter().map(|(_, g, real)| (g, real)).collect())
    }

    /// A reshape as an op.
    fn rewritten(&mut self, n: &Node, x: &View, to: &[usize]) -> Result<View> {
        let groups = self.groups(n, x, to)?;
        let runs = self.runs_of(x, &groups);
        let runs = runs.ok_or_else(|| self.refuse(n, "its dims are apart"))?;
        let (mut from, mut out) = (String::new(), String::new());
        let (mut join, mut split) = (vec![], vec![]);
        let mut dims = vec![Dim::Virtual; to.len()];
        // Letters of the operand, then those of the result where they differ.
        let mut fresh = (x.shape.len()..26).map(letter);
        let mut next = 0..;
        let mut two = false;
        for (g, real) in runs {
            let mut made: Vec<usize> = g.to.clone().filter(|&d| to[d] != 1).collect();
            if made.is_empty() {
                // A dim of one element stays one, or is lost in a neighbour.
                made.extend(g.to.clone().next());
            }
            let own: String = real.iter().map(|&d| letter(d)).collect();
            for &d in &made {
                dims[d] = Dim::Real(next.next().unwrap_or(0));
            }
            match (real.len(), made.len()) {
                (1, 1) => [&mut from, &mut out].into_iter().for_each(|s| *s += &own),
                (_, 1) => {
                    from += &own;
                    out += &format!("({own})");
                    let major = &real[..real.len() - 1];
                    join.extend(major.iter().map(|&d| sized(letter(d), x.shape[d])));
                }
                (1, _) => {
                    let parts: String = fresh.by_ref().take(made.len()).collect();
                    from += &format!("({parts})");
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
                true => mid.push(room::count(&x.shape[g.from])),
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
            // Dims of one element that nothing pairs with are lost in the group before them.
            while from.get(i) == Some(&1) && x.dims[i] != Dim::Virtual && to.get(j) != Some(&1) {
                i += 1;
            }
            out.push(Group { from: a..i, to: b..j });
        }
        Ok(out)
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
