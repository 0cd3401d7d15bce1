//! Where every frame lies in the arena, from which instruction to which.

use super::layout::{Bound, Frames};
use super::lifetimes::{Lifetime, NONE};
use super::pieces::{LiveRange, fullest, most_alive, offsets, padded};
use super::repeats::Repeats;
use crate::step::instructions::Lists;
use shardc_ir::func::{Module, Name, Value};
use shardc_ir::plan::{Alive, Call, Instr, MemoryClass, Moment, Span, calls};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// What is known of a whole arena.
pub(super) struct ArenaFacts {
    pub peak_bytes: usize,
    pub at_peak: ByClass,
    pub live_at_peak: Live,
    pub alive: Vec<Alive>,
    pub peak_at: Option<Moment>,
    pub live_bytes: usize,
    pub whole: ByClass,
    pub spans: Vec<Span>,
}

/// Bytes by class.
type ByClass = Vec<(MemoryClass, usize)>;
/// Values with their class and bytes.
type Live = Vec<(String, MemoryClass, usize)>;

/// A frame in use.
#[derive(Clone, Copy, Debug)]
enum Frame {
    /// Of a microbatch, or of none: between stages at step scope, and of a part of the step.
    Shared(usize, Option<usize>),
    /// What the call that is instruction `i` needs for itself, and which part of it.
    Own(usize, usize),
}

/// A frame from its first moment to its last. Instruction `i` begins at moment `i * turn`, and node
/// `n` of a call is moment `n + 1` of it, so that a frame may lie where another of the same call was.
struct Block {
    frame: Frame,
    bytes: usize,
    birth: usize,
    death: usize,
    offset: usize,
}

/// Most values that are listed at the peak.
const LISTED: usize = 10;

/// Fills in the offsets of both lists, unless more than `most` bytes are alive at once. There is no search for better
/// ones in an arena of at most `enough` bytes.
pub(super) fn arena(
    m: &Module,
    l: &Frames,
    lists: Lists,
    enough: usize,
    most: usize,
) -> Option<(Vec<Instr>, Vec<Instr>, ArenaFacts)> {
    let Lists { mut step, mut evaluation } = lists;
    let base = padded(l.whole);
    let lists = [&step[..], &evaluation[..]];
    let mut blocks = lists.map(|list| blocks(l, list));
    let live_bytes = live(l, &step, &blocks[0].all);
    if live_bytes > most {
        return None;
    }
    let mut peak = (l.whole, None);
    for (which, all) in blocks.iter_mut().enumerate() {
        let placed = place(l, lists[which], all, base, peak.0.max(enough));
        if let Some((end, at)) = placed.filter(|p| p.0 > peak.0) {
            peak = (end, Some((which, at)));
        }
    }
    bind(l, &mut step, &blocks[0]);
    bind(l, &mut evaluation, &blocks[1]);
    let (bytes, at) = peak;
    let alive: Vec<&Block> = match at {
        None => vec![],
        Some((which, t)) => {
            blocks[which].all.iter().filter(|b| b.birth <= t && b.death >= t).collect()
        }
    };
    let list = if at.is_some_and(|a| a.0 == 1) { &evaluation } else { &step };
    let (at_peak, alive) = account(l, list, &alive, bytes);
    let live_at_peak = largest(m, &alive);
    let moment = |(list, t): (usize, usize)| Moment {
        in_evaluation: list == 1,
        instr: t / l.turn,
        node: t % l.turn,
    };
    let peak_at = at.map(moment);
    let mut whole: BTreeMap<MemoryClass, usize> = BTreeMap::new();
    for o in l.objects.iter().filter(|o| !o.kind.is_framed()) {
        *whole.entry(o.class).or_default() += o.bytes;
    }
    let whole = whole.into_iter().collect();
    let spans = blocks[0].all.iter().filter(|b| b.bytes > 0);
    let spans = spans.map(|b| span(l, &step, b)).collect();
    let found = ArenaFacts {
        peak_bytes: bytes,
        at_peak,
        live_at_peak,
        alive,
        peak_at,
        live_bytes,
        whole,
        spans,
    };
    Some((step, evaluation, found))
}

