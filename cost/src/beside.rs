//! What a GPU's memory holds beside a rank's plan: the driver's context, NCCL's buffers and the workspace of cuBLASLt.
//!
//! Upper bounds from what others have reported, each with its source; no run of this compiler has measured them
//! (`docs/cost.md`).

use shardc_ir::ops::Sends;
use shardc_ir::plan::Plan;

/// Context of the driver with the code of kernels, and cuBLASLt's 32 MiB.
pub const CONTEXT: usize = 1 << 30;

/// A communicator of NCCL of more than two ranks that sums or gathers: NVIDIA/nccl issue 964, on A100.
pub const COMMUNICATOR: usize = 688 << 20;

/// For another rank of a group that exchanges pieces: NVIDIA/nccl issue 1685, 3.28 GB for seven on H100.
pub const PEER: usize = 448 << 20;

/// Other ranks that have buffers of their own; those on other nodes share theirs.
const PEERS: usize = 7;

/// Communicators of a rank: one of each group, and one of each direction in which it sends or receives; of the class
/// that has most.
pub fn communicators(plan: &Plan) -> usize {
    let edges = plan.edges();
    let of = |class| edges.iter().filter(|e| e.0 == class || e.1 == class).count();
    plan.groups().len() + (0..plan.classes.len()).map(of).max().unwrap_or(0)
}

/// Bytes beside a plan, at most.
pub fn bytes(plan: &Plan) -> usize {
    let mesh = &plan.module.mesh;
    let mut pieces = std::collections::BTreeSet::new();
    for n in plan.module.funcs.iter().flat_map(|f| &f.nodes) {
        let Some(c) = n.op.collective() else { continue };
        if matches!(c.sends(), Sends::Pieces | Sends::Rows { .. } | Sends::Boxes { .. }) {
            pieces.insert(c.atoms());
        }
    }
    let peers = pieces.into_iter().map(|g| mesh.ways(g).saturating_sub(1).min(PEERS));
    guess(communicators(plan)) + peers.sum::<usize>() * PEER
}

/// The same of so many communicators, none of which exchanges pieces.
pub fn guess(communicators: usize) -> usize {
    CONTEXT + communicators * COMMUNICATOR
}
