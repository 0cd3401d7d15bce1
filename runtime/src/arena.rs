//! A rank's memory: one allocation of the plan's peak, handed out by place.

use shardc_ir::plan::ALIGN;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// What poisoned memory is filled with: a NaN as f32, two as bf16, a large number as i32.
const POISON: u32 = 0x7fc1_7fc1;

/// One aligned block of memory.
pub struct Arena {
    base: NonNull<f32>,
    bytes: usize,
    layout: Layout,
    touched: usize,
}

// SAFETY: the arena owns its memory; whoever holds it may use it from any thread.
unsafe impl Send for Arena {}

impl Arena {
    /// `bytes` of memory, zero, or all NaN if `poison`. `None` if the size is no possible size.
    pub fn new(bytes: usize, poison: bool) -> Option<Arena> {
        let layout = Layout::from_size_align(bytes.max(ALIGN), ALIGN).ok()?;
        // SAFETY: the layout has at least ALIGN bytes.
        let ptr = unsafe { alloc_zeroed(layout) };
        let base = NonNull::new(ptr.cast()).unwrap_or_else(|| handle_alloc_error(layout));
        if poison {
            for i in 0..bytes / 4 {
                // SAFETY: i counts the 4-byte words of the block, which is aligned for them.
                unsafe { base.cast::<u32>().add(i).write(POISON) };
            }
        }
        Some(Arena { base, bytes, layout, touched: 0 })
    }

    /// Memory from an offset on, valid for this many bytes; `None` if it does not lie inside the
    /// arena or is not aligned to elements.
    pub fn at(&mut self, offset: usize, bytes: usize) -> Option<NonNull<f32>> {
        let end = offset.checked_add(bytes)?;
        if end > self.bytes || offset % 4 != 0 {
            return None;
        }
        self.touched = self.touched.max(end);
        // SAFETY: offset is inside the block, or one past its end for an empty place there.
        Some(unsafe { self.base.byte_add(offset) })
    }

    /// The elements from an offset on. `None` as for [`Arena::at`].
    pub fn elements(&mut self, offset: usize, bytes: usize) -> Option<&mut [f32]> {
        let ptr = self.at(offset, bytes)?;
        // SAFETY: the bytes lie inside the block, every bit pattern is an f32, and the borrow of
        // the arena keeps others away.
        Some(unsafe { std::slice::from_raw_parts_mut(ptr.as_ptr(), bytes / 4) })
    }

    /// One past the last byte of any place that was asked for.
    pub fn touched(&self) -> usize {
        self.touched
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, in `new`.
        unsafe { dealloc(self.base.as_ptr().cast(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_checked_and_counted() {
        let mut a = Arena::new(256, true).unwrap();
        assert!(a.elements(64, 64).unwrap().iter().all(|x| x.is_nan()));
        assert_eq!(a.at(64, 64).unwrap().as_ptr() as usize % ALIGN, 0);
        assert_eq!(a.touched(), 128);
        assert!(a.at(192, 64).is_some() && a.at(192, 68).is_none() && a.at(66, 4).is_none());
        assert!(a.at(usize::MAX - 3, 8).is_none());
        assert_eq!(a.touched(), 256);
    }
}
