//! Who wrote which bytes of an arena last.

use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::ops::Range;

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
        let mut inside: SmallVec<[usize; 4]> = SmallVec::new();
        let mut behind = None;
        for (&s, range) in self.ranges.range_mut(..to).rev() {
            let (end, old) = *range;
            if end <= from {
                break;
            }
            // Most of what is written lies where the like of it lay.
            if (s, end) == (from, to) {
                range.1 = stamp;
                return;
            }
            if end > to {
                behind = Some((end, old));
            }
            match s < from {
                true => range.0 = from,
                false => inside.push(s),
            }
        }
        for s in inside.iter().filter(|&&s| s > from) {
            self.ranges.remove(s);
        }
        if let Some(rest) = behind {
            self.ranges.insert(to, rest);
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

    /// All ranges in order, with their stamps.
    pub fn ranges(&self) -> impl Iterator<Item = (Span, u64)> {
        self.ranges.iter().map(|(&from, &(to, stamp))| ((from, to), stamp))
    }
}

/// The same of bytes of which all spans are known before: these are cut into slots where spans begin and end.
pub(super) struct Slots {
    /// Where the slots begin, and where the last one ends.
    bounds: Vec<usize>,
    /// By slot: who wrote it last.
    stamps: Vec<u64>,
}

impl Slots {
    /// The stamp of what nobody wrote.
    pub const UNWRITTEN: u64 = 0;

    /// Slots that nobody wrote.
    pub fn of(spans: impl Iterator<Item = Span>) -> Slots {
        let some = spans.filter(|(from, to)| from < to);
        let mut bounds: Vec<usize> = some.flat_map(|(from, to)| [from, to]).collect();
        bounds.sort_unstable();
        bounds.dedup();
        let stamps = vec![Slots::UNWRITTEN; bounds.len().saturating_sub(1)];
        Slots { bounds, stamps }
    }

    /// The slots of one of the spans.
    pub fn within(&self, (from, to): Span) -> Range<usize> {
        let at = |bound| self.bounds.partition_point(|&b| b < bound);
        if from < to { at(from)..at(to) } else { 0..0 }
    }

    pub fn write(&mut self, within: Range<usize>, stamp: u64) {
        self.stamps[within].fill(stamp);
    }

    pub fn hold(&self, within: Range<usize>, stamp: u64) -> bool {
        self.stamps[within].iter().all(|&s| s == stamp)
    }

    /// What was written, in order: the ranges of each stamp.
    pub fn written(&self) -> impl Iterator<Item = (Span, u64)> {
        let ends = self.bounds.iter().skip(1);
        let mut all = self.bounds.iter().zip(ends).zip(&self.stamps).peekable();
        std::iter::from_fn(move || {
            let ((&from, &end), &stamp) = all.find(|x| *x.1 != Slots::UNWRITTEN)?;
            let mut to = end;
            while let Some(((_, &end), _)) = all.next_if(|x| *x.1 == stamp) {
                to = end;
            }
            Some(((from, to), stamp))
        })
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

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::rng::Stream;

    const BYTES: usize = 40;

    /// Random spans, some of them empty.
    fn spans(seed: u32) -> impl Iterator<Item = Span> {
        let s = Stream::new(7, "spans", seed);
        let at = move |k: u64| (s.uniform(k) * BYTES as f64) as usize;
        (0..).map(move |k| {
            let (from, bytes) = (at(2 * k), at(2 * k + 1) / 4);
            (from, (from + bytes).min(BYTES))
        })
    }

    /// Asks for what spans hold, of one stamp and of another.
    fn check(arena: &Arena, bytes: &[u64], asked: &[Span]) {
        let holds = |span: Span, stamp| bytes[span.0..span.1].iter().all(|&b| b == stamp);
        let stamp = |span: Span| bytes.get(span.0).copied().filter(|&s| s > 0).unwrap_or(1);
        for &span in asked {
            for stamp in [stamp(span), 1] {
                assert_eq!(arena.holds(span, stamp), holds(span, stamp), "{span:?}: {bytes:?}");
            }
        }
        let mut sorted = asked.to_vec();
        sorted.sort_unstable();
        let reads = || sorted.iter().map(|&span| (span, stamp(span)));
        assert_eq!(arena.hold_all(reads()), reads().all(|(span, by)| holds(span, by)));
        let held: Vec<(Span, u64)> = reads().filter(|&(span, by)| holds(span, by)).collect();
        assert!(arena.hold_all(held.into_iter()), "{sorted:?}: {bytes:?}");
    }

    #[test]
    fn bytes_hold_what_was_written_last() {
        for seed in 0..100 {
            let (mut arena, mut bytes) = (Arena::default(), [0; BYTES]);
            let mut spans = spans(seed);
            let mut next = 1;
            for turn in 0..20 {
                let mut some: Vec<Span> = spans.by_ref().take(1 + turn % 6).collect();
                check(&arena, &bytes, &some);
                if turn % 2 == 0 {
                    // One behind the other.
                    some.sort_unstable();
                    let mut end = 0;
                    some.retain(|span| {
                        span.0 >= end && {
                            end = span.1;
                            true
                        }
                    });
                }
                let writes: Vec<(Span, u64)> = some.into_iter().zip(next..).collect();
                next += writes.len() as u64;
                writes.iter().for_each(|&(span, by)| bytes[span.0..span.1].fill(by));
                match turn % 2 == 0 {
                    true => arena.write_all(writes.into_iter()),
                    false => writes.into_iter().for_each(|(span, by)| arena.write(span, by)),
                }
                let ranges: Vec<(Span, u64)> = arena.ranges().collect();
                assert!(ranges.is_sorted_by(|a, b| a.0.1 <= b.0.0), "{ranges:?}");
                let mut own = [0; BYTES];
                ranges.iter().for_each(|&((from, to), by)| own[from..to].fill(by));
                assert_eq!(own, bytes);
            }
        }
    }

    #[test]
    fn slots_hold_what_was_written_last() {
        for seed in 0..100 {
            let known: Vec<Span> = spans(seed).take(12).collect();
            let (mut slots, mut bytes) = (Slots::of(known.iter().copied()), [0; BYTES]);
            for (&span, by) in known.iter().chain(&known).zip(1..) {
                let written: Vec<(Span, u64)> = slots.written().collect();
                let mut own = [0; BYTES];
                written.iter().for_each(|&((from, to), by)| own[from..to].fill(by));
                assert_eq!(own, bytes);
                for &asked in &known {
                    for stamp in [0, 1, bytes.get(asked.0).copied().unwrap_or(0)] {
                        let holds = bytes[asked.0..asked.1].iter().all(|&b| b == stamp);
                        assert_eq!(slots.hold(slots.within(asked), stamp), holds, "{asked:?}");
                    }
                }
                slots.write(slots.within(span), by);
                bytes[span.0..span.1].fill(by);
            }
        }
    }
}
