//! A collective kernel as an operation of the transport.

use crate::transport::{Reduced, Region, Transport};
use shardc_ir::diag::Result;
use shardc_ir::kernel::{self, Block, Collective, Exchange, Ragged};
use shardc_ir::types::Reduction;

/// Exchanges what the kernel says, in memory that has been made ready: the root's part of a
/// `broadcast` is in its result, and what a `reduce` clears is clear. `there` gives the rows that are
/// there.
///
/// # Errors
/// Those of the transport and of `there`.
///
/// # Safety
/// As for [`Region::new`], for all blocks.
pub(crate) unsafe fn exchange(
    t: &mut dyn Transport,
    k: &Collective,
    memory: &[*mut f32],
    there: impl Fn(&Ragged) -> Result<Vec<Region>>,
) -> Result<()> {
    // SAFETY: by the caller.
    let region = |b: &Block| unsafe { Region::new(memory[b.view.operand], b) };
    let regions = |b: &[Block]| b.iter().map(region).collect::<Vec<_>>();
    match &k.exchange {
        Exchange::AllReduce { tensors } => {
            let one = |r: &kernel::Reduced| Reduced {
                fold: r.fold,
                from: region(&r.from),
                to: region(&r.to),
            };
            t.all_reduce(k.axes, &tensors.iter().map(one).collect::<Vec<_>>())
        }
        Exchange::AllGather { from, to } => t.all_gather(k.axes, &region(from), &regions(to)),
        Exchange::ReduceScatter { fold, from, to } => {
            t.reduce_scatter(k.axes, *fold, &regions(from), &region(to))
        }
        Exchange::AllToAll { from, to, .. } => t.all_to_all(k.axes, &regions(from), &regions(to)),
        Exchange::AllToAllV { from, to } => {
            let all = |r: &[Ragged]| r.iter().map(&there).collect::<Result<Vec<_>>>();
            t.all_to_all_v(k.axes, &all(from)?, &all(to)?)
        }
        Exchange::Permute { shift, from, to } => {
            t.permute(k.axes, *shift, &region(from), &region(to))
        }
        Exchange::Broadcast { root, to, .. } => t.broadcast(k.axes, *root, &region(to)),
        Exchange::Reduce { from, to, .. } => {
            t.reduce_scatter(k.axes, Reduction::Sum, &regions(from), &region(to))
        }
    }
}
