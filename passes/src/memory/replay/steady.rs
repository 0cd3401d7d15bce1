//! Repetitions that need not be replayed.
//!
//! If a rank is at one instruction of its list as it was at an earlier one, but for microbatches that are later, and
//! if what follows is what followed then, it ends as it is: then what follows may be left out, as often as it
//! repeats. What it *is* is who wrote which bytes last ([`State`]); data of microbatches, which lie one behind the
//! other, must be there for each call that is left out.

use super::{DATA, Replay, SPENT, Span, UNMADE};
use crate::memory::repeats::Repeats;
use shardc_ir::maps::HashMap;
use shardc_ir::plan::{Call, Instr, Transfer, calls};
use std::collections::{BTreeMap, VecDeque};

/// Who wrote what lies in the arena and what waits for other ranks, by numbers in place of stamps: at two moments of
/// the same state a rank does the same, if the instructions that follow are alike.
#[derive(PartialEq, Eq)]
struct State {
    /// What roles of a step hold, and those outside of microbatches.
    step: Vec<usize>,
    /// How much later a microbatch is than the first of the stretch, a role of it, and what that holds.
    micro: Vec<(i64, usize, usize)>,
    /// Bytes and what they hold; those that hold nothing anybody may ask for hold the same.
    arena: Vec<(Span, usize)>,
    offers: Vec<(usize, Span, usize)>,
    posted: Vec<(usize, Span, usize)>,
}

/// Looks for a state that was there before, at the stretches of a list that repeat in the same places (Brent, 1980:
/// one state is kept, a later one in its place after twice as many).
pub(super) struct Steady {
    /// Stretches of which each does what the one before it did, in the same places.
    repeats: Repeats,
    /// A state, and its stretch.
    kept: Option<(State, usize)>,
    /// Stretches that were looked at.
    looked: usize,
}

/// Lists with fewer repetitions are replayed whole; and no state is looked for at more than so many.
const FEW: usize = 16;
const MANY: usize = 256;

impl Replay<'_> {
    /// The repetitions of a list; none where what lies in their places would not come again three times.
    pub(super) fn steady(&self, list: &[Instr]) -> Option<Steady> {
        let one = Repeats::of(list).filter(|r| r.count > FEW)?;
        let end = one.first + one.count * one.length;
        // Places change in turns, of which the last tells the number.
        let repeats = (1..=MANY.min(one.count / 3)).find_map(|turn| {
            let (length, later) = (turn * one.length, turn * one.later);
            let again = self.again(&list[..end], end - length, length, later) == length;
            again.then_some(Repeats { length, later, count: one.count / turn, ..one })
        })?;
        Some(Steady { repeats, kept: None, looked: 0 })
    }

    /// How many instructions from `i` on may be left out, which are then taken for done.
    pub(super) fn leave_out(&mut self, s: &mut Steady, list: &[Instr], i: usize) -> usize {
        let r = s.repeats;
        let Some(behind) = i.checked_sub(r.first) else { return 0 };
        let k = behind / r.length;
        if behind % r.length != 0 || k >= r.count || s.looked >= MANY {
            return 0;
        }
        s.looked += 1;
        let state = self.state(k * r.later);
        let before = s.kept.as_ref().filter(|kept| kept.0 == state).map(|kept| kept.1);
        if s.looked.is_power_of_two() {
            s.kept = Some((state, k));
        }
        let Some(before) = before else { return 0 };
        let (cycle, later) = ((k - before) * r.length, (k - before) * r.later);
        let cycles = self.again(list, i, cycle, later) / cycle;
        if !self.has_data(&list[i - cycle..i + cycles * cycle]) {
            return 0;
        }
        // What microbatches have left is that of others now.
        let micro = &mut self.stamps.micro;
        for j in (0..micro.len()).rev().filter(|&j| !micro[j].is_empty()).collect::<Vec<_>>() {
            let own = std::mem::take(&mut micro[j]);
            micro[j + cycles * later] = own;
        }
        s.kept = None;
        cycles * cycle
    }

    /// The state before a stretch whose first microbatch is `first`.
    fn state(&self, first: usize) -> State {
        let mut numbers: HashMap<u64, usize> = HashMap::default();
        for known in [UNMADE, DATA, SPENT] {
            numbers.insert(known, known as usize);
        }
        let mut number = |stamp: u64| {
            let next = numbers.len();
            *numbers.entry(stamp).or_insert(next)
        };
        let stamps = &self.stamps;
        let step = stamps.step.iter().chain(&stamps.outside).map(|&x| number(x)).collect();
        let mut micro = vec![];
        for (j, own) in stamps.micro.iter().enumerate() {
            let of = |(i, &x): (usize, &u64)| (j as i64 - first as i64, i, number(x));
            micro.extend(own.iter().enumerate().map(of));
        }
        let mut under_way = |all: &BTreeMap<usize, VecDeque<(Span, u64)>>| {
            let all = all.iter().flat_map(|(&with, all)| all.iter().map(move |x| (with, *x)));
            all.map(|(with, (span, x))| (with, span, number(x))).collect()
        };
        let (offers, posted) = (under_way(&self.offers), under_way(&self.posted));
        let mut arena: Vec<(Span, usize)> = vec![];
        for (span, stamp) in self.arena.ranges() {
            let holds = numbers.get(&stamp).copied().unwrap_or(SPENT as usize);
            match arena.last_mut().filter(|(last, x)| last.1 == span.0 && *x == holds) {
                Some((last, _)) => last.1 = span.1,
                None => arena.push((span, holds)),
            }
        }
        State { step, micro, arena, offers, posted }
    }

    /// How many instructions from `i` on do what those before them by a cycle do, for microbatches that are later by
    /// so many.
    fn again(&self, list: &[Instr], i: usize, cycle: usize, later: usize) -> usize {
        (i..list.len()).take_while(|&x| self.alike(&list[x - cycle], &list[x], later)).count()
    }

    /// True if an instruction does what another does, in the same places, for a microbatch that is later by so many.
    /// Data may lie elsewhere.
    fn alike(&self, a: &Instr, b: &Instr, later: usize) -> bool {
        let same = match (a, b) {
            (Instr::Call(a), Instr::Call(b)) => {
                let data = &self.known[&b.func].data;
                let alike = |i: usize| a.frames[i] == b.frames[i] || data.contains(&i);
                let frames = (a.frames.len(), b.frames.len());
                a.func == b.func && frames.0 == frames.1 && (0..frames.0).all(alike)
            }
            (Instr::Send(a), Instr::Send(b))
            | (Instr::PostRecv(a), Instr::PostRecv(b))
            | (Instr::Recv(a), Instr::Recv(b)) => {
                let of = |t: &Transfer| (t.func, t.value, t.with, t.offset, t.bytes);
                of(a) == of(b)
            }
            (Instr::Sent { to: a }, Instr::Sent { to: b }) => a == b,
            _of_two_kinds => false,
        };
        same && a.microbatch().map(|j| j + later) == b.microbatch()
    }

    /// True if the data of all calls are there. Nothing writes them but what fills them before the list: those that
    /// are there were there since, so nothing wrote over them in a cycle, and nothing will in the next.
    fn has_data(&self, list: &[Instr]) -> bool {
        calls(list).all(|c: &Call| {
            self.known[&c.func]
                .inputs
                .iter()
                .all(|&v| self.span(c, v).is_ok_and(|span| self.arena.holds(span, DATA)))
        })
    }
}
