//! Joins small all_reduces over the same axes into one call each.
//!
//! Before:  `%a = all_reduce[dp] %x`, `%b = all_reduce[dp] %y`
//! After:   `%a, %b = all_reduce[dp] %x, %y`
//! Assumes: phase Step.  Leaves: phase Step.
//!
//! Only operands that are arguments of the function are joined (the gradients at step scope): they
//! are all there from the beginning, so no call waits for another's operand.

use crate::group::BUCKET_BYTES;
use shardc_ir::func::{Func, Node, Value};
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::Op;
use std::collections::{BTreeMap, BTreeSet};

/// Joins the all_reduces of arguments.
pub fn bucket_grads(mesh: &Mesh, f: &mut Func) {
    let args: BTreeSet<Value> = f.args.iter().map(|a| a.value).collect();
    // Per axes: the node that the bucket now being filled is in, and its bytes.
    let mut open: BTreeMap<AtomSet, (usize, usize)> = BTreeMap::new();
    let mut nodes: Vec<Node> = Vec::with_capacity(f.nodes.len());
    for n in std::mem::take(&mut f.nodes) {
        let Some(axes) = joinable(&n, &args) else {
            nodes.push(n);
            continue;
        };
        let bytes = f.ty(n.ins[0]).local_bytes(mesh);
        if bytes >= BUCKET_BYTES {
            nodes.push(n);
            continue;
        }
        match open.get_mut(&axes) {
            Some((at, sum)) if *sum + bytes <= BUCKET_BYTES => {
                *sum += bytes;
                nodes[*at].ins.extend(n.ins);
                nodes[*at].outs.extend(n.outs);
            }
            _ => {
                open.insert(axes, (nodes.len(), bytes));
                nodes.push(n);
            }
        }
    }
    f.nodes = nodes;
}

fn joinable(n: &Node, args: &BTreeSet<Value>) -> Option<AtomSet> {
    let Op::AllReduce(r) = &n.op else { return None };
    (!n.kept && n.ins.iter().all(|v| args.contains(v))).then_some(r.axes)
}
