//! The cheapest collectives from one layout to another: a shortest path over layout states.
//!
//! States are types, edges are the collectives of the type table, weights are ring bytes plus a
//! latency (petgraph's A*). Only atoms whose state differs may move, so the graph is small; equal
//! questions are answered once.

use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::*;
use shardc_ir::types::{AtomList, Type};
use std::collections::HashMap;

/// One collective and the type it makes.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub op: Op,
    pub ty: Type,
}

/// Remembers answered questions.
#[derive(Default)]
pub struct Resharder {
    known: HashMap<(Type, Type), Option<Vec<Step>>>,
}

/// Time of a call beyond its bytes, as bytes that a link could have carried meanwhile.
const LATENCY_BYTES: f64 = 100_000.0;
/// Most states looked at for one path.
const MAX_STATES: usize = 4096;

impl Resharder {
    /// The cheapest steps from `from` to `to`; `None` if no sequence of collectives leads there.
    pub fn path(&mut self, mesh: &Mesh, from: &Type, to: &Type) -> Option<Vec<Step>> {
        if from == to {
            return Some(vec![]);
        }
        let key = (from.clone(), to.clone());
        self.known.entry(key).or_insert_with(|| search(mesh, from, to)).clone()
    }
}

fn search(mesh: &Mesh, from: &Type, to: &Type) -> Option<Vec<Step>> {
    let moving = moving_atoms(mesh, from, to);
    let mut graph: DiGraph<Type, (Op, f64)> = DiGraph::new();
    let mut ids: HashMap<Type, NodeIndex> = HashMap::new();
    let start = graph.add_node(from.clone());
    ids.insert(from.clone(), start);
    let mut at = 0;
    while at < graph.node_count() && graph.node_count() < MAX_STATES {
        let id = NodeIndex::new(at);
        let ty = graph[id].clone();
        for (op, next) in moves(mesh, &ty, to, moving) {
            let bytes =
                op.collective().map_or(1.0, |c| LATENCY_BYTES + c.ring_bytes(mesh, &ty, &next));
            let to_id = *ids.entry(next.clone()).or_insert_with(|| graph.add_node(next));
            graph.add_edge(id, to_id, (op, bytes));
        }
        at += 1;
    }
    let goal = *ids.get(to)?;
    let (_, path) = petgraph::algo::astar(&graph, start, |n| n == goal, |e| e.weight().1, |_| 0.0)?;
    let steps = path.windows(2).map(|w| {
        let edges = graph.edges_connecting(w[0], w[1]);
        let edge = edges
            .min_by(|a, b| a.weight().1.total_cmp(&b.weight().1))
            .expect("an edge of the path");
        Step { op: edge.weight().0.clone(), ty: graph[edge.target()].clone() }
    });
    Some(steps.collect())
}

/// Atoms whose state differs, with all atoms minor to them in the same dim; all of a dim that is cut
/// unevenly.
fn moving_atoms(mesh: &Mesh, from: &Type, to: &Type) -> AtomSet {
    let mut set: AtomSet = mesh.all().iter().filter(|&a| from.state(a) != to.state(a)).collect();
    for (f, t) in from.dims.iter().zip(&to.dims) {
        let pieces = |l: AtomList| l.iter().map(|a| mesh.size(a)).product::<usize>();
        // Uneven pieces can be neither cut again nor joined in part: all of the dim moves.
        let even = [f, t].iter().all(|d| d.size % pieces(d.atoms) == 0);
        let alike = f.atoms.iter().zip(t.atoms.iter()).take_while(|(x, y)| even && x == y);
        let same = alike.count();
        if f.atoms != t.atoms {
            set = f.atoms.iter().chain(t.atoms.iter()).fold(set, |s, a| {
                let kept = f.atoms.iter().take(same).any(|x| x == a);
                if kept { s } else { s.with(a) }
            });
        }
    }
    set
}

/// All subsets of a small set, or the whole and the single atoms of a large one.
fn subsets(s: AtomSet) -> Vec<AtomSet> {
    let atoms: Vec<_> = s.iter().collect();
    if atoms.len() > 4 {
        return std::iter::once(s).chain(atoms.into_iter().map(AtomSet::one)).collect();
    }
    let pick = |bits: usize| {
        atoms.iter().enumerate().filter(|(i, _)| bits >> i & 1 == 1).map(|(_, &a)| a).collect()
    };
    (1..1usize << atoms.len()).map(pick).collect()
}

