//! Which element-wise work backward redoes, so that forward saves the fewest bytes: a minimum cut.
//!
//! He and Yu, "Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware", MLSys 2023:
//! an element-wise op that stands before its reader is part of the reader's kernel, so to redo it costs no pass
//! over memory that reading a saved value would not cost, too. So may what shifts a value: of a convolution over a few
//! tokens it costs a pass, and saves one of as many copies as there are tokens. What is to be saved separates what forward
//! makes by other means (products, attention, reductions, collectives) from what backward reads. Each value is an
//! edge with its bytes as capacity; operands of what may be redone are joined without a limit; a minimum
//! cut is then what to save (Ford and Fulkerson, 1956).
//!
//! What leaves a layer is saved by itself, so each layer of a stage is a cut of its own. Layers with one graph have
//! one cut.

#[cfg(test)]
mod tests;

use crate::depends::weighted;
use petgraph::Direction;
use petgraph::algo::dinics;
use petgraph::graph::DiGraph;
use petgraph::visit::EdgeRef;
use shardc_ir::func::{Func, Value, ValueMap};
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::FusionClass;
use std::collections::BTreeMap;

/// A graph: how many nodes it has, and its edges, each with where it begins and ends and its capacity.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
struct Graph {
    nodes: u32,
    edges: Vec<(u32, u32, u64)>,
}

/// A capacity that no cut pays: sums of some millions of them do not overflow.
const UNCUT: u64 = 1 << 42;

/// Forward, and what is settled of it. All lists go by its nodes.
pub(super) struct Forward<'a> {
    pub mesh: &'a Mesh,
    /// The joint program.
    pub func: &'a Func,
    /// The layer of each node: an edge from one to another is never crossed by a repetition.
    pub runs: &'a [Option<u32>],
    /// What backward makes again whatever is saved.
    pub always: &'a [bool],
    /// What other layers read.
    pub leaves: &'a [bool],
}

/// Per node of forward, whether backward redoes it.
pub(super) fn redone(p: &Forward) -> Vec<bool> {
    let j = p.func;
    let makers = j.makers();
    let (mut direct, weighted) = (j.per_value(false), weighted(j));
    for n in &j.nodes[p.runs.len()..] {
        n.ins.iter().for_each(|v| direct[v] = true);
    }
    // What backward needs whatever is chosen here.
    let mut needed = direct.clone();
    for (node, _) in j.nodes.iter().zip(p.always).rev().filter(|x| *x.1) {
        if node.outs.iter().any(|o| needed[o]) {
            node.ins.iter().for_each(|v| needed[v] = true);
        }
    }
    let mut runs: BTreeMap<(usize, Option<u32>), Vec<usize>> = BTreeMap::new();
    for (n, run) in p.runs.iter().enumerate() {
        runs.entry((j.stage_of(&j.nodes[n]), *run)).or_default().push(n);
    }
    let mut out = vec![false; p.runs.len()];
    let mut known: HashMap<Graph, Vec<bool>> = HashMap::default();
    for nodes in runs.values() {
        let cut = Cut {
            p,
            makers: &makers,
            direct: &direct,
            needed: &needed,
            weighted: &weighted,
            graph: Graph::default(),
        };
        let (graph, chosen) = cut.of(nodes);
        if !chosen.is_empty() {
            let behind = known.entry(graph).or_insert_with_key(Graph::behind);
            chosen.iter().for_each(|&(n, from)| out[n] = behind[from as usize]);
        }
    }
    out
}

/// The graph of one layer: of each value, an edge from where it is made to where it is read.
struct Cut<'a> {
    p: &'a Forward<'a>,
    makers: &'a ValueMap<Option<u32>>,
    direct: &'a ValueMap<bool>,
    needed: &'a ValueMap<bool>,
    weighted: &'a ValueMap<bool>,
    graph: Graph,
}

/// The first two nodes of a graph.
const SOURCE: u32 = 0;
const SINK: u32 = 1;

