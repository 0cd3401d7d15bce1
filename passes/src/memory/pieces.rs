//! Offsets of pieces of memory that are in use from one moment to another.
//!
//! A pass gives all pieces their offsets. Passes of several kinds are made until one is good enough, until they
//! have compared so many pieces with each other, or until for long none was better: so the result, and about the
//! time, depend on the pieces alone.

use super::free::FreeList;
use shardc_ir::plan::ALIGN;
use shardc_ir::steps;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;

/// Bytes, and the first and the last moment at which they are needed.
#[derive(Clone, Copy)]
pub(super) struct LiveRange {
    pub bytes: usize,
    pub birth: usize,
    pub death: usize,
}

impl LiveRange {
    fn size(&self) -> usize {
        padded(self.bytes)
    }

    fn length(&self) -> usize {
        self.death - self.birth + 1
    }
}

/// Offsets, and the end of the highest. There is no search for better ones once the end is at most
/// `enough`, and a search makes at most about `work` comparisons of two pieces.
pub(super) fn offsets(pieces: &[LiveRange], enough: usize, work: usize) -> (Vec<usize>, usize) {
    let first = by_birth(pieces);
    let best = (top(pieces, &first), first);
    let (top, offsets) = match best.0 <= enough {
        true => best,
        false => Search::of(pieces, best, work).run(enough),
    };
    (offsets, top)
}

fn top(pieces: &[LiveRange], offsets: &[usize]) -> usize {
    let ends = pieces.iter().zip(offsets).map(|(p, o)| o + p.bytes);
    ends.max().unwrap_or(0)
}

/// The most bytes that are in use at once.
pub(super) fn most_alive(pieces: &[LiveRange]) -> usize {
    let mut changes: Vec<(usize, bool, usize)> = vec![];
    for p in pieces {
        // What begins at a moment is there before what ends at it is gone.
        changes.extend([(p.birth, false, p.size()), (p.death, true, p.size())]);
    }
    changes.sort_unstable();
    let (mut now, mut most) = (0, 0);
    for (_, ends, bytes) in changes {
        now = if ends { now - bytes } else { now + bytes };
        most = most.max(now);
    }
    most
}

/// Of the moments at which a piece that ends highest, at `end`, is in use: the first of those with most bytes.
pub(super) fn fullest(pieces: &[LiveRange], offsets: &[usize], end: usize) -> usize {
    let mut changes: Vec<(usize, bool, usize, usize)> = vec![];
    for (p, offset) in pieces.iter().zip(offsets).filter(|(p, _)| p.bytes > 0) {
        let highest = usize::from(offset + p.bytes == end);
        // As in `most_alive`, what begins at a moment is there before what ends at it is gone.
        changes.extend([(p.birth, false, p.bytes, highest), (p.death, true, p.bytes, highest)]);
    }
    changes.sort_unstable();
    let (mut now, mut highest) = (0, 0);
    let (mut most, mut at) = (0, 0);
    for (moment, ends, bytes, of_highest) in changes {
        if ends {
            (now, highest) = (now - bytes, highest - of_highest);
        } else {
            (now, highest) = (now + bytes, highest + of_highest);
            if highest > 0 && now > most {
                (most, at) = (now, moment);
            }
        }
    }
    at
}

/// First fit in order of birth; of what begins together, what lives longest lies lowest.
fn by_birth(pieces: &[LiveRange]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..pieces.len()).filter(|&i| pieces[i].bytes > 0).collect();
    order.sort_by_key(|&i| (pieces[i].birth, Reverse(pieces[i].death), i));
    let mut free = FreeList::default();
    let mut dying: BTreeSet<(usize, usize)> = BTreeSet::new();
    let mut offsets = vec![0; pieces.len()];
    for i in order {
        while let Some(&(death, d)) = dying.first().filter(|x| x.0 < pieces[i].birth) {
            dying.remove(&(death, d));
            free.give(offsets[d], pieces[d].size());
        }
        offsets[i] = free.take(pieces[i].size());
        dying.insert((pieces[i].death, i));
    }
    offsets
}

