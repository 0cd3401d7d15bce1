//! Which part of the scores attention computes, by the positions that a rank's queries and keys have.

use shardc_ir::func::{Func, Node, Value};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{Mask, Op};
use shardc_ir::plan::TokenOrder;
use std::ops::Range;

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
    /// Those of an operation whose operands `at` and `at + 1` are the positions of its queries and keys.
    pub fn of(mesh: &Mesh, f: &Func, n: &Node, at: usize, mask: Mask, order: TokenOrder) -> Scores {
        let [queries, keys] = [n.ins[at], n.ins[at + 1]].map(|v| f.ty(v).chunk(mesh, 0));
        let (before, seq) = match f.ty(n.ins[at + 1]).varying.is_empty() {
            true => (None, keys),
            false => piece(mesh, f, n.ins[at + 1]).unwrap_or((None, keys)),
        };
        Scores { mask, order, seq, queries: queries.min(seq), before }
    }

    /// The part of a rank's scores that blocks of so many queries compute, which is what any of them sees; with blocks
    /// of one query as if each saw half of itself. It is that of the rank that has most to do: the others wait for it.
    pub fn part(&self, block: usize) -> f64 {
        let ranks = self.seq.div_ceil(self.queries.max(1));
        let keys = if self.before.is_some() { self.queries } else { self.seq };
        let most = (0..ranks).map(|r| self.seen(r, ranks, block.max(1))).fold(0.0, f64::max);
        (most / (self.queries as f64 * keys as f64)).min(1.0)
    }

    /// Scores that a rank computes.
    fn seen(&self, rank: usize, ranks: usize, block: usize) -> f64 {
        let keys = match self.before {
            None => std::iter::once(0..self.seq).collect(),
            Some(n) => self.runs((rank + ranks - n % ranks) % ranks),
        };
        let mut all = 0.0;
        for run in self.runs(rank) {
            for first in run.clone().step_by(block) {
                let last = (first + block).min(run.end) - 1;
                let at = |i: usize| self.mask.reach(i32::try_from(i).unwrap_or(i32::MAX));
                let from = at(first)[0].max(0) as usize;
                let to = at(last)[1].max(0) as usize + 1;
                let of = |k: &Range<usize>| k.end.min(to).saturating_sub(k.start.max(from));
                let seen: usize = keys.iter().map(of).sum();
                let half = block == 1 && self.mask.right.is_some() && seen > 0;
                let own = half && keys.iter().any(|k| k.contains(&(to - 1)));
                all += (last - first + 1) as f64 * (seen as f64 - if own { 0.5 } else { 0.0 });
            }
        }
        all
    }

    /// The positions of a rank's tokens, as ranges.
    fn runs(&self, rank: usize) -> Vec<Range<usize>> {
        let own = rank * self.queries..((rank + 1) * self.queries).min(self.seq);
        if self.queries == self.seq || !self.order.fits(self.seq) {
            return vec![own];
        }
        let mut all: Vec<Range<usize>> = vec![];
        for at in own.map(|i| self.order.position(self.seq, i)) {
            match all.last_mut() {
                Some(run) if run.end == at => run.end += 1,
                _another => all.push(at..at + 1),
            }
        }
        all
    }
}

/// Of positions that are a piece of those of all keys: how many ranks before its own a rank has the piece of, and
/// the number of all.
fn piece(mesh: &Mesh, f: &Func, v: Value) -> Option<(Option<usize>, usize)> {
    let made = f.nodes.iter().find(|n| n.outs.contains(&v))?;
    let Op::Piece(p) = &made.op else { return None };
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
            // A block is of neighbours.
            let blocks = own(r);
            let blocks = blocks.chunk_by(|a, b| a + 1 == *b).flat_map(|run| run.chunks(block));
            blocks
                .map(|b| {
                    let seen = keys.iter().filter(|&&k| b.iter().any(|&q| sees(q, k)));
                    b.len() * seen.count()
                })
                .sum::<usize>()
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
                    for block in [2, 7, 32, 100] {
                        let s = Scores { mask, order, seq, queries, before };
                        let (said, counted) = (s.part(block), counted(&s, block));
                        assert!((said - counted).abs() < 1e-12, "{s:?} {block}: {said} {counted}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_query_sees_half_of_itself() {
        assert_eq!(WHOLE.part(1), 0.5);
        assert_eq!(Scores { mask: Mask::FULL, ..WHOLE }.part(1), 1.0);
        let halves = Scores { seq: 256, ..WHOLE };
        assert_eq!(halves.part(1), 0.75);
    }

    /// Of a ring in the order in which tokens come, the last rank sees all keys before its own; zigzag halves the
    /// work of each step, and with all keys at hand that of the step.
    #[test]
    fn zigzag_halves_what_the_busiest_rank_computes() {
        let all = |order| {
            let of = |n| Scores { order, seq: 512, before: Some(n), ..WHOLE }.part(1);
            (0..4).map(of).collect::<Vec<f64>>()
        };
        assert_eq!(all(TokenOrder::Contiguous), [0.5, 1.0, 1.0, 1.0]);
        assert_eq!(all(TokenOrder::Zigzag { ranks: 4 }), [0.5; 4]);
        let gathered = |order| Scores { order, seq: 512, ..WHOLE }.part(1);
        assert_eq!(gathered(TokenOrder::Contiguous), 0.875);
        assert_eq!(gathered(TokenOrder::Zigzag { ranks: 4 }), 0.5);
    }
}
