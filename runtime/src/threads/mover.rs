//! What moves elements between ranks: at once, in memory of this process, or queued on a device.

use crate::region::{self, Region};
use shardc_ir::diag::Result;
use shardc_ir::types::Reduction;
use std::ops::Range;

/// Copies and folds regions of ranks whose memory this one can read.
pub trait Mover: Send {
    /// True if regions are memory of this process, and what was called is done. Else it is queued.
    const AT_ONCE: bool;
    /// The end of what a rank has queued up to some moment.
    type Mark: Send + Sync;
    /// Marks the end of everything that this rank has queued so far.
    ///
    /// # Errors
    /// Those of the device.
    fn mark(&mut self) -> Result<Self::Mark>;
    /// What this rank queues from now on begins after a mark of another.
    ///
    /// # Errors
    /// Those of the device.
    fn after(&mut self, mark: &Self::Mark) -> Result<()>;
    /// Writes the elements of `from` in this range over those of `to`, in order; between f32 and
    /// bf16 they are converted.
    ///
    /// # Safety
    /// Both have at least `range.end` elements, nobody writes `from` or uses `to` before the next
    /// mark of this rank.
    unsafe fn copy(&mut self, from: &Region, to: &Region, range: Range<usize>) -> Result<()>;
    /// Folds the elements of all of `from` in this range, from the left, into those of `to`; all
    /// have one element type. Sums are f32, and rounded at the end if that is bf16.
    ///
    /// # Safety
    /// As for [`Mover::copy`]; `to` may be one of `from`, but overlaps none otherwise.
    unsafe fn fold(
        &mut self,
        how: Reduction,
        from: &[Region],
        to: &Region,
        range: Range<usize>,
    ) -> Result<()>;
}

/// Moves what is in memory of this process, at once.
pub struct HostMover;

impl Mover for HostMover {
    const AT_ONCE: bool = true;
    type Mark = ();
    fn mark(&mut self) -> Result<()> {
        Ok(())
    }
    fn after(&mut self, (): &()) -> Result<()> {
        Ok(())
    }
    unsafe fn copy(&mut self, from: &Region, to: &Region, range: Range<usize>) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { region::copy(from, to, range) };
        Ok(())
    }
    unsafe fn fold(
        &mut self,
        how: Reduction,
        from: &[Region],
        to: &Region,
        range: Range<usize>,
    ) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { region::fold(how, from, to, range) };
        Ok(())
    }
}