/// A piece that has its place: all that is compared lies together, as most of a search's time is this.
#[derive(Clone, Copy, PartialEq)]
struct Placed {
    offset: usize,
    end: usize,
    birth: usize,
    death: usize,
}

/// Births and ends that are looked up together, and most such spans of a piece that is looked up.
const NEAR: usize = 32;
const SPANS: usize = 4;

/// Spans are the lowest nodes of a tree, and a piece stands in the fewest nodes that make up its life: one that
/// lives long stands in few lists. What lives in a span stands in that span or in one node above it.
const CHILDREN: usize = 16;
const LEVELS: usize = 4;

/// Pieces, and when they live among all births and ends.
struct Lives<'a> {
    pieces: &'a [LiveRange],
    /// By piece: its birth, and the end of its life.
    lives: Vec<(usize, usize)>,
    /// By level, spans first: the number of its first node.
    levels: [usize; LEVELS],
    nodes: usize,
}

impl<'a> Lives<'a> {
    fn of(pieces: &'a [LiveRange], lives: Vec<(usize, usize)>, times: usize) -> Lives<'a> {
        let (mut nodes, mut of_level) = (0, times / NEAR + 1);
        let levels = [(); LEVELS].map(|()| {
            let first = nodes;
            (nodes, of_level) = (nodes + of_level, of_level.div_ceil(CHILDREN));
            first
        });
        Lives { pieces, lives, levels, nodes }
    }

    fn spans_of(&self, i: usize) -> Range<usize> {
        let (birth, end) = self.lives[i];
        birth / NEAR..(end - 1) / NEAR + 1
    }

    /// The nodes in which a piece stands.
    fn nodes_of(&self, i: usize) -> Vec<usize> {
        let mut at = self.spans_of(i);
        let mut nodes = vec![];
        for (first, level) in self.levels.into_iter().zip(1..) {
            let above = at.start.div_ceil(CHILDREN)..at.end / CHILDREN;
            if above.is_empty() || level == LEVELS {
                nodes.extend(first + at.start..first + at.end);
                break;
            }
            nodes.extend(first + at.start..first + above.start * CHILDREN);
            nodes.extend(first + above.end * CHILDREN..first + at.end);
            at = above;
        }
        nodes
    }

    /// By level: the nodes of spans, and those above them.
    fn above(&self, spans: &Range<usize>) -> [Range<usize>; LEVELS] {
        let mut at = spans.clone();
        self.levels.map(|first| {
            let nodes = first + at.start..first + at.end;
            at = at.start / CHILDREN..(at.end - 1) / CHILDREN + 1;
            nodes
        })
    }
}

/// Comparisons that may still be made: of the whole search, and until it finds something better.
struct Left {
    work: usize,
    patience: usize,
}

impl Left {
    /// `None` if they are more than are left.
    fn pay(&mut self, comparisons: usize) -> Option<()> {
        self.work = self.work.checked_sub(comparisons)?;
        self.patience = self.patience.checked_sub(comparisons)?;
        Some(())
    }
}

/// An order in which pieces are placed, each as low as it can be.
struct PlacingOrder {
    order: Vec<usize>,
    /// So many of its first ones are placed.
    placed: usize,
    /// By piece.
    offsets: Vec<usize>,
    /// Those that are placed, by offset.
    by_offset: Vec<Placed>,
    /// The same by the nodes of [`Lives`] in which they stand.
    near: Vec<Vec<Placed>>,
    /// By piece: how often it was what ended too high.
    failures: Vec<usize>,
    /// Where what ended too high in the last turn stands, until the next one.
    failed: Option<usize>,
}

impl PlacingOrder {
    fn of(l: &Lives, order: Vec<usize>) -> PlacingOrder {
        let [offsets, failures] = [(); 2].map(|()| vec![0; l.pieces.len()]);
        let near = vec![vec![]; l.nodes];
        PlacingOrder { order, placed: 0, offsets, by_offset: vec![], near, failures, failed: None }
    }

