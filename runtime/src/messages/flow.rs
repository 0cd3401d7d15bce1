//! What one message carries: a segment of elements of some regions, where they lie or as a copy.

use crate::region::{Region, split};
use shardc_ir::types::DType;
use smallvec::SmallVec;
use std::ops::Range;

/// Elements that one member sends another before both look at what came.
const SEGMENT: usize = 1 << 20;
/// Elements in this range of regions one after the other.
#[derive(Clone)]
pub(super) struct Flow<'a> {
    pub(super) regions: SmallVec<[&'a Region; 2]>,
    pub(super) range: Range<usize>,
}

impl<'a> Flow<'a> {
    pub(super) fn of(regions: impl IntoIterator<Item = &'a Region>) -> Flow<'a> {
        let regions: SmallVec<[&Region; 2]> = regions.into_iter().collect();
        let all = regions.iter().map(|r| r.len()).sum();
        Flow { regions, range: 0..all }
    }
    pub(super) fn cut(self, range: Range<usize>) -> Flow<'a> {
        Flow { range, ..self }
    }
    pub(super) fn segments(&self) -> usize {
        self.range.len().div_ceil(SEGMENT)
    }
    /// The elements of a segment.
    pub(super) fn segment(&self, number: usize) -> Range<usize> {
        let first = self.range.start + number * SEGMENT;
        first.min(self.range.end)..(first + SEGMENT).min(self.range.end)
    }
    /// A segment: its parts of regions.
    pub(super) fn parts(&self, segment: usize) -> SmallVec<[(&'a Region, Range<usize>); 2]> {
        let lens = self.regions.iter().map(|r| r.len());
        split(lens, self.segment(segment)).map(|(i, part)| (self.regions[i], part)).collect()
    }
}

/// Bytes of a segment where they lie, or, if that is in pieces, of a copy.
pub(super) struct Span {
    pub(super) room: Option<Vec<f32>>,
    pub(super) first: *mut u8,
    pub(super) bytes: usize,
}

/// Calls `f(region, range, copy)` for parts of regions and the same indices of a piece's copy.
///
/// # Safety
/// The piece has room for all parts.
pub(super) unsafe fn each(
    piece: &Span,
    parts: &[(&Region, Range<usize>)],
    mut f: impl FnMut(&Region, Range<usize>, &Region),
) {
    let mut byte = 0;
    for (r, range) in parts {
        f(r, range.clone(), &shifted(piece.first.wrapping_add(byte), r.elem(), range));
        byte += range.len() * r.elem().bytes();
    }
}

/// Adjacent elements from `first` on, which are those of a range of something larger.
pub(super) fn shifted(first: *mut u8, elem: DType, range: &Range<usize>) -> Region {
    let zero = first.wrapping_sub(range.start * elem.bytes());
    // SAFETY: only the elements of the range are used.
    unsafe { Region::adjacent(zero.cast(), elem, range.end) }
}
