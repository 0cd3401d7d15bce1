//! Products in tiles. Where tiles can read the left operand as it lies ([`Kernels::strip`]), a task packs its
//! columns of the right one; else all threads pack the right operand of a region of the result, some steps of
//! k at a time, and a task packs its rows of the left one. Where k is cut depends on k alone and no sum is
//! shared between threads, so that their number does not change a bit.

use super::Stored;
use super::kernels::{FEW, Kernels, Tile, WIDEST};
use super::parts::{self, Parts};
use super::room::{self, Room};
use super::then::Epilogue;
use crate::team;
use shardc_ir::kernel::{Extents, THEN};
use shardc_ir::types::DType;
use smallvec::SmallVec;
use std::cell::Cell;
use std::ops::Range;

/// Steps of k that are packed at once.
const STEPS: usize = 768;
/// k is cut into whole ones of so many, for kernels of all processors alike.
const PIECE: usize = 16;
/// Rows and columns that a task makes at most, in whole tiles, if it packs its columns: their panels, 786 kB,
/// are read again for every tile of rows. Sums that are not rounded yet are 2.1 MB.
const OWN_COLUMNS: [usize; 2] = [2064, BLOCK[1]];
/// Rows of a task that packs them: their panels are 442 kB.
const OWN_ROWS: usize = 144;
/// Rows and columns of the largest region of a result for which all threads pack the right operand: panels
/// of 4.7 MB, and sums that are not rounded yet of 6.3 MB. Several threads make one of twice as many rows.
const REGION: [usize; 2] = [1032, 1536];
/// As many rows more has a region without such sums: what is between its turns lies in the result, and
/// should not leave the cache.
const TALLER: usize = 8;
/// Most words of what a task has of its own.
const OWN_WORDS: usize = OWN_COLUMNS[1] * (STEPS + OWN_COLUMNS[0]);
/// Most bytes that a thread keeps for products that it makes alone. Of several, the one that shares its panels keeps
/// sums of twice as many rows, and each other one what is its own: that is less.
pub(crate) const KEPT: usize =
    4 * (REGION[1] * (STEPS + REGION[0]) + OWN_WORDS + BLOCK[0] * BLOCK[1]);
/// Rows and columns of what a thread makes at once, and of what an epilogue takes.
const BLOCK: [usize; 2] = THEN;
/// Columns that a thread packs at once for all, in whole panels.
const PACKED: usize = 128;

/// Whether tasks, regions, blocks and what is packed at once are whole tiles of this size, and the widest has
/// room.
pub(super) const fn fits([rows, cols]: [usize; 2]) -> bool {
    let of_rows = [OWN_COLUMNS[0], OWN_ROWS, REGION[0], BLOCK[0]];
    let of_cols = [OWN_COLUMNS[1], REGION[1], BLOCK[1], PACKED];
    let mut i = 0;
    while i < of_rows.len() {
        if of_rows[i] % rows != 0 || of_cols[i] % cols != 0 {
            return false;
        }
        i += 1;
    }
    // An epilogue takes blocks from whole ones on.
    cols <= WIDEST && OWN_COLUMNS[1].is_multiple_of(BLOCK[1]) && REGION[1].is_multiple_of(BLOCK[1])
}

/// Products with fewer multiplications than this take one thread: another would be late.
const LITTLE: usize = 1 << 20;
/// The same for elements of weights that few rows meet.
const LITTLE_OF_FEW: usize = 1 << 18;

/// Products of matrices `[m, k]` by `[k, n]`: `out = scale · a b`, added to what `out` holds if
/// `accumulate`.
pub(super) struct PackedProducts<'a, F> {
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
    /// Panels that all threads read, and sums of theirs that are not rounded yet.
    static SHARED: Room = const { Cell::new(Vec::new()) };
    /// Panels of a task, and its sums that are not rounded yet.
    static OWN: Room = const { Cell::new(Vec::new()) };
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

