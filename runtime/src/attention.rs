//! Attention, a block of queries by a block of keys at a time: no matrix of scores is larger, and
//! what positions hide is not computed. A thread keeps the blocks it works on; rows of 16 bits are read
//! as they are, results are summed in f32 and rounded once. A task is a block of queries (forward)
//! or the heads of a group (backward, of all rows if a bias has a gradient), so that no sum depends on the number of threads.

mod rows;
mod seen;

use crate::map::element;
use crate::math;
use crate::product::room::{self, Room};
use crate::product::{Stored, keep, multiply};
use crate::team;
use shardc_ir::kernel::{Attention, AttentionGrad, Heads, View};
use shardc_ir::ops::attention::offset;
use shardc_ir::rng::{Distribution, Draws};
use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Queries of a block of attention.
pub const QUERIES: usize = 96;
/// Keys of a block.
const KEYS: usize = 384;

/// Bytes that a thread keeps, beside a block of outputs.
pub(crate) const KEPT: usize = 4 * 2 * QUERIES * KEYS;

thread_local! {
    /// Two matrices of scores, and a block of outputs.
    static ROOM: Room = const { Cell::new(Vec::new()) };
}

/// Memory of one call.
struct AttentionCall<'a> {
    heads: &'a Heads,
    memory: &'a [*mut f32],
    q_pos: &'a [i32],
    k_pos: &'a [i32],
    /// What is dropped, if something is.
    draws: Option<Draws>,
}

/// A head of a sequence, and the keys' group that it belongs to.
#[derive(Clone, Copy)]
struct HeadPlace {
    batch: usize,
    head: usize,
    group: usize,
}

impl<'a> AttentionCall<'a> {
    /// # Safety
    /// `memory` is valid for everything the kernel reaches.
    unsafe fn new(heads: &'a Heads, memory: &'a [*mut f32]) -> AttentionCall<'a> {
        let ints = |v: &View, n: usize| {
            let at = memory[v.operand].wrapping_add(v.offset).cast::<i32>().cast_const();
            // SAFETY: by the caller.
            unsafe { std::slice::from_raw_parts(at, n) }
        };
        let draws = heads.kept.as_ref().map(|k| {
            let run = ints(&k.run, 3);
            Draws::new(Distribution::Keep(k.rate), k.stream, [0, 1, 2].map(|i| run[i] as u32))
        });
        AttentionCall {
            heads,
            memory,
            q_pos: ints(&heads.q_pos, heads.queries),
            k_pos: ints(&heads.k_pos, heads.keys),
            draws: draws.filter(|d| !d.keeps_all()),
        }
    }

    /// What the probability of each key of a block is multiplied by, if some are dropped.
    ///
    /// # Safety
    /// As for [`AttentionCall::new`].
    unsafe fn kept<'b>(
        &self,
        query: usize,
        p: HeadPlace,
        keys: &Range<usize>,
        to: &'b mut [f32; KEYS],
    ) -> &'b [f32] {
        let (Some(draws), Some(k)) = (&self.draws, &self.heads.kept) else { return &[] };
        let at = self.memory[k.place.operand].wrapping_add(k.place.at(&[p.batch, query]));
        // SAFETY: by the caller.
        let place = unsafe { *at.cast::<i32>() } as u32;
        let head = (k.first_head + p.head) as u32;
        let own = self.k_pos[keys.clone()].iter().copied();
        draws.of_keys([place, head], own, |t, by| to[t] = by as f32);
        &to[..keys.len()]
    }

    /// The slope of a head, if heads have one.
    ///
    /// # Safety
    /// As for [`AttentionCall::new`].
    unsafe fn slope(&self, head: usize) -> Option<f32> {
        let v = self.heads.slopes.as_ref()?;
        // SAFETY: by the caller.
        Some(unsafe { *self.memory[v.operand].add(v.at(&[head])) })
    }

    /// The first of a head's numbers of all offsets, of a bias or its gradient, and how many they are.
    fn offsets(&self, v: &View, head: usize) -> (*mut f32, usize) {
        let n = self.heads.bias.as_ref().map_or(0, |b| b.1);
        (self.memory[v.operand].wrapping_add(v.at(&[head])), n)
    }

    /// The gradient of a head's bias.
    ///
    /// # Safety
    /// As for [`AttentionCall::new`]; nobody else uses it.
    unsafe fn d_bias(&self, v: &View, head: usize) -> &'a mut [f32] {
        let (first, n) = self.offsets(v, head);
        // SAFETY: by the caller.
        unsafe { std::slice::from_raw_parts_mut(first, n) }
    }

    /// What is added to the scores of a query of a head with these keys.
    ///
    /// # Safety
    /// As for [`AttentionCall::new`].
    unsafe fn add(&self, scores: &mut [f32], query: usize, head: usize, keys: &Range<usize>) {
        let (at, keys) = (self.q_pos[query], &self.k_pos[keys.clone()]);
        // SAFETY: by the caller.
        if let Some(slope) = unsafe { self.slope(head) } {
            math::take_distances(scores, keys, at, slope);
        }
        if let Some((v, _)) = &self.heads.bias {
            let (first, n) = self.offsets(v, head);
            // SAFETY: by the caller.
            let bias = unsafe { std::slice::from_raw_parts(first, n) };
            scores.iter_mut().zip(keys).for_each(|(x, &k)| *x += bias[of(k, at, bias)]);
        }
    }

    /// An f32 statistic.
    fn at(&self, v: &View, query: usize, p: HeadPlace) -> *mut f32 {
        self.memory[v.operand].wrapping_add(v.at(&[p.batch, query, p.head]))
    }

    /// Rows of a head of an operand or result, from a position on.
    fn rows(&self, v: &View, batch: usize, position: usize, head: usize) -> Stored {
        let elem = self.heads.elem;
        Stored {
            at: element(self.memory[v.operand], elem, v.at(&[batch, position, head])),
            elem,
            row_stride: v.strides[1],
            col_stride: 1,
        }
    }
    /// Rows of the queries' head.
    fn by_query(&self, v: &View, query: usize, p: HeadPlace) -> Stored {
        self.rows(v, p.batch, query, p.head)
    }
    /// Rows of the keys' group.
    fn by_key(&self, v: &View, key: usize, p: HeadPlace) -> Stored {
        self.rows(v, p.batch, key, p.group)
    }

    /// Blocks of queries.
    fn block(&self, i: usize) -> Range<usize> {
        i * QUERIES..self.heads.queries.min((i + 1) * QUERIES)
    }
    fn blocks(&self) -> usize {
        self.heads.queries.div_ceil(QUERIES)
    }
}

