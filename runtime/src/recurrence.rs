//! Gated linear recurrences, a chunk of tokens at a time (Yang et al., 2024, *Gated Delta Networks*, 3.3; Dao and Gu,
//! 2024, *Mamba-2*, 6): within a chunk all pairs of tokens, between chunks the state. No state is kept per token.
//!
//! With G the sums of g in a chunk, A_ij = e^(G_i - G_j) for i ≥ j of one document, D = e^G and Λ = e^(G_last - G) as
//! diagonals, S the state before the chunk and B = diag(β):
//!
//! ```text
//! M = A ∘ Q Kᵀ    W = A ∘ K Kᵀ below the diagonal    (I + B W) N = B (V - D K S)    (without the delta rule N = V)
//! O = D Q S + M N                                    S' = e^(G_last) S + (Λ K)ᵀ N
//! ```
//!
//! A task is a head of a row, so that no sum depends on the number of threads.

mod grad;

pub(crate) use grad::backward;

use crate::math;
use crate::product::{Stored, multiply};
use crate::team;
use shardc_ir::kernel::{Recurrence, Recurrent, View};
use shardc_ir::ops::scan::CHUNK;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Rows of a triangular system that are solved one by one; those before are subtracted by a product.
const ROWS: usize = 16;

/// A head of a row.
#[derive(Clone, Copy)]
struct ScanHead<'a> {
    of: &'a Recurrent,
    memory: &'a [*mut f32],
    batch: usize,
    head: usize,
}

/// Tokens that follow each other.
struct Chunk {
    first: usize,
    len: usize,
    /// Sums of g up to each token.
    sums: [f64; CHUNK],
    /// Borders of documents in the chunk up to each token.
    runs: [usize; CHUNK],
    beta: [f32; CHUNK],
}

/// Matrices of a chunk, and the states.
#[derive(Clone, Copy)]
struct ChunkScratch {
    /// A, W, M, and in backward the gradient of one of them.
    pairs: [Stored; 4],
    /// N, and in backward what N is made of and the gradient of N.
    values: [Stored; 3],
    /// Rows of queries or keys times a factor each.
    scaled: Stored,
    state: Stored,
    /// Behind it, in backward, the state before each chunk.
    states: *mut f32,
}

/// Row `i` of a matrix with adjacent columns.
///
/// # Safety
/// The row has `n` valid elements, which nobody else uses while the slice is.
unsafe fn row<'a>(m: Stored, i: usize, n: usize) -> &'a mut [f32] {
    // SAFETY: by the caller.
    unsafe { std::slice::from_raw_parts_mut(m.at.add(i * m.row_stride), n) }
}

fn dot(x: &[f32], y: &[f32]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum::<f32>().into()
}

fn add(to: &mut [f32], by: f32, x: &[f32]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += by * x);
}

fn scale(x: &mut [f32], by: f32) {
    x.iter_mut().for_each(|x| *x *= by);
}

/// `out = scale · a b`, added to what `out` holds if `accumulate`, by this thread.
///
/// # Safety
/// As for [`multiply`].
unsafe fn product(size: [usize; 3], all: [Stored; 3], scale: f32, accumulate: bool) {
    // SAFETY: by the caller.
    unsafe { multiply(size, all, scale, accumulate, 1) }
}

impl Chunk {
    fn factor(&self, is: bool, exponent: f64) -> f32 {
        if is { math::exp(exponent as f32) } else { 0.0 }
    }
    /// How much of the state before the chunk token `i` sees.
    fn before(&self, i: usize) -> f32 {
        self.factor(self.runs[i] == 0, self.sums[i])
    }
    /// How much of token `i` is in the state behind the chunk.
    fn behind(&self, i: usize) -> f32 {
        let last = self.len - 1;
        self.factor(self.runs[i] == self.runs[last], self.sums[last] - self.sums[i])
    }
    /// A: how much of token `j` token `i` sees, into rows of so many.
    ///
    /// # Safety
    /// The matrix is valid.
    unsafe fn pairs(&self, to: Stored) {
        for i in 0..self.len {
            // SAFETY: by the caller.
            let to = unsafe { row(to, i, self.len) };
            for (j, x) in to.iter_mut().enumerate() {
                let seen = j <= i && self.runs[i] == self.runs[j];
                *x = self.factor(seen, self.sums[i] - self.sums[j]);
            }
        }
    }
}

