//! Products of few rows with a matrix whose columns have adjacent elements, as weights of a layer
//! do: too little work to pack the matrix for. Sums are over 16 partial sums, in a fixed order.

use super::tile::COLS;
use crate::product::Stored;
use crate::product::kernels::{Dots, FEW};
use std::arch::x86_64::*;

macro_rules! dots {
    ($name:ident, $features:literal, $lanes:literal, |$at:ident, $left:ident| $load:expr,
     |$sum:ident, $a:ident, $b:ident| $step:expr) => {
        /// `M` rows by `C` columns at once.
        #[target_feature(enable = $features)]
        unsafe fn $name<const M: usize, const C: usize>(
            k: usize,
            a: Stored,
            b: Stored,
            cols: usize,
            to: *mut f32,
        ) {
            // SAFETY: by the caller; elements beyond the last are masked.
            let load = |x: Stored, l: usize| unsafe {
                let ($at, $left) = (x.from(0, l).at, k - l);
                $load
            };
            for first in (0..cols).step_by(C) {
                let mut sums = [[_mm512_setzero_ps(); C]; M];
                // Columns beyond the last are the last once more.
                let mut columns = [b; C];
                for (j, c) in columns.iter_mut().enumerate() {
                    *c = b.from(0, (first + j).min(cols - 1)).transposed();
                }
                for l in (0..k).step_by($lanes) {
                    let columns = columns.map(|c| load(c, l));
                    for i in 0..M {
                        let $a = load(a.from(i, 0), l);
                        for j in 0..C {
                            let ($sum, $b) = (sums[i][j], columns[j]);
                            sums[i][j] = $step;
                        }
                    }
                }
                for i in 0..M {
                    for j in (0..C).filter(|j| first + j < cols) {
                        // SAFETY: there is room for this sum.
                        unsafe { *to.add(i * COLS + first + j) = _mm512_reduce_add_ps(sums[i][j]) };
                    }
                }
            }
        }
    };
}

dots!(
    f32s,
    "avx512f,avx512bw,avx512vl",
    16,
    |at, left| {
        let mask = if left >= 16 { u16::MAX } else { (1 << left) - 1 };
        _mm512_maskz_loadu_ps(mask, at)
    },
    |sum, a, b| _mm512_fmadd_ps(a, b, sum)
);

dots!(
    pairs,
    "avx512f,avx512bw,avx512vl,avx512bf16",
    32,
    |at, left| {
        let mask = if left >= 32 { u32::MAX } else { (1 << left) - 1 };
        // 32 bf16.
        std::mem::transmute::<__m512i, __m512bh>(_mm512_maskz_loadu_epi16(mask, at.cast()))
    },
    |sum, a, b| _mm512_dpbf16_ps(sum, a, b)
);

macro_rules! by_rows {
    ($name:ident) => {
        [
            $name::<1, 4>,
            $name::<2, 4>,
            $name::<3, 4>,
            $name::<4, 4>,
            $name::<5, 2>,
            $name::<6, 2>,
            $name::<7, 2>,
            $name::<8, 2>,
        ]
    };
}

/// Kernels by rows, for words of f32.
pub(super) const F32S: [Dots; FEW] = by_rows!(f32s);
/// Kernels by rows, for words of two bf16.
pub(super) const PAIRS: [Dots; FEW] = by_rows!(pairs);