/// Which of the offsets of a bias a key has.
fn of(key: i32, query: i32, bias: &[f32]) -> usize {
    offset(i64::from(key) - i64::from(query), bias.len())
}

/// The smallest and the largest of some positions.
fn ends(positions: &[i32]) -> [i32; 2] {
    let (min, max) = (positions.iter().min(), positions.iter().max());
    [min.copied().unwrap_or(i32::MAX), max.copied().unwrap_or(i32::MIN)]
}

/// Row `i` of a matrix with rows of adjacent f32.
///
/// # Safety
/// The row has `n` valid elements, which nobody else uses while the slice is.
unsafe fn row<'a>(m: Stored, i: usize, n: usize) -> &'a mut [f32] {
    // SAFETY: by the caller.
    unsafe { std::slice::from_raw_parts_mut(m.at.add(i * m.row_stride), n) }
}

/// Sets a block of rows of adjacent f32.
///
/// # Safety
/// As for [`row`], for all rows.
unsafe fn zero(m: Stored, [rows, cols]: [usize; 2]) {
    for i in 0..rows {
        // SAFETY: by the caller.
        unsafe { row(m, i, cols) }.fill(0.0);
    }
}

/// Runs attention.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches; results overlap nothing else.
pub(crate) unsafe fn forward(k: &Attention, memory: &[*mut f32], threads: usize) {
    let h = &k.heads;
    // SAFETY: by the caller.
    let c = unsafe { AttentionCall::new(h, memory) };
    let heads = h.groups * h.repeat;
    let task = |i: usize| {
        // The last blocks of a causal sequence see most: they come first of their head.
        let (block, rest) = (c.blocks() - 1 - i % c.blocks(), i / c.blocks());
        let (batch, head) = (rest / heads, rest % heads);
        let place = HeadPlace { batch, head, group: head / h.repeat };
        let words = QUERIES * KEYS + QUERIES * h.value_width;
        room::with(&ROOM, words, |room| {
            // SAFETY: block, head and batch are within the kernel's sizes.
            unsafe { forward_block(k, &c, place, c.block(block), room.cast()) };
        });
    };
    // SAFETY: every task has its own rows of the results.
    unsafe { team::each(threads, c.blocks() * h.batch * heads, task) };
}

