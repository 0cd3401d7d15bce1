//! Products of packed panels, for processors with AVX-512: what a task makes is a block of the
//! result, from first to last of k; blocks of operands that fit the nearer caches are packed first.
//! Where k is cut depends on k alone and no sum is shared between tasks, so that the number of
//! threads does not change a bit.

use super::pack::{Word, panels};
use super::room::{self, Room};
use super::tile::{self, COLS, Kernel, ROWS, Tile};
use super::{Stored, few, team};
use shardc_ir::kernel::{Elem, Extents};
use std::cell::Cell;
use std::ops::Range;

/// Steps of k that are packed at once.
const STEPS: usize = 512;
/// Rows and columns of the largest block of a result. With the steps, a thread keeps at most 3 MB.
const BLOCK: [usize; 2] = [42 * ROWS, 16 * COLS];
/// Products with fewer multiplications than this take one thread: another would be late.
const LITTLE: usize = 1 << 20;
/// The same for elements of weights that few rows meet.
const FEW: usize = 1 << 18;

/// Products of matrices `[m, k]` by `[k, n]`: `out = scale · a b`, added to what `out` holds if
/// `accumulate`.
#[derive(Clone)]
pub(super) struct Products<F> {
    pub size: [usize; 3],
    /// Loops over results, and loops that are summed like k.
    pub batch: Extents,
    pub sum: Extents,
    /// Matrices by an index of the loops: `a`, `b` and `out`, which does not depend on the sum.
    pub at: F,
    pub scale: f32,
    pub accumulate: bool,
}

thread_local! {
    /// Packed operands, and sums that are not rounded yet.
    static ROOM: Room = const { Cell::new(Vec::new()) };
}

/// Kernels for words of one kind, by rows of their tiles from 1 on.
#[derive(Clone, Copy)]
pub(super) struct Kernels {
    word: Word,
    by_rows: &'static [Kernel; ROWS],
}

impl Kernels {
    /// Those for products of these elements; `None` if the processor has none.
    pub fn of(a: Elem, b: Elem) -> Option<Kernels> {
        let any = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl");
        let pairs = [a, b] == [Elem::BF16; 2] && is_x86_feature_detected!("avx512bf16");
        let (word, by_rows) =
            if pairs { (Word::Pair, &tile::BF16) } else { (Word::F32, &tile::F32) };
        any.then_some(Kernels { word, by_rows })
    }
}

/// Element `flat` of loops, first loop outermost.
fn index(extents: &[usize], mut flat: usize) -> Extents {
    let mut index: Extents = extents.into();
    for (i, &n) in index.iter_mut().zip(extents).rev() {
        let n = n.max(1);
        (*i, flat) = (flat % n, flat / n);
    }
    index
}

/// Cuts `n` into so many ranges of whole units; the last ones may be shorter, or empty.
fn cut(n: usize, pieces: usize, unit: usize, i: usize) -> Range<usize> {
    let each = n.div_ceil(pieces.max(1)).next_multiple_of(unit);
    (i * each).min(n)..((i + 1) * each).min(n)
}

/// Into how many blocks to cut rows and columns, so that threads end together and little is packed
/// twice.
fn grid([m, n]: [usize; 2], results: usize, threads: usize) -> [usize; 2] {
    /// Packing a word costs as much as this many tile words of a step.
    const PACK: usize = 24;
    let fewest = [m.div_ceil(BLOCK[0]).max(1), n.div_ceil(BLOCK[1]).max(1)];
    let cost = |&[i, j]: &[usize; 2]| {
        let (rows, cols) = (cut(m, i, ROWS, 0).len(), cut(n, j, COLS, 0).len());
        let rounds = (i * j * results).div_ceil(threads.max(1));
        rounds * (rows * cols.next_multiple_of(COLS) + PACK * (rows + cols))
    };
    let more = |n: usize| n..n + if threads > 1 { 2 * threads } else { 1 };
    let all = more(fewest[0]).flat_map(|i| more(fewest[1]).map(move |j| [i, j]));
    all.min_by_key(cost).unwrap_or(fewest)
}

impl<F: Fn(&[usize], &[usize]) -> [Stored; 3]> Products<F> {
    /// Runs all products; of nothing (k or a sum loop of 0) they are 0.
    ///
    /// # Safety
    /// All matrices are valid, and no result overlaps an operand or another result.
    pub unsafe fn run(&self, kernels: Kernels, threads: usize) {
        let [m, n, k] = self.size;
        let results: usize = self.batch.iter().product();
        if m * n * results == 0 {
            return;
        }
        if self.is_few(kernels.word) {
            // SAFETY: by the caller.
            return unsafe { self.run_few(kernels.word, threads) };
        }
        let work = m * n * results * k * self.sum.iter().product::<usize>();
        let threads = if work < LITTLE { 1 } else { threads };
        let [down, right] = grid([m, n], results, threads);
        let block = |task: usize| {
            let (result, block) = (task / (down * right), task % (down * right));
            let rows = cut(m, down, ROWS, block / right);
            let cols = cut(n, right, COLS, block % right);
            if !rows.is_empty() && !cols.is_empty() {
                let at = index(&self.batch, result);
                // SAFETY: by the caller; the block is inside the result.
                unsafe { self.block(&at, rows, cols, kernels) };
            }
        };
        // SAFETY: no element of a result is in two blocks.
        unsafe { team::each(threads, results * down * right, block) };
    }

