//! What a collective overlaps: it begins where it stands in its function, and is waited for by the first
//! launch that uses its results, or writes memory that it uses.

use crate::func::Func;
use crate::group::Launch;
use crate::plan::{Call, Memory, Place};
use smallvec::SmallVec;
use std::ops::Range;

/// Bytes of the arena.
type Bytes = SmallVec<[Range<usize>; 4]>;

/// Memory that a launch reads, and what it writes.
struct Uses {
    reads: Bytes,
    writes: Bytes,
}

fn meet(a: &Bytes, b: &Bytes) -> bool {
    a.iter().any(|x| b.iter().any(|y| x.start < y.end && y.start < x.end))
}

/// True if a launch does something: it is no view.
pub fn works(f: &Func, x: &Launch) -> bool {
    f.nodes[x.nodes.clone()].iter().any(|n| !n.op.def().is_view())
}

/// For every launch of a call the launch before which it is waited for; one past the last is the end of
/// the call. Only collectives are waited for later than by the next launch.
pub fn awaited(f: &Func, launches: &[Launch], memory: &Memory, call: &Call) -> Vec<usize> {
    let places = &memory.places[call.func];
    let bytes = |p: Place| {
        let first = call.frames[p.frame as usize] + p.offset;
        (p.bytes > 0).then_some(first..first + p.bytes)
    };
    let uses = |x: &Launch| {
        let of = |all: &[crate::func::Value]| -> Bytes {
            all.iter().filter_map(|v| bytes(places[v.0 as usize])).collect()
        };
        let work = &memory.workspaces[call.func][x.nodes.clone()];
        let mut writes = of(&x.outs);
        writes.extend(work.iter().filter_map(|&p| bytes(p)));
        Uses { reads: of(&x.ins), writes }
    };
    let all: Vec<Uses> = launches.iter().map(uses).collect();
    let until = |i: usize| {
        if f.nodes[launches[i].nodes.start].op.collective().is_none() {
            return i + 1;
        }
        let own = &all[i];
        let needs = |j: &usize| {
            let next = &all[*j];
            works(f, &launches[*j])
                && (meet(&next.reads, &own.writes)
                    || meet(&next.writes, &own.reads)
                    || meet(&next.writes, &own.writes))
        };
        (i + 1..launches.len()).find(needs).unwrap_or(launches.len())
    };
    (0..launches.len()).map(until).collect()
}
