//! What products are made of on a processor: how operands are packed, and tiles of a result.

use super::{Stored, portable};
use shardc_ir::kernel::Elem;
use smallvec::SmallVec;
use std::ops::Range;

/// Rows of a product that are few.
pub(super) const FEW: usize = 8;
/// Columns of the widest tile.
pub(super) const WIDEST: usize = 32;

/// The kernels of a processor for operands of some elements. All sum each element of a result in the
/// order of k, wherever in a tile it is: how a result is cut into tiles does not change a bit.
pub(super) struct Kernels {
    pub word: Word,
    /// Rows and columns of a tile.
    pub tile: [usize; 2],
    /// By rows of a tile, from 1 to all.
    pub tiles: &'static [MakeTile],
    /// For panels of a tile's rows of `a`, and of its columns of `b`.
    pub pack: [Pack; 2],
    /// By rows, for operands of these elements.
    pub few: (Elem, &'static [Dots; FEW]),
    pub finish: Finish,
}

/// What the words of a panel are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Word {
    F32,
    /// Two bf16, adjacent along k.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    Pair,
}

/// What becomes of the sums of a tile: `write = onto + (read + scale · sum)`.
pub(super) struct Tile {
    pub scale: f32,
    pub read: Option<Stored>,
    pub onto: Option<Stored>,
    pub write: Stored,
    /// Columns that exist.
    pub cols: usize,
}

/// Sums so many steps of a panel of `a` and one of `b` to a tile.
///
/// # Safety
/// The processor has what the kernels are for; panels have so many steps, and the tile's rows and
/// columns are valid.
pub(super) type MakeTile = unsafe fn(usize, *const u32, *const u32, &Tile);

/// Packs panels of an operand whose columns are k: these rows, and these columns, step by step: a word
/// per row and step. Panels follow each other. What a panel has too many is 0, and so is the second half
/// of the last pair of an odd k.
///
/// # Safety
/// The processor has what the kernels are for; rows and columns are valid, and there is room for whole
/// panels.
pub(super) type Pack = unsafe fn(Stored, Range<usize>, Range<usize>, Word, *mut u32);

/// Sums of rows of `a` by some columns of `b`, no more than a tile's, of so many elements each, which are
/// adjacent: to rows of a tile's columns. Sums are over partial sums, in a fixed order.
///
/// # Safety
/// The processor has what the kernels are for; operands have so many elements, and there is room for the
/// sums.
pub(super) type Dots = unsafe fn(usize, Stored, Stored, usize, *mut f32);

/// Does with so many rows of sums, of a tile's columns, what the tile says.
///
/// # Safety
/// The processor has what the kernels are for; the tile's rows and columns are valid.
pub(super) type Finish = unsafe fn(*const f32, usize, &Tile);

impl Kernels {
    /// Those that the processor has for products of these elements, the fastest first.
    pub fn all(a: Elem, b: Elem) -> SmallVec<[&'static Kernels; 4]> {
        let half = [a, b] == [Elem::BF16; 2];
        let of = |[words, halves]: [&'static Kernels; 2]| if half { halves } else { words };
        let mut all = SmallVec::new();
        #[cfg(target_arch = "x86_64")]
        {
            use super::avx512;
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
            {
                let pairs = half && is_x86_feature_detected!("avx512bf16");
                match pairs.then(avx512::pairs_are_fast) {
                    Some(true) => all.extend([&avx512::PAIRS, &avx512::HALVES]),
                    Some(false) => all.extend([&avx512::HALVES, &avx512::PAIRS]),
                    None => all.push(&avx512::WORDS),
                }
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                all.push(of([&portable::avx2::WORDS, &portable::avx2::HALVES]));
            }
        }
        all.push(of([&portable::any::WORDS, &portable::any::HALVES]));
        all
    }
    /// The fastest.
    pub fn of(a: Elem, b: Elem) -> &'static Kernels {
        Kernels::all(a, b)[0]
    }
}

impl Word {
    /// Elements of k per word.
    pub fn depth(self) -> usize {
        match self {
            Word::F32 => 1,
            Word::Pair => 2,
        }
    }
}

impl Tile {
    /// The tile from a row and a column on, with so many columns.
    pub fn from(&self, row: usize, col: usize, cols: usize) -> Tile {
        let from = |x: Stored| x.from(row, col);
        let (read, onto) = (self.read.map(from), self.onto.map(from));
        Tile { scale: self.scale, read, onto, write: from(self.write), cols }
    }
}
