//! A collective kernel as an operation of the transport.

use crate::transport::{Gathered, Reduced, Region, Scattered, Transport};
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
        Exchange::AllGather { tensors } => {
            let one = |g: &kernel::Gathered| Gathered { from: region(&g.from), to: regions(&g.to) };
            t.all_gather(k.axes, &tensors.iter().map(one).collect::<Vec<_>>())
        }
        Exchange::ReduceScatter { tensors } => {
            let one = |s: &kernel::Scattered| Scattered {
                fold: s.fold,
                from: regions(&s.from),
                to: region(&s.to),
            };
            t.reduce_scatter(k.axes, &tensors.iter().map(one).collect::<Vec<_>>())
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
            let (fold, from, to) = (Reduction::Sum, regions(from), region(to));
            t.reduce_scatter(k.axes, &[Scattered { fold, from, to }])
        }
    }
}
