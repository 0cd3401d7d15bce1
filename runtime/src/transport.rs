//! What ranks exchange, and how: the interface between the executor and a way to move bytes.

pub use crate::region::Region;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::mesh::AtomSet;
use shardc_ir::types::Reduction;
use std::time::Instant;

/// One tensor of an `all_reduce`: both regions have the same number of elements on every member.
#[derive(Clone, Debug)]
pub struct Reduced {
    pub fold: Reduction,
    pub from: Region,
    pub to: Region,
}

/// One tensor of an `all_gather`: member p's `from` arrives in `to[p]` of everybody.
#[derive(Clone, Debug)]
pub struct Gathered {
    pub from: Region,
    pub to: Vec<Region>,
}

/// One tensor of a `reduce_scatter`: `to` becomes the fold of the members' `from[this member]`.
#[derive(Clone, Debug)]
pub struct Scattered {
    pub fold: Reduction,
    pub from: Vec<Region>,
    pub to: Region,
}

/// When a collective that was deferred was done.
#[derive(Clone, Copy, Debug)]
pub struct Took {
    pub begun: Instant,
    pub done: Instant,
}

/// One rank's end of a transport. A group is named by its atoms: the ranks that differ from this
/// one in those coordinates only, in group order. All members call the same operations in the same
/// order, with matching sizes. Results overlap no operand, but that of an `all_reduce` may be its
/// own.
///
/// A sum is folded from the left in group order, in f32, so results depend neither on chunking nor
/// on the transport, and are the same on all members, bit for bit.
///
/// Every operation fails, with a [`Diag`] that names the rank, when a member
/// failed, left, called something else, or did not come in time. After that all of them fail.
pub trait Transport: Send {
    /// This rank.
    fn rank(&self) -> usize;
    /// Number of ranks.
    fn world(&self) -> usize;
    /// Waits for all members.
    fn barrier(&mut self, axes: AtomSet) -> Result<()>;
    /// Folds all tensors, in one pass.
    fn all_reduce(&mut self, axes: AtomSet, tensors: &[Reduced]) -> Result<()>;
    /// Gathers all tensors, in one pass.
    fn all_gather(&mut self, axes: AtomSet, tensors: &[Gathered]) -> Result<()>;
    /// Folds and scatters all tensors, in one pass.
    fn reduce_scatter(&mut self, axes: AtomSet, tensors: &[Scattered]) -> Result<()>;
    /// `from[p]` arrives in member p's `to[this member]`.
    fn all_to_all(&mut self, axes: AtomSet, from: &[Region], to: &[Region]) -> Result<()> {
        let one = |r: &[Region]| r.iter().map(|r| vec![r.clone()]).collect::<Vec<_>>();
        self.all_to_all_v(axes, &one(from), &one(to))
    }
    /// As [`Transport::all_to_all`], several regions each, of sizes that are known only now:
    /// `from[p]` arrive in member p's `to[this member]`, in their order.
    fn all_to_all_v(
        &mut self,
        axes: AtomSet,
        from: &[Vec<Region>],
        to: &[Vec<Region>],
    ) -> Result<()>;
    /// `from` arrives in the `to` of the member `shift` places on, around the ring.
    fn permute(&mut self, axes: AtomSet, shift: usize, from: &Region, to: &Region) -> Result<()>;
    /// The `data` of member `root` arrives in everybody's.
    fn broadcast(&mut self, axes: AtomSet, root: usize, data: &Region) -> Result<()>;
    /// Offers data to rank `to` and returns at once; the data stay as they are until
    /// [`Transport::sent`]. Offers from one rank to another are taken in their order.
    fn send(&mut self, to: usize, data: &Region) -> Result<()>;
    /// Waits until rank `to` has taken the oldest offer that was not yet waited for.
    fn sent(&mut self, to: usize) -> Result<()>;
    /// Says where the next offer of rank `from` that was not posted may arrive from now on, and returns at
    /// once; [`Transport::recv`] then waits for it. Nobody uses the data until then.
    fn post_recv(&mut self, _from: usize, _data: &Region) -> Result<()> {
        Ok(())
    }
    /// Takes the oldest offer of rank `from`, when there is one; into the same data if it was posted.
    fn recv(&mut self, from: usize, data: &Region) -> Result<()>;
    /// True if operations need to be rehearsed: while it `does`, they do nothing but note what memory they
    /// need, which is there once it no more does. So nothing is allocated while others wait.
    ///
    /// # Errors
    /// Those of the device.
    fn rehearse(&mut self, _does: bool) -> Result<bool> {
        Ok(false)
    }
    /// True if a collective can be under way while other work is done.
    fn overlaps(&self) -> bool {
        false
    }
    /// Says that what follows the next collective does not wait for it before [`Transport::finish`].
    fn defer(&mut self) {}
    /// Where collectives of a group are done, one after the other; those of another lane are in nobody's way.
    fn lane(&self, _axes: AtomSet) -> usize {
        0
    }
    /// Makes what follows wait for the oldest collective of a lane that was deferred; tells when that was done, if it
    /// is.
    fn finish(&mut self, _lane: usize) -> Result<Option<Took>> {
        Ok(None)
    }
    /// Waits until what was deferred is done, as the next operation would: so that its time is its own.
    fn settle(&mut self) {}
    /// Moves on what was sent or posted and was not waited for, and returns at once; true if some of it is
    /// still under way.
    fn advance(&mut self) -> Result<bool> {
        Ok(false)
    }
    /// Makes every pending and later operation of every rank fail with this cause.
    fn abort(&mut self, cause: Diag);
}

/// The failure of an operation, which names the rank.
pub(crate) fn failure(message: String) -> Diag {
    Diag::new("rank-failed", message)
        .rule("all ranks of a group run the same collectives, in the same order")
        .help("run again with 1 rank to see whether the program itself fails")
}

/// Says that a rank has more or fewer regions than there are members.
pub(crate) fn misplaced(rank: usize, places: usize, ways: usize) -> String {
    format!("rank {rank} has {places} places for the data of {ways} ranks")
}