/// Every collective that may come next on the way to `to`.
fn moves(mesh: &Mesh, t: &Type, to: &Type, moving: AtomSet) -> Vec<(Op, Type)> {
    let mut out = Vec::new();
    let mut add = |op: Op, declared: Option<&Type>| {
        if let Ok(types) = op.check(mesh, &[t], &[declared]) {
            out.push((op, types[0].clone()));
        }
    };
    let invariant = moving.minus(t.marked());
    let wanted = |d: usize| to.dims[d].atoms.set();
    for pending in [t.sum, t.max, t.min] {
        for axes in subsets(pending.and(moving)) {
            let mut replicated = t.clone();
            replicated.replicated = t.replicated.union(axes);
            add(AllReduce { axes }.into(), None);
            add(AllReduce { axes }.into(), Some(&replicated));
            for dim in (0..t.rank()).filter(|&d| axes.within(wanted(d))) {
                add(ReduceScatter { axes, dim }.into(), Some(to));
            }
        }
    }
    for (from, d) in t.dims.iter().enumerate() {
        let mut axes = AtomSet::EMPTY;
        for a in d.atoms.iter().rev().take_while(|&a| moving.has(a)) {
            axes = axes.with(a);
            let mut invariant = t.clone();
            axes.iter().for_each(|a| invariant.clear(a));
            add(AllGather { axes, dim: from }.into(), None);
            add(AllGather { axes, dim: from }.into(), Some(&invariant));
            for dim in (0..t.rank()).filter(|&j| j != from && axes.meets(wanted(j))) {
                add(AllToAll { axes, from, to: dim }.into(), Some(to));
            }
        }
    }
    for free in [invariant, t.replicated.and(moving)] {
        for axes in subsets(free) {
            for dim in (0..t.rank()).filter(|&d| axes.within(wanted(d))) {
                add(Slice { axes, dim }.into(), Some(to));
            }
        }
    }
    for axes in subsets(invariant.and(to.replicated)) {
        add(FanOut { axes }.into(), None);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(from: &Type, to: &Type, mesh: &Mesh) -> Vec<&'static str> {
        let p = Resharder::default().path(mesh, from, to).expect("a path");
        p.iter().map(|s| s.op.mnemonic()).collect()
    }

    #[test]
    fn one_collective_where_one_is_enough() {
        let mesh = Mesh::new(&[("dp", 2), ("tp", 4)]).unwrap();
        let (dp, tp) = (mesh.axis("dp").unwrap(), mesh.axis("tp").unwrap());
        let plain = Type::f32(&[1 << 10, 1 << 10]);
        let split = |d: usize, s: AtomSet| {
            let mut t = plain.clone();
            t.dims[d].atoms = AtomList::collect(s.iter()).unwrap();
            t
        };
        let (mut sum, mut repl) = (plain.clone(), plain.clone());
        sum.sum = tp;
        repl.replicated = tp;
        assert_eq!(kinds(&sum, &plain, &mesh), ["all_reduce"]);
        assert_eq!(kinds(&plain, &repl, &mesh), ["fan_out"]);
        assert_eq!(kinds(&sum, &split(1, tp), &mesh), ["reduce_scatter"]);
        assert_eq!(kinds(&split(0, tp), &split(1, tp), &mesh), ["all_to_all"]);
        assert_eq!(kinds(&split(0, tp), &repl, &mesh), ["all_gather"]);
        assert_eq!(kinds(&split(0, dp.union(tp)), &split(0, dp), &mesh), ["all_gather"]);
        assert_eq!(kinds(&plain, &split(0, tp), &mesh), ["slice"]);
        // Another order of axes goes through a gather of what is in the way.
        let mut swapped = plain.clone();
        swapped.dims[0].atoms = AtomList::collect(tp.iter().chain(dp.iter())).unwrap();
        assert!(!kinds(&split(0, dp.union(tp)), &swapped, &mesh).is_empty());
    }
}
