//! Matrix products, by the `gemm` crate: packed and blocked, for any strides. It splits m and n
//! between threads but never k, so the number of threads does not change a bit.

use crate::map::Odometer;
use gemm::Parallelism;
use shardc_ir::kernel::{Gemm, Matrix};

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
            let index: shardc_ir::kernel::Extents = at.iter().chain(inner).copied().collect();
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
