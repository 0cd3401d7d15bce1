//! Kernels in plain Rust, written so that the compiler vectorises them, each compiled twice: for any
//! processor of the target, and for AVX2 with fused products. Elements of 16 bits become f32 when they
//! are packed.

use super::Stored;
use super::kernels::{FEW, Kernels, Tile, Word};
use crate::element::{Bf16, Element, get, set, with_element};
use shardc_ir::types::DType;
use std::ops::Range;

/// Rows of a tile: with 16 columns, 12 of 16 registers of AVX2 are sums.
const ROWS: usize = 6;
/// Columns of a tile.
const COLS: usize = 16;
const _: () = assert!(super::packed::fits([ROWS, COLS]));
/// Partial sums of products of few rows.
const LANES: usize = 8;
/// Rows and steps of a block that turns while it is packed.
const SIDE: usize = 8;

/// Words of so many rows, and of so many steps in each; or the other way round.
type Block = [[u32; SIDE]; SIDE];

/// `a b + c`.
#[inline(always)]
fn madd<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// # Safety
/// As for [`super::kernels::MakeTile`], with tiles of `M` rows.
#[inline(always)]
unsafe fn tile<const M: usize, const STEPS: bool, const FUSED: bool>(
    depth: usize,
    a: *const u32,
    apart: usize,
    b: *const u32,
    to: &Tile,
) {
    let (down, step) = if STEPS { (apart, 1) } else { (1, apart) };
    let mut sums = [[0.0f32; COLS]; M];
    for p in 0..depth {
        // SAFETY: by the caller.
        let b = unsafe { *b.add(p * COLS).cast::<[f32; COLS]>() };
        for (i, row) in sums.iter_mut().enumerate() {
            // SAFETY: by the caller.
            let a = unsafe { *a.add(p * step + i * down).cast::<f32>() };
            for j in 0..COLS {
                row[j] = madd::<FUSED>(a, b[j], row[j]);
            }
        }
    }
    // SAFETY: by the caller.
    unsafe { finish(sums.as_ptr().cast(), M, to) };
}

/// # Safety
/// As for [`super::kernels::Finish`].
#[inline(always)]
unsafe fn finish(sums: *const f32, rows: usize, to: &Tile) {
    let plain = |x: &Stored| !x.elem.is_half() && x.col_stride == 1;
    let all = [Some(&to.write), to.read.as_ref(), to.onto.as_ref()];
    // SAFETY: by the caller.
    unsafe {
        match to.cols >= COLS && all.into_iter().flatten().all(plain) {
            true => finish_rows::<true>(sums, rows, to),
            false => finish_rows::<false>(sums, rows, to),
        }
    }
}

/// # Safety
/// As for [`finish`]; if `WHOLE`, all columns exist, are f32, and are adjacent in every matrix.
#[inline(always)]
unsafe fn finish_rows<const WHOLE: bool>(sums: *const f32, rows: usize, to: &Tile) {
    for i in 0..rows {
        // SAFETY: by the caller.
        let sums = unsafe { *sums.add(i * COLS).cast::<[f32; COLS]>() };
        let mut x = sums.map(|x| x * to.scale);
        // SAFETY: by the caller.
        unsafe {
            for read in [&to.read, &to.onto].into_iter().flatten() {
                let y = load::<WHOLE>(read.from(i, 0), to.cols);
                for j in 0..COLS {
                    x[j] += y[j];
                }
            }
            store::<WHOLE>(to.write.from(i, 0), to.cols, &x);
        }
    }
}

/// The first `n` columns of a row in f32, at most [`COLS`].
///
/// # Safety
/// These elements are valid; if `WHOLE`, all are there, f32 and adjacent.
#[inline(always)]
unsafe fn load<const WHOLE: bool>(x: Stored, n: usize) -> [f32; COLS] {
    if WHOLE {
        // SAFETY: by the caller.
        return unsafe { *x.at.cast::<[f32; COLS]>() };
    }
    let mut all = [0.0; COLS];
    for (j, y) in all[..n.min(COLS)].iter_mut().enumerate() {
        // SAFETY: by the caller.
        *y = unsafe { get(x.from(0, j).at, x.elem) };
    }
    all
}

/// Sets the first `n` columns of a row, at most [`COLS`].
///
/// # Safety
/// As for [`load`].
#[inline(always)]
unsafe fn store<const WHOLE: bool>(to: Stored, n: usize, x: &[f32; COLS]) {
    if WHOLE {
        // SAFETY: by the caller.
        return unsafe { *to.at.cast::<[f32; COLS]>() = *x };
    }
    for (j, &y) in x[..n.min(COLS)].iter().enumerate() {
        // SAFETY: by the caller.
        unsafe { set(to.from(0, j).at, to.elem, y) };
    }
}

/// An element as a word of a panel.
///
/// # Safety
/// It is valid, and of this kind.
#[inline(always)]
unsafe fn word<T: Element>(x: Stored, at: usize) -> u32 {
    // SAFETY: by the caller.
    unsafe { *x.at.cast::<T>().add(at) }.number().to_bits()
}

