//! What ranks that share a device launch to copy and to fold each other's elements: entry points of
//! `codegen/cuda/collective.cu`, whose structs the words are in the order of.

use super::{DeviceLaunch, KernelSource, Word};
use crate::kernel::Extents;
use crate::types::{DType, Reduction};
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;

/// The most nested loops of a region, and the most regions that are folded: they are all parameters of one
/// launch.
pub const LOOPS: usize = 6;
pub const PARTS: usize = 32;

const THREADS: usize = 256;

/// Elements in memory, walked in row-major order.
#[derive(Clone, Debug)]
pub struct Region {
    /// Where the first is: an address, or a byte of an operand.
    first: Word,
    elem: DType,
    /// Sizes of loops and strides in elements, outermost first: no loop has one turn, and none goes on where the
    /// one inside it ends.
    loops: SmallVec<[(usize, usize); LOOPS]>,
}

impl Region {
    /// Operands begin at multiples of 64 bytes.
    pub fn new(first: Word, elem: DType, extents: &[usize], strides: &[usize]) -> Region {
        let mut loops: SmallVec<[(usize, usize); LOOPS]> = SmallVec::new();
        for (&n, &stride) in extents.iter().zip(strides).filter(|x| *x.0 != 1) {
            match loops.last_mut() {
                Some(outer) if outer.1 == n * stride => *outer = (outer.0 * n, stride),
                _ => loops.push((n, stride)),
            }
        }
        Region { first, elem, loops }
    }

    /// Whether there are no more loops than a launch takes.
    pub fn fits(&self) -> bool {
        self.loops.len() <= LOOPS
    }

    /// Whether so many elements from every multiple of that number on are adjacent, and begin where so many can be
    /// moved at once.
    fn has_packs(&self, pack: usize) -> bool {
        let Some((&(n, 1), outer)) = self.loops.split_last() else { return false };
        let first = match self.first {
            Word::Address { byte, .. } => byte,
            Word::Int(address) => address as usize,
            _ => return false,
        };
        first % (pack * self.elem.bytes()) == 0
            && n % pack == 0
            && outer.iter().all(|(_, stride)| stride % pack == 0)
    }

    /// The fields of the struct, with loops over packs of so many elements.
    fn push(&self, pack: usize, words: &mut Vec<Word>) {
        words.extend([self.first, Word::Int(self.elem as i64)]);
        let around = LOOPS - self.loops.len();
        let (mut extents, mut strides): (Extents, Extents) =
            std::iter::repeat_n((1, 0), around).chain(self.loops.iter().copied()).unzip();
        if pack > 1 {
            extents[LOOPS - 1] /= pack;
            strides[LOOPS - 1] *= pack;
        }
        words.extend(extents.iter().chain(&strides).map(|&x| Word::Int(x as i64)));
    }
}

/// How many elements a thread moves: 16 bytes of those of 16 bits if there are some, else of those of 32.
fn pack(all: &[&Region]) -> usize {
    let halves = all.iter().any(|r| r.elem.is_half());
    let tried: &[usize] = if halves { &[8, 4, 2] } else { &[4, 2] };
    let fits = |pack: &usize| all.iter().all(|r| r.has_packs(*pack));
    tried.iter().copied().find(fits).unwrap_or(1)
}

/// The parts of a range that are moved by so many elements at once: whole packs, and before and behind them single
/// elements.
fn parts(range: Range<usize>, pack: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let first = range.start.next_multiple_of(pack).min(range.end);
    let last = (range.end - range.end % pack).max(first);
    let all = [(1, range.start..first), (pack, first..last), (1, last..range.end)];
    all.into_iter().filter(|(_, part)| !part.is_empty())
}

/// The entry points: of [`copy`], and of [`fold`].
pub const COPY: &str = "copy_region";
pub const FOLD: &str = "fold_regions";

/// Launches of an entry point for the elements of a range: `words` are its own parameters, `regions` what follows.
fn launches(
    source: &Arc<KernelSource>,
    entry: &'static str,
    range: Range<usize>,
    own: &[i64],
    regions: &[&Region],
    padding: usize,
) -> Vec<DeviceLaunch> {
    let one = |(pack, part): (usize, Range<usize>)| {
        let (start, n) = (part.start / pack, part.len() / pack);
        let mut words: Vec<Word> = [start as i64, n as i64, pack as i64].map(Word::Int).to_vec();
        words.extend(own.iter().map(|&x| Word::Int(x)));
        regions.iter().for_each(|r| r.push(pack, &mut words));
        words.resize(words.len() + padding, Word::Int(0));
        let grid = [n.div_ceil(THREADS) as u32, 1, 1];
        let (source, threads) = (source.clone(), THREADS as u32);
        DeviceLaunch { source, entry: entry.into(), grid, threads, shared: 0, words }
    };
    parts(range, pack(regions)).map(one).collect()
}

