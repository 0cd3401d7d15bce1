//! Which nodes of a function are those of equal layers: a stretch of nodes that repeats, with numbers of layers that
//! go on by the same step.

use super::ops::is_nothing;
use shardc_ir::func::{Func, Node, ValueMap};
use shardc_ir::mesh::Mesh;
use shardc_ir::text::type_text;
use std::collections::HashMap;
use std::ops::Range;

/// Most layers that repeat together, as layers of sliding and of full attention do in turn.
const MOST_TOGETHER: usize = 8;

/// Nodes that follow each other.
pub(super) enum Stretch {
    /// Of no layer that repeats.
    Plain(Range<usize>),
    /// `count` units of so many nodes each, one after the other.
    Layers { first: usize, nodes: usize, count: usize },
}

/// What a node is, whatever layer it is of.
fn kinds(f: &Func, mesh: &Mesh) -> Vec<usize> {
    let mut known: HashMap<String, usize> = HashMap::new();
    let text = |n: &Node| {
        let mut t = String::new();
        n.op.write(mesh, &mut t);
        for v in n.ins.iter().chain(&n.outs) {
            t.push(' ');
            t += &type_text(mesh, f.ty(*v));
        }
        for part in f.scope_info(n.scope).path.split('.') {
            t.push('.');
            t += if part.bytes().all(|b| b.is_ascii_digit()) { "#" } else { part };
        }
        t
    };
    f.nodes
        .iter()
        .map(|n| {
            let next = known.len();
            *known.entry(text(n)).or_insert(next)
        })
        .collect()
}

/// The stretches of a function; `last` is the last node that reads a value.
pub(super) fn stretches(f: &Func, mesh: &Mesh, last: &ValueMap<usize>) -> Vec<Stretch> {
    let kinds = kinds(f, mesh);
    let layers: Vec<Option<u32>> = f.nodes.iter().map(|n| f.scope_info(n.scope).layer).collect();
    // The next node of the same kind.
    let mut next = vec![usize::MAX; kinds.len()];
    let mut seen: HashMap<usize, usize> = HashMap::new();
    for (i, k) in kinds.iter().enumerate().rev() {
        next[i] = seen.insert(*k, i).unwrap_or(usize::MAX);
    }
    let mut out = vec![];
    let (mut plain, mut at) = (0, 0);
    while at < kinds.len() {
        let Some((nodes, len)) = repeat(&kinds, &layers, &next, at) else {
            at += 1;
            continue;
        };
        // Where units are cut is free, as far as they repeat further than whole units: where least crosses.
        let slack = (len % nodes).min(nodes - 1);
        let crossing = |cut: usize| {
            let unit = &f.nodes[cut..cut + nodes];
            unit.iter().flat_map(|n| &n.outs).filter(|v| last[**v] >= cut + nodes).count()
        };
        // Then where it has least of other layers.
        let foreign = |cut: usize| {
            let unit = &layers[cut..cut + nodes];
            unit.iter().filter(|l| **l != unit[0]).count()
        };
        let cuts = at..=at + slack;
        let first = cuts.min_by_key(|&cut| (crossing(cut), foreign(cut))).unwrap_or(at);
        let count = (len - (first - at)) / nodes + 1;
        if f.nodes[first..first + nodes].iter().all(|n| is_nothing(&n.op)) {
            at += nodes;
            continue;
        }
        if plain < first {
            out.push(Stretch::Plain(plain..first));
        }
        out.push(Stretch::Layers { first, nodes, count });
        at = first + nodes * count;
        plain = at;
    }
    if plain < kinds.len() {
        out.push(Stretch::Plain(plain..kinds.len()));
    }
    out
}

/// The number of nodes of a unit that repeats from here on, and how many nodes are like those a unit behind them.
fn repeat(
    kinds: &[usize],
    layers: &[Option<u32>],
    next: &[usize],
    at: usize,
) -> Option<(usize, usize)> {
    let own = layers[at]?;
    let mut best: Option<(usize, usize)> = None;
    let (mut other, mut tried) = (next[at], 0);
    let mut met = vec![own];
    while other < kinds.len() && tried < MOST_TOGETHER {
        let layer = layers[other].unwrap_or(own);
        if !met.contains(&layer) {
            met.push(layer);
            tried += 1;
            let nodes = other - at;
            let step = i64::from(layer) - i64::from(own);
            let alike = |i: usize| {
                let step_of = |a: u32, b: u32| i64::from(b) - i64::from(a) == step;
                kinds[i] == kinds[i + nodes]
                    && match (layers[i], layers[i + nodes]) {
                        (Some(a), Some(b)) => step_of(a, b),
                        (None, None) => true,
                        (Some(_), None) | (None, Some(_)) => false,
                    }
            };
            let len = (at..kinds.len() - nodes).take_while(|&i| alike(i)).count();
            let covers = |(nodes, len): (usize, usize)| (len / nodes + 1) * nodes;
            if len >= nodes && best.is_none_or(|b| covers((nodes, len)) > covers(b)) {
                best = Some((nodes, len));
            }
        }
        other = next[other];
    }
    best
}