    /// The lowest place of a piece that is free while it lives.
    fn lowest(&self, l: &Lives, left: &mut Left, i: usize) -> Option<usize> {
        let (LiveRange { birth, death, .. }, size) = (l.pieces[i], l.pieces[i].size());
        let spans = l.spans_of(i);
        // Of each span all that lives in it.
        let few: usize = match spans.len() <= SPANS {
            true => spans.clone().map(|s| self.living(l, s)).sum(),
            false => usize::MAX,
        };
        let mut at = 0;
        // True if the piece fits below it; else it lies above it, if they meet.
        let mut fits_below = |q: &Placed| {
            if q.birth > death || birth > q.death {
                return false;
            }
            let below = q.offset >= at + size;
            at = if below { at } else { at.max(q.end) };
            below
        };
        if few < self.by_offset.len() / 2 {
            // Lists merged by offset; a piece may be in several.
            let lists = l.above(&spans).into_iter().flat_map(|nodes| &self.near[nodes]);
            let mut near: Vec<&[Placed]> = lists.map(Vec::as_slice).collect();
            near.retain(|list| !list.is_empty());
            while let Some(k) = (0..near.len()).min_by_key(|&k| near[k][0].offset) {
                if fits_below(&near[k][0]) {
                    break;
                }
                near[k] = &near[k][1..];
                if near[k].is_empty() {
                    near.swap_remove(k);
                }
            }
            left.pay(few)?;
        } else {
            let found = self.by_offset.iter().position(fits_below);
            left.pay(found.unwrap_or(self.by_offset.len()))?;
        }
        Some(at)
    }

    /// How many of those that are placed live in a span.
    fn living(&self, l: &Lives, span: usize) -> usize {
        l.above(&(span..span + 1)).into_iter().map(|node| self.near[node.start].len()).sum()
    }

    /// Places the rest, but for the first one that would end at `limit` or above it, and those behind that.
    fn place(&mut self, l: &Lives, left: &mut Left, limit: usize) -> Option<()> {
        while let Some(&i) = self.order.get(self.placed) {
            let at = self.lowest(l, left, i)?;
            if at + l.pieces[i].bytes >= limit {
                break;
            }
            self.offsets[i] = at;
            let new = self.entry(l, i);
            self.lists(&l.nodes_of(i), |list| {
                let before = list.partition_point(|x| x.offset <= at);
                list.insert(before, new);
            });
            self.placed += 1;
        }
        Some(())
    }

    /// Moves what ended too high before all that have failed less often, at least by one, and takes all from
    /// there on from their places.
    fn sooner(&mut self, l: &Lives) {
        let Some(at) = self.failed.take() else { return };
        let i = self.order[at];
        self.failures[i] += 1;
        let as_often = |&j: &usize| self.failures[j] >= self.failures[i];
        let behind = self.order[..at].iter().rposition(as_often).map_or(0, |j| j + 1);
        let to = behind.min(at.saturating_sub(1));
        let mut touched = vec![];
        for j in to..self.placed {
            let j = self.order[j];
            let (old, nodes) = (self.entry(l, j), l.nodes_of(j));
            self.lists(&nodes, |list| {
                let first = list.partition_point(|x| x.offset < old.offset);
                let found = list[first..].iter().position(|x| *x == old);
                // Without an end until all of them are found.
                list[first + found.expect("what is placed is in its lists")].end = 0;
            });
            touched.extend(nodes);
        }
        touched.sort_unstable();
        touched.dedup();
        self.lists(&touched, |list| list.retain(|x| x.end > 0));
        self.order[to..=at].rotate_right(1);
        self.placed = self.placed.min(to);
    }

