//! The cheapest collectives from one layout to another: a shortest path over layout states.
//!
//! States are types, edges are the collectives of the type table, weights are ring bytes plus a
//! latency (petgraph's A*). Only atoms whose state differs may move, so the graph is small; equal
//! questions are answered once.

use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::EdgeRef;
use shardc_ir::func::Step;
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::*;
use shardc_ir::types::{AtomList, Type};
use std::collections::HashMap;

/// Remembers answered questions.
#[derive(Default)]
pub struct Resharder {
    known: HashMap<(Type, Type), Option<Vec<Step>>>,
}

/// Time of a call beyond its bytes, as bytes that a link could have carried meanwhile.
const LATENCY_BYTES: f64 = 100_000.0;
/// Most states looked at for one path.
pub const MAX_STATES: usize = 4096;

impl Resharder {
    /// The cheapest steps from `from` to `to`; `None` if no sequence of collectives leads there.
    pub fn path(&mut self, mesh: &Mesh, from: &Type, to: &Type) -> Option<Vec<Step>> {
        if from == to {
            return Some(vec![]);
        }
        let key = (from.clone(), to.clone());
        self.known.entry(key).or_insert_with(|| search(mesh, from, to).steps).clone()
    }
}

/// What a search found.
#[derive(Clone, Debug)]
pub struct Search {
    /// `None` if no sequence of collectives leads there.
    pub steps: Option<Vec<Step>>,
    /// Layouts looked at, at most [`MAX_STATES`] and those one step beyond.
    pub states: usize,
}

/// The cheapest steps from `from` to `to`: least time of ring bytes and calls.
pub fn search(mesh: &Mesh, from: &Type, to: &Type) -> Search {
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
    let states = graph.node_count();
    let path = ids.get(to).and_then(|&goal| {
        petgraph::algo::astar(&graph, start, |n| n == goal, |e| e.weight().1, |_| 0.0)
    });
    let Some((_, path)) = path else { return Search { steps: None, states } };
    let steps = path.windows(2).map(|w| {
        let edges = graph.edges_connecting(w[0], w[1]);
        let edge = edges
            .min_by(|a, b| a.weight().1.total_cmp(&b.weight().1))
            .expect("an edge of the path");
        Step { op: edge.weight().0.clone(), ty: graph[edge.target()].clone() }
    });
    Search { steps: Some(steps.collect()), states }
}

/// Bytes that a rank sends in these steps, by rings.
pub fn ring_bytes(mesh: &Mesh, from: &Type, steps: &[Step]) -> f64 {
    let mut at = from;
    let mut sum = 0.0;
    for s in steps {
        sum += s.op.collective().map_or(0.0, |c| c.ring_bytes(mesh, at, &s.ty));
        at = &s.ty;
    }
    sum
}

/// The steps without any thought: take all sums, gather every dim that changes, cut again. `None` where
/// this does not lead to `to`.
pub fn simple(mesh: &Mesh, from: &Type, to: &Type) -> Option<Vec<Step>> {
    let mut steps: Vec<Step> = vec![];
    let mut at = from.clone();
    let mut step = |at: &mut Type, op: Op, declared: Option<&Type>| -> Option<()> {
        let ty = op.check(mesh, &[at], &[declared]).ok()?.swap_remove(0);
        steps.push(Step { op, ty: ty.clone() });
        *at = ty;
        Some(())
    };
    for pending in [at.sum, at.max, at.min] {
        if !pending.is_empty() {
            step(&mut at, AllReduce { axes: pending }.into(), None)?;
        }
    }
    for dim in 0..from.rank() {
        let axes = from.dims[dim].atoms.set();
        if from.dims[dim].atoms != to.dims[dim].atoms && !axes.is_empty() {
            let mut whole = at.clone();
            axes.iter().for_each(|a| whole.clear(a));
            step(&mut at, AllGather { axes, dim }.into(), Some(&whole))?;
        }
    }
    for dim in 0..to.rank() {
        let axes = to.dims[dim].atoms.set();
        if at.dims[dim].atoms != to.dims[dim].atoms {
            step(&mut at, Slice { axes, dim }.into(), Some(to))?;
        }
    }
    let axes = to.replicated.minus(at.replicated);
    if !axes.is_empty() {
        step(&mut at, FanOut { axes }.into(), None)?;
    }
    (at == *to).then_some(steps)
}

