//! Matrix products, by the `gemm` crate: packed and blocked, for any strides. It splits m and n
//! between threads but never k, so the number of threads does not change a bit.
//!
//! It has no bf16. Of such matrices a block at a time is made f32, in memory that the plan gives;
//! the sum over all blocks of k is f32 and is rounded once.

#[cfg(target_arch = "x86_64")]
mod pack;
#[cfg(target_arch = "x86_64")]
mod packed;
pub(crate) mod team;
#[cfg(target_arch = "x86_64")]
mod tile;

use crate::map::{Odometer, element, scatter};
use crate::math::{from_bf16, widen};
use gemm::Parallelism;
use shardc_ir::kernel::{Elem, Extents, Gemm, Matrix};
use shardc_ir::ops::dot::BLOCK;
use std::ops::Range;

/// A matrix in memory.
#[derive(Clone, Copy)]
pub(crate) struct Mat {
    pub at: *mut f32,
    pub row_stride: usize,
    pub col_stride: usize,
}

impl Mat {
    /// Rows of adjacent elements.
    pub fn rows(at: *mut f32, row_stride: usize) -> Mat {
        Mat { at, row_stride, col_stride: 1 }
    }
    pub fn transposed(self) -> Mat {
        Mat { at: self.at, row_stride: self.col_stride, col_stride: self.row_stride }
    }
}

/// A matrix in memory, of any elements.
#[derive(Clone, Copy)]
pub(crate) struct Stored {
    pub at: *mut f32,
    pub elem: Elem,
    pub row_stride: usize,
    pub col_stride: usize,
}

impl Stored {
    /// The same from a row and a column on.
    pub fn from(self, row: usize, col: usize) -> Stored {
        let first = row * self.row_stride + col * self.col_stride;
        Stored { at: element(self.at, self.elem, first), ..self }
    }
    pub fn transposed(self) -> Stored {
        Stored { row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }
}

/// Cuts a range from 0 into blocks.
pub(crate) fn blocks(n: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n).step_by(BLOCK).map(move |i| i..n.min(i + BLOCK))
}

/// `out = scale · a b`, added to what `out` holds if `accumulate`; `[m, k]` by `[k, n]`.
///
/// # Safety
/// All three matrices are valid, and `out` overlaps neither operand.
pub(crate) unsafe fn multiply(
    [m, n, k]: [usize; 3],
    a: Mat,
    b: Mat,
    out: Mat,
    scale: f32,
    accumulate: bool,
    threads: usize,
) {
    let [x, y, z] = [a, b, out].map(|m| Stored {
        at: m.at,
        elem: Elem::F32,
        row_stride: m.row_stride,
        col_stride: m.col_stride,
    });
    // SAFETY: by the caller.
    if unsafe { packed([m, n, k], [x, y, z], scale, accumulate, threads) } {
        return;
    }
    let parallelism = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::None };
    let s = |n: usize| n as isize;
    // SAFETY: by the caller; strides of valid matrices fit an isize.
    unsafe {
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
    }
}

/// `out = scale · a b`, added to what `out` holds if `accumulate`, by kernels of our own; false if
/// the processor has none.
///
/// # Safety
/// As for [`multiply`].
unsafe fn packed(
    size: [usize; 3],
    all: [Stored; 3],
    scale: f32,
    accumulate: bool,
    threads: usize,
) -> bool {
    #[cfg(target_arch = "x86_64")]
    if let Some(kernels) = packed::word(all[0].elem, all[1].elem) {
        let (batch, sum, at) = (Extents::new(), Extents::new(), |_: &[usize], _: &[usize]| all);
        let one = packed::Products { size, batch, sum, at, scale, accumulate };
        // SAFETY: by the caller.
        unsafe { one.run(kernels, threads) };
        return true;
    }
    let _others = (size, all, scale, accumulate, threads);
    false
}

