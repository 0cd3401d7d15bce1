//! What is known of a function while it is written: its lines, which values are one, and who reads them first and last.

use super::ops;
use super::ops::norms::{Call, Raised};
use shardc_ir::func::{Func, Node, Port, Value, ValueMap};
use shardc_ir::mesh::Mesh;
use std::collections::BTreeSet;
use std::ops::Range;

/// A line of a function: an op, or a call that stands for several.
pub(super) struct Line<'a> {
    /// The op; of a call that stands for several, the one in whose place it stands.
    pub n: &'a Node,
    pub call: Option<&'a Call>,
    pub ins: Vec<Value>,
    pub outs: Vec<Value>,
}

/// What is known of a function while it is written.
pub(super) struct Seen<'a> {
    pub f: &'a Func,
    pub lines: Vec<Line<'a>>,
    /// What a value is that an op passes on as it is.
    pub same: ValueMap<Value>,
    /// The last line that reads a value; [`KEPT`] of a result.
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

/// The lines of a function. Nothing is written for ops whose result is their operand.
fn lines<'a>(f: &'a Func, same: &ValueMap<Value>, raised: &'a Raised) -> Vec<Line<'a>> {
    let calls = raised.of_func(f);
    // What calls have made of several values: the others are not there.
    let mut gone: BTreeSet<Value> = BTreeSet::new();
    gone.extend(calls.keys().flat_map(|n| f.nodes[*n].outs.iter().copied()));
    calls.values().flatten().flat_map(|c| &c.outs).for_each(|v| _ = gone.remove(v));
    let mut out: Vec<Line> = vec![];
    for (i, n) in f.nodes.iter().enumerate().filter(|(_, n)| !ops::is_nothing(&n.op)) {
        match calls.get(&i) {
            Some(None) => {}
            Some(Some(call)) => {
                let (ins, outs) = (call.ins.clone(), call.outs.clone());
                out.push(Line { n, call: Some(call), ins, outs });
            }
            None => {
                let ins = n.ins.iter().map(|v| same[*v]).filter(|v| !gone.contains(v));
                out.push(Line { n, call: None, ins: ins.collect(), outs: n.outs.to_vec() });
            }
        }
    }
    out
}

impl<'a> Seen<'a> {
    pub fn new(f: &'a Func, mesh: &Mesh, raised: &'a Raised) -> Seen<'a> {
        let same = same(f);
        let lines = lines(f, &same, raised);
        let (mut last, mut first) = (f.per_value(0), f.per_value(KEPT));
        for (i, l) in lines.iter().enumerate() {
            for v in &l.ins {
                last[*v] = i;
                first[*v] = first[*v].min(i);
            }
        }
        let kept = |r: &&Port| r.role.as_ref().is_none_or(|r| raised.is_kept(r));
        f.results.iter().filter(kept).for_each(|r| last[same[r.value]] = KEPT);
        let bytes = |v: Value| f.ty(v).local_bytes(mesh);
        let most = f.values.ids().map(bytes).max().unwrap_or(0);
        let small = f.values.ids().map(|v| bytes(v) * SMALL <= most).collect();
        Seen { f, lines, same, last, first, small }
    }

    /// The values that lines read and do not make, in the order of their uses.
    pub fn reads(&self, lines: Range<usize>) -> Vec<Value> {
        let mut out: Vec<Value> = vec![];
        let all = &self.lines[lines];
        let made: BTreeSet<Value> = all.iter().flat_map(|l| l.outs.iter().copied()).collect();
        for v in all.iter().flat_map(|l| &l.ins) {
            if !made.contains(v) && !out.contains(v) {
                out.push(*v);
            }
        }
        out
    }

    /// The results of a line that are not its operands.
    pub fn own(&self, line: usize) -> impl Iterator<Item = Value> {
        self.lines[line].outs.iter().copied().filter(|v| self.same[*v] == *v)
    }

    /// The values of a line that nobody reads behind it.
    pub fn dying(&self, line: usize) -> Vec<Value> {
        let mut out: Vec<Value> = vec![];
        for v in &self.lines[line].ins {
            if self.last[*v] == line && !out.contains(v) {
                out.push(*v);
            }
        }
        out
    }
}
