//! Packs operands: panels of rows of `a`, or of columns of `b`, step by step of k, so that a tile
//! reads its operands in order. A step is one word per row or column: an f32, or a pair of bf16.
//! What a panel has too many is 0, and so is the second half of the last pair of an odd k.

use crate::element::get;
use crate::product::Stored;
use crate::product::kernels::Word;
use shardc_ir::types::DType;
use std::arch::x86_64::*;
use std::ops::Range;

/// Bytes of a row, and rows of adjacent elements, that are asked for before they are packed: the processor
/// does not see so many rows at once coming.
const BYTES_AHEAD: usize = 256;
const STEPS_AHEAD: usize = 8;

/// Packs panels of `W` rows of an operand, whose columns are k: the rows of this range, and
/// these columns. Panels follow each other, each with a word per row and step.
///
/// # Safety
/// Rows and columns are valid, `to` has room for whole panels, and the processor has AVX-512.
pub(super) unsafe fn panels<const W: usize>(
    x: Stored,
    rows: Range<usize>,
    k: Range<usize>,
    word: Word,
    to: *mut u32,
) {
    if x.row_stride == 1 && x.col_stride != 1 {
        // SAFETY: by the caller.
        return unsafe { along::<W>(x.from(rows.start, k.start), rows.len(), k.len(), word, to) };
    }
    let steps = k.len().div_ceil(word.depth());
    for (i, first) in rows.clone().step_by(W).enumerate() {
        let (from, n) = (x.from(first, k.start), rows.end.min(first + W) - first);
        let to = to.wrapping_add(i * W * steps);
        // SAFETY: by the caller.
        unsafe {
            match x.col_stride {
                1 => across::<W>(from, n, k.len(), word, to),
                _apart => one_by_one::<W>(from, n, k.len(), word, to),
            }
        }
    }
}

/// Panels of an operand whose rows have adjacent elements: blocks of 16 rows by 16 steps turn.
///
/// # Safety
/// As for [`panels`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn across<const W: usize>(x: Stored, rows: usize, k: usize, word: Word, to: *mut u32) {
    let steps = k.div_ceil(word.depth());
    for first in (0..W).step_by(16) {
        let width = (W - first).min(16);
        let n = rows.saturating_sub(first).min(width);
        let store = ((1u32 << width) - 1) as u16;
        for step in (0..steps).step_by(16) {
            let mut block = [_mm512_setzero_si512(); 16];
            let left = k - step * word.depth();
            for (i, b) in block[..n].iter_mut().enumerate() {
                let row = x.from(first + i, step * word.depth());
                _mm_prefetch::<_MM_HINT_T0>(row.at.cast::<i8>().wrapping_add(BYTES_AHEAD));
                // SAFETY: `left` columns are valid from here on.
                *b = unsafe { words(row, left, word) };
            }
            turn(&mut block);
            for (i, &b) in block[..(steps - step).min(16)].iter().enumerate() {
                // SAFETY: the panel has this step.
                unsafe {
                    let to = to.add((step + i) * W + first);
                    _mm512_mask_storeu_epi32(to.cast(), store, b);
                }
            }
        }
    }
}

/// 16 words of a row of adjacent elements, of which `left` are valid.
///
/// # Safety
/// The elements are valid, and the processor has AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn words(x: Stored, left: usize, word: Word) -> __m512i {
    // SAFETY: by the caller; what is not valid is masked.
    unsafe {
        match (word, x.elem) {
            (Word::Pair, _) => {
                let mask = if left >= 32 { u32::MAX } else { (1 << left) - 1 };
                _mm512_maskz_loadu_epi16(mask, x.at.cast())
            }
            (Word::F32, DType::BF16) => widened(x.at.cast(), few(left)),
            (Word::F32, DType::F16) => widened_f16(x.at.cast(), few(left)),
            (Word::F32, _) => _mm512_maskz_loadu_epi32(few(left), x.at.cast()),
        }
    }
}

/// A mask of the first of 16.
fn few(n: usize) -> u16 {
    if n >= 16 { u16::MAX } else { (1 << n) - 1 }
}

/// # Safety
/// Elements of the mask are valid, and the processor has AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn widened(at: *const i16, mask: u16) -> __m512i {
    // SAFETY: by the caller.
    let half = unsafe { _mm256_maskz_loadu_epi16(mask, at) };
    _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half))
}

/// # Safety
/// As for [`widened`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn widened_f16(at: *const i16, mask: u16) -> __m512i {
    // SAFETY: by the caller.
    _mm512_castps_si512(_mm512_cvtph_ps(unsafe { _mm256_maskz_loadu_epi16(mask, at) }))
}

