//! What recurrences take of memory: `_scan.py` walks over chunks of tokens.

use crate::torch::seen::{Line, Seen};
use shardc_ir::ops::scan::ScanOperands;

/// Tokens of a chunk, as in `_scan.py`.
const CHUNK: usize = 64;

/// Bytes of what a walk has.
pub(super) struct Walk {
    /// Of a chunk keys, values, one number for each token, and pairs of tokens.
    keys: usize,
    values: usize,
    numbers: usize,
    pairs: usize,
    /// States before a chunk, and how many chunks there are.
    state: usize,
    chunks: usize,
    starts: bool,
    /// Whether rows and heads are put together as a copy: of one of either they are a view.
    copies: bool,
    delta: bool,
    /// The outputs.
    out: usize,
}

impl Walk {
    /// Of `scan(q, k, g, v, …)` or its gradient.
    pub fn of(seen: &Seen, l: &Line, behind: ScanOperands) -> Walk {
        let f = seen.f;
        let of = |i: usize| l.ins.get(i).map_or(0, |v| seen.bytes(*v));
        let size = f.ty(l.ins[0]).dtype.bytes().max(1);
        let last = |i: usize| f.ty(l.ins[i]).dims.last().map_or(1, |d| d.size).max(1);
        // Tokens are not split: of several pieces each is walked by itself.
        let piece = l.outs.iter().chain(&l.ins).map(|v| f.ty(*v)).find(|t| t.rank() == 5);
        let pieces = piece.map_or(1, |t| t.dims[1].size);
        let tokens = (f.ty(l.ins[0]).dims[1].size / pieces).max(1);
        let (c, chunks) = (tokens.min(CHUNK), tokens.div_ceil(CHUNK));
        // All heads of all rows and pieces, times a chunk's tokens.
        let numbers = of(0) / last(0) / tokens * c;
        let (k, v) = (last(0), last(3));
        let shape = f.ty(l.ins[0]).chunks(seen.mesh);
        let copies = shape[0] * pieces > 1 && shape[2] > 1;
        Walk {
            keys: numbers * k,
            values: numbers * v,
            numbers,
            pairs: numbers * c,
            state: numbers / c * k * v,
            chunks,
            starts: behind.start.is_some(),
            copies,
            delta: behind.beta.is_some(),
            out: of(3).max(size),
        }
    }

    /// A chunk, with its queries.
    fn chunk(&self) -> usize {
        let rates = self.numbers * usize::from(self.delta);
        self.pairs + 2 * self.numbers + self.copied(2 * self.keys + self.values + rates)
    }

    /// What a chunk of operands takes of memory.
    fn copied(&self, bytes: usize) -> usize {
        if self.copies { bytes } else { 0 }
    }

    /// The most bytes at a time, results with them.
    pub fn forward(&self) -> usize {
        let (own, solved) = match self.delta {
            true => (self.values + self.pairs, 2 * (self.pairs + self.values)),
            false => (0, 0),
        };
        let state = if self.starts && self.chunks == 1 { 0 } else { self.state };
        let further = self.values + self.keys + self.state;
        let most = (self.keys + self.values).max(self.values + self.pairs).max(further);
        self.out + state + self.chunk() + solved.max(own + most)
    }

    /// The same of the gradient, whose results take so many bytes.
    pub fn backward(&self, results: usize) -> usize {
        let (k, v, p, s) = (self.keys, self.values, self.pairs, self.state);
        let (own, starts) = (self.chunks - usize::from(self.starts), usize::from(self.starts));
        let products = 3 * p + v + k;
        let states = 2 * p + v + 3 * k + s + 2 * self.numbers;
        let most = match self.delta {
            false => products.max(states),
            true => {
                let solved = 2 * p + 2 * v + 2 * k + s;
                let read = 2 * p + 3 * v + p.max(v) + 2 * k + s + 3 * self.numbers;
                (p + v) + products.max(states).max(solved).max(read)
            }
        };
        results - starts * s + own * s + self.chunk() + self.copied(v) + most
    }
}
