//! What is known of a function while it is written: which values are one, and who reads them first and last.

use super::ops;
use shardc_ir::func::{Func, Node, Value, ValueMap};
use shardc_ir::mesh::Mesh;
use std::collections::BTreeSet;
use std::ops::Range;

/// What is known of a function while it is written.
pub(super) struct Seen<'a> {
    pub f: &'a Func,
    /// What a value is that an op passes on as it is.
    pub same: ValueMap<Value>,
    /// The last node that reads a value; [`KEPT`] of a result.
    pub last: ValueMap<usize>,
    /// The first one.
    pub first: ValueMap<usize>,
    /// Values that are small beside others of the function: they are dropped where it ends.
    pub small: ValueMap<bool>,
}

/// A value that is smaller than the largest by this factor is small.
const SMALL: usize = 8;

/// For each value the one that it is: ops pass operands on as they are, or write results over them.
pub(super) fn same(f: &Func) -> ValueMap<Value> {
    let mut same = f.identity();
    for n in &f.nodes {
        for (o, v) in n.outs.iter().enumerate().filter(|_| !n.ins.is_empty()) {
            // Other sums may be views of what is read elsewhere.
            let adds = is_accumulator(f, same[n.ins[0]]);
            let over = ops::written_over(&n.op, o).filter(|_| adds || !n.op.accumulates());
            let from = ops::is_nothing(&n.op).then_some(0).or(over);
            if let Some(i) = from {
                same[*v] = same[n.ins[i]];
            }
        }
    }
    same
}

/// True of an argument that microbatches add to.
fn is_accumulator(f: &Func, v: Value) -> bool {
    let role = f.args.iter().find(|a| a.value == v).and_then(|a| a.role.as_ref());
    role.is_some_and(|r| r.kind.is_summed())
}

/// Later than all nodes.
pub(super) const KEPT: usize = usize::MAX;

impl<'a> Seen<'a> {
    pub fn new(f: &'a Func, mesh: &Mesh) -> Seen<'a> {
        let same = same(f);
        let (mut last, mut first) = (f.per_value(0), f.per_value(KEPT));
        for (i, n) in f.nodes.iter().enumerate().filter(|(_, n)| !ops::is_nothing(&n.op)) {
            for v in n.ins.iter().map(|v| same[*v]) {
                last[v] = i;
                first[v] = first[v].min(i);
            }
        }
        f.results.iter().for_each(|r| last[same[r.value]] = KEPT);
        let bytes = |v: Value| f.ty(v).local_bytes(mesh);
        let most = f.values.ids().map(bytes).max().unwrap_or(0);
        let small = f.values.ids().map(|v| bytes(v) * SMALL <= most).collect();
        Seen { f, same, last, first, small }
    }

    /// The values that nodes read and do not make, in the order of their uses.
    pub fn reads(&self, nodes: Range<usize>) -> Vec<Value> {
        let mut out: Vec<Value> = vec![];
        let made: BTreeSet<Value> =
            self.f.nodes[nodes.clone()].iter().flat_map(|n| n.outs.to_vec()).collect();
        for n in self.written(nodes) {
            for v in n.ins.iter().map(|v| self.same[*v]) {
                if !made.contains(&v) && !out.contains(&v) {
                    out.push(v);
                }
            }
        }
        out
    }

    /// The nodes that lines are written for.
    pub fn written(&self, nodes: Range<usize>) -> impl Iterator<Item = &'a Node> {
        self.f.nodes[nodes].iter().filter(|n| !ops::is_nothing(&n.op))
    }

    /// The results of a node that are not its operands.
    pub fn own(&self, n: &'a Node) -> impl Iterator<Item = Value> {
        n.outs.iter().copied().filter(|v| self.same[*v] == *v)
    }

    /// The values that nobody reads behind these nodes, of those that they read.
    pub fn dying(&self, n: &Node, at: usize) -> Vec<Value> {
        let mut out: Vec<Value> = vec![];
        for v in n.ins.iter().map(|v| self.same[*v]) {
            if self.last[v] == at && !out.contains(&v) {
                out.push(v);
            }
        }
        out
    }
}
