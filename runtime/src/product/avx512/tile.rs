//! Tiles of a result, in registers: [`ROWS`] by [`COLS`] sums of products of a strip and a panel, for
//! processors with AVX-512. Every element is summed in the order of k wherever in a tile it is, so
//! that how a result is cut into tiles does not change a bit.

use crate::element::{get, set};
use crate::product::Stored;
use crate::product::kernels::{MakeTile, Tile};
use shardc_ir::types::DType;
use std::arch::x86_64::*;

/// Rows of a tile: with two vectors of columns each, 24 of the 32 registers are sums.
pub(super) const ROWS: usize = 12;
/// Columns of a tile.
pub(super) const COLS: usize = 32;

/// A kernel for tiles of `M` rows: `$sum` is the sum after a step, `$a` being 16 times a word of a
/// row and `$b` 16 columns.
macro_rules! kernel {
    ($(#[$doc:meta])* $name:ident, $features:literal, |$sum:ident, $a:ident, $b:ident| $step:expr) => {
        $(#[$doc])*
        #[target_feature(enable = $features)]
        unsafe fn $name<const M: usize, const STEPS: bool>(
            depth: usize,
            a: *const u32,
            apart: usize,
            b: *const u32,
            to: &Tile,
        ) {
            let mut sums = [[_mm512_setzero_ps(); 2]; M];
            // SAFETY: by the caller.
            unsafe {
                for i in 0..M {
                    let at = to.write.from(i, 0).at.cast::<i8>().cast_const();
                    _mm_prefetch::<_MM_HINT_T0>(at);
                    _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(64));
                }
                // Of adjacent steps, four rows each: more addresses than there are registers would lie in memory.
                let mut at = [0, 4, 8].map(|i| a.wrapping_add(i * apart));
                for p in 0..depth {
                    let b = b.add(p * COLS);
                    let columns = [_mm512_loadu_si512(b.cast()), _mm512_loadu_si512(b.add(16).cast())];
                    _mm_prefetch::<_MM_HINT_T0>(b.wrapping_add(16 * COLS).cast());
                    _mm_prefetch::<_MM_HINT_T0>(b.wrapping_add(16 * COLS + 16).cast());
                    if !STEPS {
                        _mm_prefetch::<_MM_HINT_T0>(at[0].wrapping_add(8 * apart).cast());
                    }
                    for i in 0..M {
                        let word = match STEPS {
                            true => at[i / 4].wrapping_add(i % 4 * apart),
                            false => at[0].wrapping_add(i),
                        };
                        let $a = _mm512_set1_epi32(word.cast::<i32>().read());
                        for h in 0..2 {
                            let ($sum, $b) = (sums[i][h], columns[h]);
                            sums[i][h] = $step;
                        }
                    }
                    at = at.map(|at| at.wrapping_add(if STEPS { 1 } else { apart }));
                }
                if !is_plain(to) {
                    return finish(&sums, to);
                }
                let scale = _mm512_set1_ps(to.scale);
                for i in 0..M {
                    let write = to.write.at.wrapping_add(i * to.write.row_stride);
                    for h in 0..2 {
                        let mut x = _mm512_mul_ps(sums[i][h], scale);
                        if let Some(read) = &to.read {
                            let at = read.at.wrapping_add(i * read.row_stride + 16 * h);
                            x = _mm512_add_ps(_mm512_loadu_ps(at), x);
                        }
                        _mm512_storeu_ps(write.wrapping_add(16 * h), x);
                    }
                }
            }
        }
    };
}

kernel! {
    /// Words are f32.
    avx512, "avx512f,avx512bw,avx512vl",
    |sum, a, b| _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum)
}

kernel! {
    /// Words are pairs of bf16, adjacent along k.
    avx512_bf16, "avx512f,avx512bw,avx512vl,avx512bf16",
    |sum, a, b| {
        // Both are 32 bf16.
        let [a, b] = [a, b].map(|x| std::mem::transmute::<__m512i, __m512bh>(x));
        _mm512_dpbf16_ps(sum, a, b)
    }
}

macro_rules! by_rows {
    ($name:ident, $steps:expr) => {
        [
            $name::<1, $steps>,
            $name::<2, $steps>,
            $name::<3, $steps>,
            $name::<4, $steps>,
            $name::<5, $steps>,
            $name::<6, $steps>,
            $name::<7, $steps>,
            $name::<8, $steps>,
            $name::<9, $steps>,
            $name::<10, $steps>,
            $name::<11, $steps>,
            $name::<12, $steps>,
        ]
    };
}

/// Kernels for adjacent rows, and for adjacent steps, by rows from 1 on.
pub(super) const F32: [[MakeTile; ROWS]; 2] = [by_rows!(avx512, false), by_rows!(avx512, true)];
/// Kernels for adjacent rows of pairs.
pub(super) const BF16: [MakeTile; ROWS] = by_rows!(avx512_bf16, false);

