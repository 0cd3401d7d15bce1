//! What products are made of on a processor: how operands are packed, and tiles of a result.

use super::{Stored, portable};
use shardc_ir::types::DType;
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::OnceLock;

/// Rows of a product that are few.
pub(super) const FEW: usize = 8;
/// Words from one step to the next of an operand with adjacent rows that is read as it lies: less.
const NEAR: usize = 512;
/// Words of a page: lines so far apart have the same places in the nearest cache of most processors.
const PAGE: usize = 1024;
/// Columns of the widest tile.
pub(super) const WIDEST: usize = 32;

/// The kernels of a processor for operands of some elements. All sum each element of a result in the
/// order of k, wherever in a tile it is: how a result is cut into tiles does not change a bit.
pub(super) struct Kernels {
    pub word: Word,
    /// Rows and columns of a tile.
    pub tile: [usize; 2],
    /// By rows of a tile, from 1 to all, for strips of `a` whose rows are adjacent, or whose steps are.
    pub rows: &'static [MakeTile],
    pub steps: &'static [MakeTile],
    /// For panels of a tile's rows of `a`, and of its columns of `b`.
    pub pack: [Pack; 2],
    /// By rows, for operands of these elements.
    pub few: (DType, &'static [Dots; FEW]),
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

/// Words of some rows of `a`, from a row on.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    pub at: *const u32,
    /// Words from one row to the next: of strips that are packed, in the mean of a panel.
    row: usize,
    /// Words from one step to the next if rows are adjacent, from one row to the next if steps are.
    pub apart: usize,
    /// Kernels for such strips.
    pub tiles: &'static [MakeTile],
}

impl Strip {
    /// The strip from a row on, which begins a panel if it is packed.
    pub fn from(self, row: usize) -> Strip {
        Strip { at: self.at.wrapping_add(row * self.row), ..self }
    }
}

/// Sums so many steps of a strip of `a` and a panel of `b` to a tile; the strip's rows or steps are so many
/// words apart.
///
/// # Safety
/// The processor has what the kernels are for; strip and panel have so many steps, and the tile's rows and
/// columns are valid.
pub(super) type MakeTile = unsafe fn(usize, *const u32, usize, *const u32, &Tile);

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
    pub fn all(a: DType, b: DType) -> SmallVec<[&'static Kernels; 4]> {
        let half = [a, b] == [DType::BF16; 2];
        let of = |[words, halves]: [&'static Kernels; 2]| if half { halves } else { words };
        let mut all = SmallVec::new();
        #[cfg(target_arch = "x86_64")]
        {
            use super::avx512;
            use crate::math::has;
            if has!("avx512f", "avx512bw", "avx512vl") {
                let pairs = half && has!("avx512bf16");
                match pairs.then(avx512::pairs_are_fast) {
                    Some(true) => all.extend([&avx512::PAIRS, &avx512::HALVES]),
                    Some(false) => all.extend([&avx512::HALVES, &avx512::PAIRS]),
                    None => all.push(&avx512::WORDS),
                }
            }
            if has!("avx2", "fma") {
                all.push(of([&portable::avx2::WORDS, &portable::avx2::HALVES]));
            }
        }
        all.push(of([&portable::any::WORDS, &portable::any::HALVES]));
        all
    }
    /// The fastest. The processor is asked once: in a virtual machine, that takes as long as a small product.
    pub fn of(a: DType, b: DType) -> &'static Kernels {
        static FASTEST: OnceLock<[&Kernels; 2]> = OnceLock::new();
        let fastest = |elem| Kernels::all(elem, elem)[0];
        let [words, halves] = FASTEST.get_or_init(|| [DType::F32, DType::BF16].map(fastest));
        if [a, b] == [DType::BF16; 2] { halves } else { words }
    }

    /// An operand as it lies, if tiles can read it so: f32 of which steps or rows are adjacent. Where rows are,
    /// each step is in another line of memory, so that steps must be near. Where steps are, as many lines as a
    /// tile has rows are read in turns, and if rows are whole pages apart, the nearest cache must have as many
    /// ways: they all compete for the same places.
    pub fn strip(&self, a: Stored) -> Option<Strip> {
        let (at, row) = (a.at.cast_const().cast(), a.row_stride);
        let alike = row.is_multiple_of(PAGE) && !self.has_ways();
        match (self.word, a.elem, a.row_stride, a.col_stride) {
            (Word::F32, DType::F32, _, 1) if !alike => {
                Some(Strip { at, row, apart: row, tiles: self.steps })
            }
            (Word::F32, DType::F32, 1, apart) if apart < NEAR => {
                Some(Strip { at, row, apart, tiles: self.rows })
            }
            _ => None,
        }
    }

    /// Whether the nearest cache has as many ways as a tile has rows.
    fn has_ways(&self) -> bool {
        static WAYS: OnceLock<usize> = OnceLock::new();
        // Fewer than 8 have none that these kernels are for.
        self.tile[0] <= 8 || self.tile[0] <= *WAYS.get_or_init(ways)
    }

    /// Panels of so many steps, one behind the other.
    pub fn packed(&self, at: *const u32, steps: usize) -> Strip {
        Strip { at, row: steps, apart: self.tile[0], tiles: self.rows }
    }
}

/// Ways of the nearest cache of data, at least.
fn ways() -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        // "Deterministic cache parameters" of Intel and "cache topology" of AMD are alike.
        let leaf = if super::avx512::is_intel() { 4 } else { 0x8000_001d };
        if __cpuid(leaf & 0x8000_0000).eax >= leaf {
            let caches = (0..8).map(|i| __cpuid_count(leaf, i)).take_while(|c| c.eax & 31 != 0);
            let mut first = caches.filter(|c| c.eax & 31 == 1 && c.eax >> 5 & 7 == 1);
            return first.next().map_or(8, |c| (c.ebx >> 22) as usize + 1);
        }
    }
    8
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
