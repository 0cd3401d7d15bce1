//! Products of packed panels. A region of a result is made at a time,
//! from first to last of k: all threads pack what it needs of both operands, some steps of k, then all
//! make tiles of it. Where k is cut depends on k alone and no sum is shared between threads, so that
//! their number does not change a bit.

use super::Stored;
use super::kernels::{FEW, Kernels, Tile, WIDEST};
use super::room::{self, Room};
use super::then::Epilogue;
use crate::team;
use shardc_ir::kernel::{Elem, Extents, THEN};
use smallvec::SmallVec;
use std::cell::Cell;
use std::ops::Range;

/// Steps of k that are packed at once.
const STEPS: usize = 512;
/// Rows and columns of the largest region of a result that one thread makes, in whole tiles; with the
/// steps it keeps at most 11.6 MB. Several threads make one of twice as many rows, and keep 20.1 MB together.
/// Larger regions pack less: all of an operand is packed again for every region across it.
const REGION: [usize; 2] = [1032, 1536];
/// Rows and columns of what a thread makes of a region at once: panels of so many columns stay in its
/// cache while the next rows pass; so does the block, if an epilogue takes it.
const BLOCK: [usize; 2] = THEN;
/// Rows and columns that a thread packs at once, in whole panels.
const PACKED: [usize; 2] = [96, 128];

/// Whether regions, blocks and what is packed at once are whole tiles of this size, and the widest has room.
pub(super) const fn fits([rows, cols]: [usize; 2]) -> bool {
    let (of_rows, of_cols) = ([REGION[0], BLOCK[0], PACKED[0]], [REGION[1], BLOCK[1], PACKED[1]]);
    let mut i = 0;
    while i < of_rows.len() {
        if of_rows[i] % rows != 0 || of_cols[i] % cols != 0 {
            return false;
        }
        i += 1;
    }
    cols <= WIDEST
}
/// Products with fewer multiplications than this take one thread: another would be late.
const LITTLE: usize = 1 << 20;
/// The same for elements of weights that few rows meet.
const LITTLE_OF_FEW: usize = 1 << 18;

/// Products of matrices `[m, k]` by `[k, n]`: `out = scale · a b`, added to what `out` holds if
/// `accumulate`.
pub(super) struct Products<'a, F> {
    pub size: [usize; 3],
    /// Loops over results, and loops that are summed like k.
    pub batch: Extents,
    pub sum: Extents,
    /// Matrices by an index of the loops: `a`, `b` and `out`, which does not depend on the sum.
    pub at: F,
    pub scale: f32,
    pub accumulate: bool,
    /// What takes the result; then it is not written itself.
    pub then: Option<&'a Epilogue<'a>>,
}

