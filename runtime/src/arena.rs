//! A rank's memory: one mapping of the plan's peak, handed out by place.

use memmap2::{MmapMut, MmapRaw};
use shardc_ir::diag::{Diag, Result, exact_bytes};
use std::ptr::NonNull;

/// What poisoned memory is filled with: a NaN as f32, two as bf16, a large number as i32.
const POISON: u32 = 0x7fc1_7fc1;

/// Memory of a rank, in pages of the system's usual size: large ones made no step faster, and the first one
/// slower by more than a second for a gigabyte.
pub struct Arena {
    memory: MmapRaw,
    bytes: usize,
    touched: usize,
}

impl Arena {
    /// `bytes` of memory, zero, or all NaN if `poison`.
    ///
    /// # Errors
    /// `no-memory` if the system does not give so much.
    pub fn new(bytes: usize, poison: bool) -> Result<Arena> {
        let mapped = MmapMut::map_anon(bytes.max(size_of::<f32>()));
        let mut memory = mapped.map_err(|e| {
            let needs = exact_bytes(bytes);
            Diag::new("no-memory", format!("this machine does not give a rank {needs}: {e}"))
                .help("run fewer ranks on this machine, or compile with a smaller --memory")
        })?;
        if poison {
            let words = memory[..bytes].chunks_exact_mut(4);
            words.for_each(|w| w.copy_from_slice(&POISON.to_ne_bytes()));
        }
        Ok(Arena { memory: memory.into(), bytes, touched: 0 })
    }

    /// Memory from an offset on, valid for this many bytes; `None` if it does not lie inside the
    /// arena or is not aligned to elements.
    pub fn at(&mut self, offset: usize, bytes: usize) -> Option<NonNull<f32>> {
        let end = offset.checked_add(bytes)?;
        if end > self.bytes || offset % 4 != 0 {
            return None;
        }
        self.touched = self.touched.max(end);
        NonNull::new(self.memory.as_mut_ptr().wrapping_add(offset).cast())
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

#[cfg(test)]
mod tests {
    use super::*;
    use shardc_ir::plan::ALIGN;

    #[test]
    fn more_than_there_can_be_is_refused() {
        let e = Arena::new(usize::MAX / 4, false).err().unwrap();
        assert!(e.code == "no-memory", "{e}");
    }

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
