//! A box of elements somewhere in memory, walked in row-major order in contiguous runs.

use crate::map::{element, read, scatter};
use shardc_ir::kernel::{Block, Extents, View};
use shardc_ir::tensor;
use shardc_ir::types::{DType, Reduction};
use std::ops::Range;

/// Elements in the memory of some rank: the block of an operand.
#[derive(Clone, Debug)]
pub struct Region {
    first: *mut f32,
    elem: DType,
    extents: Extents,
    strides: Extents,
}

// SAFETY: who makes a region promises that its memory may be read by the ranks it is shown to.
unsafe impl Send for Region {}
// SAFETY: as above; a region itself is never changed.
unsafe impl Sync for Region {}

impl Region {
    /// The block `block` of the operand whose memory begins at `base`.
    ///
    /// # Safety
    /// All elements of the block lie in memory valid for reads and writes, which nobody frees or
    /// uses otherwise before the transport's call returns, and, if it has only queued its work, before
    /// that is done: what the rank queues behind the call comes after it. If it returns an error,
    /// before the transports of all ranks are dropped.
    pub unsafe fn new(base: *mut f32, block: &Block) -> Region {
        Region {
            first: element(base, block.elem, block.view.offset),
            elem: block.elem,
            extents: block.extents.clone(),
            strides: block.view.strides.clone(),
        }
    }

    /// Adjacent elements.
    ///
    /// # Safety
    /// As for [`Region::new`].
    pub unsafe fn adjacent(first: *mut f32, elem: DType, len: usize) -> Region {
        Region { first, elem, extents: smallvec::smallvec![len], strides: smallvec::smallvec![1] }
    }

    /// Address of the first element, type of all, sizes of loops and strides.
    pub(crate) fn parts(&self) -> (*mut f32, DType, &[usize], &[usize]) {
        (self.first, self.elem, &self.extents, &self.strides)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.extents.iter().product()
    }
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    pub(crate) fn elem(&self) -> DType {
        self.elem
    }

    /// Address of the first element of a range, if all of them are adjacent.
    pub(crate) fn together(&self, range: &Range<usize>) -> Option<*mut f32> {
        // Loops of one turn do not part what they contain.
        let whole = || {
            let mut step = 1;
            self.extents.iter().zip(&self.strides).rev().all(|(&n, &stride)| {
                let fits = n == 1 || stride == step;
                step *= n;
                fits
            })
        };
        let (first, left) = self.run(range.start);
        (left >= range.len() || whole()).then_some(first)
    }

    /// Address of element `i` in row-major order, and how many from there on are adjacent.
    fn run(&self, mut i: usize) -> (*mut f32, usize) {
        let Some((&n, &stride)) = self.extents.last().zip(self.strides.last()) else {
            return (self.first, 1);
        };
        let inner = i % n;
        let left = if stride == 1 { n - inner } else { 1 };
        let mut at = inner * stride;
        i /= n;
        let outer = self.extents.len() - 1;
        for (n, stride) in self.extents[..outer].iter().zip(&self.strides).rev() {
            at += i % n * stride;
            i /= n;
        }
        (element(self.first, self.elem, at), left)
    }
}

/// The chunk of `total` elements that member `p` of `ways` folds.
pub(crate) fn chunk(total: usize, ways: usize, p: usize) -> Range<usize> {
    // Whole cache lines, of 16 bits too, so that two members never write the same one.
    let size = total.div_ceil(ways).next_multiple_of(32);
    (p * size).min(total)..((p + 1) * size).min(total)
}

/// Parts of tensors of these lengths, one after the other, that lie in a range: which tensor, and
/// which of its elements.
pub(crate) fn split(
    lens: impl Iterator<Item = usize>,
    range: Range<usize>,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let mut start = 0;
    lens.enumerate().filter_map(move |(i, n)| {
        let inside = |at: usize| at.clamp(start, start + n) - start;
        let part = inside(range.start)..inside(range.end);
        start += n;
        (!part.is_empty()).then_some((i, part))
    })
}

/// Writes the elements of `from` in this range over those of `to`, in order; between f32 and 16
/// bits they are converted.
///
/// # Safety
/// Both have at least `range.end` elements, nobody writes `from` or uses `to` meanwhile.
pub(crate) unsafe fn copy(from: &Region, to: &Region, range: Range<usize>) {
    let mut i = range.start;
    while i < range.end {
        let ((src, a), (dst, b)) = (from.run(i), to.run(i));
        let n = a.min(b).min(range.end - i);
        // SAFETY: both runs have n elements; equal runs are allowed.
        unsafe {
            match (from.elem.is_half(), to.elem.is_half()) {
                (true, false) => read(src, from.elem, std::slice::from_raw_parts_mut(dst, n)),
                (false, true) => scatter(src, dst, 1, n, to.elem),
                _ => std::ptr::copy(src.cast::<u8>(), dst.cast::<u8>(), n * from.elem.bytes()),
            }
        }
        i += n;
    }
}

/// Elements folded at a time: a run stays in the nearest cache while all parts pass by.
const RUN: usize = 1024;

/// Folds the elements of all of `from` in this range, from the left, into those of `to`; all have
/// one element type. Sums are f32, and rounded at the end if that is of 16 bits.
///
/// # Safety
/// As for [`copy`]; `to` may be one of `from`, but overlaps none otherwise.
pub(crate) unsafe fn fold(fold: Reduction, from: &[Region], to: &Region, range: Range<usize>) {
    let (mut acc, mut wide) = ([0.0f32; RUN], [0.0f32; RUN]);
    let mut i = range.start;
    while i < range.end {
        let (dst, mut n) = to.run(i);
        n = from.iter().fold(n, |n, f| n.min(f.run(i).1)).min(range.end - i).min(RUN);
        let acc = &mut acc[..n];
        for (k, f) in from.iter().enumerate() {
            let at = f.run(i).0;
            // SAFETY: all runs have n elements, and nobody writes them meanwhile.
            let src = unsafe {
                if f.elem.is_half() {
                    read(at, f.elem, &mut wide[..n]);
                    &wide[..n]
                } else {
                    std::slice::from_raw_parts(at.cast_const(), n)
                }
            };
            if k == 0 { acc.copy_from_slice(src) } else { join(fold, acc, src) }
        }
        // SAFETY: the result's run has n elements; all parts of it have been read.
        unsafe { scatter(acc.as_ptr(), dst, 1, n, to.elem) };
        i += n;
    }
}

/// Folds `x` into `acc`, element by element.
pub(crate) fn join(fold: Reduction, acc: &mut [f32], x: &[f32]) {
    let both = acc.iter_mut().zip(x);
    match fold {
        Reduction::Sum => both.for_each(|(a, x)| *a += x),
        Reduction::Max => both.for_each(|(a, x)| *a = a.max(*x)),
        Reduction::Min => both.for_each(|(a, x)| *a = a.min(*x)),
    }
}

/// A row-major block of f32 without gaps.
pub(crate) fn dense_block(extents: &[usize]) -> Block {
    let view = View { operand: 0, offset: 0, strides: tensor::strides(extents) };
    Block { extents: extents.into(), view, elem: DType::F32 }
}
