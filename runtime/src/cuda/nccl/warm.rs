//! The first exchange of every kind in every group, before the arena is there: NCCL connects the members then,
//! each waiting on the host for the others, and takes memory for it. Later nothing of that is left to do.

use super::RankGroup;
use super::comm::{Comm, Data};
use super::library::{DataType, Fold, Queue};
use crate::alarm::Alarm;
use crate::cuda::arena::DeviceArena;
use crate::cuda::device::Stream;
use shardc_ir::diag::Result;
use shardc_ir::mesh::AtomSet;
use shardc_ir::ops::{Op, Sends};
use shardc_ir::plan::Plan;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of an element that is exchanged.
const ELEMENT: usize = 4;

/// What NCCL connects members for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Kind {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    Reduce,
    /// Every member with every other.
    Pieces,
    /// Every member with the one so many places on.
    Pass(usize),
}

/// What the groups of a plan do. Uneven parts are gathered and scattered by one root after the other.
fn kinds(plan: &Plan) -> BTreeMap<AtomSet, BTreeSet<Kind>> {
    let mut all: BTreeMap<AtomSet, BTreeSet<Kind>> = BTreeMap::new();
    for n in plan.module.funcs.iter().flat_map(|f| &f.nodes) {
        let Some(c) = n.op.collective() else { continue };
        let kinds: &[Kind] = match (c.sends(), &n.op) {
            (Sends::Nothing, _) => &[],
            (Sends::SumToAll, _) => &[Kind::AllReduce],
            (Sends::ShareOfResult, _) => &[Kind::AllGather, Kind::Broadcast],
            (Sends::Share, _) => &[Kind::ReduceScatter, Kind::Reduce],
            (Sends::MeanShare, Op::Reduce(_)) => &[Kind::Reduce],
            (Sends::MeanShare, _) => &[Kind::Broadcast],
            (Sends::Whole, Op::Permute(p)) => &[Kind::Pass(p.shift)],
            (Sends::Whole | Sends::Pieces | Sends::Rows { .. } | Sends::Boxes { .. }, _) => {
                &[Kind::Pieces]
            }
        };
        all.entry(c.atoms()).or_default().extend(kinds);
    }
    all
}

/// Bytes that the exchanges need.
pub(super) fn room(plan: &Plan) -> usize {
    let ways = plan.groups().into_iter().map(|axes| plan.module.mesh.ways(axes)).max();
    2 * ELEMENT * ways.unwrap_or(1)
}

/// Queues the exchanges, in the same order on all ranks; `room` stays until they are done, or for ever.
///
/// # Errors
/// Those of NCCL.
pub(super) fn groups(
    plan: &Plan,
    groups: &BTreeMap<AtomSet, RankGroup>,
    main: &Stream,
    room: &DeviceArena,
    alarm: &Alarm,
) -> Result<()> {
    for (axes, kinds) in kinds(plan) {
        for kind in kinds {
            let name = plan.module.mesh.names(axes, "+");
            alarm.begin(format!(", in the first {kind:?} over {name}"));
            one(kind, &groups[&axes], room, main.stream.cast())?;
        }
    }
    Ok(())
}

fn one(kind: Kind, g: &RankGroup, room: &DeviceArena, queue: Queue) -> Result<()> {
    let (from, to) = (room.address(0), room.address(ELEMENT * g.ways));
    let element = |at: u64| Data { at, count: 1, kind: DataType::ncclFloat32 };
    let swap = |comm: &Comm, out: &[usize], into: &[usize]| {
        comm.together(|| {
            // SAFETY: as below.
            out.iter().try_for_each(|&p| unsafe { comm.send(element(from), p, queue) })?;
            // SAFETY: as below.
            into.iter().try_for_each(|&p| unsafe { comm.recv(element(to), p, queue) })
        })
    };
    // SAFETY: each of the two places has room for an element of every member; what they hold has no meaning.
    unsafe {
        match kind {
            Kind::AllReduce => g.comm.all_reduce(element(from), to, Fold::ncclSum, queue),
            Kind::AllGather => g.comm.all_gather(element(from), to, queue),
            Kind::ReduceScatter => g.comm.reduce_scatter(from, element(to), Fold::ncclSum, queue),
            Kind::Broadcast => g.comm.broadcast(element(from), to, 0, queue),
            Kind::Reduce => g.comm.reduce(element(from), to, Fold::ncclSum, 0, queue),
            Kind::Pieces => {
                let others: Vec<usize> = (0..g.ways).filter(|&p| p != g.me).collect();
                swap(&g.comm, &others, &others)
            }
            Kind::Pass(shift) => {
                let next = (g.me + shift) % g.ways;
                let last = (g.me + g.ways - shift % g.ways) % g.ways;
                swap(&g.comm, &[next], &[last])
            }
        }
    }
}
