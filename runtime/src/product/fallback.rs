//! Products for processors that have no kernels of ours, by the `gemm` crate: packed and blocked,
//! for any strides. It splits m and n between threads but never k. It has no bf16: of such matrices
//! a block at a time is made f32; the sum over all blocks of k is f32 and is rounded once.

use super::room::{self, Room};
use super::then::Epilogue;
use super::{Stored, blocks, keep, matrix, tiles};
use crate::map::Odometer;
use crate::math::{from_bf16, widen};
use gemm::Parallelism;
use shardc_ir::kernel::{Elem, Extents, Gemm, THEN};
use shardc_ir::ops::dot::BLOCK;
use std::cell::Cell;

thread_local! {
    /// Operands of bf16 in f32.
    static WIDE: Room = const { Cell::new(Vec::new()) };
    /// A block of a result that an epilogue takes.
    static RESULT: Room = const { Cell::new(Vec::new()) };
}

/// As [`super::multiply`], of which the result is f32.
///
/// # Safety
/// As there.
pub(super) unsafe fn multiply(
    [m, n, k]: [usize; 3],
    [a, b, out]: [Stored; 3],
    scale: f32,
    accumulate: bool,
    threads: usize,
) {
    let parallelism = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::None };
    let s = |n: usize| n as isize;
    let narrow = [(a, m * k), (b, k * n)].map(|(x, n)| if x.elem == Elem::BF16 { n } else { 0 });
    // SAFETY: by the caller; there is room for operands that are not f32, and strides of valid
    // matrices fit an isize.
    room::with(&WIDE, narrow.iter().sum(), |room| unsafe {
        let a = load(a, [m, k], room.cast());
        let b = load(b, [k, n], room.wrapping_add(narrow[0]).cast());
        gemm::gemm(
            m,
            n,
            k,
            out.at,
            s(out.col_stride),
            s(out.row_stride),
            accumulate,
            a.at.cast_const(),
            s(a.col_stride),
            s(a.row_stride),
            b.at.cast_const(),
            s(b.col_stride),
            s(b.row_stride),
            1.0,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    });
}

/// As [`super::run`].
///
/// # Safety
/// As there.
pub(super) unsafe fn run(k: &Gemm, memory: &[*mut f32], threads: usize) {
    if let Some(scratch) = &k.scratch {
        let first = memory[scratch.operand].wrapping_add(scratch.offset);
        // SAFETY: by the caller.
        return unsafe { by_blocks(k, memory, first, threads) };
    }
    let nothing = k.sum.contains(&0);
    let mut batch = Odometer::new(&k.batch);
    while let Some(at) = batch.index() {
        let out = matrix(&k.out, memory, at);
        let mut sum = Odometer::new(if nothing { &[] } else { &k.sum });
        let mut accumulate = k.accumulate;
        while let Some(inner) = sum.index() {
            let index: Extents = at.iter().chain(inner).copied().collect();
            let size = [k.m, k.n, if nothing { 0 } else { k.k }];
            let [a, b] = [&k.a, &k.b].map(|x| matrix(x, memory, &index));
            // SAFETY: by the caller.
            unsafe { multiply(size, [a, b, out], 1.0, accumulate, threads) };
            accumulate = true;
            sum.advance();
        }
        batch.advance();
    }
}

/// Rows of a block that an epilogue takes.
const ROWS: usize = 8 * THEN[0];

/// As [`super::run`], of a product with an epilogue.
///
/// # Safety
/// As there.
pub(super) unsafe fn run_then(k: &Gemm, then: &Epilogue, memory: &[*mut f32], threads: usize) {
    let narrow = [k.a.elem, k.b.elem].contains(&Elem::BF16);
    let mut batch = Odometer::new(&k.batch);
    while let Some(at) = batch.index() {
        for (row, col) in tiles([k.m, k.n], [ROWS, THEN[1]]) {
            let (m, n) = (row.len(), col.len());
            room::with(&RESULT, m * THEN[1], |block| {
                let sums = Stored::rows(block.cast(), THEN[1]);
                // SAFETY: by the caller; there is room for the block.
                unsafe {
                    sums.at.write_bytes(0, m * THEN[1]);
                    let mut inner = Odometer::new(&k.sum);
                    while let Some(rest) = inner.index() {
                        let index: Extents = at.iter().chain(rest).copied().collect();
                        let [a, b] = [&k.a, &k.b].map(|x| matrix(x, memory, &index));
                        for l in blocks(k.k, if narrow { BLOCK } else { k.k.max(1) }) {
                            let (a, b) = (a.from(row.start, l.start), b.from(l.start, col.start));
                            multiply([m, n, l.len()], [a, b, sums], 1.0, true, threads);
                        }
                        inner.advance();
                    }
                    then.run(at, sums.at, [row.start, col.start], [m, n]);
                }
            });
        }
        batch.advance();
    }
}