    /// Whether rows are so few that nothing is packed.
    fn is_few(&self, word: Word) -> bool {
        let [m, n, k] = self.size;
        if m > few::MOST || n == 0 || k == 0 || !self.sum.is_empty() {
            return false;
        }
        let [a, b, _] = (self.at)(&index(&self.batch, 0), &[]);
        a.col_stride == 1
            && b.row_stride == 1
            && (word == Word::Pair || [a.elem, b.elem] == [Elem::F32; 2])
    }

    /// Runs products of few rows.
    ///
    /// # Safety
    /// As for [`Products::run`].
    unsafe fn run_few(&self, word: Word, threads: usize) {
        let [m, n, k] = self.size;
        let (results, dots) = (self.batch.iter().product::<usize>(), few::dots(word, m));
        let pieces = if n * k * results < FEW { 1 } else { threads };
        let piece = |task: usize| {
            let [a, b, out] = (self.at)(&index(&self.batch, task / pieces), &[]);
            let cols = cut(n, pieces, COLS, task % pieces);
            for first in cols.clone().step_by(COLS) {
                let (mut sums, cols) = ([0.0; few::MOST * COLS], (cols.end - first).min(COLS));
                let write = out.from(0, first);
                let read = self.accumulate.then_some(write);
                let tile = Tile { scale: self.scale, read, write, cols };
                // SAFETY: by the caller; the columns are inside the matrices.
                unsafe {
                    dots(k, a, b.from(0, first), cols, sums.as_mut_ptr());
                    tile::finish_any(sums.as_ptr(), m, &tile);
                }
            }
        };
        // SAFETY: no column of a result is in two pieces.
        unsafe { team::each(pieces, results * pieces, piece) };
    }

    /// Makes one block of a result.
    ///
    /// # Safety
    /// As for [`Products::run`].
    unsafe fn block(&self, at: &[usize], rows: Range<usize>, cols: Range<usize>, kernels: Kernels) {
        let word = kernels.word;
        let k = self.size[2];
        let terms: usize = self.sum.iter().product();
        let pieces = k.div_ceil(STEPS * word.depth()).max(1);
        let piece = |i: usize| cut(k, pieces, 16, i);
        let [_, _, out] = (self.at)(at, &index(&self.sum, 0));
        let out = out.from(rows.start, cols.start);
        let all = if k == 0 { 0 } else { terms * pieces };
        let steps = piece(0).len().div_ceil(word.depth());
        let (m, n) = (rows.len(), cols.len());
        // Panels of `b` begin at a line of the cache.
        let of_a = (m.next_multiple_of(ROWS) * steps).next_multiple_of(16);
        let of_b = n.next_multiple_of(COLS) * steps;
        // Sums that are not rounded yet, or that are added to what is there when they are whole: so a
        // sum over microbatches is that of their products, in order.
        let apart = all > 1 && (out.elem != Elem::F32 || self.accumulate);
        // Whole vectors are read, the last one beyond the end.
        let sums = if apart { m * n + 16 } else { 0 };
        room::with(&ROOM, of_a + of_b + sums, |a| {
            let (b, sums) = (a.wrapping_add(of_a), a.wrapping_add(of_a + of_b));
            let sums = Stored { at: sums.cast(), elem: Elem::F32, row_stride: n, col_stride: 1 };
            for i in 0..all.max(1) {
                let first = if self.accumulate && !apart { Some(out) } else { None };
                let between = if apart { sums } else { out };
                let read = if i == 0 { first } else { Some(between) };
                let last = i + 1 >= all && !(apart && self.accumulate);
                let write = if last { out } else { between };
                let k = if all == 0 { 0..0 } else { piece(i % pieces) };
                // SAFETY: by the caller; there is room for these panels and for the sums.
                unsafe {
                    if !k.is_empty() {
                        let [x, y, _] = (self.at)(at, &index(&self.sum, i / pieces));
                        panels::<ROWS>(x, rows.clone(), k.clone(), word, a);
                        panels::<COLS>(y.transposed(), cols.clone(), k.clone(), word, b);
                    }
                    let steps = k.len().div_ceil(word.depth());
                    let tile = Tile { scale: self.scale, read, write, cols: 0 };
                    tiles([m, n, steps], a, b, tile, kernels.by_rows);
                }
            }
            if apart && self.accumulate {
                for (row, col) in (0..m).flat_map(|r| (0..n).step_by(COLS).map(move |c| (r, c))) {
                    let (write, cols) = (out.from(row, col), (n - col).min(COLS));
                    let tile = Tile { scale: 1.0, read: Some(write), write, cols };
                    // SAFETY: the sums are in the room, the elements of the result are the block's.
                    unsafe { tile::finish_any(sums.from(row, col).at.cast_const(), 1, &tile) };
                }
            }
        });
    }
}

/// All tiles of a block: the panels of `b` stay in the second cache while those of `a` pass.
///
/// # Safety
/// Panels have so many steps, and the block so many rows and columns.
unsafe fn tiles(
    [m, n, steps]: [usize; 3],
    a: *const u32,
    b: *const u32,
    whole: Tile,
    kernels: &[Kernel; ROWS],
) {
    for row in (0..m).step_by(ROWS) {
        let kernel = kernels[(m - row).min(ROWS) - 1];
        for col in (0..n).step_by(COLS) {
            let from = |x: Stored| x.from(row, col);
            let cols = (n - col).min(COLS);
            let (read, write) = (whole.read.map(from), from(whole.write));
            let tile = Tile { scale: whole.scale, read, write, cols };
            // SAFETY: by the caller.
            unsafe { kernel(steps, a.add(row * steps), b.add(col * steps), &tile) };
        }
    }
}
