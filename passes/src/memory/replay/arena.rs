//! Who wrote which bytes of an arena last.

use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Bytes from one to before another.
pub(super) type Span = (usize, usize);

/// Ranges with the stamp of who wrote them last.
#[derive(Default)]
pub(super) struct Arena {
    /// Start → (end, stamp); ranges do not overlap.
    ranges: BTreeMap<usize, (usize, u64)>,
}

impl Arena {
    pub fn write(&mut self, (from, to): Span, stamp: u64) {
        if from == to {
            return;
        }
        // Most of what is written lies where the like of it lay.
        if let Some(same) = self.ranges.get_mut(&from).filter(|r| r.0 == to) {
            same.1 = stamp;
            return;
        }
        let ranges = self.ranges.range(..to).rev().map(|(&s, &(end, old))| (s, end, old));
        let met: SmallVec<[_; 4]> = ranges.take_while(|r| r.1 > from).collect();
        for (s, end, old) in met {
            match s < from {
                true => drop(self.ranges.insert(s, (from, old))),
                false => drop(self.ranges.remove(&s)),
            }
            if end > to {
                self.ranges.insert(to, (end, old));
            }
        }
        self.ranges.insert(from, (to, stamp));
    }

    /// Writes spans that lie one behind the other, with gaps or without.
    pub fn write_all(&mut self, writes: impl Iterator<Item = (Span, u64)> + Clone) {
        let mut rest = writes;
        while let Some((span, stamp)) = self.renew(&mut rest) {
            self.write(span, stamp);
        }
    }

    /// Stamps ranges anew as long as there is one for each span; the first span for which there is none.
    fn renew(&mut self, writes: &mut impl Iterator<Item = (Span, u64)>) -> Option<(Span, u64)> {
        let first = writes.next()?;
        let mut ranges = self.ranges.range_mut(first.0.0..).peekable();
        for ((from, to), stamp) in std::iter::once(first).chain(writes) {
            while ranges.next_if(|r| *r.0 < from).is_some() {}
            match ranges.next_if(|r| *r.0 == from && r.1.0 == to) {
                Some((_, range)) => range.1 = stamp,
                None => return Some(((from, to), stamp)),
            }
        }
        None
    }

    pub fn holds(&self, (from, to): Span, stamp: u64) -> bool {
        let mut at = from;
        while at < to {
            match self.ranges.range(..=at).next_back() {
                Some((_, &(end, s))) if end > at && s == stamp => at = end,
                _ => return false,
            }
        }
        true
    }

    /// True if all of these are held; those of one piece of memory in order.
    pub fn hold_all(&self, reads: impl Iterator<Item = (Span, u64)>) -> bool {
        let mut ranges = self.ranges.range(..0);
        // The range in which the last span began.
        let mut at = (0, 0, 0);
        for ((from, to), stamp) in reads {
            // The next range is the next in most cases: to look for it takes longer.
            for _ in 0..2 {
                if at.1 <= from
                    && let Some((&s, &(end, stamp))) = ranges.next()
                {
                    at = (s, end, stamp);
                }
            }
            if !(at.0 <= from && from < at.1) {
                ranges = self.ranges.range(from..);
                at = match self.ranges.range(..=from).next_back() {
                    Some((&s, &(end, stamp))) => (s, end, stamp),
                    None => (0, 0, 0),
                };
                if at.0 == from {
                    ranges.next();
                }
            }
            let whole = at.2 == stamp && at.0 <= from && to <= at.1;
            if from < to && !whole && !self.holds((from, to), stamp) {
                return false;
            }
        }
        true
    }

    /// True if any of these bytes were written.
    pub fn meets(&self, (from, to): Span) -> bool {
        let before = self.ranges.range(..to).next_back();
        from < to && before.is_some_and(|(_, r)| r.0 > from)
    }

    /// How many ranges there are.
    pub fn count(&self) -> usize {
        self.ranges.len()
    }

    /// All ranges in order, with their stamps.
    pub fn ranges(&self) -> impl Iterator<Item = (Span, u64)> {
        self.ranges.iter().map(|(&from, &(to, stamp))| ((from, to), stamp))
    }
}

/// Spans that are asked for those that meet another, however many there are.
pub(super) struct Spans {
    /// In order of their beginnings: a span, the furthest end up to it, and its number.
    all: Vec<(Span, usize, usize)>,
}

impl Spans {
    pub fn of(all: impl Iterator<Item = Span>) -> Spans {
        let mut all: Vec<_> = all.enumerate().map(|(i, span)| (span, 0, i)).collect();
        all.sort_unstable();
        let mut furthest = 0;
        for x in &mut all {
            furthest = furthest.max(x.0.1);
            x.1 = furthest;
        }
        Spans { all }
    }

    /// The numbers of those that have bytes in common with a span, which has some.
    pub fn meeting(&self, (from, to): Span) -> impl Iterator<Item = usize> {
        let first_after = self.all.partition_point(|x| x.0.0 < to);
        let near = self.all[..first_after].iter().rev().take_while(move |x| x.1 > from);
        near.filter(move |x| x.0.1 > from.max(x.0.0)).map(|x| x.2)
    }
}