impl ScanHead<'_> {
    fn rows(&self, v: &View, token: usize) -> Stored {
        let at = self.memory[v.operand].wrapping_add(v.at(&[self.batch, token, self.head]));
        Stored::rows(at, v.strides[1])
    }
    fn number(&self, v: &View, token: usize) -> *mut f32 {
        self.memory[v.operand].wrapping_add(v.at(&[self.batch, token, self.head]))
    }
    /// A state [k, v].
    fn state(&self, v: &View) -> Stored {
        let at = self.memory[v.operand].wrapping_add(v.at(&[self.batch, self.head]));
        Stored::rows(at, v.strides[2])
    }

    /// # Safety
    /// Memory is valid for what the kernel reaches, and `first` is a token.
    unsafe fn chunk(&self, first: usize) -> Chunk {
        let len = CHUNK.min(self.of.tokens - first);
        let mut c = Chunk { first, len, sums: [0.0; CHUNK], runs: [0; CHUNK], beta: [1.0; CHUNK] };
        let (mut sum, mut run) = (0.0, 0);
        for i in 0..len {
            let t = first + i;
            // SAFETY: by the caller.
            unsafe {
                sum += f64::from(*self.number(&self.of.g, t));
                run += usize::from(self.borders(t));
                if let Some(v) = &self.of.beta {
                    c.beta[i] = *self.number(v, t);
                }
            }
            (c.sums[i], c.runs[i]) = (sum, run);
        }
        c
    }

    /// Whether a document begins at a token that is not the first.
    ///
    /// # Safety
    /// As for [`ScanHead::chunk`].
    unsafe fn borders(&self, token: usize) -> bool {
        let Some(v) = self.of.segments.as_ref().filter(|_| token > 0) else { return false };
        let at = |t| self.memory[v.operand].wrapping_add(v.at(&[self.batch, t])).cast::<i32>();
        // SAFETY: by the caller.
        unsafe { *at(token) != *at(token - 1) }
    }

    /// A copy of a state, or zeros.
    ///
    /// # Safety
    /// Both are valid and apart.
    unsafe fn copy(&self, from: Option<Stored>, to: Stored) {
        for d in 0..self.of.width {
            // SAFETY: by the caller.
            unsafe {
                let to = row(to, d, self.of.value_width);
                match from {
                    Some(from) => to.copy_from_slice(row(from, d, self.of.value_width)),
                    None => to.fill(0.0),
                }
            }
        }
    }

    /// Rows of a chunk, each times a factor.
    ///
    /// # Safety
    /// Memory is valid; there is room for the rows.
    unsafe fn scaled(&self, v: &View, c: &Chunk, to: Stored, by: impl Fn(usize) -> f32) {
        let (from, n) = (self.rows(v, c.first), self.of.width);
        for i in 0..c.len {
            let by = by(i);
            // SAFETY: by the caller.
            let (to, from) = unsafe { (row(to, i, n), row(from, i, n)) };
            to.iter_mut().zip(from).for_each(|(to, x)| *to = by * *x);
        }
    }

    /// x yᵀ ∘ A of rows of a chunk, for pairs that see each other; below the diagonal only if `strict`.
    ///
    /// # Safety
    /// Memory is valid; matrices have room.
    unsafe fn seen(&self, c: &Chunk, x: Stored, a: Stored, to: Stored, strict: bool) {
        let keys = self.rows(&self.of.k, c.first).transposed();
        // SAFETY: by the caller.
        unsafe { product([c.len, c.len, self.of.width], [x, keys, to], 1.0, false) };
        for i in 0..c.len {
            // SAFETY: by the caller.
            let (to, a) = unsafe { (row(to, i, c.len), row(a, i, c.len)) };
            to.iter_mut().zip(a.iter()).for_each(|(to, a)| *to *= a);
            to[i + usize::from(!strict)..].fill(0.0);
        }
    }

    /// What tokens write to the state, N: their values or, by the delta rule, into the first matrix of values; what that is
    /// made of is left in `error`, if that is another one.
    ///
    /// # Safety
    /// Memory is valid; `s.pairs[0]` is A.
    unsafe fn written(
        &self,
        c: &Chunk,
        s: &ChunkScratch,
        state: Stored,
        error: Option<Stored>,
    ) -> Stored {
        let (k, v) = (self.of.width, self.of.value_width);
        let (keys, values) = (self.rows(&self.of.k, c.first), self.rows(&self.of.v, c.first));
        if !self.of.delta {
            return values;
        }
        let [n, ..] = s.values;
        let w = s.pairs[1];
        // SAFETY: by the caller.
        unsafe {
            self.seen(c, keys, s.pairs[0], w, true);
            product([c.len, v, k], [keys, state, n], 1.0, false);
            for i in 0..c.len {
                let (n, by) = (row(n, i, v), c.before(i));
                n.iter_mut().zip(row(values, i, v)).for_each(|(n, x)| *n = *x - by * *n);
                if let Some(error) = error {
                    row(error, i, v).copy_from_slice(n);
                }
            }
            for first in (0..c.len).step_by(ROWS) {
                let end = c.len.min(first + ROWS);
                let own = n.from(first, 0);
                if first > 0 {
                    product([end - first, v, first], [w.from(first, 0), n, own], -1.0, true);
                }
                for i in first..end {
                    let (to, w) = (row(n, i, v), row(w, i, c.len));
                    (first..i).for_each(|j| add(to, -w[j], row(n, j, v)));
                    scale(to, c.beta[i]);
                }
            }
        }
        n
    }

    /// The state behind a chunk from that before it.
    ///
    /// # Safety
    /// Memory is valid; the states may be one.
    unsafe fn advance(&self, c: &Chunk, s: &ChunkScratch, n: Stored, to: Stored) {
        let (k, v) = (self.of.width, self.of.value_width);
        let through = c.before(c.len - 1);
        // SAFETY: by the caller.
        unsafe {
            self.scaled(&self.of.k, c, s.scaled, |i| c.behind(i));
            (0..k).for_each(|d| scale(row(to, d, v), through));
            product([k, v, c.len], [s.scaled.transposed(), n, to], 1.0, true);
        }
    }

    fn chunks(&self) -> impl Iterator<Item = usize> + use<> {
        (0..self.of.tokens.div_ceil(CHUNK)).map(|i| i * CHUNK)
    }
}

