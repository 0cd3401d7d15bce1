//! Tensors whose numbers are known when a model is imported: sizes, ranges, masks, tables. A dim along
//! which nothing changes takes no room, so a mask of all rows is that of one.

use super::graph::Elem;
use super::room::{self, MAX_LISTED, Numbers};
use std::rc::Rc;

/// What a row costs beside its numbers, as so many of them.
const ROW: usize = 8;

/// A tensor of known numbers.
#[derive(Clone, Debug)]
pub(super) struct Folded {
    pub elem: Elem,
    pub shape: Vec<usize>,
    strides: Vec<usize>,
    offset: usize,
    data: Rc<Numbers>,
}

impl Folded {
    /// True if both are the same tensor in memory.
    pub fn is(&self, o: &Folded) -> bool {
        let of = |f: &Folded| (f.elem, f.offset);
        let same = of(self) == of(o) && self.shape == o.shape && self.strides == o.strides;
        same && Rc::ptr_eq(&self.data, &o.data)
    }
}

fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut next = 1;
    let mut s: Vec<usize> = shape
        .iter()
        .rev()
        .map(|&n| {
            let own = if n == 1 { 0 } else { next };
            next *= n;
            own
        })
        .collect();
    s.reverse();
    s
}

impl Folded {
    /// A tensor of these numbers, row-major, as many as the shape has; nothing if they are too many to be stored.
    pub fn new(
        elem: Elem,
        shape: &[usize],
        numbers: impl IntoIterator<Item = f64>,
    ) -> Option<Folded> {
        let n = room::elements(shape).map(|_| room::count(shape))?;
        room::make(elem, n)?;
        let mut data = Numbers::with_room(elem, n);
        numbers.into_iter().for_each(|x| data.push(x));
        assert_eq!(data.len(), n, "as many numbers as elements");
        Some(Folded::of(elem, shape, shape, data))
    }

    /// Numbers that have all dims of `core`, and one for all where a dim of the shape is larger.
    fn of(elem: Elem, shape: &[usize], core: &[usize], data: Numbers) -> Folded {
        let (shape, strides) = (shape.to_vec(), row_major(core));
        Folded { elem, shape, strides, offset: 0, data: Rc::new(data) }
    }

    /// One number everywhere.
    pub fn full(elem: Elem, shape: &[usize], x: f64) -> Folded {
        let mut one = Numbers::with_room(elem, 1);
        one.push(x);
        Folded::of(elem, shape, &vec![1; shape.len()], one)
    }

    /// 0, 1, 2, … as integers; nothing if they are too many.
    pub fn iota(n: usize) -> Option<Folded> {
        Folded::new(Elem::Int, &[n], (0..n).map(|i| i as f64))
    }

    pub fn elements(&self) -> usize {
        room::count(&self.shape)
    }

    /// True if elements do not depend on the index of this dim.
    pub fn is_same_along(&self, dim: usize) -> bool {
        self.strides[dim] == 0 || self.shape[dim] == 1
    }

    pub fn at(&self, index: &[usize]) -> f64 {
        let at = index.iter().zip(&self.strides).map(|(i, s)| i * s).sum::<usize>();
        self.data.get(self.offset + at)
    }

    /// The number, if all elements are the same one.
    pub fn scalar(&self) -> Option<f64> {
        let same = (0..self.shape.len()).all(|d| self.is_same_along(d));
        (same && self.elements() > 0).then(|| self.data.get(self.offset))
    }

    /// True if all elements are the same number, whether or not they are stored once.
    pub fn is_one_number(&self) -> bool {
        let Some(first) = self.first() else { return false };
        let core = self.varying(&[self]);
        // What is too much work to know is not said to be so.
        if room::work(room::count(&core)).is_none() {
            return false;
        }
        let mut same = true;
        runs(&core, &[self], |[x], n| same &= (0..n).all(|i| x.get(i) == first));
        same
    }