/// # Safety
/// As for [`super::kernels::Pack`], with panels of `W` rows.
#[inline(always)]
unsafe fn pack<const W: usize>(
    x: Stored,
    rows: Range<usize>,
    k: Range<usize>,
    to: *mut u32,
    turn: impl Fn(Block) -> Block,
) {
    let (x, size) = (x.from(rows.start, k.start), [rows.len(), k.len()]);
    // SAFETY: by the caller.
    unsafe { with_element!(x.elem, T => panels::<W, T>(x, size, to, turn)) }
}

/// Packs so many rows and steps.
///
/// # Safety
/// As for [`pack`].
#[inline(always)]
unsafe fn panels<const W: usize, T: Element>(
    x: Stored,
    [rows, k]: [usize; 2],
    to: *mut u32,
    turn: impl Fn(Block) -> Block,
) {
    // Where rows are adjacent, panels share lines of memory: a step of all whole ones comes first.
    let along = if x.row_stride == 1 { rows / W } else { 0 };
    for step in 0..k {
        for panel in 0..along {
            // SAFETY: by the caller: rows of a step, and those of a whole panel.
            unsafe {
                let from = x.from(panel * W, step);
                let row: [u32; W] = std::array::from_fn(|i| word::<T>(from, i));
                *to.add((panel * k + step) * W).cast() = row;
            }
        }
    }
    for panel in along..rows.div_ceil(W) {
        let (from, n) = (x.from(panel * W, 0), (rows - panel * W).min(W));
        // SAFETY: by the caller: rows of one panel.
        unsafe { across::<W, T>(from, [n, k], to.add(panel * k * W), &turn) };
    }
}

/// Packs one panel; blocks turn where the steps of a row are adjacent.
///
/// # Safety
/// As for [`pack`].
#[inline(always)]
unsafe fn across<const W: usize, T: Element>(
    x: Stored,
    [rows, k]: [usize; 2],
    to: *mut u32,
    turn: &impl Fn(Block) -> Block,
) {
    let height = const { if W < SIDE { W } else { SIDE } };
    const { assert!(W < SIDE || W.is_multiple_of(SIDE)) };
    let blocks = if rows == W && x.col_stride == 1 { k / SIDE } else { 0 };
    for first in (0..blocks).map(|b| b * SIDE) {
        for top in (0..W).step_by(SIDE) {
            let mut block = [[0; SIDE]; SIDE];
            for (i, row) in block[..height].iter_mut().enumerate() {
                let from = x.from(top + i, first);
                // SAFETY: by the caller: all these steps are adjacent.
                *row = std::array::from_fn(|s| unsafe { word::<T>(from, s) });
            }
            for (s, row) in turn(block).iter().enumerate() {
                // SAFETY: the panel has these rows of this step.
                unsafe {
                    let to = to.add((first + s) * W + top);
                    std::ptr::copy_nonoverlapping(row.as_ptr(), to, height);
                }
            }
        }
    }
    for step in blocks * SIDE..k {
        for i in 0..W {
            let w = match i < rows {
                // SAFETY: by the caller: there is such a row.
                true => unsafe { word::<T>(x.from(i, step), 0) },
                false => 0,
            };
            // SAFETY: the panel has this step.
            unsafe { *to.add(step * W + i) = w };
        }
    }
}

/// A block the other way round.
fn turned(x: Block) -> Block {
    std::array::from_fn(|s| std::array::from_fn(|i| x[i][s]))
}

