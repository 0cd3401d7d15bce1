//! Gradients of gated linear recurrences: chunks from the last, with the states before all of them.

use super::*;
use shardc_ir::kernel::RecurrenceGrad;

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

impl ScanHead<'_> {
    /// The gradients of a chunk; `s.state` is that of the state behind it, and becomes that of the state before it.
    ///
    /// # Safety
    /// Memory is valid.
    unsafe fn chunk_grad(&self, r: &RecurrenceGrad, c: &Chunk, s: &ChunkScratch, state: Stored) {
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
            for (i, d_sum) in d_sums.iter_mut().enumerate().take(len) {
                let (d_q, d_k) = (row(d_q, i, k), row(d_k, i, k));
                scale(d_q, c.before(i));
                scale(d_k, c.behind(i));
                let written = dot(d_k, row(keys, i, k));
                *d_sum += dot(d_q, row(q, i, k)) - written;
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
        s: &ChunkScratch,
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
            for (i, d_sum) in d_sums.iter_mut().enumerate().take(len) {
                let own = row(s.scaled, i, k);
                scale(own, c.before(i));
                *d_sum += dot(own, row(keys, i, k));
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