impl<F: Fn(&[usize], &[usize]) -> [Stored; 3]> PackedProducts<'_, F> {
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
        let blocks = m.div_ceil(BLOCK[0]) * n.div_ceil(BLOCK[1]);
        let small = results > 1 && m <= REGION[0] && n <= REGION[1];
        let small = small && results >= threads.min(blocks);
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
    /// As for [`PackedProducts::run`].
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
            let cols = parts::part(n, pieces, self.unit(kernels), task % pieces);
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

    /// Makes a result.
    ///
    /// # Safety
    /// As for [`PackedProducts::run`].
    unsafe fn result(&self, at: &[usize], kernels: &Kernels, threads: usize) {
        let ([m, n, k], unit) = (self.size, [kernels.tile[0], self.unit(kernels)]);
        let [a, _, out] = (self.at)(at, &index(&self.sum, 0));
        let pieces = k.div_ceil(STEPS * kernels.word.depth()).max(1);
        let sums = if k == 0 { 0 } else { self.sum.iter().product::<usize>() };
        let turns = (sums * pieces).max(1);
        // Sums that are not rounded yet, or that are added to what is there when they are whole: so a
        // sum over microbatches is that of their products, in order.
        let elsewhere = out.elem != DType::F32 || self.accumulate || self.then.is_some();
        let k = if sums == 0 { 0 } else { k };
        let made = Made { at, kernels, k, pieces, turns, apart: turns > 1 && elsewhere };
        if kernels.strip(a).is_some() {
            let parts = Parts::tasks([m, n], OWN_COLUMNS, unit, 1, threads);
            let task = |i: usize| {
                // SAFETY: by the caller; no element is in two tasks.
                unsafe { self.make(&made, parts.part(i), 0..turns, None) };
            };
            // SAFETY: as above.
            return unsafe { team::each(threads, parts.count(), task) };
        }
        let more = if made.apart { threads.clamp(1, 2) } else { TALLER };
        let regions = Parts::fewest([m, n], [REGION[0] * more, REGION[1]], unit);
        for [rows, cols] in (0..regions.count()).map(|i| regions.part(i)) {
            let parts =
                Parts::tasks([rows.len(), cols.len()], [OWN_ROWS, REGION[1]], unit, 0, threads);
            // SAFETY: by the caller; no element is in two regions.
            unsafe { self.region(&made, [rows, cols], &parts, threads) };
        }
    }

    /// Makes a region of a result: in each turn all threads pack the right operand, then each does tasks.
    ///
    /// # Safety
    /// As for [`PackedProducts::run`], for the result's rows and columns.
    unsafe fn region(
        &self,
        made: &Made,
        [rows, cols]: [Range<usize>; 2],
        parts: &Parts,
        threads: usize,
    ) {
        let panels = cols.len().next_multiple_of(made.kernels.tile[1]) * made.steps();
        let sums = if made.apart { rows.len() * cols.len() } else { 0 };
        let packs = cols.len().div_ceil(PACKED);
        let tasks = [packs, parts.count()].into_iter().cycle().take(2 * made.turns);
        let ends = tasks.scan(0, |all, tasks| {
            *all += tasks;
            Some(*all)
        });
        let starts: SmallVec<[usize; 16]> = std::iter::once(0).chain(ends).collect();
        room::with(&SHARED, panels + sums, |room| {
            let sums = Stored::rows(room.wrapping_add(panels).cast(), cols.len());
            let first = [rows.start, cols.start];
            let task = |phase: usize, i: usize| {
                let turn = phase / 2;
                if phase % 2 == 1 {
                    let [r, c] = parts.part(i);
                    let part = [
                        first[0] + r.start..first[0] + r.end,
                        first[1] + c.start..first[1] + c.end,
                    ];
                    let right = Right { panels: room, sums, first };
                    // SAFETY: by the caller; panels of this turn are packed, and no element is in two tasks.
                    return unsafe { self.make(made, part, turn..turn + 1, Some(right)) };
                }
                let ([_, b], k) = self.operands(made, turn);
                let from = i * PACKED;
                let own = cols.start + from..cols.end.min(cols.start + from + PACKED);
                let to = room.wrapping_add(from * made.steps_of(&k));
                // SAFETY: by the caller; there is room for these panels.
                unsafe { made.kernels.pack[1](b.transposed(), own, k, made.kernels.word, to) };
            };
            // SAFETY: no two tasks of a phase write the same panel, or the same element.
            unsafe { team::phases(threads, &starts, task) };
        });
    }

    /// Operands of a turn, and the part of k that it sums.
    fn operands(&self, made: &Made, turn: usize) -> ([Stored; 2], Range<usize>) {
        let [a, b, _] = (self.at)(made.at, &index(&self.sum, turn / made.pieces));
        ([a, b], made.piece(turn % made.pieces))
    }

    /// Makes a part of a result, or does some turns of it: packs its rows for panels that are shared, else its
    /// columns.
    ///
    /// # Safety
    /// As for [`PackedProducts::run`], for these rows and columns; what is shared is packed for the turns.
    unsafe fn make(
        &self,
        made: &Made,
        [rows, cols]: [Range<usize>; 2],
        turns: Range<usize>,
        shared: Option<Right>,
    ) {
        let (kernels, [tall, wide]) = (made.kernels, made.kernels.tile);
        let (side, unit) = if shared.is_some() { (rows.len(), tall) } else { (cols.len(), wide) };
        let panels = side.next_multiple_of(unit) * made.steps();
        let sums = if made.apart && shared.is_none() { rows.len() * cols.len() } else { 0 };
        let [_, _, out] = (self.at)(made.at, &index(&self.sum, 0));
        room::with(&OWN, OWN_WORDS.max(panels + sums), |own| {
            let own_sums = Stored::rows(own.wrapping_add(panels).cast(), cols.len());
            let alone = Right { panels: own, sums: own_sums, first: [rows.start, cols.start] };
            let Right { panels: right, sums, first } = shared.unwrap_or(alone);
            for turn in turns {
                let ([a, b], k) = self.operands(made, turn);
                let steps = made.steps_of(&k);
                let (pack, word) = (kernels.pack, kernels.word);
                // SAFETY: by the caller; there is room for these panels.
                let strip = unsafe {
                    match shared {
                        Some(_) => {
                            pack[0](a, rows.clone(), k, word, own);
                            kernels.packed(own, steps)
                        }
                        None => {
                            let left = a.from(rows.start, k.start);
                            pack[1](b.transposed(), cols.clone(), k, word, own);
                            kernels.strip(left).expect("all of an operand lies alike")
                        }
                    }
                };
                for (row, col) in blocks(&rows, &cols) {
                    let at = [row - first[0], col - first[1]];
                    let tile = made.tile(turn, out.from(row, col), sums.from(at[0], at[1]), self);
                    let size = [(rows.end - row).min(BLOCK[0]), (cols.end - col).min(BLOCK[1])];
                    let strip = strip.from(row - rows.start);
                    let right = right.wrapping_add(at[1] * steps).cast_const();
                    // SAFETY: by the caller; strips and panels have these rows, columns and steps.
                    let all = |whole: &Tile| unsafe {
                        for row in (0..size[0]).step_by(tall) {
                            let make = strip.tiles[(size[0] - row).min(tall) - 1];
                            let left = strip.from(row).at;
                            for col in (0..size[1]).step_by(wide) {
                                let tile = whole.from(row, col, (size[1] - col).min(wide));
                                make(
                                    steps,
                                    left,
                                    strip.apart,
                                    right.wrapping_add(col * steps),
                                    &tile,
                                );
                            }
                        }
                    };
                    match turn + 1 == made.turns {
                        // SAFETY: by the caller.
                        true => unsafe { self.block(made.at, &tile, [row, col], size, all) },
                        false => all(&tile),
                    }
                }
            }
        });
    }
}