/// [`turned`], which the compiler does not see to be exchanges of a few registers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
fn turned_by_avx2(x: Block) -> Block {
    use std::arch::x86_64::*;
    // SAFETY: eight words are a register.
    let x: [__m256i; SIDE] = unsafe { std::mem::transmute(x) };
    let mut y = x;
    // Pairs of rows word by word, then pairs of these by two words: 4x4 blocks are turned.
    for i in 0..4 {
        y[2 * i] = _mm256_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        y[2 * i + 1] = _mm256_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
    let mut z = y;
    for i in 0..2 {
        for h in 0..2 {
            let (a, b) = (y[4 * i + h], y[4 * i + 2 + h]);
            z[4 * i + 2 * h] = _mm256_unpacklo_epi64(a, b);
            z[4 * i + 2 * h + 1] = _mm256_unpackhi_epi64(a, b);
        }
    }
    // Row `4 i + c` now has column `4 l + c` of rows 4 i.. in its half l: halves change places.
    for c in 0..4 {
        y[c] = _mm256_permute2x128_si256::<0x20>(z[c], z[4 + c]);
        y[4 + c] = _mm256_permute2x128_si256::<0x31>(z[c], z[4 + c]);
    }
    // SAFETY: as above.
    unsafe { std::mem::transmute(y) }
}

/// `M` rows by `C` columns at once.
///
/// # Safety
/// As for [`super::kernels::Dots`], with `M` rows.
#[inline(always)]
unsafe fn dots<const M: usize, const C: usize, T: Element, const FUSED: bool>(
    k: usize,
    [a, b]: [Stored; 2],
    cols: usize,
    to: *mut f32,
) {
    // SAFETY: by the caller.
    let load = |x: Stored, l: usize| unsafe {
        let x = x.from(0, l);
        let one = |i: usize| f32::from_bits(word::<T>(x, i));
        if k - l >= LANES {
            return std::array::from_fn(one);
        }
        std::array::from_fn::<f32, LANES, _>(|i| if i < k - l { one(i) } else { 0.0 })
    };
    for first in (0..cols).step_by(C) {
        let mut sums = [[[0.0f32; LANES]; C]; M];
        // Columns beyond the last are the last once more.
        let columns: [Stored; C] =
            std::array::from_fn(|j| b.from(0, (first + j).min(cols - 1)).transposed());
        for l in (0..k).step_by(LANES) {
            let columns: [[f32; LANES]; C] = std::array::from_fn(|j| load(columns[j], l));
            for (i, sums) in sums.iter_mut().enumerate() {
                let a = load(a.from(i, 0), l);
                for (sum, column) in sums.iter_mut().zip(&columns) {
                    for p in 0..LANES {
                        sum[p] = madd::<FUSED>(a[p], column[p], sum[p]);
                    }
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            for (j, s) in sums.iter().enumerate().take(cols - first) {
                let fours: [f32; 4] = std::array::from_fn(|p| s[p] + s[p + 4]);
                let sum = (fours[0] + fours[2]) + (fours[1] + fours[3]);
                // SAFETY: there is room for this sum.
                unsafe { *to.add(i * COLS + first + j) = sum };
            }
        }
    }
}

/// Compiles all kernels for processors with some features.
macro_rules! kernels {
    ($(#[$doc:meta])* $name:ident, $fused:expr, $turn:expr $(, #[$features:meta])?) => {
        $(#[$doc])*
        pub(super) mod $name {
            use super::*;

            const FUSED: bool = $fused;

            $(#[$features])?
            unsafe fn tile<const M: usize, const STEPS: bool>(
                k: usize,
                a: *const u32,
                apart: usize,
                b: *const u32,
                to: &Tile,
            ) {
                // SAFETY: by the caller.
                unsafe { super::tile::<M, STEPS, FUSED>(k, a, apart, b, to) }
            }
            $(#[$features])?
            unsafe fn finish(sums: *const f32, rows: usize, to: &Tile) {
                // SAFETY: by the caller.
                unsafe { super::finish(sums, rows, to) }
            }
            $(#[$features])?
            unsafe fn pack<const W: usize>(
                x: Stored,
                rows: Range<usize>,
                k: Range<usize>,
                _: Word,
                to: *mut u32,
            ) {
                // SAFETY: by the caller.
                unsafe { super::pack::<W>(x, rows, k, to, |x| $turn(x)) }
            }
            $(#[$features])?
            unsafe fn dots<const M: usize, const C: usize, T: Element>(
                k: usize,
                a: Stored,
                b: Stored,
                cols: usize,
                to: *mut f32,
            ) {
                // SAFETY: by the caller.
                unsafe { super::dots::<M, C, T, FUSED>(k, [a, b], cols, to) }
            }

            pub(crate) static WORDS: Kernels = Kernels {
                word: Word::F32,
                tile: [ROWS, COLS],
                rows: &tiles!(false),
                steps: &tiles!(true),
                pack: [pack::<ROWS>, pack::<COLS>],
                few: (DType::F32, &by_rows!(f32)),
                finish,
            };

            /// For products of bf16 with bf16.
            pub(crate) static HALVES: Kernels = Kernels { few: (DType::BF16, &by_rows!(Bf16)), ..WORDS };
        }
    };
}

/// Kernels for tiles of 1 to [`ROWS`] rows.
macro_rules! tiles {
    ($steps:expr) => {
        [
            tile::<1, $steps>,
            tile::<2, $steps>,
            tile::<3, $steps>,
            tile::<4, $steps>,
            tile::<5, $steps>,
            tile::<6, $steps>,
        ] as [_; ROWS]
    };
}

/// Kernels for 1 to [`FEW`] rows, with as many columns as the registers of AVX2 have room for.
macro_rules! by_rows {
    ($kind:ident) => {
        [
            dots::<1, 8, $kind>,
            dots::<2, 4, $kind>,
            dots::<3, 3, $kind>,
            dots::<4, 2, $kind>,
            dots::<5, 2, $kind>,
            dots::<6, 2, $kind>,
            dots::<7, 1, $kind>,
            dots::<8, 1, $kind>,
        ] as [_; FEW]
    };
}

kernels! {
    /// For any processor of the target.
    any, cfg!(any(target_arch = "aarch64", target_feature = "fma")), turned
}

#[cfg(target_arch = "x86_64")]
kernels! {
    /// For processors with AVX2 and fused products.
    avx2, true, turned_by_avx2, #[target_feature(enable = "avx2,fma")]
}
