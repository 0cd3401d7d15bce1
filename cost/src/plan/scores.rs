//! Which part of the scores attention computes, by the positions that a rank's queries and keys have.

use shardc_ir::func::{Func, Node, Value};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{Mask, Op};
use shardc_ir::plan::TokenOrder;
use std::ops::Range;

/// The part of all scores of so many tokens that masks leave, in the mean of the layers of a model with attention; half of
/// them if it has none.
pub fn seen(f: &Func, seq: usize) -> f64 {
    let one = |n: &Node| match &n.op {
        Op::Attention(a) => {
            let order = TokenOrder::Contiguous;
            Some(Scores { mask: a.mask, order, seq, queries: seq, before: None }.seen())
        }
        _other => None,
    };
    let all: Vec<f64> = f.nodes.iter().filter_map(one).collect();
    if all.is_empty() { 0.5 } else { all.iter().sum::<f64>() / all.len() as f64 }
}

/// Queries and keys of an attention, as the ranks of a group have them.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Scores {
    pub mask: Mask,
    /// How tokens are dealt to ranks.
    pub order: TokenOrder,
    /// Tokens of a sequence, and of these the queries of one rank.
    pub seq: usize,
    pub queries: usize,
    /// The rank has the keys of the rank that is so many before it; all keys if `None`.
    pub before: Option<usize>,
}

impl Scores {
    /// Those of the node with this number, whose operands `at` and `at + 1` are the positions of its queries and keys.
    pub fn of(
        mesh: &Mesh,
        f: &Func,
        node: usize,
        at: usize,
        mask: Mask,
        order: TokenOrder,
    ) -> Scores {
        let n = &f.nodes[node];
        let [queries, keys] = [n.ins[at], n.ins[at + 1]].map(|v| f.ty(v).chunk(mesh, 0));
        let (before, seq) = match f.ty(n.ins[at + 1]).varying.is_empty() {
            true => (None, keys),
            // What a text makes in another way is counted as if it were all keys.
            false => piece(mesh, f, &f.nodes[..node], n.ins[at + 1]).unwrap_or((None, keys)),
        };
        Scores { mask, order, seq, queries: queries.min(seq), before }
    }

    /// The part of a rank's scores that blocks of so many queries compute, neighbours on their rank: the keys from the
    /// first position that any of them reaches to the last, as kernels do. It is that of the rank that has most to do:
    /// the others wait for it.
    pub fn computed(&self, block: usize) -> f64 {
        self.most(|queries, keys| {
            let seen = |b: &Range<usize>| keys.iter().map(|k| self.reached(b, k)).sum::<usize>();
            blocks(queries, block.max(1)).map(|(n, b)| (n * seen(&b)) as f64).sum()
        })
    }

    /// The part of its scores that count, as many as queries see keys; under a causal mask without a window a query
    /// sees half of itself.
    pub fn seen(&self) -> f64 {
        let halves = self.mask.right == Some(0) && self.mask.left.is_none();
        let of = |run: &Range<usize>, keys: &Range<usize>| {
            let own = run.end.min(keys.end).saturating_sub(run.start.max(keys.start));
            let all = self.pairs(run, keys);
            if halves { all - own as f64 / 2.0 } else { all }
        };
        self.most(|queries, keys| {
            queries.iter().flat_map(|q| keys.iter().map(move |k| of(q, k))).sum()
        })
    }

    /// Of the rank with the most: what its queries have of its keys, both as runs, as a part of all its scores.
    fn most(&self, of: impl Fn(&[Range<usize>], &[Range<usize>]) -> f64) -> f64 {
        let ranks = self.seq.div_ceil(self.queries.max(1));
        let all: Vec<Vec<Range<usize>>> = (0..ranks).map(|r| self.runs(r)).collect();
        let whole: Vec<Range<usize>> = std::iter::once(0..self.seq).collect();
        let one = |r: usize| {
            let keys = self.before.map_or(&whole, |n| &all[(r + ranks - n % ranks) % ranks]);
            of(&all[r], keys)
        };
        let keys = if self.before.is_some() { self.queries } else { self.seq };
        let most = (0..ranks).map(one).fold(0.0, f64::max);
        (most / (self.queries as f64 * keys as f64)).min(1.0)
    }

    /// Keys of a run from the first position that any of these queries reaches to the last.
    fn reached(&self, queries: &Range<usize>, keys: &Range<usize>) -> usize {
        let at = |i: usize| self.mask.reach(i32::try_from(i).unwrap_or(i32::MAX));
        let from = at(queries.start)[0].max(0) as usize;
        let to = at(queries.end - 1)[1].max(0) as usize + 1;
        keys.end.min(to).saturating_sub(keys.start.max(from))
    }