/// A result that is made.
struct Made<'a> {
    /// Its index.
    at: &'a [usize],
    kernels: &'a Kernels,
    k: usize,
    /// Into how many pieces k is cut, and how often something is added to a tile until it is whole.
    pieces: usize,
    turns: usize,
    /// Whether sums lie apart from the result until they are whole.
    apart: bool,
}

/// Panels of the right operand, and sums that lie apart, from a row and a column of the result on.
#[derive(Clone, Copy)]
struct Right {
    panels: *mut u32,
    sums: Stored,
    first: [usize; 2],
}

impl Made<'_> {
    fn piece(&self, i: usize) -> Range<usize> {
        parts::part(self.k, self.pieces, PIECE, i)
    }

    fn steps_of(&self, k: &Range<usize>) -> usize {
        k.len().div_ceil(self.kernels.word.depth())
    }

    /// Steps of the longest piece.
    fn steps(&self) -> usize {
        let longest = self.k.div_ceil(PIECE).div_ceil(self.pieces) * PIECE;
        longest.div_ceil(self.kernels.word.depth())
    }

    /// What a turn does with sums, where the result and the sums that lie apart begin with this tile.
    fn tile<F>(&self, turn: usize, out: Stored, sums: Stored, of: &PackedProducts<F>) -> Tile {
        let (last, between) = (turn + 1 == self.turns, if self.apart { sums } else { out });
        let first = (of.accumulate && !self.apart).then_some(out);
        Tile {
            scale: of.scale,
            read: if turn == 0 { first } else { Some(between) },
            onto: (last && self.apart && of.accumulate).then_some(out),
            write: if last { out } else { between },
            cols: 0,
        }
    }
}

/// Where blocks begin; those below each other follow each other.
fn blocks(rows: &Range<usize>, cols: &Range<usize>) -> impl Iterator<Item = (usize, usize)> {
    let rows = rows.clone().step_by(BLOCK[0]);
    cols.clone().step_by(BLOCK[1]).flat_map(move |col| rows.clone().map(move |row| (row, col)))
}
