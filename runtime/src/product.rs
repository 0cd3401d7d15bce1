//! Matrix products, by kernels for the processor at hand: of any strides, summed in f32 and rounded
//! once. k is not split between threads, so that the number of threads does not change a bit.

#[cfg(target_arch = "x86_64")]
mod avx512;
mod kernels;
mod packed;
mod parts;
mod portable;
pub(crate) mod room;
pub(crate) mod then;

use crate::map::{element, scatter};
use kernels::Kernels;
pub(crate) use packed::KEPT;
use packed::PackedProducts;
use shardc_ir::kernel::{Extents, Gemm, Matrix};
use shardc_ir::types::DType;
use std::ops::Range;
use then::Epilogue;

/// What kernels on this processor are made for.
pub fn processor() -> &'static str {
    match Kernels::all(DType::F32, DType::F32).len() {
        1 => "any processor of the target",
        2 => "AVX2",
        _all => "AVX-512",
    }
}

/// A matrix in memory.
#[derive(Clone, Copy)]
pub(crate) struct Stored {
    pub at: *mut f32,
    pub elem: DType,
    pub row_stride: usize,
    pub col_stride: usize,
}

impl Stored {
    /// Rows of adjacent f32.
    pub fn rows(at: *mut f32, row_stride: usize) -> Stored {
        Stored { at, elem: DType::F32, row_stride, col_stride: 1 }
    }
    /// The same from a row and a column on.
    pub fn from(self, row: usize, col: usize) -> Stored {
        let first = row * self.row_stride + col * self.col_stride;
        Stored { at: element(self.at, self.elem, first), ..self }
    }
    pub fn transposed(self) -> Stored {
        Stored { row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }
}

/// A matrix of a product, for an index of its loops.
fn matrix(x: &Matrix, memory: &[*mut f32], index: &[usize]) -> Stored {
    Stored {
        at: element(memory[x.view.operand], x.elem, x.view.at(index)),
        elem: x.elem,
        row_stride: x.row_stride,
        col_stride: x.col_stride,
    }
}

/// `out = scale · a b`, added to what `out` holds if `accumulate`; `[m, k]` by `[k, n]`. The result
/// is f32, operands need not be.
///
/// # Safety
/// All three matrices are valid, and `out` overlaps neither operand.
pub(crate) unsafe fn multiply(
    size: [usize; 3],
    all: [Stored; 3],
    scale: f32,
    accumulate: bool,
    threads: usize,
) {
    let (batch, sum, at) = (Extents::new(), Extents::new(), |_: &[usize], _: &[usize]| all);
    let one = PackedProducts { size, batch, sum, at, scale, accumulate, then: None };
    // SAFETY: by the caller.
    unsafe { one.run(Kernels::of(all[0].elem, all[1].elem), threads) };
}

/// Runs a product; one of nothing (k or a sum loop of 0) is 0. An epilogue takes its result, which is not
/// written itself.
///
/// # Safety
/// `memory` is valid for everything the kernel reaches, and what is written overlaps no operand; but what
/// the epilogue writes may be what it reads, walked alike.
pub(crate) unsafe fn run(k: &Gemm, then: Option<&Epilogue>, memory: &[*mut f32], threads: usize) {
    let at = |batch: &[usize], sum: &[usize]| {
        let index: Extents = batch.iter().chain(sum).copied().collect();
        [(&k.a, &index[..]), (&k.b, &index[..]), (&k.out, batch)]
            .map(|(x, index)| matrix(x, memory, index))
    };
    let (batch, sum, size) = (k.batch.clone(), k.sum.clone(), [k.m, k.n, k.k]);
    let all = PackedProducts { size, batch, sum, at, scale: 1.0, accumulate: k.accumulate, then };
    // SAFETY: by the caller.
    unsafe { all.run(Kernels::of(k.a.elem, k.b.elem), threads) };
}

/// Cuts a range from 0 into blocks.
pub(crate) fn blocks(n: usize, size: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    (0..n).step_by(size).map(move |i| i..n.min(i + size))
}

/// All blocks of a matrix of so many rows and columns.
pub(crate) fn tiles(
    [rows, cols]: [usize; 2],
    size: [usize; 2],
) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let cols = blocks(cols, size[1]);
    blocks(rows, size[0]).flat_map(move |r| cols.clone().map(move |c| (r.clone(), c)))
}

/// A block of rows of adjacent f32, rounded to where it belongs.
///
/// # Safety
/// Both are valid and apart.
pub(crate) unsafe fn keep(block: Stored, to: Stored, [rows, cols]: [usize; 2]) {
    for row in 0..rows {
        // SAFETY: by the caller.
        unsafe {
            let from = block.at.add(row * block.row_stride).cast_const();
            scatter(from, to.from(row, 0).at, to.col_stride, cols, to.elem);
        }
    }
}

#[cfg(test)]
mod tests;