    /// The first number, if there is one.
    pub fn first(&self) -> Option<f64> {
        (self.elements() > 0).then(|| self.data.get(self.offset))
    }

    /// All numbers, row-major; nothing if they are too many for a list.
    pub fn numbers(&self) -> Option<Vec<f64>> {
        let n = Some(self.elements()).filter(|&n| n <= MAX_LISTED)?;
        room::work(n + ROW * (1 + n / self.shape.last().map_or(1, |&d| d.max(1))))?;
        let mut out = Vec::with_capacity(n);
        runs(&self.shape, &[self], |[x], n| out.extend((0..n).map(|i| x.get(i))));
        Some(out)
    }

    /// The numbers as another type has them.
    pub fn cast(&self, elem: Elem) -> Option<Folded> {
        if elem == self.elem { Some(self.clone()) } else { self.map(elem, |x| x) }
    }

    /// A function of each element; nothing if there are too many.
    pub fn map(&self, elem: Elem, f: impl Fn(f64) -> f64) -> Option<Folded> {
        let (mut out, core) = self.core(&[self], elem)?;
        runs(&core, &[self], |[x], n| (0..n).for_each(|i| out.push(f(x.get(i)))));
        Some(Folded::of(elem, &self.shape, &core, out))
    }

    /// A function of two elements, whose dims are spread from the right; nothing if they do not fit or are
    /// too many.
    pub fn zip(&self, o: &Folded, elem: Elem, f: impl Fn(f64, f64) -> f64) -> Option<Folded> {
        let shape = spread(&self.shape, &o.shape)?;
        let (a, b) = (self.expand(&shape)?, o.expand(&shape)?);
        let (mut out, core) = a.core(&[&a, &b], elem)?;
        runs(&core, &[&a, &b], |[x, y], n| (0..n).for_each(|i| out.push(f(x.get(i), y.get(i)))));
        Some(Folded::of(elem, &shape, &core, out))
    }

    /// Per element the one of `a` or `b` that this mask chooses.
    pub fn choose(&self, a: &Folded, b: &Folded) -> Option<Folded> {
        let elem = if a.elem == Elem::Float || a.elem == Elem::Double { a.elem } else { b.elem };
        let shape = spread(&spread(&self.shape, &a.shape)?, &b.shape)?;
        let [m, a, b] = [self, a, b].map(|t| t.expand(&shape));
        let (m, a, b) = (m?, a?, b?);
        let (mut out, core) = m.core(&[&m, &a, &b], elem)?;
        runs(&core, &[&m, &a, &b], |[m, x, y], n| {
            (0..n).for_each(|i| out.push(if m.get(i) != 0.0 { x.get(i) } else { y.get(i) }));
        });
        Some(Folded::of(elem, &shape, &core, out))
    }

    /// The shape without the dims along which nothing changes in any of these, which are of this shape.
    fn varying(&self, all: &[&Folded]) -> Vec<usize> {
        let same = |d: usize| all.iter().all(|t| t.is_same_along(d));
        let dims = self.shape.iter().enumerate();
        dims.map(|(d, &n)| if same(d) && n > 0 { 1 } else { n }).collect()
    }

    /// The shape of what must be stored of a result of operands of one shape, and room for it.
    fn core(&self, all: &[&Folded], elem: Elem) -> Option<(Numbers, Vec<usize>)> {
        let core = self.varying(all);
        let n = room::elements(&core).map(|_| room::count(&core))?;
        room::make(elem, n)?;
        // A row costs as much as some numbers, however short it is.
        room::work(ROW * (n / core.last().map_or(1, |&d| d.max(1))))?;
        Some((Numbers::with_room(elem, n), core))
    }

