//! Segments: the runs of nodes of one layer, and their structure without names.

use super::graph::{Head, Numbers};
use shardc_ir::func::{Func, Uses, Value, ValueMap};
use shardc_ir::maps::HashMap;
use smallvec::SmallVec;
use std::ops::Range;

/// Longest segment: programs without layers are cut, so that the work stays linear.
const LONGEST: usize = 512;

/// A value as a segment sees it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Ref {
    /// Made before the segment: the n-th such value in order of first use.
    Outer(u32),
    /// Result of one of the segment's nodes.
    Inner { node: u32, out: u32 },
    /// Made by the rewrite: the n-th such value.
    Fresh(u32),
}

/// What the pass asks of a whole function.
pub(crate) struct Facts {
    /// A result of the function keeps a value of its own.
    pub uses: Uses,
    /// Segments in program order.
    pub runs: Vec<Range<usize>>,
    /// Read after its segment, or never.
    pub live_out: ValueMap<bool>,
}

impl Facts {
    pub(crate) fn new(f: &Func) -> Facts {
        let mut run_of = f.per_value(u32::MAX);
        let mut runs: Vec<Range<usize>> = vec![];
        let mut layer = None;
        for (n, node) in f.nodes.iter().enumerate() {
            let here = f.scope_info(node.scope).layer;
            match runs.last_mut().filter(|r| layer == Some(here) && r.len() < LONGEST) {
                Some(run) => run.end = n + 1,
                None => runs.push(n..n + 1),
            }
            layer = Some(here);
            for o in &node.outs {
                run_of[o] = runs.len() as u32 - 1;
            }
        }
        let mut live_out = f.per_value(false);
        for (r, run) in runs.iter().enumerate() {
            for v in f.nodes[run.clone()].iter().flat_map(|n| &n.ins) {
                live_out[v] |= run_of[v] != r as u32;
            }
        }
        let uses = f.uses();
        for v in f.values.ids() {
            live_out[v] |= uses.is_result(v) || uses.of(v).is_empty();
        }
        Facts { uses, runs, live_out }
    }
}

/// One segment in terms of itself: equal for those with the same ops, operands and types.
#[derive(PartialEq, Eq, Hash, Debug)]
pub(crate) struct Segment {
    /// Types of the values behind [`Ref::Outer`], by number.
    outer: Vec<u32>,
    pub nodes: Vec<SegmentNode>,
}

/// Ops and types by number.
#[derive(PartialEq, Eq, Hash, Debug)]
pub(crate) struct SegmentNode {
    pub head: Head,
    pub ins: SmallVec<[Ref; 4]>,
    /// Types of its results.
    pub outs: SmallVec<[u32; 2]>,
    /// Its result is read after the segment, or by nobody: it stays.
    pub live_out: bool,
    /// Its result is one of the function's: nothing may take its place.
    pub port: bool,
    /// Rules do not look through it: it has several results, or somebody annotated its result or keeps it as it is.
    pub opaque: bool,
}

/// Where a segment is in its function.
pub(crate) struct SegmentRun {
    pub nodes: Range<usize>,
    /// The values behind [`Ref::Outer`].
    pub outer: Vec<Value>,
}

impl Segment {
    pub(crate) fn new(
        f: &Func,
        facts: &Facts,
        nodes: Range<usize>,
        numbers: &mut Numbers,
    ) -> (Segment, SegmentRun) {
        let mut known: HashMap<Value, u32> = HashMap::default();
        let mut run = SegmentRun { nodes: nodes.clone(), outer: vec![] };
        let mut s = Segment { outer: vec![], nodes: vec![] };
        for node in &f.nodes[nodes.clone()] {
            let mut one = |v: &Value| {
                if let Some(maker) = facts.uses.maker(*v).filter(|m| nodes.contains(m)) {
                    let out = f.nodes[maker].outs.iter().position(|o| o == v);
                    let out = out.expect("its maker makes it") as u32;
                    return Ref::Inner { node: (maker - nodes.start) as u32, out };
                }
                Ref::Outer(*known.entry(*v).or_insert_with(|| {
                    run.outer.push(*v);
                    run.outer.len() as u32 - 1
                }))
            };
            let annotated = node.outs.iter().any(|o| f.annotations.contains_key(o));
            s.nodes.push(SegmentNode {
                head: numbers.head(&node.op),
                ins: node.ins.iter().map(&mut one).collect(),
                outs: node.outs.iter().map(|&o| numbers.ty(f.ty(o))).collect(),
                live_out: node.outs.iter().any(|o| facts.live_out[o]),
                port: node.outs.iter().any(|&o| facts.uses.is_result(o)),
                opaque: node.outs.len() != 1 || annotated || node.kept,
            });
        }
        s.outer = run.outer.iter().map(|&v| numbers.ty(f.ty(v))).collect();
        (s, run)
    }

    /// The number of the type of a value that was there before the rewrite.
    pub(crate) fn ty(&self, r: Ref) -> u32 {
        match r {
            Ref::Outer(i) => self.outer[i as usize],
            Ref::Inner { node, out } => self.nodes[node as usize].outs[out as usize],
            Ref::Fresh(_) => unreachable!("fresh values exist only after the rewrite"),
        }
    }
}
