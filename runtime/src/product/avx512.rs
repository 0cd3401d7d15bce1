//! Kernels for processors with AVX-512: of f32, and of pairs of bf16.

mod few;
mod pack;
mod tile;

use super::kernels::{Kernels, Word};
use shardc_ir::kernel::Elem;
use tile::{COLS, ROWS};

const _: () = assert!(super::packed::fits([ROWS, COLS]));

pub(super) static WORDS: Kernels = Kernels {
    word: Word::F32,
    tile: [ROWS, COLS],
    tiles: &tile::F32,
    pack: [pack::panels::<ROWS>, pack::panels::<COLS>],
    few: (Elem::F32, &few::F32S),
    finish: tile::finish_any,
};

/// For products of bf16 with bf16, if the processor has instructions for them.
pub(super) static PAIRS: Kernels =
    Kernels { word: Word::Pair, tiles: &tile::BF16, few: (Elem::BF16, &few::PAIRS), ..WORDS };