/// # Safety
/// As for [`forward`]; there is room for scores and outputs of a block.
unsafe fn forward_block(
    k: &Attention,
    c: &AttentionCall,
    place: HeadPlace,
    block: Range<usize>,
    room: *mut f32,
) {
    let h = c.heads;
    let (m, width) = (block.len(), h.value_width);
    let out = Stored::rows(room.wrapping_add(QUERIES * KEYS), width);
    // SAFETY: by the caller.
    let segments = unsafe { c.segments(place.batch) };
    let (mut max, mut sums) = ([f32::NEG_INFINITY; QUERIES], [0.0f32; QUERIES]);
    let mut factors = [1.0; KEYS];
    let q = c.by_query(&k.q, block.start, place);
    // SAFETY: room for the block of outputs.
    unsafe { zero(out, [m, width]) };
    for keys in c.seen(block.clone(), segments) {
        let n = keys.len();
        let scores = Stored::rows(room, n);
        let own = c.by_key(&k.k, keys.start, place).transposed();
        // SAFETY: rows of the block and of the seen keys are valid; there is room for the scores.
        unsafe { multiply([m, n, h.width], [q, own, scores], h.scale, false, 1) };
        let hidden = c.hides(block.clone(), keys.clone(), segments);
        for i in 0..m {
            let seen = c.mask(block.start + i, &keys, hidden);
            // SAFETY: row i of the scores and of the outputs.
            let (x, y) = unsafe { (row(scores, i, n), row(out, i, width)) };
            if let Some(cap) = h.softcap {
                math::cap_scores(x, cap);
            }
            // SAFETY: by the caller.
            unsafe { c.add(x, block.start + i, place.head, &keys) };
            let largest = rows::largest(x, seen);
            if largest > max[i] {
                // What was summed before is e^(max - largest) of what it was.
                let by = math::exp(max[i] - largest);
                (sums[i], max[i]) = (sums[i] * by, largest);
                y.iter_mut().for_each(|y| *y *= by);
            }
            sums[i] += rows::weigh(x, seen, max[i]);
            // SAFETY: by the caller.
            let kept = unsafe { c.kept(block.start + i, place, &keys, &mut factors) };
            x.iter_mut().zip(kept).for_each(|(x, by)| *x *= by);
        }
        let values = c.by_key(&k.v, keys.start, place);
        // SAFETY: as above; the outputs lie apart.
        unsafe { multiply([m, width, n], [scores, values, out], 1.0, true, 1) };
    }
    for i in 0..m {
        let nothing = sums[i] == 0.0;
        let lse = if nothing { f32::NEG_INFINITY } else { max[i] + sums[i].ln() };
        let by = if nothing { 0.0 } else { 1.0 / sums[i] };
        // SAFETY: row i of the outputs, and an element of the kernel's result.
        unsafe {
            row(out, i, width).iter_mut().for_each(|x| *x *= by);
            *c.at(&k.lse, block.start + i, place) = lse;
        }
    }
    // SAFETY: rows of the kernel's result.
    unsafe { keep(out, c.by_query(&k.out, block.start, place), [m, width]) };
}

/// Runs the gradient of attention.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches; results and workspace overlap nothing else.
pub(crate) unsafe fn backward(k: &AttentionGrad, memory: &[*mut f32], threads: usize) {
    let h = &k.heads;
    // SAFETY: by the caller.
    let c = unsafe { AttentionCall::new(h, memory) };
    let own = h.keys * (h.width + h.value_width);
    // Sums of f32 lie in the results; others in the workspace, which has room for so many groups.
    let slots = match h.elem.is_half() {
        false => usize::MAX,
        true => ((2 * h.rows * h.keys + h.wide(true)) / own.max(1)).max(1),
    };
    // The gradient of a bias is a sum over rows, in their order.
    let rows = if k.d_bias.is_some() { h.batch } else { 1 };
    if let Some(v) = &k.d_bias {
        // SAFETY: by the caller; no task has begun.
        (0..h.groups * h.repeat).for_each(|head| unsafe { c.d_bias(v, head).fill(0.0) });
    }
    let (all, next) = (h.batch * h.groups / rows.max(1), AtomicUsize::new(0));
    let workers = threads.min(slots).min(all);
    let task = |slot: usize| {
        let slot = memory[h.scratch.operand].wrapping_add(h.scratch.offset + slot * own);
        while let Some(i) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&i| i < all) {
            let words = 2 * QUERIES * KEYS + QUERIES * h.width;
            room::with(&ROOM, words, |room| {
                // SAFETY: group and batch are within the kernel's sizes.
                unsafe {
                    for batch in i / h.groups * rows..(i / h.groups + 1) * rows {
                        backward_group(k, &c, [batch, i % h.groups], slot, room.cast());
                    }
                }
            });
        }
    };
    // SAFETY: every group has its own rows of the results, every worker its part of the workspace.
    unsafe { team::each(workers, workers, task) };
}