/// Writes elements of a range of `from` over those of `to`; between f32 and 16 bits they are converted.
/// Both have at most [`LOOPS`] loops.
pub fn copy(
    source: &Arc<KernelSource>,
    from: &Region,
    to: &Region,
    range: Range<usize>,
) -> Vec<DeviceLaunch> {
    launches(source, COPY, range, &[], &[from, to], 0)
}

/// Writes what folding elements of a range of all parts, at most [`PARTS`], from the left gives to `to`, which may
/// be one of them. All have at most [`LOOPS`] loops.
pub fn fold(
    source: &Arc<KernelSource>,
    how: Reduction,
    parts: &[Region],
    to: &Region,
    range: Range<usize>,
) -> Vec<DeviceLaunch> {
    let how = match how {
        Reduction::Sum => 0,
        Reduction::Max => 1,
        Reduction::Min => 2,
    };
    let regions: Vec<&Region> = std::iter::once(to).chain(parts).collect();
    // Parts that are not there are parameters too.
    let padding = (PARTS - parts.len()) * (2 + 2 * LOOPS);
    launches(source, FOLD, range, &[how, parts.len() as i64], &regions, padding)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(first: i64, elem: DType, extents: &[usize], strides: &[usize]) -> Region {
        Region::new(Word::Int(first), elem, extents, strides)
    }

    /// As many as all regions allow: by where they begin, by strides, by elements of 16 bits; and none where the
    /// innermost loop is no walk of adjacent elements.
    #[test]
    fn packs_are_as_large_as_regions_allow() {
        let f32s = |first, n: &[usize], s: &[usize]| region(first, DType::F32, n, s);
        let bf16s = |first, n: &[usize], s: &[usize]| region(first, DType::BF16, n, s);
        let of = |all: &[&Region]| pack(all);
        assert_eq!(of(&[&f32s(64, &[5, 8], &[8, 1])]), 4);
        assert_eq!(of(&[&f32s(64, &[5, 8], &[9, 1])]), 1);
        assert_eq!(of(&[&f32s(64, &[5, 8], &[10, 1])]), 2);
        assert_eq!(of(&[&f32s(72, &[5, 8], &[12, 1])]), 2);
        assert_eq!(of(&[&f32s(64, &[5, 8], &[16, 2])]), 1);
        // One loop of 40 elements, and one of 10.
        assert_eq!(of(&[&f32s(64, &[5, 1, 8], &[8, 3, 1]), &f32s(0, &[10, 4], &[4, 1])]), 4);
        assert_eq!(of(&[&bf16s(64, &[24], &[1])]), 8);
        assert_eq!(of(&[&bf16s(64, &[24], &[1]), &f32s(32, &[24], &[1])]), 8);
        assert_eq!(of(&[&bf16s(64, &[24], &[1]), &f32s(16, &[24], &[1])]), 4);
        // No element, or one, is nothing to be packed.
        assert_eq!(of(&[&f32s(64, &[], &[])]), 1);
        assert_eq!(of(&[&f32s(64, &[1, 1], &[7, 7])]), 1);
    }

    /// A range is moved once, whole packs at multiples of them.
    #[test]
    fn parts_are_the_range() {
        for (range, pack) in [(0..0, 4), (3..5, 4), (0..7, 1), (32..71, 8), (5..8, 4), (5..16, 8)] {
            let all: Vec<_> = parts(range.clone(), pack).collect();
            let elements: Vec<usize> = all.iter().flat_map(|(_, part)| part.clone()).collect();
            assert_eq!(elements, range.clone().collect::<Vec<_>>());
            for (n, part) in all {
                assert!(part.start % n == 0 && part.len() % n == 0, "{n} of {part:?}");
                assert!(n == 1 || n == pack);
            }
        }
    }

    #[test]
    fn loops_are_as_few_as_can_be() {
        let loops = |n: &[usize], s: &[usize]| region(0, DType::F32, n, s).loops.to_vec();
        assert_eq!(loops(&[2, 3, 4], &[12, 4, 1]), [(24, 1)]);
        assert_eq!(loops(&[2, 3, 4], &[20, 4, 1]), [(2, 20), (12, 1)]);
        assert_eq!(loops(&[2, 1, 4], &[4, 99, 1]), [(8, 1)]);
        assert_eq!(loops(&[1, 1], &[5, 5]), []);
        assert!(!region(0, DType::F32, &[2; 7], &[100, 90, 80, 70, 60, 50, 40]).fits());
    }
}