    /// Repeated to a larger shape, as in `expand`; nothing if it does not fit.
    pub fn expand(&self, shape: &[usize]) -> Option<Folded> {
        let more = shape.len().checked_sub(self.shape.len())?;
        let mut strides = vec![0; more];
        for (d, &n) in self.shape.iter().enumerate() {
            if n != shape[more + d] && n != 1 {
                return None;
            }
            strides.push(if n == 1 { 0 } else { self.strides[d] });
        }
        Some(Folded { shape: shape.to_vec(), strides, ..self.clone() })
    }

    /// Dims in another order.
    pub fn permute(&self, order: &[usize]) -> Folded {
        let shape = order.iter().map(|&d| self.shape[d]).collect();
        let strides = order.iter().map(|&d| self.strides[d]).collect();
        Folded { shape, strides, ..self.clone() }
    }

    pub fn unsqueeze(&self, dim: usize) -> Folded {
        let mut t = self.clone();
        t.shape.insert(dim, 1);
        t.strides.insert(dim, 0);
        t
    }

    /// Without a dim, of which index `i` is taken.
    pub fn select(&self, dim: usize, i: usize) -> Folded {
        let mut t = self.clone();
        t.offset += i * t.strides[dim];
        t.shape.remove(dim);
        t.strides.remove(dim);
        t
    }

    /// `len` elements of a dim, each `step` behind the last, from `start`.
    pub fn slice(&self, dim: usize, start: usize, len: usize, step: usize) -> Folded {
        let mut t = self.clone();
        if len > 0 {
            t.offset += start * t.strides[dim];
        }
        t.shape[dim] = len;
        // A step may be larger than the dim, of which then one element is left.
        t.strides[dim] = if len > 1 { t.strides[dim] * step } else { 0 };
        t
    }

    /// The same elements in the same order; nothing if the shape has another number of them.
    pub fn reshape(&self, shape: &[usize]) -> Option<Folded> {
        room::elements(shape)?;
        if room::count(shape) != self.elements() {
            return None;
        }
        if let Some(x) = self.scalar() {
            return Some(Folded::full(self.elem, shape, x));
        }
        // Leading dims that stay may be of any stride.
        let kept = self.shape.iter().zip(shape).take_while(|(a, b)| a == b).count();
        let inner = Folded {
            shape: self.shape[kept..].to_vec(),
            strides: self.strides[kept..].to_vec(),
            ..self.clone()
        };
        if kept > 0 && (0..kept).all(|d| self.is_same_along(d)) {
            let rest = inner.reshape(&shape[kept..])?;
            return rest.expand(shape);
        }
        room::make(self.elem, self.elements())?;
        let mut out = Numbers::with_room(self.elem, self.elements());
        runs(&self.shape, &[self], |[x], n| (0..n).for_each(|i| out.push(x.get(i))));
        Some(Folded::of(self.elem, shape, shape, out))
    }

    /// The same numbers; along a dim where they do not change it takes no room.
    pub fn squashed(self, dim: usize) -> Folded {
        if dim >= self.shape.len() || self.is_same_along(dim) {
            return self;
        }
        if self.elements() == 0 {
            return self;
        }
        let Some(first) = self.select(dim, 0).numbers() else { return self };
        let alike = |i| self.select(dim, i).numbers().is_some_and(|own| own == first);
        match (1..self.shape[dim]).all(alike) {
            true => {
                let shape = self.shape.clone();
                self.slice(dim, 0, 1, 1).expand(&shape).unwrap_or(self)
            }
            false => self,
        }
    }

    /// Sums of all elements of a dim up to each.
    pub fn cumsum(&self, dim: usize) -> Option<Folded> {
        let mut shape = self.shape.clone();
        let others = (0..shape.len()).filter(|&d| d != dim && self.is_same_along(d));
        others.for_each(|d| shape[d] = shape[d].min(1));
        let elem = if self.elem == Elem::Bool { Elem::Int } else { self.elem };
        let small = Folded { shape: shape.clone(), ..self.clone() };
        let mut x = small.numbers()?;
        let step = room::count(&shape[dim + 1..]);
        for i in 0..x.len() {
            if step > 0 && (i / step) % shape[dim] > 0 {
                x[i] += x[i - step];
            }
        }
        Folded::new(elem, &shape, x)?.expand(&self.shape)
    }

