//! Kernels for processors with AVX-512: of f32, and of pairs of bf16.

mod few;
mod pack;
mod tile;

use super::kernels::{Kernels, Word};
use shardc_ir::types::DType;
use tile::{COLS, ROWS};

const _: () = assert!(super::packed::fits([ROWS, COLS]));

pub(super) static WORDS: Kernels = Kernels {
    word: Word::F32,
    tile: [ROWS, COLS],
    rows: &tile::F32[0],
    steps: &tile::F32[1],
    pack: [pack::panels::<ROWS>, pack::panels::<COLS>],
    few: (DType::F32, &few::F32S),
    finish: tile::finish_any,
};

/// For products of bf16 with bf16, if the processor has instructions for them.
pub(super) static PAIRS: Kernels = Kernels { word: Word::Pair, rows: &tile::BF16, ..HALVES };

/// The same with words of f32: few rows wait for memory, and bf16 is half of it.
pub(super) static HALVES: Kernels = Kernels { few: (DType::BF16, &few::PAIRS), ..WORDS };

/// Whether sums of pairs of bf16 are the fastest. Intel's cores start one per two cycles, and in that time
/// four of f32, which are twice the terms; AMD's start as many as of f32. Asked of the processor, not
/// measured: ranks of one machine give the same bits.
pub(super) fn pairs_are_fast() -> bool {
    !is_intel()
}

/// Whether the processor is Intel's.
pub(super) fn is_intel() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == *b"GenuineIntel"
}