/// Transposes 16 rows of 16 words.
#[inline]
#[target_feature(enable = "avx512f")]
fn turn(x: &mut [__m512i; 16]) {
    // Pairs of rows word by word, then pairs of these by two words: 4x4 blocks are turned.
    let mut y = *x;
    for i in 0..8 {
        y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
    for i in 0..4 {
        for h in 0..2 {
            let (a, b) = (y[4 * i + h], y[4 * i + 2 + h]);
            x[4 * i + 2 * h] = _mm512_unpacklo_epi64(a, b);
            x[4 * i + 2 * h + 1] = _mm512_unpackhi_epi64(a, b);
        }
    }
    // Row `4 i + c` now has column `4 l + c` of rows 4 i.. in its lane l: lanes change places.
    for c in 0..4 {
        let [a, b, d, e] = [x[c], x[4 + c], x[8 + c], x[12 + c]];
        y[c] = _mm512_shuffle_i32x4::<0x88>(a, b);
        y[4 + c] = _mm512_shuffle_i32x4::<0xdd>(a, b);
        y[8 + c] = _mm512_shuffle_i32x4::<0x88>(d, e);
        y[12 + c] = _mm512_shuffle_i32x4::<0xdd>(d, e);
    }
    for c in 0..4 {
        x[c] = _mm512_shuffle_i32x4::<0x88>(y[c], y[8 + c]);
        x[8 + c] = _mm512_shuffle_i32x4::<0xdd>(y[c], y[8 + c]);
        x[4 + c] = _mm512_shuffle_i32x4::<0x88>(y[4 + c], y[12 + c]);
        x[12 + c] = _mm512_shuffle_i32x4::<0xdd>(y[4 + c], y[12 + c]);
    }
}

/// Panels of an operand whose columns have adjacent elements: all panels at once, step by step, since
/// they share lines of memory.
///
/// # Safety
/// As for [`panels`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn along<const W: usize>(x: Stored, rows: usize, k: usize, word: Word, to: *mut u32) {
    let steps = k.div_ceil(word.depth());
    for step in 0..steps {
        for panel in 0..rows.div_ceil(W) {
            for first in (0..W).step_by(16) {
                let width = (W - first).min(16);
                let row = panel * W + first;
                let next = x.from(row, (step + STEPS_AHEAD) * word.depth());
                _mm_prefetch::<_MM_HINT_T0>(next.at.cast::<i8>());
                let mask = few(rows.saturating_sub(row)) & few(width);
                // SAFETY: rows that do not exist are masked, and so is what the panel has no room for.
                unsafe {
                    let x = x.from(row, step * word.depth());
                    let words = match (word, x.elem) {
                        (Word::Pair, _) => {
                            let second = if 2 * step + 1 < k { mask } else { 0 };
                            let next = x.from(0, 1).at.cast::<i16>();
                            let low = _mm256_maskz_loadu_epi16(mask, x.at.cast());
                            let low = _mm512_cvtepu16_epi32(low);
                            _mm512_or_si512(low, widened(next, second))
                        }
                        (Word::F32, DType::BF16) => widened(x.at.cast(), mask),
                        (Word::F32, DType::F16) => widened_f16(x.at.cast(), mask),
                        (Word::F32, _) => _mm512_maskz_loadu_epi32(mask, x.at.cast()),
                    };
                    let to = to.add((panel * steps + step) * W + first);
                    _mm512_mask_storeu_epi32(to.cast(), few(width), words);
                }
            }
        }
    }
}

/// Panels of an operand of any strides.
///
/// # Safety
/// As for [`panels`].
unsafe fn one_by_one<const W: usize>(x: Stored, rows: usize, k: usize, word: Word, to: *mut u32) {
    let bits = |row: usize, col: usize| {
        let at = x.from(row, col).at;
        // SAFETY: by the caller.
        unsafe { u32::from(*at.cast::<u16>()) }
    };
    for step in 0..k.div_ceil(word.depth()) {
        for i in 0..W {
            let w = match (word, x.elem) {
                _none if i >= rows => 0,
                (Word::Pair, _) => {
                    let second = if 2 * step + 1 < k { bits(i, 2 * step + 1) } else { 0 };
                    bits(i, 2 * step) | second << 16
                }
                // SAFETY: by the caller.
                (Word::F32, _) => unsafe { get(x.from(i, step).at, x.elem).to_bits() },
            };
            // SAFETY: the panel has this step.
            unsafe { *to.add(step * W + i) = w };
        }
    }
}
