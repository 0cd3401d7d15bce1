//! Rows of elements as NCCL takes them: one after the other, where they are or in scratch memory.

use super::Lane;
use crate::region::Region;
use crate::threads::Mover;
use crate::transport::failure;
use shardc_ir::diag::Result;
use smallvec::SmallVec;

/// Places in scratch memory begin at multiples of so many bytes.
const ALIGN: usize = 256;

/// Where the elements of some regions lie one after the other.
#[derive(Clone, Copy)]
pub(super) struct Laid {
    pub at: u64,
    /// True if that is where they are; else it is scratch memory.
    own: bool,
}

impl Lane {
    /// Elements of regions that lie together, and scratch memory for those that do not: each list as
    /// one row of elements.
    pub(super) fn lay(
        &mut self,
        rows: &[&[Region]],
        rehearses: bool,
    ) -> Result<SmallVec<[Laid; 4]>> {
        let mut end = 0;
        let mut places: SmallVec<[Laid; 4]> = SmallVec::new();
        for row in rows {
            if let Some(first) = adjacent(row) {
                places.push(Laid { at: first, own: true });
                continue;
            }
            places.push(Laid { at: end as u64, own: false });
            end += row.iter().map(bytes).sum::<usize>().next_multiple_of(ALIGN);
        }
        let scratch = &mut self.scratch;
        if rehearses {
            scratch.bytes = scratch.bytes.max(end);
        } else if end > scratch.bytes {
            let message = format!("an exchange of {end} B was not rehearsed");
            return Err(failure(message));
        }
        let base = scratch.room.as_ref().map_or(0, |room| room.address(0));
        places.iter_mut().filter(|p| !p.own).for_each(|p| p.at += base);
        Ok(places)
    }

    /// Copies rows to where they were laid, or back.
    ///
    /// # Safety
    /// Memory of regions is valid until the stream is done.
    pub(super) unsafe fn copy(
        &mut self,
        rows: &[&[Region]],
        places: &[Laid],
        back: bool,
    ) -> Result<()> {
        for (row, place) in rows.iter().zip(places).filter(|x| !x.1.own) {
            let mut at = place.at;
            for r in row.iter() {
                // SAFETY: `lay` has made room for all.
                unsafe {
                    let copy = Region::adjacent(at as *mut f32, r.elem(), r.len());
                    let (from, to) = if back { (&copy, r) } else { (r, &copy) };
                    self.mover.copy(from, to, 0..r.len())?;
                }
                at += bytes(r) as u64;
            }
        }
        Ok(())
    }
}

/// The number of bytes of all elements.
pub(super) fn bytes(r: &Region) -> usize {
    r.len() * r.elem().bytes()
}

/// The address of the first element of regions that lie one after the other.
fn adjacent(row: &[Region]) -> Option<u64> {
    let mut first = None;
    let mut next = None;
    for r in row.iter().filter(|r| !r.is_empty()) {
        let at = r.together(&(0..r.len()))? as u64;
        if next.is_some_and(|n| n != at) {
            return None;
        }
        first = first.or(Some(at));
        next = Some(at + bytes(r) as u64);
    }
    first.or(Some(0))
}
