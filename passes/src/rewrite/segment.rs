//! Segments: the runs of nodes of one layer, and their structure without names and numbers.

use shardc_ir::func::{Func, Uses, Value, ValueMap};
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::Mesh;
use shardc_ir::types::Type;
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

/// One segment in terms of itself.
pub(crate) struct Segment {
    pub run: Range<usize>,
    /// Operands of every node.
    pub ins: Vec<SmallVec<[Ref; 4]>>,
    /// The values behind [`Ref::Outer`].
    pub outer: Vec<Value>,
    pub nodes: Vec<NodeFacts>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeFacts {
    /// Its result is read after the segment, or by nobody: it stays.
    pub live_out: bool,
    /// Its result is one of the function's: nothing may take its place.
    pub port: bool,
    /// Rules do not look through it: it has several results, or somebody annotated its result or keeps it as it is.
    pub opaque: bool,
}

impl Segment {
    pub(crate) fn new(f: &Func, facts: &Facts, run: Range<usize>) -> Segment {
        let mut numbers: HashMap<Value, u32> = HashMap::default();
        let mut s = Segment { run: run.clone(), ins: vec![], outer: vec![], nodes: vec![] };
        for node in &f.nodes[run.clone()] {
            let mut one = |v: &Value| {
                if let Some(maker) = facts.uses.maker(*v).filter(|m| run.contains(m)) {
                    let outs = &f.nodes[maker].outs;
                    let out = outs.iter().position(|o| o == v).expect("its maker makes it");
                    return Ref::Inner { node: (maker - run.start) as u32, out: out as u32 };
                }
                Ref::Outer(*numbers.entry(*v).or_insert_with(|| {
                    s.outer.push(*v);
                    s.outer.len() as u32 - 1
                }))
            };
            s.ins.push(node.ins.iter().map(&mut one).collect());
            let annotated = node.outs.iter().any(|o| f.annotations.contains_key(o));
            s.nodes.push(NodeFacts {
                live_out: node.outs.iter().any(|o| facts.live_out[o]),
                port: node.outs.iter().any(|&o| facts.uses.is_result(o)),
                opaque: node.outs.len() != 1 || annotated || node.kept,
            });
        }
        s
    }

    /// The type of a value that was there before the rewrite.
    pub(crate) fn ty<'f>(&self, f: &'f Func, r: Ref) -> &'f Type {
        f.ty(match r {
            Ref::Outer(i) => self.outer[i as usize],
            Ref::Inner { node, out } => f.nodes[self.run.start + node as usize].outs[out as usize],
            Ref::Fresh(_) => unreachable!("fresh values exist only after the rewrite"),
        })
    }

    /// Equal for segments with the same ops, operands and types, whatever their names.
    pub(crate) fn key(&self, mesh: &Mesh, f: &Func) -> Vec<u8> {
        let mut text = String::new();
        let mut key: Vec<u8> = vec![];
        for &v in &self.outer {
            write_type(f.ty(v), &mut key);
        }
        for (i, node) in f.nodes[self.run.clone()].iter().enumerate() {
            text.clear();
            node.op.write(mesh, &mut text);
            key.extend((text.len() as u32).to_le_bytes());
            key.extend(text.as_bytes());
            let n = &self.nodes[i];
            let flags = u8::from(n.live_out) | u8::from(n.port) << 1 | u8::from(n.opaque) << 2;
            key.extend([flags, node.outs.len() as u8]);
            key.extend((self.ins[i].len() as u32).to_le_bytes());
            for r in &self.ins[i] {
                let (kind, a, b) = match *r {
                    Ref::Outer(i) => (0, i, 0),
                    Ref::Inner { node, out } => (1, node, out),
                    Ref::Fresh(i) => (2, i, 0),
                };
                key.push(kind);
                key.extend(a.to_le_bytes());
                key.extend(b.to_le_bytes());
            }
            node.outs.iter().for_each(|&o| write_type(f.ty(o), &mut key));
        }
        key
    }
}

fn write_type(t: &Type, key: &mut Vec<u8>) {
    key.extend([t.dtype as u8, t.dims.len() as u8]);
    for s in [t.replicated, t.varying, t.sum, t.max, t.min] {
        key.extend(s.0.to_le_bytes());
    }
    for d in &t.dims {
        key.extend(d.size.to_le_bytes());
        key.push(d.atoms.len() as u8 | u8::from(d.atoms.is_turned()) << 7);
        key.extend(d.atoms.iter().map(|a| a.0));
    }
}