/// The gradients of a group of heads.
///
/// # Safety
/// As for [`backward`]; there is room for two matrices of scores and a block of gradients, and in
/// the slot, if sums are not made in the results, for those of all keys.
unsafe fn backward_group(
    k: &AttentionGrad,
    c: &AttentionCall,
    [batch, group]: [usize; 2],
    slot: *mut f32,
    room: *mut f32,
) {
    let h = c.heads;
    let (keys, values) = ([h.keys, h.width], [h.keys, h.value_width]);
    let place = |head| HeadPlace { batch, head, group };
    let [to_k, to_v] = [&k.d_k, &k.d_v].map(|v| c.by_key(v, 0, place(0)));
    let [d_k, d_v] = match h.elem.is_half() {
        false => [to_k, to_v],
        true => {
            let behind = slot.wrapping_add(h.keys * h.width);
            [Stored::rows(slot, h.width), Stored::rows(behind, h.value_width)]
        }
    };
    // SAFETY: by the caller.
    unsafe {
        zero(d_k, keys);
        zero(d_v, values);
        for head in group * h.repeat..(group + 1) * h.repeat {
            for block in (0..c.blocks()).map(|i| c.block(i)) {
                backward_block(k, c, place(head), [d_k, d_v], block, room);
            }
        }
        if h.elem.is_half() {
            keep(d_k, to_k, keys);
            keep(d_v, to_v, values);
        }
    }
}

