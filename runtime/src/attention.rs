//! Attention, a block of queries at a time: the scores of a block by all keys it can see are the
//! only matrix that is ever stored. Rows of bf16 are made f32 beside it, keys and values once for all
//! queries of their group; results are summed in f32 and rounded once.

use crate::map::element;
use crate::math;
use crate::product::{Mat, multiply};
use shardc_ir::kernel::{Attention, AttentionGrad, Elem, Heads, View};
use std::ops::Range;

/// Memory of one call.
struct Call<'a> {
    heads: &'a Heads,
    memory: &'a [*mut f32],
    threads: usize,
    q_pos: &'a [i32],
    k_pos: &'a [i32],
    /// Matrices of scores in the scratch memory.
    matrices: usize,
    /// Distance from which keys are not seen; positions are i32, so 2^31 means never.
    window: u32,
}

impl<'a> Call<'a> {
    /// # Safety
    /// `memory` is valid for everything the kernel reaches.
    unsafe fn new(
        heads: &'a Heads,
        memory: &'a [*mut f32],
        threads: usize,
        matrices: usize,
    ) -> Call<'a> {
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
            matrices,
            window,
        }
    }

    /// An f32 statistic.
    fn at(&self, v: &View, b: usize, position: usize, head: usize) -> *mut f32 {
        self.memory[v.operand].wrapping_add(v.at(&[b, position, head]))
    }

    /// Elements of a head, from a position on.
    fn head(&self, v: &View, b: usize, position: usize, head: usize) -> *mut f32 {
        element(self.memory[v.operand], self.heads.elem, v.at(&[b, position, head]))
    }

    /// Rows of a head in f32, from a position on: where they lie, or widened in `slot`.
    ///
    /// # Safety
    /// The rows are valid, and the slot has room for them.
    unsafe fn rows(
        &self,
        v: &View,
        (b, position, head): (usize, usize, usize),
        [rows, width]: [usize; 2],
        slot: Slot,
    ) -> Mat {
        let (at, stride) = (self.head(v, b, position, head), v.strides[1]);
        if self.heads.elem != Elem::BF16 {
            return Mat::rows(at, stride);
        }
        let room = self.slot(slot);
        for i in 0..rows {
            // SAFETY: by the caller.
            unsafe {
                let from = at.cast::<u16>().add(i * stride).cast_const();
                let to = std::slice::from_raw_parts_mut(room.add(i * width), width);
                math::widen(std::slice::from_raw_parts(from, width), to);
            }
        }
        Mat::rows(room, width)
    }

    /// Where rows of a result are made in f32: where they lie, or in `slot`, from where
    /// [`Call::keep`] brings them.
    fn made(
        &self,
        v: &View,
        (b, position, head): (usize, usize, usize),
        width: usize,
        slot: Slot,
    ) -> Mat {
        match self.heads.elem {
            Elem::BF16 => Mat::rows(self.slot(slot), width),
            Elem::F32 | Elem::I32 => Mat::rows(self.head(v, b, position, head), v.strides[1]),
        }
    }

    /// Rounds rows that were made in a slot to where they lie.
    ///
    /// # Safety
    /// The rows are valid, here and there.
    unsafe fn keep(
        &self,
        v: &View,
        (b, position, head): (usize, usize, usize),
        [rows, width]: [usize; 2],
        slot: Slot,
    ) {
        if self.heads.elem != Elem::BF16 {
            return;
        }
        let (at, room) = (self.head(v, b, position, head).cast::<u16>(), self.slot(slot));
        for i in 0..rows {
            // SAFETY: by the caller.
            unsafe {
                let to = std::slice::from_raw_parts_mut(at.add(i * v.strides[1]), width);
                let from = room.add(i * width).cast_const();
                math::narrow(std::slice::from_raw_parts(from, width), to);
            }
        }
    }

    /// Scratch memory behind the scores, in which 16-bit rows are f32: in the order of [`Slot`].
    fn slot(&self, slot: Slot) -> *mut f32 {
        let h = self.heads;
        let (queries, outputs) = (h.rows * h.width, h.rows * h.value_width);
        let (keys, values) = (h.keys * h.width, h.keys * h.value_width);
        let sizes = [queries, keys, values, outputs, queries, keys, values];
        let before: usize = sizes[..slot as usize].iter().sum();
        self.scratch(self.matrices, 0).at.wrapping_add(before)
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

/// What is f32 while it is used; its number is its place.
#[derive(Clone, Copy)]
enum Slot {
    Queries,
    Keys,
    Values,
    /// A block of outputs, or of their gradients.
    Outputs,
    QueryGrads,
    KeyGrads,
    ValueGrads,
}

/// Row `i` of a matrix with rows of adjacent elements.
///
/// # Safety
/// The row has `n` valid elements, which nobody else uses while the slice is.
unsafe fn row<'a>(m: Mat, i: usize, n: usize) -> &'a mut [f32] {
    // SAFETY: by the caller.
    unsafe { std::slice::from_raw_parts_mut(m.at.add(i * m.row_stride), n) }
}

/// Keys and values of a group in f32, or their gradients.
#[derive(Clone, Copy)]
struct Group {
    keys: Mat,
    values: Mat,
}

impl Group {
    /// From a key on.
    fn from(self, key: usize) -> Group {
        let skip = |m: Mat| Mat { at: m.at.wrapping_add(key * m.row_stride), ..m };
        Group { keys: skip(self.keys), values: skip(self.values) }
    }
}

/// Runs attention.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches; results and workspace overlap nothing else.
pub(crate) unsafe fn forward(k: &Attention, memory: &[*mut f32], threads: usize) {
    let h = &k.heads;
    // SAFETY: by the caller.
    let c = unsafe { Call::new(h, memory, threads, 1) };
    for b in 0..h.batch {
        for group in 0..h.groups {
            let at = (b, 0, group);
            // SAFETY: all keys of the group.
            let own = unsafe {
                let keys = c.rows(&k.k, at, [h.keys, h.width], Slot::Keys);
                let values = c.rows(&k.v, at, [h.keys, h.value_width], Slot::Values);
                Group { keys, values }
            };
            for head in group * h.repeat..(group + 1) * h.repeat {
                for block in c.blocks() {
                    // SAFETY: block, head and batch are within the kernel's sizes.
                    unsafe { forward_block(k, &c, (b, head), own, block) };
                }
            }
        }
    }
}

unsafe fn forward_block(
    k: &Attention,
    c: &Call,
    (b, head): (usize, usize),
    group: Group,
    block: Range<usize>,
) {
    let h = c.heads;
    let seen = c.seen(block.clone());
    let (m, n) = (block.len(), seen.len());
    let scores = c.scratch(0, n);
    let (at, group) = ((b, block.start, head), group.from(seen.start));
    // SAFETY: rows of the block and of the seen keys are valid; scratch has m · n elements.
    unsafe {
        let q = c.rows(&k.q, at, [m, h.width], Slot::Queries);
        let size = [m, n, h.width];
        multiply(size, q, group.keys.transposed(), scores, h.scale, false, c.threads);
    }
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
    let out = c.made(&k.out, at, h.value_width, Slot::Outputs);
    let size = [m, h.value_width, n];
    // SAFETY: as above; the result overlaps nothing.
    unsafe { multiply(size, scores, group.values, out, 1.0, false, c.threads) };
    for (i, &sum) in sums[..m].iter().enumerate() {
        let by = if sum > 0.0 { 1.0 / sum } else { 0.0 };
        // SAFETY: row i of the block's result.
        unsafe { row(out, i, h.value_width) }.iter_mut().for_each(|x| *x *= by);
    }
    // SAFETY: rows of the kernel's result.
    unsafe { c.keep(&k.out, at, [m, h.value_width], Slot::Outputs) };
}

/// Runs the gradient of attention.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches; results and workspace overlap nothing else.
pub(crate) unsafe fn backward(k: &AttentionGrad, memory: &[*mut f32], threads: usize) {
    let h = &k.heads;
    // SAFETY: by the caller.
    let c = unsafe { Call::new(h, memory, threads, 2) };
    let (keys, values) = ([h.keys, h.width], [h.keys, h.value_width]);
    for b in 0..h.batch {
        for group in 0..h.groups {
            let at = (b, 0, group);
            // SAFETY: all keys of the group.
            let own = unsafe {
                let keys = c.rows(&k.k, at, keys, Slot::Keys);
                Group { keys, values: c.rows(&k.v, at, values, Slot::Values) }
            };
            let made = Group {
                keys: c.made(&k.d_k, at, h.width, Slot::KeyGrads),
                values: c.made(&k.d_v, at, h.value_width, Slot::ValueGrads),
            };
            for t in 0..h.keys {
                // SAFETY: rows of the kernel's results.
                unsafe {
                    row(made.keys, t, h.width).fill(0.0);
                    row(made.values, t, h.value_width).fill(0.0);
                }
            }
            for head in group * h.repeat..(group + 1) * h.repeat {
                for block in c.blocks() {
                    // SAFETY: block, head and batch are within the kernel's sizes.
                    unsafe { backward_block(k, &c, (b, head), [own, made], block) };
                }
            }
            // SAFETY: rows of the kernel's results.
            unsafe {
                c.keep(&k.d_k, at, keys, Slot::KeyGrads);
                c.keep(&k.d_v, at, values, Slot::ValueGrads);
            }
        }
    }
}

unsafe fn backward_block(
    k: &AttentionGrad,
    c: &Call,
    (b, head): (usize, usize),
    group: [Group; 2],
    block: Range<usize>,
) {
    let h = c.heads;
    let seen = c.seen(block.clone());
    let (m, n) = (block.len(), seen.len());
    let (p, d_p) = (c.scratch(0, n), c.scratch(1, n));
    let at = (b, block.start, head);
    let [own, made] = group.map(|g| g.from(seen.start));
    // SAFETY: rows of the block.
    let (q, d_out) = unsafe {
        let q = c.rows(&k.q, at, [m, h.width], Slot::Queries);
        (q, c.rows(&k.d_out, at, [m, h.value_width], Slot::Outputs))
    };
    let d_q = c.made(&k.d_q, at, h.width, Slot::QueryGrads);
    let product = |size, a, b, out, scale, accumulate| {
        // SAFETY: rows of the block and of the seen keys are valid; scratch has m · n elements
        // twice; results overlap nothing.
        unsafe { multiply(size, a, b, out, scale, accumulate, c.threads) }
    };
    product([m, n, h.width], q, own.keys.transposed(), p, h.scale, false);
    product([m, n, h.value_width], d_out, own.values.transposed(), d_p, 1.0, false);
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
    product([n, h.value_width, m], p.transposed(), d_out, made.values, 1.0, true);
    product([n, h.width, m], d_p.transposed(), q, made.keys, 1.0, true);
    product([m, h.width, n], d_p, own.keys, d_q, 1.0, false);
    // SAFETY: rows of the kernel's result.
    unsafe { c.keep(&k.d_q, at, [m, h.width], Slot::QueryGrads) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scores that a rank computes in a step of a ring, in blocks of `rows` queries.
    fn computed(queries: &[i32], keys: &[i32], rows: usize, window: u32) -> usize {
        let heads = Heads {
            elem: Elem::F32,
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
        let (heads, threads, matrices) = (&heads, 1, 1);
        let c = Call { heads, memory: &[], threads, matrices, q_pos: queries, k_pos: keys, window };
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