fn span(l: &Frames, list: &[Instr], b: &Block) -> Span {
    let class = match b.frame {
        Frame::Shared(f, _) => l.objects[l.shared[f].1[0]].class,
        Frame::Own(i, part) => {
            // What takes most of it where it is fullest.
            let own = |c: &Call| &l.scratch[c.func].parts[part].at_peak;
            let call = calls(&list[i..=i]).next();
            let most = call.and_then(|c| own(c).iter().max_by_key(|x| x.1));
            most.map_or(MemoryClass::Temporary, |x| *x.0)
        }
    };
    let (first, last) = (b.birth / l.turn, b.death / l.turn);
    let (from_node, to_node) = (b.birth % l.turn, b.death % l.turn);
    Span { first, last, from_node, to_node, offset: b.offset, bytes: b.bytes, class }
}

/// The frames of a list, and which of them each instruction names.
struct Blocks {
    all: Vec<Block>,
    /// In the order of the instructions: of a call those of its own and then those it shares, of a transfer
    /// the one of its value, if that has one.
    named: Vec<usize>,
    /// By instruction: how many are named up to its end.
    until: Vec<usize>,
}

impl Blocks {
    /// The blocks that an instruction names.
    fn named_by(&self, i: usize) -> &[usize] {
        &self.named[i.checked_sub(1).map_or(0, |i| self.until[i])..self.until[i]]
    }
}

/// Where the frames of a list are while it is walked.
struct ArenaWalk<'a> {
    l: &'a Frames,
    /// By shared frame: its block, if it is the step's.
    of_step: Vec<usize>,
    /// By microbatch, as long as the list names it: by shared frame, its block.
    of_microbatch: Vec<Vec<usize>>,
    all: Vec<Block>,
}

impl ArenaWalk<'_> {
    /// Notes that a frame is in use; its block.
    fn touch(
        &mut self,
        frame: Frame,
        bytes: usize,
        i: usize,
        (first, last): (usize, usize),
    ) -> usize {
        let new = self.all.len();
        let at = match frame {
            Frame::Own(..) => new,
            Frame::Shared(f, None) => known(&mut self.of_step[f], new),
            Frame::Shared(f, Some(j)) => {
                let own = &mut self.of_microbatch[j];
                own.resize(self.of_step.len(), NONE);
                known(&mut own[f], new)
            }
        };
        if at == new {
            let birth = i * self.l.turn + first;
            self.all.push(Block { frame, bytes, birth, death: 0, offset: 0 });
        }
        self.all[at].death = i * self.l.turn + last;
        at
    }

    /// A shared frame as a call of a microbatch knows it.
    fn shared(&self, f: usize, microbatch: Option<usize>) -> Frame {
        let micro = self.l.objects[self.l.shared[f].1[0]].kind == Lifetime::Micro;
        Frame::Shared(f, microbatch.filter(|_| micro))
    }
}

/// A number if there is one, and else a new one, which there is then.
fn known(number: &mut usize, new: usize) -> usize {
    *number = new.min(*number);
    *number
}

