//! Who wrote which bytes of an arena last.

use std::iter::once;
use std::ops::Range;

/// Bytes from one to before another.
pub(super) type Span = (usize, usize);

/// Ranges with the stamp of who wrote them last.
#[derive(Default)]
pub(super) struct Arena {
    /// In order; they do not overlap.
    ranges: Vec<(Span, u64)>,
}

impl Arena {
    /// The first range that ends behind a byte.
    fn first_behind(&self, at: usize) -> usize {
        self.ranges.partition_point(|r| r.0.1 <= at)
    }

    pub fn write(&mut self, span: Span, stamp: u64) {
        let (from, to) = span;
        if from == to {
            return;
        }
        let first = self.first_behind(from);
        let met = self.ranges[first..].iter().take_while(|r| r.0.0 < to).count();
        let met = first..first + met;
        let left = self.ranges[met.clone()].first().filter(|r| r.0.0 < from);
        let left = left.map(|r| ((r.0.0, from), r.1));
        let right = self.ranges[met.clone()].last().filter(|r| r.0.1 > to);
        let right = right.map(|r| ((to, r.0.1), r.1));
        self.ranges.splice(met, left.into_iter().chain([(span, stamp)]).chain(right));
    }

    /// Writes spans that lie one behind the other, with gaps or without.
    pub fn write_all(&mut self, writes: impl Iterator<Item = (Span, u64)>) {
        let mut writes = writes.filter(|w| w.0.0 < w.0.1);
        // Most of what is written lies where the like of it lay.
        let mut at = 0;
        let first = loop {
            let Some((span, stamp)) = writes.next() else { return };
            at += self.ranges[at..].iter().take_while(|r| r.0.1 <= span.0).count();
            match self.ranges.get_mut(at).filter(|r| r.0 == span) {
                Some(same) => same.1 = stamp,
                None => break (span, stamp),
            }
        };
        // All others at once: ranges come between, and ranges vanish.
        let mut rest = self.ranges.split_off(at).into_iter();
        let mut next = rest.next();
        for (span, stamp) in once(first).chain(writes) {
            while let Some((old, by)) = next.filter(|r| r.0.0 < span.1) {
                if old.0 < span.0 {
                    self.ranges.push(((old.0, old.1.min(span.0)), by));
                }
                let behind = (old.1 > span.1).then_some(((span.1, old.1), by));
                next = behind.or_else(|| rest.next());
            }
            self.ranges.push((span, stamp));
        }
        self.ranges.extend(next.into_iter().chain(rest));
    }

    pub fn holds(&self, span: Span, stamp: u64) -> bool {
        self.holds_at(self.first_behind(span.0), span, stamp)
    }

    /// The same of a span that begins in a range, if any holds it.
    fn holds_at(&self, range: usize, (from, to): Span, stamp: u64) -> bool {
        let mut at = from;
        for (own, by) in &self.ranges[range..] {
            if at >= to || own.0 > at || *by != stamp {
                break;
            }
            at = own.1;
        }
        at >= to
    }

    /// True if all of these are held; those of one piece of memory in order.
    pub fn hold_all(&self, mut reads: impl Iterator<Item = (Span, u64)>) -> bool {
        let mut at = 0;
        reads.all(|(span, stamp)| {
            // It is in the same range or the next in most cases: to look for it takes longer.
            let has = |at: &usize| {
                self.ranges.get(*at).is_some_and(|r| r.0.0 <= span.0 && span.0 < r.0.1)
            };
            at = [at, at + 1].into_iter().find(has).unwrap_or_else(|| self.first_behind(span.0));
            self.holds_at(at, span, stamp)
        })
    }

    /// How many ranges there are.
    pub fn count(&self) -> usize {
        self.ranges.len()
    }

    /// All ranges in order, with their stamps.
    pub fn ranges(&self) -> impl Iterator<Item = (Span, u64)> {
        self.ranges.iter().copied()
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