    /// One after the other along a dim.
    pub fn concat(all: &[Folded], dim: usize) -> Option<Folded> {
        let first = all.first()?;
        let mut shape = first.shape.clone();
        let alike = |t: &Folded| {
            t.shape.len() == shape.len()
                && (0..shape.len()).all(|d| d == dim || t.shape[d] == shape[d])
        };
        if dim >= shape.len() || !all.iter().all(alike) {
            return None;
        }
        shape[dim] = all.iter().map(|t| t.shape[dim]).try_fold(0usize, usize::checked_add)?;
        let n = room::elements(&shape).map(|_| room::count(&shape)).filter(|&n| n <= MAX_LISTED)?;
        room::make(first.elem, n)?;
        let rows = room::count(&shape[..dim]);
        let parts: Vec<Vec<f64>> = all.iter().map(Folded::numbers).collect::<Option<_>>()?;
        let mut out = Numbers::with_room(first.elem, n);
        for r in 0..rows {
            for p in &parts {
                let own = p.len() / rows;
                p[r * own..(r + 1) * own].iter().for_each(|&x| out.push(x));
            }
        }
        Some(Folded::of(first.elem, &shape, &shape, out))
    }

    /// Where counting along a dim starts: `Some(c)` if element `i` of `dim` is
    /// `c + i`, whatever the other indices are.
    pub fn counts_from(&self, dim: usize) -> Option<f64> {
        if (0..self.shape.len()).any(|d| d != dim && !self.is_same_along(d)) {
            return None;
        }
        let mut index = vec![0; self.shape.len()];
        let first = (self.shape[dim] > 0).then(|| self.at(&index))?;
        // Nothing counts along a dim where nothing changes.
        if self.is_same_along(dim) && self.shape[dim] > 1 {
            return None;
        }
        room::work(self.shape[dim])?;
        for i in 0..self.shape[dim] {
            index[dim] = i;
            if self.at(&index) != first + i as f64 {
                return None;
            }
        }
        Some(first)
    }
}

/// The elements of one row.
#[derive(Clone, Copy)]
struct Row<'a> {
    data: &'a Numbers,
    from: usize,
    step: usize,
}

impl Row<'_> {
    fn get(&self, i: usize) -> f64 {
        self.data.get(self.from + i * self.step)
    }
}

/// Calls `f` with each row of operands of one shape, whose dims `core` cuts to 1 where they do not change.
fn runs<'a, const N: usize>(
    core: &[usize],
    all: &[&'a Folded; N],
    mut f: impl FnMut([Row<'a>; N], usize),
) {
    if core.contains(&0) {
        return;
    }
    let (last, outer) = core.split_last().map_or((1, core), |(n, o)| (*n, o));
    let mut index = vec![0; outer.len()];
    loop {
        let row = |t: &&'a Folded| Row {
            data: &t.data,
            from: t.offset + index.iter().zip(&t.strides).map(|(i, s)| i * s).sum::<usize>(),
            step: t.strides.last().copied().unwrap_or(0),
        };
        f(std::array::from_fn(|i| row(&all[i])), last);
        let Some(d) = (0..outer.len()).rev().find(|&d| index[d] + 1 < outer[d]) else { return };
        index[d] += 1;
        index[d + 1..].fill(0);
    }
}

/// The shape of two operands together, dims counted from the right.
pub(super) fn spread(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let n = a.len().max(b.len());
    let size = |s: &[usize], d: usize| (d + s.len()).checked_sub(n).map_or(1, |i| s[i]);
    let both = |d| match (size(a, d), size(b, d)) {
        (x, y) if x == y || y == 1 => Some(x),
        (1, y) => Some(y),
        _ => None,
    };
    (0..n).map(both).collect()
}
