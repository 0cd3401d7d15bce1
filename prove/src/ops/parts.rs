//! Some elements of a dim, elements among zeros, and operands one after the other.

use super::*;

/// Elements of a dim, at places.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Narrow(pub Places);

/// Elements of a dim at places among zeros.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Pad(pub Places);

/// Index i of a dim is index i + `start` of the operand, and 0 where there is none.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Shifted {
    pub dim: usize,
    pub start: i64,
}

/// Along a dim.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Concat(pub usize);

/// A tensor whose index along a dim is another one of the operand's; 0 where it is none.
fn from(
    x: &Tensor,
    shape: &[usize],
    dim: usize,
    index: impl Fn(usize) -> Option<usize>,
) -> Result<Vec<Tensor>, String> {
    Ok(vec![Tensor::from_fn(shape, |i| {
        let Some(at) = index(i[dim]).filter(|k| *k < x.shape[dim]) else { return 0 };
        let mut j = i.to_vec();
        j[dim] = at;
        x.at(&j)
    })])
}

impl Function for Narrow {
    fn name(&self) -> String {
        format!("narrow[{}]", self.0)
    }
    fn results(&self, x: &[&Tensor], shape: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        from(x[0], shape, self.0.dim, |i| Some(self.0.start + self.0.step * i))
    }
}

impl Function for Pad {
    fn name(&self) -> String {
        format!("widen[{}]", self.0)
    }
    fn results(&self, x: &[&Tensor], shape: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        from(x[0], shape, self.0.dim, |i| self.0.taken_at(i))
    }
}

impl Function for Shifted {
    fn name(&self) -> String {
        format!("shifted[dim={}; start={}]", self.dim, self.start)
    }
    fn results(&self, x: &[&Tensor], shape: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        from(x[0], shape, self.dim, |i| usize::try_from(i as i64 + self.start).ok())
    }
}

impl Function for Concat {
    fn name(&self) -> String {
        format!("concat[dim={}]", self.0)
    }
    fn results(&self, x: &[&Tensor], _: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        Ok(vec![Tensor::concat(self.0, x)])
    }
}

/// A dim of the first operand; one that is not named is its last.
pub(super) fn along(ins: &[&Type], dim: usize) -> Result<usize, String> {
    let rank = ins.first().map_or(0, |t| t.rank());
    let dim = if dim == usize::MAX { rank.checked_sub(1) } else { Some(dim) };
    let known = dim.filter(|d| *d < rank);
    known.ok_or_else(|| format!("a tensor of {rank} dims has no such dim"))
}

/// The place behind the last of `n` elements, so far apart.
fn end(start: usize, n: usize, step: usize) -> Option<usize> {
    match n {
        0 => Some(start),
        _some => (n - 1).checked_mul(step)?.checked_add(start)?.checked_add(1),
    }
}

/// True if `n` elements from `start` have places among `all`.
fn holds(start: usize, n: usize, step: usize, all: usize) -> bool {
    step > 0 && end(start, n, step).is_some_and(|e| e <= all)
}

/// What has no smaller form in a whole plan.
pub(super) const UNTIED: &str = "to make what it puts together or chooses smaller";

/// Letters of a part and of the whole.
const PART: Name = Name(b'p' - b'a');
const WHOLE: Name = Name(b'd' - b'a');

/// Elements that are only moved move back.
fn moved_back(back: impl Into<Fun>, at: &mut At) -> Result<Back, String> {
    let (d, shape) = (at.d()?, at.shape(0));
    Ok(vec![Some(at.s.apply(back, &[d], 0, &shape))])
}

impl Law for ops::Narrow {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        let &[rank] = ranks else { return None };
        Some(Cow::Owned(Rule::along(rank, self.dim.of(rank)?, &[WHOLE], PART)))
    }
    fn typing(&self) -> Option<Typing> {
        Some(MOVER)
    }
    fn along(&self, rank: usize) -> Option<usize> {
        self.dim.of(rank)
    }
    fn tied(&self, own: &[usize]) -> bool {
        matches!(own, &[d, p] if holds(self.start, p, self.step.0, d))
    }
    fn shrink(&mut self, small: &mut Small) {
        let along = small.along(self);
        let [d, p] = [0, 1].map(|i| small.letter(i, along));
        let rest = end(self.start, small.was(p), self.step.0).is_some_and(|end| small.was(d) > end);
        (self.start, self.step.0) = (self.start.min(1), self.step.0.min(2));
        let end = end(self.start, small.is(p), self.step.0).unwrap_or(1);
        small.set(d, end + usize::from(rest));
    }
    fn stays(&self) -> bool {
        true
    }
    fn function(&self, ins: &[&Type]) -> Result<Option<Fun>, String> {
        let ops::Narrow { sizes: _, start, dim, step } = self;
        let at = Places { dim: along(ins, dim.0)?, start: *start, step: step.0.max(1) };
        Ok(Some(Narrow(at).into()))
    }
    fn back(&self, at: &mut At) -> Result<Back, String> {
        match self.function(&at.types)? {
            Some(Fun::Narrow(Narrow(p))) => moved_back(Pad(p), at),
            _other => Err("elements of a dim".into()),
        }
    }
}