/// The frames of a list and the moments between which they are in use.
fn blocks(l: &Frames, list: &[Instr]) -> Blocks {
    let microbatches = list.iter().filter_map(Instr::microbatch).map(|j| j + 1).max();
    // The last instruction that names a microbatch.
    let mut last = vec![0; microbatches.unwrap_or(0)];
    for (i, instr) in list.iter().enumerate() {
        instr.microbatch().into_iter().for_each(|j| last[j] = i);
    }
    let (of_step, of_microbatch) = (vec![NONE; l.shared.len()], vec![vec![]; last.len()]);
    let mut walk = ArenaWalk { l, of_step, of_microbatch, all: vec![] };
    let (mut named, mut until) = (vec![], Vec::with_capacity(list.len()));
    let mut offers: BTreeMap<usize, VecDeque<usize>> = BTreeMap::new();
    let all = (0, l.turn - 1);
    for (i, instr) in list.iter().enumerate() {
        match instr {
            Instr::Call(c) => {
                for (number, part) in l.scratch[c.func].parts.iter().enumerate() {
                    named.push(walk.touch(Frame::Own(i, number), part.bytes, i, part.within));
                }
                for b in &l.bound[c.func] {
                    if let Bound::Shared(f) = *b {
                        let within = l.within.get(&(c.func, f)).copied().unwrap_or(all);
                        let frame = walk.shared(f, c.microbatch);
                        named.push(walk.touch(frame, l.shared[f].0, i, within));
                    }
                }
            }
            Instr::Send(t) | Instr::PostRecv(t) | Instr::Recv(t) => {
                if let Some(&f) = l.frame_of.get(&(t.func, t.value)) {
                    let frame = walk.shared(f, t.microbatch);
                    let block = walk.touch(frame, l.shared[f].0, i, all);
                    named.push(block);
                    if matches!(instr, Instr::Send(_)) {
                        offers.entry(t.with).or_default().push_back(block);
                    }
                }
            }
            Instr::Sent { to } => {
                if let Some(block) = offers.get_mut(to).and_then(VecDeque::pop_front) {
                    walk.all[block].death = i * l.turn + all.1;
                }
            }
        }
        if let Some(j) = instr.microbatch().filter(|&j| last[j] == i) {
            walk.of_microbatch[j] = vec![];
        }
        until.push(named.len());
    }
    Blocks { all: walk.all, named, until }
}

/// Comparisons of two blocks that the search for good offsets may cost.
const WORK: usize = 1 << 24;
/// The part of what is alive at once that gaps may take without a search: a thousandth.
const GAPS: usize = 1000;
/// That where a longer search finds places that do not repeat: a fiftieth.
const GAPS_OF_REPEATS: usize = 50;

/// What blocks may take: they lie above `base`, and there is no search for better offsets if they end at `enough`, or
/// if gaps are at most this part of what is alive at once.
#[derive(Clone, Copy)]
struct Room {
    base: usize,
    enough: usize,
    gaps: usize,
}

/// Gives the blocks of a list their offsets, above `base`. There is no search for better ones if they end at
/// `enough`.
fn place(l: &Frames, list: &[Instr], blocks: &mut Blocks, base: usize, enough: usize) -> Highest {
    let room = |gaps| Room { base, enough, gaps };
    let mut few = |gaps| place_few(l, list, (blocks, Repeats::of(list)?), room(gaps));
    let of_few = few(GAPS).or_else(|| few(GAPS_OF_REPEATS));
    of_few.unwrap_or_else(|| place_all(&mut blocks.all, room(GAPS)))
}

/// Stretches that are searched for places: so many times those in which a microbatch is in use.
const KEPT_OF_LIVES: usize = 4;
/// At least, and at most.
const KEPT: usize = 64;
const KEPT_AT_MOST: usize = 1024;

/// Where the highest of some blocks ends, and the moment, of those at which it is in use, when most bytes are; none
/// if no block has bytes.
type Highest = Option<(usize, usize)>;

/// As [`place`], by a list without most of its stretches that repeat. None if there are too few of them, or if frames
/// do not come to lie alike.
fn place_few(
    l: &Frames,
    list: &[Instr],
    (blocks, r): (&mut Blocks, Repeats),
    room: Room,
) -> Option<Highest> {
    let of_microbatch = |b: &&Block| matches!(b.frame, Frame::Shared(_, Some(_)));
    let lives = blocks.all.iter().filter(of_microbatch).map(|b| (b.death - b.birth) / l.turn);
    let lives = lives.max().unwrap_or(0).div_ceil(r.length);
    let mut kept = KEPT.max(KEPT_OF_LIVES * lives);
    // More are kept if those between two that lie alike do not go into the rest.
    for _ in 0..2 {
        if r.count < 2 * kept || kept > KEPT_AT_MOST {
            return None;
        }
        let short = r.without(list, kept)?;
        let mut few = self::blocks(l, &short);
        let placed = place_all(&mut few.all, room);
        let between = match r.alike(kept, |k| in_use(l, &few.all, r, k)) {
            Ok(between) => between,
            Err(more) => {
                kept += more?;
                continue;
            }
        };
        let mut offsets = vec![NONE; blocks.all.len()];
        for i in 0..list.len() {
            let stands = few.named_by(r.stands_for(kept, between.clone(), i));
            for (&b, &stands) in blocks.named_by(i).iter().zip(stands) {
                let offset = few.all[stands].offset;
                // A block has one place.
                if ![NONE, offset].contains(&offsets[b]) {
                    return None;
                }
                offsets[b] = offset;
            }
        }
        blocks.all.iter_mut().zip(offsets).for_each(|(b, offset)| b.offset = offset);
        let left_out = (r.count - kept) * r.length;
        let behind = r.first + between.end * r.length;
        let whole = |at: usize| at + if at / l.turn < behind { 0 } else { left_out * l.turn };
        return Some(placed.map(|(end, at)| (end, whole(at))));
    }
    None
}