    /// Pairs of a query and a key that it sees: in closed form, as rows are long.
    fn pairs(&self, queries: &Range<usize>, keys: &Range<usize>) -> f64 {
        let chunk = self.mask.chunk.unwrap_or(self.seq).max(1);
        let first = queries.start - queries.start % chunk;
        let of_chunk = |begin: usize| {
            let run = queries.start.max(begin) as f64..queries.end.min(begin + chunk) as f64;
            let (low, high) = (keys.start.max(begin) as f64, keys.end.min(begin + chunk) as f64);
            if low >= high {
                return 0.0;
            }
            let until = |right: usize| sum_between(&run, right as f64 + 1.0, low, high);
            let from = |left: usize| sum_between(&run, -(left as f64), low, high);
            let n = run.end - run.start;
            let ends = self.mask.right.map_or(n * high, until);
            ends - self.mask.left.map_or(n * low, from)
        };
        (first..queries.end).step_by(chunk).map(of_chunk).sum()
    }

    /// The positions of a rank's tokens, as ranges.
    fn runs(&self, rank: usize) -> Vec<Range<usize>> {
        let own = rank * self.queries..((rank + 1) * self.queries).min(self.seq);
        let len = match self.order {
            TokenOrder::Zigzag { ranks } if self.order.fits(self.seq) => self.seq / (2 * ranks),
            TokenOrder::Zigzag { .. } | TokenOrder::Contiguous => self.seq,
        };
        if self.queries >= self.seq || len == self.seq {
            return std::iter::once(own).collect();
        }
        let mut all: Vec<Range<usize>> = vec![];
        let mut at = own.start;
        while at < own.end {
            let end = own.end.min(at - at % len + len);
            let first = self.order.position(self.seq, at);
            match all.last_mut() {
                Some(run) if run.end == first => run.end += end - at,
                _another => all.push(first..first + end - at),
            }
            at = end;
        }
        all
    }
}

/// Blocks of so many tokens of a rank, which has these runs of positions: how many tokens each has, and from its first
/// position to its last.
fn blocks(runs: &[Range<usize>], block: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let (mut left, mut at) = (runs.iter().cloned(), 0..0);
    std::iter::from_fn(move || {
        let (mut tokens, mut first, mut end) = (0, None, 0);
        while tokens < block {
            if at.is_empty() {
                let Some(next) = left.next() else { break };
                at = next;
            }
            let n = at.len().min(block - tokens);
            first = first.or(Some(at.start));
            (tokens, end) = (tokens + n, at.start + n);
            at.start = end;
        }
        first.map(|first| (tokens, first..end))
    })
}

/// The sum over the whole numbers x of a range of x + `more`, but not below `low` and not above `high`.
fn sum_between(run: &Range<f64>, more: f64, low: f64, high: f64) -> f64 {
    let (start, end) = (run.start + more, run.end + more);
    let (from, to) = (start.max(low).min(end), end.min(high).max(start));
    // Those below `low`, those between, those above `high`.
    let (below, above) = ((low.min(end) - start).max(0.0), (end - high.max(start)).max(0.0));
    let n = (to - from).max(0.0);
    below * low + n * (from + from + n - 1.0) / 2.0 + above * high
}

