//! Matrix products, by the `gemm` crate: packed and blocked, for any strides. It splits m and n
//! between threads but never k, so the number of threads does not change a bit.
//!
//! It has no bf16. Of such matrices a block at a time is made f32, in memory that the plan gives;
//! the sum over all blocks of k is f32 and is rounded once.

use crate::map::{Odometer, element, scatter};
use crate::math::{from_bf16, widen};
use gemm::Parallelism;
use shardc_ir::kernel::{Elem, Extents, Gemm, Matrix};
use shardc_ir::ops::dot::BLOCK;

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

/// Runs a product; one of nothing (k or a sum loop of 0) is 0.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, and the result overlaps no operand.
pub(crate) unsafe fn run(k: &Gemm, memory: &[*mut f32], threads: usize) {
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
    let steps = |n: usize| (0..n).step_by(BLOCK).map(move |i| (i, BLOCK.min(n - i)));
    let mut batch = Odometer::new(&k.batch);
    while let Some(at) = batch.index() {
        for (i, m) in steps(k.m) {
            for (j, n) in steps(k.n) {
                let sum = Mat::rows(out, n);
                // SAFETY: the block has m · n elements.
                unsafe { out.write_bytes(0, m * n) };
                let mut inner = Odometer::new(&k.sum);
                while let Some(rest) = inner.index() {
                    let index: Extents = at.iter().chain(rest).copied().collect();
                    for (l, depth) in steps(k.k) {
                        // SAFETY: the kernel reaches these elements, and blocks have room.
                        unsafe {
                            let x = load(&k.a, memory, &index, [i, l], [m, depth], a);
                            let y = load(&k.b, memory, &index, [l, j], [depth, n], b);
                            multiply([m, n, depth], x, y, sum, 1.0, true, threads);
                        }
                    }
                    inner.advance();
                }
                let place = &k.out;
                for row in 0..m {
                    let to =
                        place.view.at(at) + (i + row) * place.row_stride + j * place.col_stride;
                    let to = element(memory[place.view.operand], place.elem, to);
                    // SAFETY: the kernel reaches this row, and the block has it.
                    unsafe {
                        scatter(out.add(row * n).cast_const(), to, place.col_stride, n, place.elem);
                    }
                }
            }
        }
        batch.advance();
    }
}

/// A block of a matrix in f32, from an index of the loops and a row and a column on: where it lies,
/// if its elements are f32, else in `room`, with what is adjacent in the matrix adjacent there.
///
/// # Safety
/// The block is valid, and `room` for as many elements.
unsafe fn load(
    x: &Matrix,
    memory: &[*mut f32],
    index: &[usize],
    [row, col]: [usize; 2],
    [rows, cols]: [usize; 2],
    room: *mut f32,
) -> Mat {
    let first = x.view.at(index) + row * x.row_stride + col * x.col_stride;
    let at = element(memory[x.view.operand], x.elem, first);
    if x.elem != Elem::BF16 {
        return Mat { at, row_stride: x.row_stride, col_stride: x.col_stride };
    }
    let by_column = x.row_stride == 1 && x.col_stride != 1;
    let (outer, inner) = if by_column { (cols, rows) } else { (rows, cols) };
    let (stride, step) = if by_column { (x.col_stride, 1) } else { (x.row_stride, x.col_stride) };
    let from = at.cast::<u16>().cast_const();
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