impl Law for ops::Pad {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        let &[rank] = ranks else { return None };
        Some(Cow::Owned(Rule::along(rank, self.dim.of(rank)?, &[PART], WHOLE)))
    }
    /// Zeros beside elements are neither the largest nor the smallest.
    fn typing(&self) -> Option<Typing> {
        Some(Typing { moves: false, ..MOVER })
    }
    fn along(&self, rank: usize) -> Option<usize> {
        self.dim.of(rank)
    }
    fn tied(&self, own: &[usize]) -> bool {
        let &[p, d] = own else { return false };
        let some = self.start < d as i64 && self.start.saturating_add(p as i64) > 0;
        let all = |start| holds(start, p, self.step.0, d);
        usize::try_from(self.start).is_ok_and(all) || self.step.0 == 1 && some
    }
    fn shrink(&mut self, small: &mut Small) {
        let along = small.along(self);
        let [p, d] = [0, 1].map(|i| small.letter(i, along));
        let ends = |start: i64, n: usize, step: usize| {
            let end = end(0, n, step).unwrap_or(1) as i64;
            end.saturating_add(start)
        };
        // What is beyond the last element, or how many of them are left out.
        let rest =
            (small.was(d) as i64).saturating_sub(ends(self.start, small.was(p), self.step.0));
        (self.start, self.step.0) = (self.start.clamp(-1, 1), self.step.0.min(2));
        let end = ends(self.start, small.is(p), self.step.0);
        // Of more than one element one may be left out.
        small.set(d, (end + rest.clamp(-1, 1)).max(self.start.max(0) + 1) as usize);
    }
    fn stays(&self) -> bool {
        true
    }
    /// All of the elements among zeros, or those that have a place.
    fn function(&self, ins: &[&Type]) -> Result<Option<Fun>, String> {
        let ops::Pad { sizes, start, dim, step } = self;
        let (dim, step) = (along(ins, dim.0)?, step.0.max(1));
        let (own, all) = (ins[0].dims[dim].size, sizes.0.first().map_or(0, |s| s.1));
        let at = usize::try_from(*start).ok();
        Ok(Some(match at.filter(|&a| end(a, own, step).is_some_and(|end| end <= all)) {
            Some(start) => Pad(Places { dim, start, step }).into(),
            None => Shifted { dim, start: -start }.into(),
        }))
    }
    fn back(&self, at: &mut At) -> Result<Back, String> {
        match self.function(&at.types)? {
            Some(Fun::Pad(Pad(p))) => moved_back(Narrow(p), at),
            Some(Fun::Shifted(Shifted { dim, start })) => {
                moved_back(Shifted { dim, start: -start }, at)
            }
            _other => Err("elements of a dim".into()),
        }
    }
}

impl Law for ops::Concat {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        let rank = *ranks.first().filter(|r| ranks.iter().all(|o| o == *r))?;
        // p, q, r, …, z, A, B, …
        let own: Vec<Name> = (0..ranks.len()).map(|i| Name(PART.0 + i as u8)).collect();
        Some(Cow::Owned(Rule::along(rank, self.dim.of(rank)?, &own, WHOLE)))
    }
    fn typing(&self) -> Option<Typing> {
        Some(MOVER)
    }
    fn along(&self, rank: usize) -> Option<usize> {
        self.dim.of(rank)
    }
    fn tied(&self, own: &[usize]) -> bool {
        matches!(own, [parts @ .., d] if parts.iter().sum::<usize>() == *d)
    }
    fn shrink(&mut self, small: &mut Small) {
        let (along, n) = (small.along(self), small.rule.ins.len());
        let all = (0..n).map(|i| small.is(small.letter(i, along))).sum();
        small.set(small.letter(n, along), all);
    }
    fn stays(&self) -> bool {
        true
    }
    fn function(&self, ins: &[&Type]) -> Result<Option<Fun>, String> {
        let ops::Concat { sizes: _, dim } = self;
        Ok(Some(Concat(along(ins, dim.0)?).into()))
    }
    fn back(&self, at: &mut At) -> Result<Back, String> {
        let d = at.d()?;
        let dim = self.dim.of(at.shape(0).len()).ok_or("a tensor without dims")?;
        let (mut start, mut back) = (0, vec![]);
        for i in 0..at.x.len() {
            let shape = at.shape(i);
            let part = Narrow(Places { dim, start, step: 1 });
            start += shape[dim];
            back.push(Some(at.s.apply(part, &[d], 0, &shape)));
        }
        Ok(back)
    }
}