/// Of positions that are a piece of those of all keys: how many ranks before its own a rank has the piece of, and
/// the number of all. A piece is made shortly before it is used.
fn piece(mesh: &Mesh, f: &Func, nodes: &[Node], v: Value) -> Option<(Option<usize>, usize)> {
    let made = nodes.iter().rev().find(|n| n.outs.contains(&v))?;
    let Op::RingShard(p) = &made.op else { return None };
    Some((Some(p.shift), f.ty(made.ins[0]).chunk(mesh, 0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: Scores = Scores {
        mask: Mask::CAUSAL,
        order: TokenOrder::Contiguous,
        seq: 128,
        queries: 128,
        before: None,
    };

    /// Counted score by score.
    fn counted(s: &Scores, block: usize) -> f64 {
        let ranks = s.seq / s.queries;
        let own = |r: usize| -> Vec<usize> {
            (r * s.queries..(r + 1) * s.queries).map(|i| s.order.position(s.seq, i)).collect()
        };
        let sees = |q: usize, k: usize| {
            let [first, last] = s.mask.reach(q as i32);
            (first as i64..=last as i64).contains(&(k as i64))
        };
        let of = |r: usize| {
            let keys = s.before.map_or((0..s.seq).collect(), |n| own((r + ranks - n) % ranks));
            // A block is of neighbours on the rank; kernels compute from the first position that it reaches to the last.
            let of = |b: &[usize]| {
                let first = b.iter().map(|&q| s.mask.reach(q as i32)[0] as i64).min();
                let last = b.iter().map(|&q| s.mask.reach(q as i32)[1] as i64).max();
                let within = |k: &&usize| first <= Some(**k as i64) && Some(**k as i64) <= last;
                let computed = keys.iter().filter(within).count();
                let seen = keys.iter().filter(|&&k| b.iter().any(|&q| sees(q, k))).count();
                assert!(seen <= computed && (block > 1 || seen == computed));
                b.len() * computed
            };
            own(r).chunks(block).map(of).sum::<usize>()
        };
        let keys = if s.before.is_some() { s.queries } else { s.seq };
        (0..ranks).map(of).max().unwrap_or(0) as f64 / (s.queries * keys) as f64
    }

    #[test]
    fn blocks_compute_what_any_of_their_queries_sees() {
        let masks = [
            Mask::CAUSAL,
            Mask::FULL,
            Mask::causal(Some(20)),
            Mask { left: Some(9), right: Some(5), chunk: None },
            Mask { chunk: Some(24), ..Mask::CAUSAL },
        ];
        for (mask, seq, queries) in
            masks.into_iter().flat_map(|m| [(96, 96), (96, 48), (96, 24)].map(|(s, q)| (m, s, q)))
        {
            let ranks = seq / queries;
            for order in [TokenOrder::Contiguous, TokenOrder::Zigzag { ranks }] {
                for before in [None, Some(0), Some(1), Some(ranks - 1)] {
                    let before = before.filter(|&n| n < ranks && ranks > 1);
                    let s = Scores { mask, order, seq, queries, before };
                    if mask.right != Some(0) || mask.left.is_some() {
                        let (said, counted) = (s.seen(), counted(&s, 1));
                        assert!((said - counted).abs() < 1e-12, "{s:?}: {said} {counted}");
                    }
                    for block in [1, 2, 7, 32, 100] {
                        let (said, counted) = (s.computed(block), counted(&s, block));
                        assert!((said - counted).abs() < 1e-12, "{s:?} {block}: {said} {counted}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_query_sees_half_of_itself() {
        assert_eq!(WHOLE.seen(), 0.5);
        assert_eq!(Scores { mask: Mask::FULL, ..WHOLE }.seen(), 1.0);
        let halves = Scores { seq: 256, ..WHOLE };
        assert_eq!(halves.seen(), 0.75);
    }

    /// Windows and chunks, by hand: of 4 queries the first see 1, 2 and 3 keys, the others 3; of chunks of 2 a half of
    /// each.
    #[test]
    fn windows_and_chunks_by_hand() {
        let of = |mask| Scores { mask, seq: 4, queries: 4, ..WHOLE }.seen() * 16.0;
        assert_eq!(of(Mask::causal(Some(3))), 9.0);
        assert_eq!(of(Mask { chunk: Some(2), ..Mask::CAUSAL }), 4.0);
    }

    /// A long ring is as quick to count as a short one.
    #[test]
    fn a_million_tokens() {
        let order = TokenOrder::Zigzag { ranks: 64 };
        let (seq, queries) = (1 << 20, 1 << 14);
        for n in 0..64 {
            let s = Scores { order, seq, queries, before: Some(n), ..WHOLE };
            assert_eq!(s.seen(), 0.5, "step {n}");
            assert!((s.computed(128) - 0.5).abs() < 0.01, "step {n}");
        }
    }

    /// Of a ring in the order in which tokens come, the last rank sees all keys before its own; zigzag halves the
    /// work of each step, and with all keys at hand that of the step.
    #[test]
    fn zigzag_halves_what_the_busiest_rank_computes() {
        let all = |order| {
            let of = |n| Scores { order, seq: 512, before: Some(n), ..WHOLE }.seen();
            (0..4).map(of).collect::<Vec<f64>>()
        };
        assert_eq!(all(TokenOrder::Contiguous), [0.5, 1.0, 1.0, 1.0]);
        assert_eq!(all(TokenOrder::Zigzag { ranks: 4 }), [0.5; 4]);
        let gathered = |order| Scores { order, seq: 512, ..WHOLE }.seen();
        assert_eq!(gathered(TokenOrder::Contiguous), 0.875);
        assert_eq!(gathered(TokenOrder::Zigzag { ranks: 4 }), 0.5);
    }
}