/// The frames in use before a stretch, as the stretch knows them: with how much later their microbatches are than
/// its own, and where they lie.
fn in_use(l: &Frames, all: &[Block], r: Repeats, k: usize) -> Vec<(usize, Option<i64>, usize)> {
    let at = (r.first + k * r.length) * l.turn;
    let here = all.iter().filter(|b| b.birth < at && at <= b.death);
    let frame = |b: &Block| match b.frame {
        Frame::Shared(f, j) => (f, j.map(|j| j as i64 - (k * r.later) as i64), b.offset),
        Frame::Own(..) => unreachable!("a call's own frames are in use within one instruction"),
    };
    let mut here: Vec<_> = here.map(frame).collect();
    here.sort_unstable();
    here
}

/// As [`place`], all blocks of a list.
fn place_all(blocks: &mut [Block], Room { base, enough, gaps }: Room) -> Highest {
    let piece = |b: &Block| LiveRange { bytes: b.bytes, birth: b.birth, death: b.death };
    let pieces: Vec<LiveRange> = blocks.iter().map(piece).collect();
    let most = most_alive(&pieces);
    let enough = enough.saturating_sub(base).max(most + (base + most) / gaps);
    let (offsets, end) = offsets(&pieces, enough, WORK);
    let at = fullest(&pieces, &offsets, end);
    blocks.iter_mut().zip(offsets).for_each(|(b, offset)| b.offset = base + offset);
    (end > 0).then_some((base + end, at))
}

/// Writes the offsets into the instructions.
fn bind(l: &Frames, list: &mut [Instr], blocks: &Blocks) {
    let mut named = blocks.named.iter().map(|&b| blocks.all[b].offset);
    let mut next = || named.next().expect("every frame of an instruction was named");
    for instr in list {
        match instr {
            Instr::Call(c) => {
                let own: SmallVec<[usize; 8]> =
                    l.scratch[c.func].parts.iter().map(|_| next()).collect();
                c.frames.extend([0, own[0]]);
                for b in &l.bound[c.func] {
                    c.frames.push(match *b {
                        Bound::Shared(_) => next(),
                        Bound::Own(part) => own[part],
                        Bound::Input(o, bytes) => {
                            l.objects[o].offset + c.microbatch.unwrap_or(0) * bytes
                        }
                    });
                }
            }
            Instr::Send(t) | Instr::PostRecv(t) | Instr::Recv(t) => {
                let place = l.places[t.func][t.value];
                let framed = l.frame_of.contains_key(&(t.func, t.value));
                t.offset = place.offset + if framed { next() } else { 0 };
            }
            Instr::Sent { .. } => {}
        }
    }
}