    fn entry(&self, l: &Lives, i: usize) -> Placed {
        let (LiveRange { birth, death, .. }, offset) = (l.pieces[i], self.offsets[i]);
        Placed { offset, end: offset + l.pieces[i].size(), birth, death }
    }

    /// Changes the list of all and those of `nodes`.
    fn lists(&mut self, nodes: &[usize], change: impl Fn(&mut Vec<Placed>)) {
        steps::add("lists of pieces", nodes.len());
        change(&mut self.by_offset);
        nodes.iter().for_each(|&n| change(&mut self.near[n]));
    }

    /// Where what ends highest stands, if all are placed.
    fn highest(&self, l: &Lives) -> Option<usize> {
        let end = |&at: &usize| self.offsets[self.order[at]] + l.pieces[self.order[at]].bytes;
        (0..self.placed).max_by_key(end)
    }
}

/// A search for better offsets.
struct Search<'a> {
    lives: Lives<'a>,
    /// Those with bytes.
    all: Vec<usize>,
    best: (usize, Vec<usize>),
    left: Left,
}

/// Comparisons for each piece after which a search ends that has found nothing better, if they are not fewer than
/// it had made when it last did.
const PATIENCE: usize = 1 << 11;

impl<'a> Search<'a> {
    fn of(pieces: &'a [LiveRange], best: (usize, Vec<usize>), work: usize) -> Search<'a> {
        let all: Vec<usize> = (0..pieces.len()).filter(|&i| pieces[i].bytes > 0).collect();
        let mut times: Vec<usize> =
            all.iter().flat_map(|&i| [pieces[i].birth, pieces[i].death + 1]).collect();
        times.sort_unstable();
        times.dedup();
        let at = |time: usize| times.partition_point(|&t| t < time);
        let lives: Vec<_> = pieces.iter().map(|p| (at(p.birth), at(p.death + 1))).collect();
        let lives = Lives::of(pieces, lives, times.len());
        Search { lives, all, best, left: Left { work, patience: work } }
    }

    /// Searches until the best end is at most `enough`, or the comparisons are used up.
    fn run(mut self, enough: usize) -> (usize, Vec<usize>) {
        // Cut short, it has still kept the best.
        let _cut_short = self.orders(enough).is_none();
        self.best
    }

    /// What finds most in fewest comparisons first: the largest pieces first, and skylines. Then several orders in
    /// turn: what in an order would not end below the best so far is placed sooner, the more the oftener (Joslin and
    /// Clements, 1999, squeaky wheel optimization). `None` if it was cut short.
    fn orders(&mut self, enough: usize) -> Option<()> {
        let (p, work) = (self.lives.pieces, self.left.work);
        let area = |i: usize| p[i].size().saturating_mul(p[i].length());
        let mut orders = [(); 4].map(|()| self.all.clone());
        orders[0].sort_by_key(|&i| (Reverse(p[i].bytes), p[i].birth));
        orders[1].sort_by_key(|&i| (Reverse(area(i)), p[i].birth));
        orders[2].sort_by_key(|&i| Reverse((p[i].death, p[i].bytes)));
        orders[3].sort_by_key(|&i| (p[i].birth, Reverse(p[i].death)));
        let mut orders = orders.map(|order| PlacingOrder::of(&self.lives, order));
        self.turn(&mut orders[0], usize::MAX)?;
        if self.best.0 > enough {
            self.skyline(|i| (p[i].length(), p[i].bytes))?;
        }
        if self.best.0 > enough {
            self.skyline(|i| (area(i), p[i].bytes))?;
        }
        let least = PATIENCE * self.all.len();
        self.left.patience = least;
        loop {
            for o in &mut orders {
                if self.best.0 <= enough {
                    return Some(());
                }
                if self.turn(o, self.best.0)? {
                    self.left.patience = least.max(work - self.left.work);
                }
            }
        }
    }

    /// Changes an order by what ended too high in its last turn, and places the rest of it below `limit`. Whether all
    /// of it came to lie so and is the best so far.
    fn turn(&mut self, o: &mut PlacingOrder, limit: usize) -> Option<bool> {
        o.sooner(&self.lives);
        o.place(&self.lives, &mut self.left, limit)?;
        if o.placed < o.order.len() {
            o.failed = Some(o.placed);
            return Some(false);
        }
        o.failed = o.highest(&self.lives);
        let top = top(self.lives.pieces, &o.offsets);
        let better = top < self.best.0;
        if better {
            self.best = (top, o.offsets.clone());
        }
        Some(better)
    }

    /// Fills the lowest gap of what is placed with the piece that has the largest key of those that
    /// live in it, or, if there is none, raises its ground to that of the lower neighbour (Burke et al.,
    /// 2004, best fit of rectangles; Sekiyama et al., 2018, of memory).
    fn skyline<K: Ord>(&mut self, key: impl Fn(usize) -> K) -> Option<()> {
        let Lives { pieces, lives, .. } = &self.lives;
        let keys: Vec<K> = (0..pieces.len()).map(key).collect();
        let mut offsets = vec![0; pieces.len()];
        let mut rest = self.all.clone();
        rest.sort_by_key(|&i| (lives[i], i));
        // From, until, and the height of what is placed.
        let mut steps = vec![(0, rest.iter().map(|&i| lives[i].1).max()?, 0)];
        while !rest.is_empty() {
            let k = (0..steps.len()).min_by_key(|&k| (steps[k].2, k))?;
            let (from, to, height) = steps[k];
            let first = rest.partition_point(|&i| lives[i].0 < from);
            let last = rest.partition_point(|&i| lives[i].0 < to);
            self.left.pay(last - first + steps.len())?;
            let mut most: Option<(&K, usize)> = None;
            for (r, &i) in (first..).zip(&rest[first..last]) {
                if lives[i].1 <= to && most.is_none_or(|m| keys[i] > *m.0) {
                    most = Some((&keys[i], r));
                }
            }
            match most.map(|m| m.1) {
                Some(r) => {
                    let i = rest.remove(r);
                    offsets[i] = height;
                    let (birth, end) = lives[i];
                    let above = (birth, end, height + pieces[i].size());
                    let new = [(from, birth, height), above, (end, to, height)];
                    steps.splice(k..=k, new.into_iter().filter(|s| s.0 < s.1));
                }
                None => {
                    let beside = [k.checked_sub(1), Some(k + 1)].map(|k| steps.get(k?));
                    let to = beside.into_iter().flatten().map(|s| s.2).min()?;
                    steps[k].2 = to;
                    let before = steps[..k].iter().rev().take_while(|s| s.2 == to).count();
                    let after = steps[k..].iter().take_while(|s| s.2 == to).count();
                    let (first, last) = (k - before, k + after - 1);
                    let joined = (steps[first].0, steps[last].1, to);
                    steps.splice(first..=last, [joined]);
                }
            }
        }
        let top = top(pieces, &offsets);
        if top < self.best.0 {
            self.best = (top, offsets);
        }
        Some(())
    }
}

pub(super) fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rectangle of so many bytes and moments, cut again and again: pieces that fit into it without a gap.
    fn cut(bytes: usize, moments: usize, pieces: usize) -> Vec<LiveRange> {
        let mut all = vec![LiveRange { bytes, birth: 0, death: moments - 1 }];
        let mut state = 1u64;
        while all.len() < pieces {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let random = (state >> 33) as usize;
            let i = random % all.len();
            let p = &mut all[i];
            let (lines, length) = (p.bytes / ALIGN, p.length());
            let rest = match random / 7 % 2 {
                0 if lines > 1 => {
                    let bytes = p.bytes;
                    p.bytes = (1 + random / 64 % (lines - 1)) * ALIGN;
                    LiveRange { bytes: bytes - p.bytes, ..*p }
                }
                1 if length > 1 => {
                    let death = p.death;
                    p.death = p.birth + random / 64 % (length - 1);
                    LiveRange { birth: p.death + 1, death, ..*p }
                }
                _one_line_or_moment => continue,
            };
            all.push(rest);
        }
        all
    }