/// Bytes that the rank which lacks most of its new piece must receive, whatever is sent how; `None` for
/// sums still to be taken, of which this says nothing.
pub fn must_receive(mesh: &Mesh, from: &Type, to: &Type) -> Option<f64> {
    let moving: Vec<_> = moving_atoms(mesh, from, to).iter().collect();
    let ways = moving.iter().try_fold(1usize, |n, &a| n.checked_mul(mesh.size(a)))?;
    if ways > MAX_STATES || !from.partial().is_empty() {
        return None;
    }
    let mut coords = vec![0; mesh.atoms.len()];
    let lacks = |mut rank: usize| {
        for &a in &moving {
            coords[a.0 as usize] = rank % mesh.size(a);
            rank /= mesh.size(a);
        }
        let (mut new, mut kept) = (1, 1);
        for d in 0..to.rank() {
            let [old, own] = [from, to].map(|t| t.extent(mesh, d, &coords));
            let end = (old.offset + old.len).min(own.offset + own.len);
            new *= own.len;
            kept *= end.saturating_sub(old.offset.max(own.offset));
        }
        ((new - kept) * to.dtype.bytes()) as f64
    };
    Some((0..ways).map(lacks).fold(0.0, f64::max))
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

    /// All collectives that the types allow, in any order of axes that `to` has or none.
    fn any_move(mesh: &Mesh, t: &Type, to: &Type) -> Vec<(Op, Type)> {
        let mut out = vec![];
        let mut add = |op: Op| {
            for declared in [None, Some(to)] {
                let made = op.check(mesh, &[t], &[declared]).map(|mut all| all.swap_remove(0));
                out.extend(made.ok().map(|ty| (op.clone(), ty)));
            }
        };
        for axes in subsets(mesh.all()) {
            add(FanOut { axes }.into());
            for dim in 0..t.rank() {
                add(AllGather { axes, dim }.into());
                add(Slice { axes, dim }.into());
                for other in (0..t.rank()).filter(|&o| o != dim) {
                    add(AllToAll { axes, from: dim, to: other }.into());
                }
            }
        }
        out
    }

    /// Fewest bytes of any sequence of collectives.
    fn fewest(mesh: &Mesh, from: &Type, to: &Type) -> Option<f64> {
        let mut known: Vec<(Type, f64, bool)> = vec![(from.clone(), 0.0, false)];
        loop {
            let open = known.iter_mut().filter(|k| !k.2);
            let next = open.min_by(|a, b| a.1.total_cmp(&b.1))?;
            next.2 = true;
            let (at, sent) = (next.0.clone(), next.1);
            if at == *to {
                return Some(sent);
            }
            for (op, ty) in any_move(mesh, &at, to) {
                let all = sent + op.collective().map_or(0.0, |c| c.ring_bytes(mesh, &at, &ty));
                match known.iter_mut().find(|k| k.0 == ty) {
                    Some(k) if k.2 || k.1 <= all => {}
                    Some(k) => k.1 = all,
                    None => known.push((ty, all, false)),
                }
            }
        }
    }

    #[test]
    fn no_more_bytes_than_the_simple_way_and_the_least_there_can_be() {
        let mesh = Mesh::new(&[("a", 2), ("b", 2), ("c", 3)]).unwrap();
        let s = shardc_ir::rng::Stream::new(5, "reshard", 0);
        let draw = |i: u64| {
            let mut t = Type::f32(&[3 << 10, 3 << 10]);
            for a in mesh.all().iter() {
                let x = s.uniform(i * 8 + u64::from(a.0));
                match (x * 4.0) as usize {
                    d @ 0..2 => t.dims[d].atoms = t.dims[d].atoms.push(a).unwrap(),
                    2 => t.replicated = t.replicated.with(a),
                    _invariant => {}
                }
            }
            t
        };
        let (mut tried, mut least, mut fewer) = (0, 0, 0);
        for i in 0..400 {
            let (from, to) = (draw(2 * i), draw(2 * i + 1));
            let found = search(&mesh, &from, &to);
            assert!(found.states < 2 * MAX_STATES);
            let Some(steps) = found.steps.filter(|p| !p.is_empty()) else { continue };
            let what = format!("{from:?} to {to:?}: {steps:?}");
            let sent = ring_bytes(&mesh, &from, &steps);
            let bound = must_receive(&mesh, &from, &to).expect("no sums");
            assert!(sent >= bound - 0.5, "{what}");
            if let Some(simple) = simple(&mesh, &from, &to) {
                let by_hand = ring_bytes(&mesh, &from, &simple);
                assert!(sent <= by_hand, "{what}");
                fewer += usize::from(sent < by_hand);
            }
            let any = fewest(&mesh, &from, &to).expect("a way was found");
            if (any - bound).abs() < 0.5 {
                assert!((sent - bound).abs() < 0.5, "{sent} for {bound}: {what}");
                least += 1;
            }
            tried += 1;
        }
        assert!(tried > 250 && least > 100 && fewer > 50, "{tried} {least} {fewer}");
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