thread_local! {
    /// Packed operands, and sums that are not rounded yet.
    static ROOM: Room = const { Cell::new(Vec::new()) };
    /// A block that an epilogue takes.
    static RESULT: Room = const { Cell::new(Vec::new()) };
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

impl<F: Fn(&[usize], &[usize]) -> [Stored; 3]> Products<'_, F> {
    /// Runs all products; of nothing (k or a sum loop of 0) they are 0.
    ///
    /// # Safety
    /// All matrices are valid, and no result overlaps an operand or another result.
    pub unsafe fn run(&self, kernels: &Kernels, threads: usize) {
        let [m, n, k] = self.size;
        let results: usize = self.batch.iter().product();
        if m * n * results == 0 {
            return;
        }
        if self.is_few(kernels) {
            // SAFETY: by the caller.
            return unsafe { self.run_few(kernels, threads) };
        }
        let work = m * n * results * k * self.sum.iter().product::<usize>();
        let threads = if work < LITTLE { 1 } else { threads };
        // Of many results that are small, each is one thread's.
        let blocks = Region::blocks(m, n);
        let small = m <= REGION[0] && n <= REGION[1] && results >= threads.min(blocks);
        let (outside, inside) = if small { (threads, 1) } else { (1, threads) };
        // SAFETY: by the caller; no element is in two results.
        unsafe {
            let result = |i: usize| self.result(&index(&self.batch, i), kernels, inside);
            team::each(outside, results, result);
        }
    }

    /// What columns are cut into whole ones of: blocks that an epilogue takes are, but for the last of a row.
    fn unit(&self, kernels: &Kernels) -> usize {
        if self.then.is_some() { BLOCK[1] } else { kernels.tile[1] }
    }

    /// Whether rows are so few that nothing is packed.
    fn is_few(&self, kernels: &Kernels) -> bool {
        let [m, n, k] = self.size;
        if m > FEW || n == 0 || k == 0 || !self.sum.is_empty() {
            return false;
        }
        let [a, b, _] = (self.at)(&index(&self.batch, 0), &[]);
        a.col_stride == 1 && b.row_stride == 1 && [a.elem, b.elem] == [kernels.few.0; 2]
    }

    /// Runs products of few rows.
    ///
    /// # Safety
    /// As for [`Products::run`].
    unsafe fn run_few(&self, kernels: &Kernels, threads: usize) {
        let [m, n, k] = self.size;
        let (results, dots) = (self.batch.iter().product::<usize>(), kernels.few.1[m - 1]);
        let pieces = if n * k * results < LITTLE_OF_FEW { 1 } else { threads };
        let piece = |task: usize| {
            let index = index(&self.batch, task / pieces);
            let [a, b, out] = (self.at)(&index, &[]);
            let read = self.accumulate.then_some(out);
            let tiles = |cols: Range<usize>, from: &Tile| {
                for first in cols.clone().step_by(kernels.tile[1]) {
                    let (mut sums, left) = ([0.0; FEW * WIDEST], cols.end - first);
                    let tile = from.from(0, first - cols.start, left.min(kernels.tile[1]));
                    // SAFETY: by the caller; the columns are inside the matrices.
                    unsafe {
                        dots(k, a, b.from(0, first), tile.cols, sums.as_mut_ptr());
                        (kernels.finish)(sums.as_ptr(), m, &tile);
                    }
                }
            };
            let whole = Tile { scale: self.scale, read, onto: None, write: out, cols: 0 };
            let cols = cut(n, pieces, self.unit(kernels), task % pieces);
            for first in cols.clone().step_by(BLOCK[1]) {
                let width = (cols.end - first).min(BLOCK[1]);
                let make = |tile: &Tile| tiles(first..first + width, tile);
                // SAFETY: no column of a result is in two pieces.
                unsafe {
                    self.block(&index, &whole.from(0, first, 0), [0, first], [m, width], make)
                };
            }
        };
        // SAFETY: no column of a result is in two pieces.
        unsafe { team::each(pieces, results * pieces, piece) };
    }

    /// Makes a block of a result: where the tile says, or for the epilogue.
    ///
    /// # Safety
    /// The block is one of the result with this index, from this place on, and nobody else makes it.
    unsafe fn block(
        &self,
        index: &[usize],
        tile: &Tile,
        from: [usize; 2],
        size: [usize; 2],
        make: impl FnOnce(&Tile),
    ) {
        let Some(then) = self.then else { return make(tile) };
        room::with(&RESULT, BLOCK[0] * BLOCK[1], |room| {
            let block = room.cast();
            make(&Tile { write: Stored::rows(block, BLOCK[1]), ..*tile });
            // SAFETY: by the caller; the block is made.
            unsafe { then.run(index, block, from, size) };
        });
    }

    /// Makes a result: of each of its regions, for some steps of k after the others, the panels and
    /// then the tiles.
    ///
    /// # Safety
    /// As for [`Products::run`].
    unsafe fn result(&self, at: &[usize], kernels: &Kernels, threads: usize) {
        let ([m, n, k], [tall, wide]) = (self.size, kernels.tile);
        let word = kernels.word;
        let [_, _, out] = (self.at)(at, &index(&self.sum, 0));
        let pieces = k.div_ceil(STEPS * word.depth()).max(1);
        let piece = |i: usize| cut(k, pieces, 16, i);
        let all = if k == 0 { 0 } else { self.sum.iter().product::<usize>() * pieces };
        let turns = all.max(1);
        let rows = REGION[0] * threads.clamp(1, 2);
        let grid = [m.div_ceil(rows), n.div_ceil(REGION[1])];
        let unit = self.unit(kernels);
        let largest = [cut(m, grid[0], tall, 0).len(), cut(n, grid[1], unit, 0).len()];
        let steps = piece(0).len().div_ceil(word.depth());
        // Panels of `b` begin at a line of the cache.
        let of_a = (largest[0].next_multiple_of(tall) * steps).next_multiple_of(16);
        let of_b = largest[1].next_multiple_of(wide) * steps;
        // Sums that are not rounded yet, or that are added to what is there when they are whole: so a
        // sum over microbatches is that of their products, in order.
        let elsewhere = out.elem != Elem::F32 || self.accumulate || self.then.is_some();
        let apart = all > 1 && elsewhere;
        let sums = if apart { largest[0] * largest[1] } else { 0 };
        let region =
            |i: usize| [cut(m, grid[0], tall, i / grid[1]), cut(n, grid[1], unit, i % grid[1])];
        let mut starts: SmallVec<[usize; 8]> = SmallVec::new();
        starts.push(0);
        for r in 0..grid[0] * grid[1] {
            let [rows, cols] = region(r).map(|x| x.len());
            for _ in 0..turns {
                for tasks in [Region::packs(rows, cols), Region::blocks(rows, cols)] {
                    starts.push(starts[starts.len() - 1] + tasks);
                }
            }
        }
        room::with(&ROOM, of_a + of_b + sums, |a| {
            let (b, sums) = (a.wrapping_add(of_a), a.wrapping_add(of_a + of_b));
            let task = |phase: usize, i: usize| {
                let [rows, cols] = region(phase / 2 / turns);
                let turn = phase / 2 % turns;
                let k = if all == 0 { 0..0 } else { piece(turn % pieces) };
                let region = Region { a, b, kernels, threads, rows, cols, k };
                if phase % 2 == 0 {
                    let [x, y, _] = (self.at)(at, &index(&self.sum, turn / pieces));
                    // SAFETY: by the caller; there is room for these panels.
                    return unsafe { region.pack([x, y.transposed()], i) };
                }
                let out = out.from(region.rows.start, region.cols.start);
                let sums = Stored::rows(sums.cast(), region.cols.len());
                let first = if self.accumulate && !apart { Some(out) } else { None };
                let between = if apart { sums } else { out };
                let read = if turn == 0 { first } else { Some(between) };
                let last = turn + 1 == turns;
                let write = if last { out } else { between };
                let onto = (last && apart && self.accumulate).then_some(out);
                let tile = Tile { scale: self.scale, read, onto, write, cols: 0 };
                let (from, size) = region.place(i);
                let tile = tile.from(from[0], from[1], 0);
                let make = |tile: &Tile| {
                    // SAFETY: by the caller; the panels are packed, and there is room for the sums.
                    unsafe { region.tiles(tile, from, size) }
                };
                let first = [region.rows.start + from[0], region.cols.start + from[1]];
                match last {
                    // SAFETY: by the caller.
                    true => unsafe { self.block(at, &tile, first, size, make) },
                    false => make(&tile),
                }
            };
            // SAFETY: no two tasks of a phase write the same panel, or the same element.
            unsafe { team::phases(threads, &starts, task) };
        });
    }
}