/// The workspace of a head.
fn scratch(of: &Recurrent, backward: bool, memory: &[*mut f32], slot: usize) -> ChunkScratch {
    let (k, v, c) = (of.width, of.value_width, Recurrent::chunk(of.tokens));
    let words = Recurrent::words(backward, [of.tokens, k, v]);
    let mut at = memory[of.scratch.operand].wrapping_add(of.scratch.offset + slot * words);
    let mut take = |there: bool, rows: usize, cols: usize| {
        let own = Stored::rows(at, cols);
        at = at.wrapping_add(if there { rows * cols } else { 0 });
        own
    };
    let pairs = [true, true, true, backward].map(|there| take(there, c, c));
    let values = [true, backward, backward].map(|there| take(there, c, v));
    let scaled = take(true, c, k);
    let state = take(true, k, v);
    ChunkScratch { pairs, values, scaled, state, states: at }
}

/// Runs a task per head of a row, each with a part of the workspace.
fn heads(
    of: &Recurrent,
    backward: bool,
    memory: &[*mut f32],
    threads: usize,
    one: impl Fn(ScanHead, &ChunkScratch),
) {
    let all = of.batch * of.heads;
    if all == 0 {
        return;
    }
    let next = AtomicUsize::new(0);
    let workers = threads.min(Recurrent::slots(all)).min(all);
    let task = |slot: usize| {
        let own = scratch(of, backward, memory, slot);
        while let Some(i) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&i| i < all) {
            one(ScanHead { of, memory, batch: i / of.heads, head: i % of.heads }, &own);
        }
    };
    // SAFETY: every head has its own rows of the results, every worker its part of the workspace.
    unsafe { team::each(workers, workers, task) };
}

/// Runs a recurrence.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches; results and workspace overlap nothing else.
pub(crate) unsafe fn forward(r: &Recurrence, memory: &[*mut f32], threads: usize) {
    let of = &r.of;
    let (k, v) = (of.width, of.value_width);
    heads(of, false, memory, threads, |h, s| {
        // SAFETY: by the caller; tokens and widths are the kernel's.
        unsafe {
            h.copy(of.start.as_ref().map(|v| h.state(v)), s.state);
            for first in h.chunks() {
                let c = h.chunk(first);
                c.pairs(s.pairs[0]);
                let n = h.written(&c, s, s.state, None);
                h.seen(&c, h.rows(&of.q, first), s.pairs[0], s.pairs[2], false);
                h.scaled(&of.q, &c, s.scaled, |i| c.before(i));
                let out = h.rows(&r.out, first);
                product([c.len, v, k], [s.scaled, s.state, out], 1.0, false);
                product([c.len, v, c.len], [s.pairs[2], n, out], 1.0, true);
                h.advance(&c, s, n, s.state);
            }
            h.copy(Some(s.state), h.state(&r.end));
        }
    });
}
