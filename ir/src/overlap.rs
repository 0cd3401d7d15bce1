//! What a collective overlaps: it begins where it stands in its function, and is waited for by the first
//! launch that uses its results, or writes memory that it uses; of its own call, or of a later one of the step. What is
//! sent is waited for by the first that writes its memory.

use crate::func::{Func, Module, Value};
use crate::group::{Launch, are_one_call};
use crate::maps::HashMap;
use crate::ops::Sends;
use crate::plan::{Call, FramePlace, Instr, Memory, RankClass, Transfer};
use smallvec::{SmallVec, smallvec};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;

/// Bytes of the arena.
type Bytes = SmallVec<[Range<usize>; 4]>;

/// Memory that a launch reads, and what it writes.
struct MemoryUses {
    reads: Bytes,
    writes: Bytes,
}

impl MemoryUses {
    /// True if one writes what the other uses.
    fn meet(&self, other: &MemoryUses) -> bool {
        meet(&self.reads, &other.writes)
            || meet(&self.writes, &other.reads)
            || meet(&self.writes, &other.writes)
    }
}

fn meet(a: &Bytes, b: &Bytes) -> bool {
    a.iter().any(|x| b.iter().any(|y| x.start < y.end && y.start < x.end))
}

/// True if a launch does something: it is not a view.
pub fn works(f: &Func, x: &Launch) -> bool {
    f.nodes[x.nodes.clone()].iter().any(|n| !n.op.def().is_view())
}

/// Where the places of a call lie.
fn bytes(call: &Call, p: FramePlace) -> Option<Range<usize>> {
    let first = call.frames[p.frame as usize] + p.offset;
    (p.bytes > 0).then_some(first..first + p.bytes)
}

/// By launch of a call.
fn uses(launches: &[Launch], memory: &Memory, call: &Call) -> Vec<MemoryUses> {
    let places = &memory.places[call.func];
    let one = |x: &Launch| {
        let of = |all: &[Value]| -> Bytes {
            all.iter().filter_map(|v| bytes(call, places[v])).collect()
        };
        let work = &memory.workspaces[call.func][x.nodes.clone()];
        let mut writes = of(&x.outs);
        writes.extend(work.iter().filter_map(|&p| bytes(call, p)));
        MemoryUses { reads: of(&x.ins), writes }
    };
    launches.iter().map(one).collect()
}

/// For every launch of a call the launch before which it is waited for; one past the last is the end of
/// the call. Only collectives are waited for later than by the next launch.
pub fn awaited(f: &Func, launches: &[Launch], memory: &Memory, call: &Call) -> Vec<usize> {
    let all = uses(launches, memory, call);
    let until = |i: usize| {
        if f.nodes[launches[i].nodes.start].op.collective().is_none() {
            return i + 1;
        }
        let needs = |&j: &usize| works(f, &launches[j]) && all[j].meet(&all[i]);
        (i + 1..launches.len()).find(needs).unwrap_or(launches.len())
    };
    (0..launches.len()).map(until).collect()
}

/// A place in a list: before an instruction, and of a call before that launch of it.
pub type Turn = (usize, usize);

/// By instruction, and in a call by launch, where that is waited for.
pub type Late = BTreeMap<(usize, Option<usize>), Turn>;

/// What is known of a call, if its frames are there.
struct CallUses {
    uses: Vec<MemoryUses>,
    /// The bytes of all of them, in order, those next to each other joined.
    all: Vec<Range<usize>>,
    /// What is read when it has ended.
    shown: MemoryUses,
    /// Collectives that nothing of the call waits for.
    open: Vec<usize>,
}

impl CallUses {
    fn of(f: &Func, launches: &[Launch], memory: &Memory, call: &Call) -> CallUses {
        let uses = uses(launches, memory, call);
        let mut all: Vec<Range<usize>> =
            uses.iter().flat_map(|u| u.reads.iter().chain(&u.writes).cloned()).collect();
        all.sort_unstable_by_key(|r| r.start);
        all.dedup_by(|next, last| {
            let joins = next.start <= last.end;
            last.end = if joins { last.end.max(next.end) } else { last.end };
            joins
        });
        let shown = f.results.iter().filter(|r| r.role.as_ref().is_some_and(|r| r.kind.is_shown()));
        let shown = shown.filter_map(|r| bytes(call, memory.places[call.func][r.value]));
        let shown = MemoryUses { reads: shown.collect(), writes: Bytes::new() };
        let until = awaited(f, launches, memory, call);
        let ends = |&i: &usize| {
            let exchanges = f.nodes[launches[i].nodes.start].op.collective().is_some();
            exchanges && until[i] == launches.len() && !uses[i].meet(&shown)
        };
        let open = (0..launches.len()).filter(ends).collect();
        CallUses { uses, all, shown, open }
    }