/// Bytes by class at the peak, and the values alive then; in a call's own frames, those of the node where
/// each is fullest. Gaps, of alignment and of first fit, count as temporary.
fn account(l: &Frames, list: &[Instr], alive: &[&Block], peak: usize) -> (ByClass, Vec<Alive>) {
    let mut by: BTreeMap<MemoryClass, usize> = BTreeMap::new();
    let mut live: Vec<Alive> = vec![];
    let one = |(func, value): (usize, Value), copies: usize, class: MemoryClass, bytes: usize| {
        Alive { func, value, class, copies, bytes }
    };
    for o in l.objects.iter().filter(|o| !o.kind.is_framed()) {
        *by.entry(o.class).or_default() += o.bytes;
        live.push(one(o.name, 1, o.class, o.bytes));
    }
    let mut copies: BTreeMap<usize, usize> = BTreeMap::new();
    for b in alive {
        match b.frame {
            Frame::Shared(f, _) => *copies.entry(f).or_default() += 1,
            Frame::Own(i, part) => {
                let Instr::Call(c) = &list[i] else { continue };
                let part = &l.scratch[c.func].parts[part];
                part.at_peak.iter().for_each(|(c, n)| *by.entry(*c).or_default() += n);
                live.extend(part.live.iter().map(|&(v, c2, n)| one((c.func, v), 1, c2, n)));
            }
        }
    }
    for (f, n) in copies {
        for o in l.shared[f].1.iter().map(|&o| &l.objects[o]) {
            *by.entry(o.class).or_default() += n * o.bytes;
            live.push(one(o.name, n, o.class, n * o.bytes));
        }
    }
    let used: usize = by.values().sum();
    *by.entry(MemoryClass::Temporary).or_default() += peak.saturating_sub(used);
    live.sort_by_key(|a| a.class);
    (by.into_iter().collect(), live)
}

/// The largest of them, by name; those of several layers that are alike are one.
fn largest(m: &Module, live: &[Alive]) -> Live {
    // By names that have layer 0 for any.
    let mut groups: BTreeMap<(Name, MemoryClass, usize), (usize, usize)> = BTreeMap::new();
    for x in live {
        let own = m.funcs[x.func].name(x.value);
        let name = Name { layer: own.layer.map(|_| 0), ..own.clone() };
        let of = groups.entry((name, x.class, x.copies)).or_default();
        *of = (of.0 + 1, of.1 + x.bytes);
    }
    let text = |name: &Name| match name.layer {
        Some(_any) => name.to_string().replacen("l0.", "l*.", 1),
        None => name.to_string(),
    };
    let groups: BTreeMap<_, _> = groups
        .into_iter()
        .map(|((name, class, copies), of)| ((text(&name), class, copies), of))
        .collect();
    let named = groups.into_iter().map(|((name, class, copies), (alike, bytes))| {
        let alike = if alike > 1 { format!(" × {alike}") } else { String::new() };
        let copies = if copies > 1 { format!(" of {copies} microbatches") } else { String::new() };
        (format!("{name}{alike}{copies}"), class, bytes)
    });
    let mut named: Live = named.collect();
    named.sort_by(|a, b| b.2.cmp(&a.2).then_with(|| a.0.cmp(&b.0)));
    named.truncate(LISTED);
    named
}

/// The most bytes alive at once in a step.
fn live(l: &Frames, list: &[Instr], blocks: &[Block]) -> usize {
    let whole: usize = l.objects.iter().filter(|o| !o.kind.is_framed()).map(|o| o.bytes).sum();
    // Frames in use, in order of their first and of their last instruction.
    let of_frame = |f: &(usize, Vec<usize>)| f.1.iter().map(|&o| l.objects[o].bytes).sum();
    let bytes: Vec<usize> = l.shared.iter().map(of_frame).collect();
    let counted = |f: &BTreeSet<usize>| f.iter().map(|&f| bytes[f]).sum::<usize>();
    let counted: Vec<usize> = l.counted.iter().map(counted).collect();
    let shared = |b: &&Block| matches!(b.frame, Frame::Shared(..));
    let mut change = vec![0i64; list.len() + 1];
    for b in blocks.iter().filter(shared) {
        let Frame::Shared(f, _) = b.frame else { continue };
        change[b.birth / l.turn] += bytes[f] as i64;
        change[b.death / l.turn + 1] -= bytes[f] as i64;
    }
    let (mut now, mut most) = (0i64, 0usize);
    for (i, instr) in list.iter().enumerate() {
        now += change[i];
        let here = match instr {
            Instr::Call(c) => {
                (now as usize).saturating_sub(counted[c.func]) + l.scratch[c.func].busiest
            }
            // What waits for its receiver may be alive beside what was received.
            Instr::Send(_) | Instr::PostRecv(_) | Instr::Recv(_) | Instr::Sent { .. } => {
                now as usize
            }
        };
        most = most.max(here);
    }
    whole + most
}
