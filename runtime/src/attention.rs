//! Attention, a block of queries at a time: the scores of a block by all keys it can see are the
//! only matrix that is ever stored.

use crate::math;
use crate::product::{Mat, multiply};
use shardc_ir::kernel::{Attention, AttentionGrad, Heads, View};
use std::ops::Range;

/// Memory of one call.
struct Call<'a> {
    heads: &'a Heads,
    memory: &'a [*mut f32],
    threads: usize,
    q_pos: &'a [i32],
    k_pos: &'a [i32],
    /// Distance from which keys are not seen; positions are i32, so 2^31 means never.
    window: u32,
}

impl<'a> Call<'a> {
    /// # Safety
    /// `memory` is valid for everything the kernel reaches.
    unsafe fn new(heads: &'a Heads, memory: &'a [*mut f32], threads: usize) -> Call<'a> {
        let positions = |v: &View, n: usize| {
            let at = memory[v.operand].wrapping_add(v.offset).cast::<i32>().cast_const();
            // SAFETY: by the caller.
            unsafe { std::slice::from_raw_parts(at, n) }
        };
        let far = 1 << 31;
        let window = heads.window.map_or(far, |w| u32::try_from(w).unwrap_or(far).min(far));
        Call {
            heads,
            memory,
            threads,
            q_pos: positions(&heads.q_pos, heads.queries),
            k_pos: positions(&heads.k_pos, heads.keys),
            window,
        }
    }

    fn at(&self, v: &View, b: usize, position: usize, head: usize) -> *mut f32 {
        self.memory[v.operand].wrapping_add(v.at(&[b, position, head]))
    }

    /// Rows of a head, from a position on.
    fn rows(&self, v: &View, b: usize, position: usize, head: usize) -> Mat {
        Mat::rows(self.at(v, b, position, head), v.strides[1])
    }

    /// The smallest range of keys outside of which no query of the block sees any.
    fn seen(&self, queries: Range<usize>) -> Range<usize> {
        let q = &self.q_pos[queries];
        let (Some(&lo), Some(&hi)) = (q.iter().min(), q.iter().max()) else { return 0..0 };
        let reach = i64::from(lo) - i64::from(self.window);
        let near = |k: &i32| *k <= hi && i64::from(*k) > reach;
        match (self.k_pos.iter().position(near), self.k_pos.iter().rposition(near)) {
            (Some(first), Some(last)) => first..last + 1,
            _ => 0..0,
        }
    }

    /// Blocks of queries.
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (n, rows) = (self.heads.queries, self.heads.rows.max(1));
        (0..n).step_by(rows).map(move |i| i..n.min(i + rows))
    }

    /// Matrix `i` of the workspace, with rows of `width` elements.
    fn scratch(&self, i: usize, width: usize) -> Mat {
        let v = &self.heads.scratch;
        let at =
            self.memory[v.operand].wrapping_add(v.offset + i * self.heads.rows * self.heads.keys);
        Mat::rows(at, width)
    }
}

/// Row `i` of a matrix with rows of adjacent elements.
///
/// # Safety
/// The row has `n` valid elements, which nobody else uses while the slice is.
unsafe fn row<'a>(m: Mat, i: usize, n: usize) -> &'a mut [f32] {
    // SAFETY: by the caller.
    unsafe { std::slice::from_raw_parts_mut(m.at.add(i * m.row_stride), n) }
}

/// Runs attention.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches; results and workspace overlap nothing else.
pub(crate) unsafe fn forward(k: &Attention, memory: &[*mut f32], threads: usize) {
    let h = &k.heads;
    // SAFETY: by the caller.
    let c = unsafe { Call::new(h, memory, threads) };
    for b in 0..h.batch {
        for head in 0..h.groups * h.repeat {
            for block in c.blocks() {
                // SAFETY: block, head and batch are within the kernel's sizes.
                unsafe { forward_block(k, &c, b, head, block) };
            }
        }
    }
}

unsafe fn forward_block(k: &Attention, c: &Call, b: usize, head: usize, block: Range<usize>) {
    let h = c.heads;
    let group = head / h.repeat;
    let seen = c.seen(block.clone());
    let (m, n) = (block.len(), seen.len());
    let scores = c.scratch(0, n);
    let (q, keys) = (c.rows(&k.q, b, block.start, head), c.rows(&k.k, b, seen.start, group));
    // SAFETY: rows of the block and of the seen keys are valid; scratch has m · n elements.
    unsafe { multiply([m, n, h.width], q, keys.transposed(), scores, h.scale, false, c.threads) };
    let keys = &c.k_pos[seen.clone()];
    // Sums of rows, until the division after the second product.
    let mut sums = [0.0f32; shardc_ir::ops::attention::ROWS];
    for (i, sum) in sums[..m].iter_mut().enumerate() {
        let at = c.q_pos[block.start + i];
        // SAFETY: row i of the scores.
        let x = unsafe { row(scores, i, n) };
        math::mask(x, keys, at, c.window);
        let max = math::max(x);
        math::weights(x, keys, at, c.window, max);
        *sum = math::sum(x);
        let lse = if *sum > 0.0 { max + sum.ln() } else { f32::NEG_INFINITY };
        // SAFETY: an element of the kernel's result.
        unsafe { *c.at(&k.lse, b, block.start + i, head) = lse };
    }
    let (v, out) = (c.rows(&k.v, b, seen.start, group), c.rows(&k.out, b, block.start, head));
    // SAFETY: as above; the result overlaps nothing.
    unsafe { multiply([m, h.value_width, n], scores, v, out, 1.0, false, c.threads) };
    for (i, &sum) in sums[..m].iter().enumerate() {
        let by = if sum > 0.0 { 1.0 / sum } else { 0.0 };
        // SAFETY: row i of the block's result.
        unsafe { row(out, i, h.value_width) }.iter_mut().for_each(|x| *x *= by);
    }
}

