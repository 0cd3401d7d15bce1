//! Offsets of pieces of memory that are alive from one node to another.

use super::free::FreeList;
use shardc_ir::plan::ALIGN;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes, and the nodes at which they are needed.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub bytes: usize,
    pub birth: usize,
    pub death: usize,
}

/// Offsets, and the end of the highest: in order of birth, or, where that leaves gaps of more than
/// so many percent, by size, if that is less.
pub(super) fn offsets(pieces: &[Piece], slack: usize) -> (Vec<usize>, usize) {
    let most = |offsets: &[usize]| {
        let ends = pieces.iter().zip(offsets).map(|(p, o)| o + p.bytes);
        ends.max().unwrap_or(0)
    };
    let first = by_birth(pieces);
    let now = most(&first);
    if now > most_alive(pieces) / 100 * (100 + slack) {
        let other = by_size(pieces);
        let then = most(&other);
        if then < now {
            return (other, then);
        }
    }
    (first, now)
}

/// The most bytes that are alive at once.
fn most_alive(pieces: &[Piece]) -> usize {
    let mut change: BTreeMap<usize, i64> = BTreeMap::new();
    for p in pieces {
        *change.entry(p.birth).or_default() += p.bytes as i64;
        *change.entry(p.death + 1).or_default() -= p.bytes as i64;
    }
    let alive = change.values().scan(0, |sum, c| {
        *sum += c;
        Some(*sum)
    });
    alive.max().unwrap_or(0) as usize
}

/// Offsets of pieces in order of birth, each where there is room: first fit.
fn by_birth(pieces: &[Piece]) -> Vec<usize> {
    let mut free = FreeList::default();
    let mut dying: BTreeSet<(usize, usize)> = BTreeSet::new();
    let mut offsets: Vec<usize> = vec![];
    for (i, p) in pieces.iter().enumerate() {
        while let Some(&(death, d)) = dying.first().filter(|x| x.0 < p.birth) {
            dying.remove(&(death, d));
            free.give(offsets[d], padded(pieces[d].bytes));
        }
        offsets.push(free.take(padded(p.bytes)));
        dying.insert((p.death, i));
    }
    offsets
}

/// Offsets of pieces from the largest to the smallest, each at the lowest place that is free all
/// its life (Pisarchyk and Lee, 2020: greedy by size).
fn by_size(pieces: &[Piece]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..pieces.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(pieces[i].bytes), i));
    let mut offsets = vec![0; pieces.len()];
    // By offset.
    let mut placed: Vec<usize> = vec![];
    for i in order {
        let p = pieces[i];
        let mut at = 0;
        for &o in &placed {
            let q = pieces[o];
            if q.death < p.birth || p.death < q.birth {
                continue;
            }
            if at + p.bytes <= offsets[o] {
                break;
            }
            at = at.max(offsets[o] + padded(q.bytes));
        }
        offsets[i] = at;
        let before = placed.partition_point(|&o| offsets[o] <= at);
        placed.insert(before, i);
    }
    offsets
}

pub(super) fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN)
}
