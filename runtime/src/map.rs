//! Walks over elements: their addresses, and reading and writing them as f32.

use crate::element::{Element, with_element};
use crate::math;
use shardc_ir::kernel::Extents;
use shardc_ir::types::DType;
use std::ops::Range;

/// Elements per block.
pub(crate) const BLOCK: usize = 512;

/// Address of an element of an operand's memory.
pub(crate) fn element(base: *mut f32, elem: DType, i: usize) -> *mut f32 {
    base.wrapping_byte_add(i * elem.bytes())
}

/// Walks all indices of some loops, first loop outermost.
pub(crate) struct Odometer {
    extents: Extents,
    index: Extents,
    /// Indices that are left.
    left: usize,
}

impl Odometer {
    pub fn new(extents: &[usize]) -> Odometer {
        Odometer::over(extents, 0..extents.iter().product())
    }
    /// Some of the indices, by number.
    pub fn over(extents: &[usize], range: Range<usize>) -> Odometer {
        let mut index: Extents = extents.into();
        let mut rest = range.start;
        for (i, n) in index.iter_mut().zip(extents).rev() {
            let n = (*n).max(1);
            (*i, rest) = (rest % n, rest / n);
        }
        Odometer { extents: extents.into(), index, left: range.len() }
    }
    /// The current index; `None` at the end.
    pub fn index(&self) -> Option<&[usize]> {
        (self.left > 0).then_some(&self.index[..])
    }
    pub fn advance(&mut self) {
        self.left = self.left.saturating_sub(1);
        for (i, n) in self.index.iter_mut().zip(&self.extents).rev() {
            *i += 1;
            if *i < *n {
                return;
            }
            *i = 0;
        }
    }
}

/// # Safety
/// `out.len()` elements from `from`, `stride` apart, are valid.
#[inline(always)]
pub(crate) unsafe fn gather<T: Element>(from: *const T, stride: usize, out: &mut [f32]) {
    match stride {
        // SAFETY: by the caller.
        0 => out.fill(unsafe { *from }.number()),
        // SAFETY: by the caller.
        1 => math::widen(unsafe { std::slice::from_raw_parts(from, out.len()) }, out),
        _ => {
            for (i, o) in out.iter_mut().enumerate() {
                // SAFETY: by the caller.
                *o = unsafe { *from.add(i * stride) }.number();
            }
        }
    }
}

/// Reads elements that lie together.
///
/// # Safety
/// `out.len()` elements from `at` are valid, and apart from `out`.
pub(crate) unsafe fn read(at: *const f32, elem: DType, out: &mut [f32]) {
    // SAFETY: by the caller.
    unsafe { with_element!(elem, T => gather::<T>(at.cast(), 1, out)) }
}

/// # Safety
/// `n` elements from `to`, `stride` apart, are valid for writes, `n` from `from` for reads.
pub(crate) unsafe fn scatter(from: *const f32, to: *mut f32, stride: usize, n: usize, elem: DType) {
    // SAFETY: by the caller. A block may be stored where it lies.
    unsafe {
        match (elem, stride) {
            (DType::F32, 1) => std::ptr::copy(from, to, n),
            _ => with_element!(elem, T => {
                let (x, to) = (std::slice::from_raw_parts(from, n), to.cast::<T>());
                match stride {
                    1 => math::narrow(x, std::slice::from_raw_parts_mut(to, n)),
                    _ => (0..n).for_each(|i| *to.add(i * stride) = T::nearest(x[i])),
                }
            }),
        }
    }
}