/// Runs a product in f32 blocks, which begin at `scratch`.
///
/// # Safety
/// As for [`run`].
unsafe fn by_blocks(k: &Gemm, memory: &[*mut f32], scratch: *mut f32, threads: usize) {
    let [size_a, size_b, _] = k.block();
    let (a, b, out) =
        (scratch, scratch.wrapping_add(size_a), scratch.wrapping_add(size_a + size_b));
    let mut batch = Odometer::new(&k.batch);
    while let Some(at) = batch.index() {
        for (i, j) in tiles([k.m, k.n], [BLOCK; 2]) {
            let (m, n) = (i.len(), j.len());
            let (sum, to) = (Stored::rows(out, n), matrix(&k.out, memory, at));
            let to = to.from(i.start, j.start);
            // SAFETY: the block has m · n elements, and the kernel reaches as many.
            unsafe {
                match k.accumulate {
                    true => copy(to, [m, n], out),
                    false => out.write_bytes(0, m * n),
                }
            }
            let mut inner = Odometer::new(&k.sum);
            while let Some(rest) = inner.index() {
                let index: Extents = at.iter().chain(rest).copied().collect();
                let [from_a, from_b] = [&k.a, &k.b].map(|x| matrix(x, memory, &index));
                for l in blocks(k.k, BLOCK) {
                    let depth = l.len();
                    // SAFETY: the kernel reaches these elements, and blocks have room.
                    unsafe {
                        let x = load(from_a.from(i.start, l.start), [m, depth], a);
                        let y = load(from_b.from(l.start, j.start), [depth, n], b);
                        multiply([m, n, depth], [x, y, sum], 1.0, true, threads);
                    }
                }
                inner.advance();
            }
            // SAFETY: the kernel reaches these rows, and the block has them.
            unsafe { keep(sum, to, [m, n]) };
        }
        batch.advance();
    }
}

/// A block of a matrix in f32: where it lies, if its elements are f32, else in `room`, with what is
/// adjacent in the matrix adjacent there.
///
/// # Safety
/// The block is valid, and `room` for as many elements.
unsafe fn load(x: Stored, [rows, cols]: [usize; 2], room: *mut f32) -> Stored {
    if x.elem != Elem::BF16 {
        return x;
    }
    let by_column = x.row_stride == 1 && x.col_stride != 1;
    let (from, size) = if by_column { (x.transposed(), [cols, rows]) } else { (x, [rows, cols]) };
    // SAFETY: by the caller.
    unsafe { copy(from, size, room) };
    let m = Stored::rows(room, size[1]);
    if by_column { m.transposed() } else { m }
}

/// Rows in f32, one behind the other in `room`.
///
/// # Safety
/// As for [`load`].
unsafe fn copy(x: Stored, [rows, cols]: [usize; 2], room: *mut f32) {
    for i in 0..rows {
        // SAFETY: by the caller.
        unsafe {
            let (from, out) =
                (x.from(i, 0), std::slice::from_raw_parts_mut(room.add(i * cols), cols));
            match (x.elem, x.col_stride) {
                (Elem::BF16, 1) => {
                    widen(std::slice::from_raw_parts(from.at.cast(), cols), out);
                }
                (Elem::BF16, _) => out.iter_mut().enumerate().for_each(|(j, y)| {
                    *y = from_bf16(*from.from(0, j).at.cast::<u16>());
                }),
                (Elem::F32 | Elem::I32, _) => {
                    out.iter_mut().enumerate().for_each(|(j, y)| *y = *from.from(0, j).at);
                }
            }
        }
    }
}