/// Runs the gradient of attention.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches; results and workspace overlap nothing else.
pub(crate) unsafe fn backward(k: &AttentionGrad, memory: &[*mut f32], threads: usize) {
    let h = &k.heads;
    // SAFETY: by the caller.
    let c = unsafe { Call::new(h, memory, threads) };
    for b in 0..h.batch {
        for group in 0..h.groups {
            for t in 0..h.keys {
                // SAFETY: rows of the kernel's results.
                unsafe {
                    c.at(&k.d_k, b, t, group).write_bytes(0, h.width);
                    c.at(&k.d_v, b, t, group).write_bytes(0, h.value_width);
                }
            }
            for head in group * h.repeat..(group + 1) * h.repeat {
                for block in c.blocks() {
                    // SAFETY: block, head and batch are within the kernel's sizes.
                    unsafe { backward_block(k, &c, b, (group, head), block) };
                }
            }
        }
    }
}

unsafe fn backward_block(
    k: &AttentionGrad,
    c: &Call,
    b: usize,
    (group, head): (usize, usize),
    block: Range<usize>,
) {
    let h = c.heads;
    let seen = c.seen(block.clone());
    let (m, n) = (block.len(), seen.len());
    let (p, d_p) = (c.scratch(0, n), c.scratch(1, n));
    let by_query = |v: &View| c.rows(v, b, block.start, head);
    let by_key = |v: &View| c.rows(v, b, seen.start, group);
    let (q, keys, values, d_out) = (by_query(&k.q), by_key(&k.k), by_key(&k.v), by_query(&k.d_out));
    let product = |size, a, b, out, scale, accumulate| {
        // SAFETY: rows of the block and of the seen keys are valid; scratch has m · n elements
        // twice; results overlap nothing.
        unsafe { multiply(size, a, b, out, scale, accumulate, c.threads) }
    };
    product([m, n, h.width], q, keys.transposed(), p, h.scale, false);
    product([m, n, h.value_width], d_out, values.transposed(), d_p, 1.0, false);
    let seen_keys = &c.k_pos[seen.clone()];
    for i in 0..m {
        let s = block.start + i;
        // SAFETY: row i of both matrices, and elements of the kernel's operands.
        unsafe {
            let (lse, delta) = (*c.at(&k.lse, b, s, head), *c.at(&k.delta, b, s, head));
            math::weights(row(p, i, n), seen_keys, c.q_pos[s], c.window, lse);
            math::score_grad(row(d_p, i, n), row(p, i, n), delta, h.scale);
        }
    }
    product([n, h.value_width, m], p.transposed(), d_out, by_key(&k.d_v), 1.0, true);
    product([n, h.width, m], d_p.transposed(), q, by_key(&k.d_k), 1.0, true);
    product([m, h.width, n], d_p, keys, by_query(&k.d_q), 1.0, false);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scores that a rank computes in a step of a ring, in blocks of `rows` queries.
    fn computed(queries: &[i32], keys: &[i32], rows: usize, window: u32) -> usize {
        let heads = Heads {
            batch: 1,
            queries: queries.len(),
            keys: keys.len(),
            groups: 1,
            repeat: 1,
            width: 1,
            value_width: 1,
            scale: 1.0,
            window: None,
            rows,
            q_pos: View::default(),
            k_pos: View::default(),
            scratch: View::default(),
        };
        let c =
            Call { heads: &heads, memory: &[], threads: 1, q_pos: queries, k_pos: keys, window };
        c.blocks().map(|b| b.len() * c.seen(b).len()).sum()
    }

    /// What a mask empties is not computed, whatever the order of tokens: with zigzag every rank
    /// computes half of a block that is not its own, and all ranks the same.
    #[test]
    fn blocks_skip_what_positions_hide() {
        let (ranks, chunk, rows) = (4, 16, 8);
        let own = |r: i32| -> Vec<i32> {
            let of = |c: i32| c * chunk..(c + 1) * chunk;
            of(r).chain(of(2 * ranks - 1 - r)).collect()
        };
        let (never, size) = (1 << 31, (2 * chunk) as usize);
        for q in 0..ranks {
            for k in (0..ranks).filter(|&k| k != q) {
                assert_eq!(computed(&own(q), &own(k), rows, never), size * size / 2);
            }
        }
        let plain = |r: i32| -> Vec<i32> { (2 * r * chunk..2 * (r + 1) * chunk).collect() };
        assert_eq!(computed(&plain(0), &plain(1), rows, never), 0);
        assert_eq!(computed(&plain(1), &plain(0), rows, never), size * size);
        // A window hides what is far back too.
        assert_eq!(computed(&plain(3), &plain(0), rows, 32), 0);
    }
}