/// # Safety
/// As for [`backward_group`].
unsafe fn backward_block(
    k: &AttentionGrad,
    c: &AttentionCall,
    place: HeadPlace,
    [d_k, d_v]: [Stored; 2],
    block: Range<usize>,
    room: *mut f32,
) {
    let h = c.heads;
    let m = block.len();
    let (mut factors, mut of_scores) = ([1.0; KEYS], [0.0; KEYS]);
    let d_q = Stored::rows(room.wrapping_add(2 * QUERIES * KEYS), h.width);
    let [q, d_out] = [&k.q, &k.d_out].map(|v| c.by_query(v, block.start, place));
    let product = |size, all, scale, accumulate| {
        // SAFETY: rows of the block and of the seen keys are valid; there is room for the scores;
        // results overlap nothing.
        unsafe { multiply(size, all, scale, accumulate, 1) }
    };
    // SAFETY: by the caller.
    let segments = unsafe { c.segments(place.batch) };
    // SAFETY: room for the block of gradients.
    unsafe { zero(d_q, [m, h.width]) };
    for keys in c.seen(block.clone(), segments) {
        let n = keys.len();
        let (p, d_p) = (Stored::rows(room, n), Stored::rows(room.wrapping_add(QUERIES * KEYS), n));
        let [own, values] = [&k.k, &k.v].map(|v| c.by_key(v, keys.start, place));
        product([m, n, h.width], [q, own.transposed(), p], h.scale, false);
        product([m, n, h.value_width], [d_out, values.transposed(), d_p], 1.0, false);
        let hidden = c.hides(block.clone(), keys.clone(), segments);
        for i in 0..m {
            let s = block.start + i;
            // SAFETY: row i of both matrices, and elements of the kernel's operands.
            let (p, d_p, lse, mut delta) = unsafe {
                let (lse, delta) = (*c.at(&k.lse, s, place), *c.at(&k.delta, s, place));
                (row(p, i, n), row(d_p, i, n), lse, delta)
            };
            // SAFETY: by the caller.
            let kept = unsafe { c.kept(s, place, &keys, &mut factors) };
            d_p.iter_mut().zip(kept).for_each(|(x, by)| *x *= by);
            if k.d_bias.is_some() {
                // Before what a softcap makes of them.
                of_scores.iter_mut().zip(&*d_p).for_each(|(x, d)| *x = d - delta);
            }
            if let Some(cap) = h.softcap {
                math::cap_scores(p, cap);
                math::cap_grad(d_p, p, std::mem::take(&mut delta), cap);
            }
            // SAFETY: by the caller.
            unsafe { c.add(p, s, place.head, &keys) };
            rows::grad(p, d_p, c.mask(s, &keys, hidden), [lse, delta, h.scale]);
            if let Some(v) = &k.d_bias {
                // SAFETY: by the caller, one task has all of this head.
                let to = unsafe { c.d_bias(v, place.head) };
                for ((&key, p), d) in c.k_pos[keys.clone()].iter().zip(&*p).zip(&of_scores) {
                    to[of(key, c.q_pos[s], to)] += p * d;
                }
            }
            p.iter_mut().zip(kept).for_each(|(x, by)| *x *= by);
        }
        let (to_k, to_v) = (d_k.from(keys.start, 0), d_v.from(keys.start, 0));
        product([n, h.value_width, m], [p.transposed(), d_out, to_v], 1.0, true);
        product([n, h.width, m], [d_p.transposed(), q, to_k], 1.0, true);
        product([m, h.width, n], [d_p, own, d_q], 1.0, true);
    }
    // SAFETY: rows of the kernel's result.
    unsafe { keep(d_q, c.by_query(&k.d_q, block.start, place), [m, h.width]) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::ops::Mask;
    use shardc_ir::types::DType;

    /// Scores that a rank computes in a step of a ring.
    fn computed(queries: &[i32], keys: &[i32], mask: Mask) -> usize {
        let heads = Heads {
            elem: DType::F32,
            batch: 1,
            queries: queries.len(),
            keys: keys.len(),
            groups: 1,
            repeat: 1,
            width: 1,
            value_width: 1,
            scale: 1.0,
            softcap: None,
            mask,
            slopes: None,
            bias: None,
            segments: None,
            kept: None,
            rows: 1,
            q_pos: View::default(),
            k_pos: View::default(),
            scratch: View::default(),
        };
        let c =
            AttentionCall { heads: &heads, memory: &[], q_pos: queries, k_pos: keys, draws: None };
        let blocks = (0..c.blocks()).map(|i| c.block(i));
        blocks.map(|b| b.len() * c.seen(b, None).map(|keys| keys.len()).sum::<usize>()).sum()
    }

    /// What a mask empties is not computed, whatever the order of tokens: with zigzag every rank
    /// computes half of a block that is not its own, and all ranks the same.
    #[test]
    fn blocks_skip_what_positions_hide() {
        let (ranks, chunk) = (4, 2 * QUERIES as i32);
        let own = |r: i32| -> Vec<i32> {
            let of = |c: i32| c * chunk..(c + 1) * chunk;
            of(r).chain(of(2 * ranks - 1 - r)).collect()
        };
        let (causal, size) = (Mask::CAUSAL, (2 * chunk) as usize);
        for q in 0..ranks {
            for k in (0..ranks).filter(|&k| k != q) {
                assert_eq!(computed(&own(q), &own(k), causal), size * size / 2);
            }
        }
        let plain = |r: i32| -> Vec<i32> { (2 * r * chunk..2 * (r + 1) * chunk).collect() };
        assert_eq!(computed(&plain(0), &plain(1), causal), 0);
        assert_eq!(computed(&plain(1), &plain(0), causal), size * size);
        assert_eq!(computed(&plain(0), &plain(1), Mask::FULL), size * size);
        // A window hides what is far back too, and one ahead what is far ahead; chunks what is of others.
        let near = Mask { left: Some(4 * QUERIES), right: Some(4 * QUERIES), chunk: None };
        assert_eq!(computed(&plain(3), &plain(0), near), 0);
        assert_eq!(computed(&plain(0), &plain(3), near), 0);
        assert!(computed(&plain(0), &plain(1), near) > 0);
        let chunks = Mask { chunk: Some(size), ..Mask::FULL };
        assert_eq!(computed(&plain(0), &plain(1), chunks), 0);
        assert_eq!(computed(&plain(1), &plain(1), chunks), size * size);
    }
}
