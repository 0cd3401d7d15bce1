//! Launches of several kernels: updates of parameters.

use shardc_ir::func::{Func, FusedWithNext};
use shardc_ir::group::{FusionBuilder, Launch, launches};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::Kind;

/// Most bytes of one joined call: enough to hide latency, little enough to overlap later.
pub(crate) const BUCKET_BYTES: usize = 64 << 20;

/// Most kernels of one launch.
const MOST_KERNELS: usize = 32;

/// Joins updates of parameters that follow each other, bucket by bucket.
pub(super) fn bucket(mesh: &Mesh, f: &mut Func) {
    if !f.nodes.iter().any(|n| n.op.facts().kind == Kind::Update) {
        return;
    }
    let all = launches(f);
    // Of a launch that updates a parameter, the bytes of its gradient.
    let update = |x: &Launch| {
        let mut nodes = f.nodes[x.nodes.clone()].iter();
        let n = nodes.find(|n| n.op.facts().kind == Kind::Update)?;
        Some(f.ty(n.ins[1]).local_bytes(mesh))
    };
    let mut joined = vec![];
    // Of the bucket that is filled: its kernels, their number, and bytes of gradients.
    let (mut open, mut count, mut sum) = (FusionBuilder::of(f), 0, 0);
    for x in &all {
        let Some(bytes) = update(x) else {
            count = 0;
            continue;
        };
        if (1..MOST_KERNELS).contains(&count) && sum + bytes <= BUCKET_BYTES && open.add(x) {
            joined.push(x.nodes.start - 1);
            (count, sum) = (count + 1, sum + bytes);
            continue;
        }
        open.clear();
        (count, sum) = (usize::from(open.add(x)), bytes);
    }
    joined.into_iter().for_each(|n| f.nodes[n].fused = FusedWithNext::Launch);
}
