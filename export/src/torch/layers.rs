//! Which lines of a function are those of equal layers: a stretch of lines that repeats, with numbers of layers that
//! go on by the same step.

use super::seen::{Line, Seen};
use shardc_ir::mesh::Mesh;
use shardc_ir::text::type_text;
use std::collections::HashMap;
use std::ops::Range;

/// Most layers that repeat together, as layers of sliding and of full attention do in turn.
const MOST_TOGETHER: usize = 8;

/// Lines that follow each other.
pub(super) enum Stretch {
    /// Of no layer that repeats.
    Plain(Range<usize>),
    /// `count` units of so many lines each, one after the other.
    Layers { first: usize, lines: usize, count: usize },
}

/// What a line is, whatever layer it is of.
fn kinds(seen: &Seen, mesh: &Mesh) -> Vec<usize> {
    let mut known: HashMap<String, usize> = HashMap::new();
    let text = |l: &Line| {
        let mut t = String::new();
        match l.call {
            Some(call) => t += &call.what(),
            None => l.n.op.write(mesh, &mut t),
        }
        for v in l.ins.iter().chain(&l.outs) {
            t.push(' ');
            t += &type_text(mesh, seen.f.ty(*v));
        }
        for part in seen.f.scope_info(l.n.scope).path.split('.') {
            t.push('.');
            t += if part.bytes().all(|b| b.is_ascii_digit()) { "#" } else { part };
        }
        t
    };
    seen.lines
        .iter()
        .map(|l| {
            let next = known.len();
            *known.entry(text(l)).or_insert(next)
        })
        .collect()
}

/// The stretches of a function.
pub(super) fn stretches(seen: &Seen, mesh: &Mesh) -> Vec<Stretch> {
    let kinds = kinds(seen, mesh);
    let layers: Vec<Option<u32>> =
        seen.lines.iter().map(|l| seen.f.scope_info(l.n.scope).layer).collect();
    // The next line of the same kind.
    let mut next = vec![usize::MAX; kinds.len()];
    let mut met: HashMap<usize, usize> = HashMap::new();
    for (i, k) in kinds.iter().enumerate().rev() {
        next[i] = met.insert(*k, i).unwrap_or(usize::MAX);
    }
    let mut out = vec![];
    let (mut plain, mut at) = (0, 0);
    while at < kinds.len() {
        let Some((lines, len)) = repeat(&kinds, &layers, &next, at) else {
            at += 1;
            continue;
        };
        // Where units are cut is free, as far as they repeat further than whole units: where least crosses.
        let slack = (len % lines).min(lines - 1);
        let crossing = |cut: usize| {
            let unit = &seen.lines[cut..cut + lines];
            unit.iter().flat_map(|l| &l.outs).filter(|v| seen.last[**v] >= cut + lines).count()
        };
        // Then where it has least of other layers.
        let foreign = |cut: usize| {
            let unit = &layers[cut..cut + lines];
            unit.iter().filter(|l| **l != unit[0]).count()
        };
        let cuts = at..=at + slack;
        let first = cuts.min_by_key(|&cut| (crossing(cut), foreign(cut))).unwrap_or(at);
        let count = (len - (first - at)) / lines + 1;
        if plain < first {
            out.push(Stretch::Plain(plain..first));
        }
        out.push(Stretch::Layers { first, lines, count });
        at = first + lines * count;
        plain = at;
    }
    if plain < kinds.len() {
        out.push(Stretch::Plain(plain..kinds.len()));
    }
    out
}

/// The number of lines of a unit that repeats from here on, and how many lines are like those a unit behind them.
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
            let lines = other - at;
            let step = i64::from(layer) - i64::from(own);
            let alike = |i: usize| {
                let step_of = |a: u32, b: u32| i64::from(b) - i64::from(a) == step;
                kinds[i] == kinds[i + lines]
                    && match (layers[i], layers[i + lines]) {
                        (Some(a), Some(b)) => step_of(a, b),
                        (None, None) => true,
                        (Some(_), None) | (None, Some(_)) => false,
                    }
            };
            let len = (at..kinds.len() - lines).take_while(|&i| alike(i)).count();
            let covers = |(lines, len): (usize, usize)| (len / lines + 1) * lines;
            if len >= lines && best.is_none_or(|b| covers((lines, len)) > covers(b)) {
                best = Some((lines, len));
            }
        }
        other = next[other];
    }
    best
}