    /// What every layer saves for backward lives from the layer's forward to its backward.
    #[test]
    fn lists_grow_as_layers() {
        let of = |layers: usize| {
            let saved = |i: usize| {
                let (bytes, birth) = (ALIGN * (1 + i % 7), i);
                LiveRange { bytes, birth, death: 2 * layers * 8 - i }
            };
            let pieces: Vec<LiveRange> = (0..layers * 8).map(saved).collect();
            let search = Search::of(&pieces, (usize::MAX, vec![]), usize::MAX);
            let mut left = Left { work: usize::MAX, patience: usize::MAX };
            let mut order = PlacingOrder::of(&search.lives, search.all);
            let (placed, steps) =
                steps::of(|| order.place(&search.lives, &mut left, usize::MAX).is_some());
            assert!(placed && order.placed == pieces.len());
            steps["lists of pieces"] as f64
        };
        let (few, many) = (of(64), of(1024));
        // As pieces times the levels of the tree, of which there may be twice as many.
        assert!(many <= few * 16.0 * 2.5, "{few} lists, and {many} of 16 times the layers");
    }

    #[test]
    fn what_ends_highest_is_fullest_at_its_first_moment_of_most_bytes() {
        let piece = |(bytes, birth, death, _): (usize, usize, usize, usize)| LiveRange {
            bytes,
            birth,
            death,
        };
        // The second ends highest, from 2 to 5; more bytes than ever then are in use from 7 on.
        let all =
            [(64, 0, 9, 0), (64, 2, 5, 192), (64, 4, 8, 64), (64, 6, 8, 128), (32, 7, 8, 192)];
        let at = |all: &[(usize, usize, usize, usize)]| {
            let pieces: Vec<LiveRange> = all.iter().copied().map(piece).collect();
            let offsets: Vec<usize> = all.iter().map(|p| p.3).collect();
            fullest(&pieces, &offsets, top(&pieces, &offsets))
        };
        assert_eq!(at(&all), 4);
        // As many bytes for one moment before.
        assert_eq!(at(&[&all[..], &[(64, 3, 3, 64)]].concat()), 3);
        // What begins as the highest ends is in use beside it.
        assert_eq!(at(&[&all[..], &[(64, 5, 5, 128)]].concat()), 5);
        assert_eq!(at(&[]), 0);
    }

    #[test]
    fn pieces_of_a_rectangle_nearly_fill_it_and_lie_apart() {
        for count in [10, 100, 1000] {
            let whole = 1 << 24;
            let pieces = cut(whole, 4096, count);
            assert_eq!(most_alive(&pieces), whole);
            let mut ends = vec![];
            for work in [0, 1 << 12, 1 << 24] {
                let (offsets, end) = offsets(&pieces, whole, work);
                assert_eq!(end, top(&pieces, &offsets));
                for (i, p) in pieces.iter().enumerate() {
                    for (j, q) in pieces.iter().enumerate().skip(i + 1) {
                        let meet = p.birth <= q.death && q.birth <= p.death;
                        let apart = offsets[i] + p.bytes <= offsets[j]
                            || offsets[j] + q.bytes <= offsets[i];
                        assert!(!meet || apart, "{i} and {j} of {count}");
                    }
                }
                ends.push(end);
            }
            println!("{count}: {ends:?} of {whole}");
            assert!(ends.is_sorted_by(|a, b| a >= b), "more work, more bytes: {ends:?}");
            // First fit alone needs up to half as much again.
            assert!(ends[2] <= whole / 100 * 115, "{count}: {ends:?}");
        }
    }
}
