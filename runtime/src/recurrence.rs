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

use crate::math;
use crate::product::{Stored, multiply};
use crate::team;
use shardc_ir::kernel::{Recurrence, RecurrenceGrad, Recurrent, View};
use shardc_ir::ops::scan::CHUNK;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Rows of a triangular system that are solved one by one; those before are subtracted by a product.
const ROWS: usize = 16;

/// A head of a row.
#[derive(Clone, Copy)]
struct Head<'a> {
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
struct Scratch {
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

impl Head<'_> {
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
    /// As for [`Head::chunk`].
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
        s: &Scratch,
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
    unsafe fn advance(&self, c: &Chunk, s: &Scratch, n: Stored, to: Stored) {
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
fn scratch(of: &Recurrent, backward: bool, memory: &[*mut f32], slot: usize) -> Scratch {
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
    Scratch { pairs, values, scaled, state, states: at }
}

/// Runs a task per head of a row, each with a part of the workspace.
fn heads(
    of: &Recurrent,
    backward: bool,
    memory: &[*mut f32],
    threads: usize,
    one: impl Fn(Head, &Scratch),
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
            one(Head { of, memory, batch: i / of.heads, head: i % of.heads }, &own);
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

/// Runs the gradient of a recurrence: states before all chunks, then chunks from the last.
///
/// # Safety
/// As for [`forward`].
pub(crate) unsafe fn backward(r: &RecurrenceGrad, memory: &[*mut f32], threads: usize) {
    let of = &r.of;
    let size = of.width * of.value_width;
    heads(of, true, memory, threads, |h, s| {
        let state = |i: usize| Stored::rows(s.states.wrapping_add(i * size), of.value_width);
        let last = h.chunks().count().saturating_sub(1);
        // SAFETY: by the caller; there is room for a state before every chunk.
        unsafe {
            if of.tokens > 0 {
                h.copy(of.start.as_ref().map(|v| h.state(v)), state(0));
            }
            for (i, first) in h.chunks().enumerate().take(last) {
                let c = h.chunk(first);
                c.pairs(s.pairs[0]);
                let n = h.written(&c, s, state(i), None);
                h.copy(Some(state(i)), state(i + 1));
                h.advance(&c, s, n, state(i + 1));
            }
            h.copy(Some(h.state(&r.d_end)), s.state);
            for i in (0..h.chunks().count()).rev() {
                h.chunk_grad(r, &h.chunk(i * CHUNK), s, state(i));
            }
            if let Some(v) = &r.d_start {
                h.copy(Some(s.state), h.state(v));
            }
        }
    });
}

impl Head<'_> {
    /// The gradients of a chunk; `s.state` is that of the state behind it, and becomes that of the state before it.
    ///
    /// # Safety
    /// Memory is valid.
    unsafe fn chunk_grad(&self, r: &RecurrenceGrad, c: &Chunk, s: &Scratch, state: Stored) {
        let (of, len) = (self.of, c.len);
        let (k, v) = (of.width, of.value_width);
        let [a, _, m, d_m] = s.pairs;
        let [_, error, d_n] = s.values;
        let [q, keys, d_q, d_k] = [&of.q, &of.k, &r.d_q, &r.d_k].map(|v| self.rows(v, c.first));
        let [d_out, d_v] = [&r.d_out, &r.d_v].map(|v| self.rows(v, c.first));
        // Of the sums of g.
        let mut d_sums = [0.0; CHUNK];
        let mut d_beta = [0.0; CHUNK];
        // SAFETY: by the caller.
        unsafe {
            c.pairs(a);
            let n = self.written(c, s, state, Some(error));
            self.seen(c, q, a, m, false);
            // dN = Mᵀ dO + Λ K dS'
            self.scaled(&of.k, c, s.scaled, |i| c.behind(i));
            product([len, v, k], [s.scaled, s.state, d_n], 1.0, false);
            product([len, v, len], [m.transposed(), d_out, d_n], 1.0, true);
            // dM = dO Nᵀ
            product([len, len, v], [d_out, n.transposed(), d_m], 1.0, false);
            of_pairs([a, m, d_m], len, &mut d_sums);
            // dQ = D dO Sᵀ + (dM ∘ A) K,  dK = Λ N dS'ᵀ + (dM ∘ A)ᵀ Q
            product([len, k, v], [d_out, state.transposed(), d_q], 1.0, false);
            product([len, k, v], [n, s.state.transposed(), d_k], 1.0, false);
            let mut at_end = 0.0;
            for i in 0..len {
                let (d_q, d_k) = (row(d_q, i, k), row(d_k, i, k));
                scale(d_q, c.before(i));
                scale(d_k, c.behind(i));
                let written = dot(d_k, row(keys, i, k));
                d_sums[i] += dot(d_q, row(q, i, k)) - written;
                at_end += written;
            }
            product([len, k, len], [d_m, keys, d_q], 1.0, true);
            product([len, k, len], [d_m.transposed(), q, d_k], 1.0, true);
            let through = c.before(len - 1);
            let of_states = |d: usize| dot(row(s.state, d, v), row(state, d, v));
            d_sums[len - 1] += at_end + f64::from(through) * (0..k).map(of_states).sum::<f64>();
            match of.delta {
                false => (0..len).for_each(|i| row(d_v, i, v).copy_from_slice(row(d_n, i, v))),
                true => self.delta_grad(c, s, state, [n, d_k, d_v], (&mut d_sums, &mut d_beta)),
            }
            // dS = e^(G_last) dS' + (D Q)ᵀ dO - (D K)ᵀ dV
            (0..k).for_each(|d| scale(row(s.state, d, v), through));
            self.scaled(&of.q, c, s.scaled, |i| c.before(i));
            product([k, v, len], [s.scaled.transposed(), d_out, s.state], 1.0, true);
            if of.delta {
                self.scaled(&of.k, c, s.scaled, |i| c.before(i));
                product([k, v, len], [s.scaled.transposed(), d_v, s.state], -1.0, true);
            }
            let mut sum = 0.0;
            for i in (0..len).rev() {
                sum += d_sums[i];
                // The state before a border is dropped, however it decays.
                let is = if self.borders(c.first + i) { 0.0 } else { sum as f32 };
                *self.number(&r.d_g, c.first + i) = is;
                if let Some(v) = &r.d_beta {
                    *self.number(v, c.first + i) = d_beta[i] as f32;
                }
            }
        }
    }

    /// What follows from the gradient of N by the delta rule: (I + B W)ᵀ dR = dN, dV = B dR, and what W, the state and β
    /// are made of.
    ///
    /// # Safety
    /// Memory is valid.
    unsafe fn delta_grad(
        &self,
        c: &Chunk,
        s: &Scratch,
        state: Stored,
        [n, d_k, d_v]: [Stored; 3],
        (d_sums, d_beta): (&mut [f64; CHUNK], &mut [f64; CHUNK]),
    ) {
        let (k, v, len) = (self.of.width, self.of.value_width, c.len);
        let [a, w, _, d_w] = s.pairs;
        let [_, error, d_r] = s.values;
        let keys = self.rows(&self.of.k, c.first);
        // SAFETY: by the caller.
        unsafe {
            for first in (0..len).step_by(ROWS).rev() {
                let end = len.min(first + ROWS);
                if end < len {
                    let later =
                        [w.from(end, first).transposed(), d_v.from(end, 0), d_r.from(first, 0)];
                    product([end - first, v, len - end], later, -1.0, true);
                }
                for i in (first..end).rev() {
                    let own = row(d_r, i, v);
                    (i + 1..end).for_each(|j| add(own, -row(w, j, len)[i], row(d_v, j, v)));
                    d_beta[i] = dot(own, row(error, i, v));
                    let to = row(d_v, i, v).iter_mut();
                    to.zip(own.iter()).for_each(|(to, x)| *to = c.beta[i] * x);
                }
            }
            // Of B W it is -dR Nᵀ.
            product([len, len, v], [d_r, n.transposed(), d_w], -1.0, false);
            for i in 0..len {
                let (d, w) = (row(d_w, i, len), row(w, i, len));
                d[i..].fill(0.0);
                d_beta[i] += dot(d, w);
                scale(d, c.beta[i]);
            }
            of_pairs([a, w, d_w], len, d_sums);
            product([len, k, len], [d_w, keys, d_k], 1.0, true);
            product([len, k, len], [d_w.transposed(), keys, d_k], 1.0, true);
            // Of D K S it is -dV.
            product([len, k, v], [d_v, state.transposed(), s.scaled], -1.0, false);
            for i in 0..len {
                let own = row(s.scaled, i, k);
                scale(own, c.before(i));
                d_sums[i] += dot(own, row(keys, i, k));
                add(row(d_k, i, k), 1.0, own);
            }
        }
    }
}

/// The gradient of a matrix x yᵀ ∘ A becomes that of x yᵀ; what it makes of the sums in A. Where the matrix is 0, A or
/// the pair is not seen.
///
/// # Safety
/// The matrices are valid.
unsafe fn of_pairs([a, m, d]: [Stored; 3], len: usize, d_sums: &mut [f64; CHUNK]) {
    for i in 0..len {
        // SAFETY: by the caller.
        let (a, m, d) = unsafe { (row(a, i, len), row(m, i, len), row(d, i, len)) };
        for j in 0..len {
            let by = f64::from(d[j] * m[j]);
            d_sums[i] += by;
            d_sums[j] -= by;
            d[j] *= a[j];
        }
    }
}