impl Cut<'_> {
    /// The graph, and the nodes of the program that may be redone, each with its node of the graph.
    fn of(mut self, nodes: &[usize]) -> (Graph, Vec<(usize, u32)>) {
        let j = self.p.func;
        (self.graph.nodes, self.graph.edges) = (2, Vec::with_capacity(5 * nodes.len()));
        let mut read: HashMap<Value, u32> = HashMap::default();
        let mut chosen: Vec<(usize, u32)> = vec![];
        for &n in nodes {
            let node = &j.nodes[n];
            let repeats = self.may_repeat(n);
            for &o in &node.outs {
                let (from, to) = (self.graph.node(), self.graph.node());
                let cost = if self.p.always[n] { UNCUT } else { self.bytes(o) };
                self.graph.edges.push((from, to, cost));
                if repeats {
                    for v in &node.ins {
                        if let Some(operand) = self.operand(*v, &mut read) {
                            self.graph.edges.push((operand, from, UNCUT));
                        }
                    }
                } else {
                    self.graph.edges.push((SOURCE, from, UNCUT));
                }
                if self.direct[o] {
                    self.graph.edges.push((to, SINK, UNCUT));
                }
                read.insert(o, to);
                if repeats && !self.p.always[n] {
                    chosen.push((n, from));
                }
            }
        }
        (self.graph, chosen)
    }

    /// Whether a node may run in backward, too: element-wise work, shifts, and what always does. A gather that
    /// backward does without is not added to it.
    fn may_repeat(&self, n: usize) -> bool {
        let node = &self.p.func.nodes[n];
        if self.p.always[n] {
            return !node.op.gathers() || node.outs.iter().any(|o| self.needed[o]);
        }
        let elements = |v: &Value| self.p.func.ty(*v).elements();
        let shifts =
            || node.op.def().halo().is_some() && elements(&node.ins[0]) == elements(&node.outs[0]);
        let each = node.op.facts().fusion == Some(FusionClass::Each) || shifts();
        let own = |o: &Value| self.weighted[o];
        each && node.op.collective().is_none() && !self.p.leaves[n] && node.outs.iter().all(own)
    }

    fn bytes(&self, v: Value) -> u64 {
        (self.p.func.ty(v).local_bytes(self.p.mesh) as u64).min(UNCUT)
    }

    /// Where an operand is read; none for arguments, which are there. One of another layer is saved or made again
    /// anyway if backward needs it, and else would be saved for this.
    fn operand(&mut self, v: Value, read: &mut HashMap<Value, u32>) -> Option<u32> {
        let maker = self.makers[v]? as usize;
        if let Some(&known) = read.get(&v) {
            return Some(known);
        }
        let cost = match (self.needed[v], self.p.always[maker]) {
            (true, _) => 0,
            (false, true) => UNCUT,
            (false, false) => self.bytes(v),
        };
        let to = self.graph.node();
        self.graph.edges.push((SOURCE, to, cost));
        read.insert(v, to);
        Some(to)
    }
}

impl Graph {
    /// A new node.
    fn node(&mut self) -> u32 {
        self.nodes += 1;
        self.nodes - 1
    }

    /// What lies behind the minimum cut that is nearest to the sink, so that least is redone: from where the sink
    /// can still be reached when nothing more flows.
    fn behind(&self) -> Vec<bool> {
        let mut graph: DiGraph<(), u64> =
            DiGraph::with_capacity(self.nodes as usize, self.edges.len());
        for _ in 0..self.nodes {
            graph.add_node(());
        }
        graph.extend_with_edges(&self.edges);
        let (_, flows) = dinics(&graph, SOURCE.into(), SINK.into());
        let mut behind = vec![false; graph.node_count()];
        behind[SINK as usize] = true;
        let mut open = vec![SINK.into()];
        while let Some(v) = open.pop() {
            let into = graph.edges_directed(v, Direction::Incoming);
            let room = into.filter(|e| flows[e.id().index()] < *e.weight()).map(|e| e.source());
            let from = graph.edges(v);
            let back = from.filter(|e| flows[e.id().index()] > 0).map(|e| e.target());
            for u in room.chain(back) {
                if !std::mem::replace(&mut behind[u.index()], true) {
                    open.push(u);
                }
            }
        }
        behind
    }
}