    /// True if it may use some of these bytes.
    fn may_use(&self, bytes: &Bytes) -> bool {
        bytes.iter().any(|b| {
            let first = self.all.partition_point(|r| r.end <= b.start);
            self.all.get(first).is_some_and(|r| r.start < b.end)
        })
    }
}

/// What of a list goes on beside instructions behind its own, and where it is waited for, at the latest at the end of
/// the list: what was sent, by the [`Instr::Sent`] behind which its memory is still as it was, and collectives of calls
/// that have ended.
pub fn late(m: &Module, launches: &[Vec<Launch>], class: &RankClass, list: &[Instr]) -> Late {
    let mut known: HashMap<(usize, SmallVec<[usize; 8]>), Rc<CallUses>> = HashMap::default();
    let mut of = |c: &Call| {
        let of = || CallUses::of(&m.funcs[c.func], &launches[c.func], &class.memory, c);
        known.entry((c.func, c.frames.clone())).or_insert_with(|| Rc::new(of())).clone()
    };
    let by_instr: Vec<Option<Rc<CallUses>>> = list
        .iter()
        .map(|i| match i {
            Instr::Call(c) => Some(of(c)),
            Instr::Send(_) | Instr::Sent { .. } | Instr::PostRecv(_) | Instr::Recv(_) => None,
        })
        .collect();
    let part = |t: &Transfer| -> Bytes { smallvec![t.offset..t.offset + t.bytes] };
    let next = |after: usize, own: &MemoryUses| -> Turn {
        let of = |i: usize| match &list[i] {
            Instr::Call(c) => {
                let known = by_instr[i].as_ref()?;
                if !known.may_use(&own.reads) && !known.may_use(&own.writes) {
                    return None;
                }
                let (f, all) = (&m.funcs[c.func], &launches[c.func]);
                let needs = |&l: &usize| works(f, &all[l]) && known.uses[l].meet(own);
                let shown = || known.shown.meet(own).then_some(all.len());
                Some((i, (0..all.len()).find(needs).or_else(shown)?))
            }
            Instr::Send(t) => meet(&part(t), &own.writes).then_some((i, 0)),
            Instr::PostRecv(t) | Instr::Recv(t) => {
                let written = MemoryUses { reads: Bytes::new(), writes: part(t) };
                written.meet(own).then_some((i, 0))
            }
            Instr::Sent { .. } => None,
        };
        (after + 1..list.len()).find_map(of).unwrap_or((list.len(), 0))
    };
    let mut offers: BTreeMap<usize, VecDeque<&Transfer>> = BTreeMap::new();
    let mut late = Late::new();
    for (i, instr) in list.iter().enumerate() {
        match instr {
            Instr::Call(_) => {
                for (l, known) in
                    by_instr[i].iter().flat_map(|k| k.open.iter().map(move |l| (l, k)))
                {
                    late.insert((i, Some(*l)), next(i, &known.uses[*l]));
                }
            }
            Instr::Send(t) => offers.entry(t.with).or_default().push_back(t),
            Instr::Sent { to } => {
                if let Some(t) = offers.get_mut(to).and_then(VecDeque::pop_front) {
                    let own = MemoryUses { reads: part(t), writes: Bytes::new() };
                    late.insert((i, None), next(i, &own));
                }
            }
            Instr::PostRecv(_) | Instr::Recv(_) => {}
        }
    }
    late
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
        let place = |offset| FramePlace { frame: 0, offset, bytes: 16 };
        let all = (0..f.values.len()).map(|i| {
            let name = f.name(crate::func::Value(i as u32)).to_string();
            place(places(&name, i * 16))
        });
        let workspace = |i: usize| match work {
            Some(offset) if i == 2 => place(offset),
            _ => FramePlace::default(),
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