/// Whether all columns of a tile exist and are adjacent f32, and no more than one matrix is added: so are most.
#[inline]
fn is_plain(to: &Tile) -> bool {
    let plain = |x: &Stored| x.elem == DType::F32 && x.col_stride == 1;
    to.cols >= COLS && plain(&to.write) && to.read.as_ref().is_none_or(plain) && to.onto.is_none()
}

/// # Safety
/// As for [`crate::product::kernels::MakeTile`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn finish<const M: usize>(sums: &[[__m512; 2]; M], to: &Tile) {
    let read = || [&to.read, &to.onto].into_iter().flatten();
    let plain = read().all(|x| x.elem == DType::F32 && x.col_stride == 1);
    if !plain || to.write.col_stride != 1 {
        // SAFETY: sums are 32 f32 per row.
        return unsafe { finish_any(sums.as_ptr().cast(), M, to) };
    }
    let scale = _mm512_set1_ps(to.scale);
    let all = if to.cols >= COLS { u32::MAX } else { (1 << to.cols) - 1 };
    for (i, row) in sums.iter().enumerate() {
        for (h, &sum) in row.iter().enumerate() {
            let (mask, col) = ((all >> (16 * h)) as u16, 16 * h);
            // SAFETY: by the caller; columns that do not exist are masked.
            unsafe {
                let mut x = _mm512_mul_ps(sum, scale);
                for read in read() {
                    x = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, read.from(i, col).at), x);
                }
                put(to.write.from(i, col), mask, x);
            }
        }
    }
}

/// Sets adjacent elements.
///
/// # Safety
/// Those of the mask are valid, and the processor has AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn put(to: Stored, mask: u16, x: __m512) {
    // SAFETY: by the caller.
    unsafe {
        match to.elem {
            DType::BF16 => {
                _mm256_mask_storeu_epi16(to.at.cast(), mask, _mm512_cvtepi32_epi16(rounded(x)));
            }
            DType::F16 => _mm256_mask_storeu_epi16(to.at.cast(), mask, _mm512_cvtps_ph::<0>(x)),
            DType::F32 | DType::I32 => _mm512_mask_storeu_ps(to.at, mask, x),
        }
    }
}

/// [`finish`] for elements and strides of any kind.
///
/// # Safety
/// As for [`crate::product::kernels::MakeTile`]; there are `rows` rows of [`COLS`] sums.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn finish_any(sums: *const f32, rows: usize, to: &Tile) {
    let scale = _mm512_set1_ps(to.scale);
    for i in 0..rows {
        for col in (0..to.cols).step_by(16) {
            let n = (to.cols - col).min(16);
            // SAFETY: by the caller, for these columns of the row.
            unsafe {
                let mut x = _mm512_mul_ps(_mm512_loadu_ps(sums.add(i * COLS + col)), scale);
                for read in [&to.read, &to.onto].into_iter().flatten() {
                    x = _mm512_add_ps(load(read.from(i, col), n), x);
                }
                store(to.write.from(i, col), n, x);
            }
        }
    }
}

/// The first `n` columns of a row, at most 16, in f32.
///
/// # Safety
/// These elements are valid, and the processor has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn load(x: Stored, n: usize) -> __m512 {
    let mask = ((1u32 << n) - 1) as u16;
    // SAFETY: by the caller.
    unsafe {
        match (x.elem, x.col_stride) {
            (DType::BF16, 1) => {
                let half = _mm256_maskz_loadu_epi16(mask, x.at.cast());
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
            }
            (DType::F16, 1) => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, x.at.cast())),
            (_, 1) => _mm512_maskz_loadu_ps(mask, x.at),
            _apart => {
                let mut all = [0.0; 16];
                for (i, y) in all[..n].iter_mut().enumerate() {
                    *y = get(x.from(0, i).at, x.elem);
                }
                _mm512_loadu_ps(all.as_ptr())
            }
        }
    }
}

/// Sets the first `n` columns of a row, at most 16.
///
/// # Safety
/// These elements are valid, and the processor has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn store(to: Stored, n: usize, x: __m512) {
    let mut all = [0.0; 16];
    // SAFETY: by the caller.
    unsafe {
        if to.col_stride == 1 {
            return put(to, ((1u32 << n) - 1) as u16, x);
        }
        _mm512_storeu_ps(all.as_mut_ptr(), x);
        for (i, &y) in all[..n].iter().enumerate() {
            set(to.from(0, i).at, to.elem, y);
        }
    }
}

/// The nearest bf16 in the low halves: as [`crate::math::to_bf16`] of 16 numbers.
#[inline]
#[target_feature(enable = "avx512f")]
fn rounded(x: __m512) -> __m512i {
    let bits = _mm512_castps_si512(x);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
    let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
    _mm512_srli_epi32::<16>(_mm512_mask_mov_epi32(up, nan, quiet))
}