/// Rows and columns of a result, steps of k, and room for what these need of both operands; how
/// many threads share the work.
struct Region<'a> {
    a: *mut u32,
    b: *mut u32,
    kernels: &'a Kernels,
    threads: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    k: Range<usize>,
}

impl Region<'_> {
    /// Tasks of packing for so many rows and columns.
    fn packs(rows: usize, cols: usize) -> usize {
        rows.div_ceil(PACKED[0]) + cols.div_ceil(PACKED[1])
    }

    /// Tasks of making tiles.
    fn blocks(rows: usize, cols: usize) -> usize {
        rows.div_ceil(BLOCK[0]) * cols.div_ceil(BLOCK[1])
    }

    fn steps(&self) -> usize {
        self.k.len().div_ceil(self.kernels.word.depth())
    }

    /// Which operand a task packs panels of, 0 the left, and which of its: both operands in turn, so
    /// that a thread's share of the tasks is mostly what its blocks are made of, and as large a part
    /// of the other operand.
    fn packed(&self, task: usize) -> (usize, usize) {
        let right = self.cols.len().div_ceil(PACKED[1]);
        let all = Region::packs(self.rows.len(), self.cols.len());
        let [before, then] = [task, task + 1].map(|t| t * right / all);
        if then > before { (1, before) } else { (0, task - before) }
    }

    /// Packs the panels of a task.
    ///
    /// # Safety
    /// The operands have these rows and steps, and there is room.
    unsafe fn pack(&self, [x, y]: [Stored; 2], task: usize) {
        let part = |all: &Range<usize>, i: usize, unit: usize| {
            let first = all.start + i * unit;
            (first..all.end.min(first + unit), i * unit * self.steps())
        };
        let (k, word, [of_rows, of_cols]) = (self.k.clone(), self.kernels.word, self.kernels.pack);
        // SAFETY: by the caller.
        unsafe {
            match self.packed(task) {
                (0, i) => {
                    let (rows, to) = part(&self.rows, i, PACKED[0]);
                    of_rows(x, rows, k, word, self.a.wrapping_add(to));
                }
                (_, i) => {
                    let (cols, to) = part(&self.cols, i, PACKED[1]);
                    of_cols(y, cols, k, word, self.b.wrapping_add(to));
                }
            }
        }
    }

    /// Where in the region the block of a task is, and its size. A thread's share of the tasks is
    /// mostly of rows of its own, or of columns, if those are the longer side; of them, tasks below
    /// each other follow each other.
    fn place(&self, task: usize) -> ([usize; 2], [usize; 2]) {
        let (m, n) = (self.rows.len(), self.cols.len());
        let (down, across) = (m.div_ceil(BLOCK[0]), n.div_ceil(BLOCK[1]));
        let parts = if m < n { 1 } else { self.threads.min(down) };
        let start = |part: usize| down * part / parts;
        // The last part that begins at this task's first row or above it.
        let part = ((task / across + 1) * parts - 1) / down;
        let (first, here) = (start(part), start(part + 1) - start(part));
        let at = task - first * across;
        let (top, left) = ((first + at % here) * BLOCK[0], at / here * BLOCK[1]);
        ([top, left], [(m - top).min(BLOCK[0]), (n - left).min(BLOCK[1])])
    }

    /// Makes the tiles of a block, where `whole` says from its first row and column on.
    ///
    /// # Safety
    /// The panels are packed, and the tile's matrices have these rows and columns.
    unsafe fn tiles(&self, whole: &Tile, [top, left]: [usize; 2], [m, n]: [usize; 2]) {
        let (steps, [tall, wide]) = (self.steps(), self.kernels.tile);
        for row in (0..m).step_by(tall) {
            let make = self.kernels.tiles[(m - row).min(tall) - 1];
            let a = self.a.wrapping_add((top + row) * steps);
            for col in (0..n).step_by(wide) {
                let tile = whole.from(row, col, (n - col).min(wide));
                let b = self.b.wrapping_add((left + col) * steps);
                // SAFETY: by the caller.
                unsafe { make(steps, a, b, &tile) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::kernel::Elem;
    use std::collections::BTreeSet;

    /// Each panel is packed once and each block made once, and of both a thread's share is mostly of
    /// rows of its own, or of columns.
    #[test]
    fn threads_have_rows_or_columns_of_their_own() {
        let kernels = Kernels::of(Elem::F32, Elem::F32);
        for [m, n] in [[2048, 1408], [2000, 100], [300, 300], [256, 1408], [100, 1536]] {
            for threads in [1, 2, 3, 4] {
                let (a, b) = (std::ptr::null_mut(), std::ptr::null_mut());
                let region = Region { a, b, kernels, threads, rows: 0..m, cols: 0..n, k: 0..0 };
                let side = usize::from(m < n);
                let share = |tasks: usize, t: usize| tasks * t / threads..tasks * (t + 1) / threads;
                let (packs, blocks) = (Region::packs(m, n), Region::blocks(m, n));
                let (mut packed, mut made) = (BTreeSet::new(), BTreeSet::new());
                for thread in 0..threads {
                    let (mut units, mut own) = (vec![], vec![]);
                    for task in share(packs, thread) {
                        let (which, unit) = region.packed(task);
                        assert!(packed.insert((which, unit)));
                        units.extend((which == side).then_some(unit * PACKED[side]));
                    }
                    for task in share(blocks, thread) {
                        let (place, _) = region.place(task);
                        assert!(made.insert(place));
                        own.push(place[side]);
                    }
                    // Three quarters, but for a block at either end.
                    let [first, last] = [thread, thread + 1].map(|t| [m, n][side] * t / threads);
                    let near = first.saturating_sub(BLOCK[side])..=last + BLOCK[side];
                    for all in [units, own] {
                        let far = all.iter().filter(|&at| !near.contains(at)).count();
                        assert!(4 * far <= all.len(), "{m} {n} {threads} {thread} {all:?}");
                    }
                }
                assert_eq!((packed.len(), made.len()), (packs, blocks));
            }
        }
    }
}