/// Runs a product; one of nothing (k or a sum loop of 0) is 0.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, and the result overlaps no operand.
pub(crate) unsafe fn run(k: &Gemm, memory: &[*mut f32], threads: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(kernels) = packed::word(k.a.elem, k.b.elem) {
        let at = |batch: &[usize], sum: &[usize]| {
            let index: Extents = batch.iter().chain(sum).copied().collect();
            [(&k.a, &index[..]), (&k.b, &index[..]), (&k.out, batch)].map(|(x, i)| Stored {
                at: element(memory[x.view.operand], x.elem, x.view.at(i)),
                elem: x.elem,
                row_stride: x.row_stride,
                col_stride: x.col_stride,
            })
        };
        let (batch, sum) = (k.batch.clone(), k.sum.clone());
        let size = [k.m, k.n, k.k];
        let all = packed::Products { size, batch, sum, at, scale: 1.0, accumulate: false };
        // SAFETY: by the caller.
        return unsafe { all.run(kernels, threads) };
    }
    if let Some(scratch) = &k.scratch {
        let first = memory[scratch.operand].wrapping_add(scratch.offset);
        // SAFETY: by the caller.
        return unsafe { by_blocks(k, memory, first, threads) };
    }
    let mat = |x: &Matrix, index: &[usize]| Mat {
        at: memory[x.view.operand].wrapping_add(x.view.at(index)),
        row_stride: x.row_stride,
        col_stride: x.col_stride,
    };
    let nothing = k.sum.contains(&0);
    let mut batch = Odometer::new(&k.batch);
    while let Some(at) = batch.index() {
        let out = mat(&k.out, at);
        let mut sum = Odometer::new(if nothing { &[] } else { &k.sum });
        let mut accumulate = false;
        while let Some(inner) = sum.index() {
            let index: Extents = at.iter().chain(inner).copied().collect();
            let size = [k.m, k.n, if nothing { 0 } else { k.k }];
            // SAFETY: by the caller.
            unsafe {
                multiply(size, mat(&k.a, &index), mat(&k.b, &index), out, 1.0, accumulate, threads);
            }
            accumulate = true;
            sum.advance();
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
    let stored = |x: &Matrix, index: &[usize]| Stored {
        at: element(memory[x.view.operand], x.elem, x.view.at(index)),
        elem: x.elem,
        row_stride: x.row_stride,
        col_stride: x.col_stride,
    };
    let mut batch = Odometer::new(&k.batch);
    while let Some(at) = batch.index() {
        for i in blocks(k.m) {
            for j in blocks(k.n) {
                let (m, n) = (i.len(), j.len());
                let sum = Mat::rows(out, n);
                // SAFETY: the block has m · n elements.
                unsafe { out.write_bytes(0, m * n) };
                let mut inner = Odometer::new(&k.sum);
                while let Some(rest) = inner.index() {
                    let index: Extents = at.iter().chain(rest).copied().collect();
                    let (from_a, from_b) = (stored(&k.a, &index), stored(&k.b, &index));
                    for l in blocks(k.k) {
                        let depth = l.len();
                        // SAFETY: the kernel reaches these elements, and blocks have room.
                        unsafe {
                            let x = load(from_a.from(i.start, l.start), [m, depth], a);
                            let y = load(from_b.from(l.start, j.start), [depth, n], b);
                            multiply([m, n, depth], x, y, sum, 1.0, true, threads);
                        }
                    }
                    inner.advance();
                }
                // SAFETY: the kernel reaches these rows, and the block has them.
                unsafe { keep(sum, stored(&k.out, at).from(i.start, j.start), [m, n]) };
            }
        }
        batch.advance();
    }
}

/// A block of rows of adjacent f32, rounded to where it belongs.
///
/// # Safety
/// Both are valid and apart.
pub(crate) unsafe fn keep(block: Mat, to: Stored, [rows, cols]: [usize; 2]) {
    for row in 0..rows {
        // SAFETY: by the caller.
        unsafe {
            let from = block.at.add(row * block.row_stride).cast_const();
            scatter(from, to.from(row, 0).at, to.col_stride, cols, to.elem);
        }
    }
}

/// A block of a matrix in f32: where it lies, if its elements are f32, else in `room`, with what is
/// adjacent in the matrix adjacent there.
///
/// # Safety
/// The block is valid, and `room` for as many elements.
pub(crate) unsafe fn load(x: Stored, [rows, cols]: [usize; 2], room: *mut f32) -> Mat {
    if x.elem != Elem::BF16 {
        return Mat { at: x.at, row_stride: x.row_stride, col_stride: x.col_stride };
    }
    let by_column = x.row_stride == 1 && x.col_stride != 1;
    let (outer, inner) = if by_column { (cols, rows) } else { (rows, cols) };
    let (stride, step) = if by_column { (x.col_stride, 1) } else { (x.row_stride, x.col_stride) };
    let from = x.at.cast::<u16>().cast_const();
    for o in 0..outer {
        // SAFETY: by the caller.
        unsafe {
            let from = from.add(o * stride);
            let out = std::slice::from_raw_parts_mut(room.add(o * inner), inner);
            if step == 1 {
                widen(std::slice::from_raw_parts(from, inner), out);
            } else {
                out.iter_mut().enumerate().for_each(|(i, y)| *y = from_bf16(*from.add(i * step)));
            }
        }
    }
    let m = Mat::rows(room, inner);
    if by_column { m.transposed() } else { m }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_do_not_change_a_bit() {
        let (m, n, k) = (150, 170, 300);
        let mut a: Vec<f32> = (0..m * k).map(|i| (i % 97) as f32 * 0.013 - 0.6).collect();
        let mut b: Vec<f32> = (0..k * n).map(|i| (i % 89) as f32 * 0.017 - 0.7).collect();
        let mut product = |threads| {
            let mut out = vec![f32::NAN; m * n];
            let (a, b) = (Mat::rows(a.as_mut_ptr(), k), Mat::rows(b.as_mut_ptr(), n));
            // SAFETY: all three vectors have the elements of their matrices.
            unsafe {
                multiply([m, n, k], a, b, Mat::rows(out.as_mut_ptr(), n), 1.0, false, threads)
            };
            out
        };
        let one = product(1);
        assert!(one.iter().all(|x| x.is_finite()) && one == product(2) && one == product(3));
    }
}
