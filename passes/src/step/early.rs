//! Posts what a rank of the pipeline receives before the call that precedes its use, so that it moves while
//! the rank works: for transports whose transfers go on beside work.
//!
//! ```text
//! Before:  call @forward, microbatch 0          After:  post recv %x, microbatch 1
//!          send %y, microbatch 0                        call @forward, microbatch 0
//!          recv %x, microbatch 1                        send %y, microbatch 0
//!          call @forward, microbatch 1                  recv %x, microbatch 1
//!                                                       call @forward, microbatch 1
//! ```
//! A post waits for nothing and nobody waits for it, so lists that end without posts end with them. What is
//! posted needs its memory from there on: a post stands only where that is free. One call ahead is enough, since
//! a transfer is shorter than a call; a device that waits for a transfer longer than that has less to work with.

use shardc_ir::plan::{Instr, RankClass, Transfer};
use std::collections::BTreeMap;

/// How often memory is planned again with fewer posts, if places leave more gaps than before.
const TRIES: usize = 3;

/// Receives between two calls: the first call, after which there are these instructions up to the second.
struct ReceiveGroup {
    call: usize,
    recvs: Vec<usize>,
}

/// A rank's class with posts in its step, if any fit: `class` is without, `step` its list without places,
/// `limit` the bytes that its arena may have, and `place` makes the class of a list.
pub fn post(
    class: &RankClass,
    step: &[Instr],
    limit: usize,
    place: impl Fn(Vec<Instr>) -> RankClass,
) -> Option<RankClass> {
    let groups = groups(step);
    // What frames may take at once: less, if they did not fit.
    let mut most = limit;
    for _ in 0..TRIES {
        let chosen = fitting(class, &groups, most);
        if chosen.is_empty() {
            return None;
        }
        let posted = place(with_posts(step, &chosen));
        let peak = posted.memory.peak_bytes;
        if peak <= limit {
            return Some(posted);
        }
        most = most.saturating_sub(peak - limit);
    }
    None
}

/// What is received behind the first call, by the call before it.
fn groups(step: &[Instr]) -> Vec<ReceiveGroup> {
    let mut all: Vec<ReceiveGroup> = vec![];
    for (i, instr) in step.iter().enumerate() {
        match instr {
            Instr::Call(_) => all.push(ReceiveGroup { call: i, recvs: vec![] }),
            Instr::Recv(_) => all.last_mut().into_iter().for_each(|g| g.recvs.push(i)),
            Instr::Send(_) | Instr::Sent { .. } | Instr::PostRecv(_) => {}
        }
    }
    all.retain(|g| !g.recvs.is_empty());
    all
}

/// The groups whose frames can be in use since the call before, if no more than `most` bytes may be at once.
fn fitting<'a>(
    class: &RankClass,
    groups: &'a [ReceiveGroup],
    most: usize,
) -> Vec<&'a ReceiveGroup> {
    let mut live = live(class);
    let whole: usize = class.memory.whole.iter().map(|w| w.1).sum();
    let born = born(class);
    let mut chosen = vec![];
    for g in groups {
        let bytes: usize = g.recvs.iter().map(|i| born.get(i).copied().unwrap_or(0)).sum();
        let last = g.recvs[g.recvs.len() - 1];
        let during = &mut live[g.call..last];
        if during.iter().all(|n| whole + n + bytes <= most) {
            during.iter_mut().for_each(|n| *n += bytes);
            chosen.push(g);
        }
    }
    chosen
}

/// By instruction, the most bytes of frames that are in use at once.
fn live(class: &RankClass) -> Vec<usize> {
    // At one moment, what ends goes before what begins.
    let mut changes: Vec<((usize, usize), bool, usize)> = vec![];
    for s in &class.memory.spans {
        changes.push(((s.first, s.from_node), true, s.bytes));
        changes.push(((s.last, s.to_node + 1), false, s.bytes));
    }
    changes.sort_unstable();
    let (mut changes, mut now) = (changes.into_iter().peekable(), 0);
    let of = |i: usize| {
        let mut most = now;
        while let Some((_, begins, bytes)) = changes.next_if(|c| c.0.0 == i) {
            now = if begins { now + bytes } else { now - bytes };
            most = most.max(now);
        }
        most
    };
    (0..class.step.len()).map(of).collect()
}

/// By receive, the bytes of the frame that is first in use there.
fn born(class: &RankClass) -> BTreeMap<usize, usize> {
    let mut out = BTreeMap::new();
    let received = |i: usize| match class.step.get(i) {
        Some(Instr::Recv(t)) => Some(*t),
        _other => None,
    };
    for s in &class.memory.spans {
        let holds = |t: &Transfer| s.offset <= t.offset && t.offset < s.offset + s.bytes;
        if received(s.first).as_ref().is_some_and(holds) {
            out.insert(s.first, s.bytes);
        }
    }
    out
}

/// A list with these receives posted.
fn with_posts(step: &[Instr], chosen: &[&ReceiveGroup]) -> Vec<Instr> {
    let mut chosen = chosen.iter().peekable();
    let mut out = Vec::with_capacity(step.len());
    for (i, instr) in step.iter().enumerate() {
        if let Some(g) = chosen.next_if(|g| g.call == i) {
            out.extend(g.recvs.iter().filter_map(|&r| match &step[r] {
                Instr::Recv(t) => Some(Instr::PostRecv(*t)),
                Instr::Call(_) | Instr::Send(_) | Instr::Sent { .. } | Instr::PostRecv(_) => None,
            }));
        }
        out.push(instr.clone());
    }
    out
}
