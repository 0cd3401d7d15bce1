//! What a collective overlaps: it begins where it stands in its function, and is waited for by the first
//! launch that uses its results, or writes memory that it uses.

use crate::func::Func;
use crate::group::{Launch, are_one_call};
use crate::ops::Sends;
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

/// True if a launch does something: it is not a view.
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
            all.iter().filter_map(|v| bytes(places[v])).collect()
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

/// By launch: the launch up to which the memory of its operands is kept. Of scattered sums of several tensors
/// that is the first that reads a result, or the next call of that kind over the same axes, or the end: so nothing
/// written meanwhile has to wait for them. Of all else it is the next launch.
pub fn held(f: &Func, launches: &[Launch]) -> Vec<usize> {
    let node = |x: &Launch| &f.nodes[x.nodes.start];
    let several = |x: &Launch| {
        let sends = node(x).op.collective().map(|c| c.sends());
        x.nodes.len() > 1 && sends == Some(Sends::Share)
    };
    let until = |i: usize| {
        let x = &launches[i];
        if !several(x) {
            return i + 1;
        }
        let ends = |y: &Launch| {
            (several(y) && are_one_call(node(x), node(y)))
                || y.ins.iter().any(|v| x.outs.contains(v))
        };
        launches[i + 1..].iter().position(ends).map_or(launches.len(), |n| i + 1 + n)
    };
    (0..launches.len()).map(until).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::launches;
    use smallvec::smallvec;

    const TEXT: &str = "mesh [tp=2]
func @f(%x: f32[4]+tp, %a: f32[4]) -> (f32[4], f32[4]) {
  %y = all_reduce[tp] %x : f32[4]
  %b = exp %a : f32[4]
  %c = exp %b : f32[4]
  %z = add %y, %c : f32[4]
  return %z, %c
}
";

    /// The launch before which the all_reduce is waited for. Values lie one after the other, but `own`
    /// and the memory that `exp %b` works in; `%y` lies over `%x` if `over`.
    fn until(places: impl Fn(&str, usize) -> usize, work: Option<usize>) -> usize {
        let m = crate::text::parse(TEXT).unwrap_or_else(|e| panic!("{e}"));
        let f = &m.funcs[0];
        let place = |offset| Place { frame: 0, offset, bytes: 16 };
        let all = (0..f.values.len()).map(|i| {
            let name = f.name(crate::func::Value(i as u32)).to_string();
            place(places(&name, i * 16))
        });
        let workspace = |i: usize| match work {
            Some(offset) if i == 2 => place(offset),
            _ => Place::default(),
        };
        let memory = Memory {
            places: vec![all.collect()],
            workspaces: vec![(0..f.nodes.len()).map(workspace).collect()],
            ..Memory::default()
        };
        let call = Call { func: 0, microbatch: None, frames: smallvec![1024] };
        let found = awaited(f, &launches(f), &memory, &call);
        assert_eq!(found[1..], [2, 3, 4], "only collectives are waited for later");
        found[0]
    }

    #[test]
    fn a_collective_is_waited_for_by_what_needs_it_or_its_memory() {
        let apart = |_: &str, at: usize| at;
        assert_eq!(until(apart, None), 3, "by the sum");
        // %b or %c written over the operand; %c over the result.
        assert_eq!(until(|v, at| if v == "%b" { 0 } else { at }, None), 1);
        assert_eq!(until(|v, at| if v == "%c" { 0 } else { at }, None), 2);
        assert_eq!(until(|v, at| if v == "%c" { 32 } else { at }, None), 2);
        // A workspace over half of the operand, and behind all.
        assert_eq!(until(apart, Some(8)), 2);
        assert_eq!(until(apart, Some(512)), 3);
    }
}
