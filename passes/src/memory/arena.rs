//! Where every frame lies in the arena, from which instruction to which.

use super::free::FreeList;
use super::layout::{Bound, Layout};
use super::lifetimes::Kind;
use super::pieces::padded;
use crate::step::instructions::Lists;
use shardc_ir::func::Module;
use shardc_ir::plan::{Class, Instr, Span};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

/// What is known of a whole arena.
pub(super) struct Found {
    pub peak_bytes: usize,
    pub at_peak: ByClass,
    pub live_at_peak: Live,
    pub live_bytes: usize,
    pub whole: ByClass,
    pub spans: Vec<Span>,
}

/// Bytes by class.
type ByClass = Vec<(Class, usize)>;
/// Values with their class and bytes.
type Live = Vec<(String, Class, usize)>;

/// A frame in use.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
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

/// Fills in the offsets of both lists.
pub(super) fn arena(m: &Module, l: &Layout, lists: Lists) -> (Vec<Instr>, Vec<Instr>, Found) {
    let Lists { mut step, mut evaluation } = lists;
    let base = padded(l.whole);
    let mut blocks = [blocks(l, &step), blocks(l, &evaluation)];
    let mut peak = (l.whole, None);
    for (which, list) in blocks.iter_mut().enumerate() {
        place(list, l.turn);
        for b in list.iter_mut() {
            b.offset += base;
            if b.bytes > 0 && b.offset + b.bytes > peak.0 {
                peak = (b.offset + b.bytes, Some((which, b.birth)));
            }
        }
    }
    bind(l, &mut step, &blocks[0]);
    bind(l, &mut evaluation, &blocks[1]);
    let (bytes, at) = peak;
    let alive: Vec<&Block> = match at {
        None => vec![],
        Some((which, t)) => blocks[which].iter().filter(|b| b.birth <= t && b.death >= t).collect(),
    };
    let list = if at.is_some_and(|a| a.0 == 1) { &evaluation } else { &step };
    let (at_peak, live_at_peak) = account(m, l, list, &alive, bytes);
    let live_bytes = live(l, &step, &blocks[0]);
    let mut whole: BTreeMap<Class, usize> = BTreeMap::new();
    for o in l.objects.iter().filter(|o| !o.kind.is_framed()) {
        *whole.entry(o.class).or_default() += o.bytes;
    }
    let whole = whole.into_iter().collect();
    let spans = blocks[0].iter().filter(|b| b.bytes > 0).map(|b| span(l, b)).collect();
    let found = Found { peak_bytes: bytes, at_peak, live_at_peak, live_bytes, whole, spans };
    (step, evaluation, found)
}

fn span(l: &Layout, b: &Block) -> Span {
    let class = match b.frame {
        Frame::Shared(f, _) => l.objects[l.shared[f].1[0]].class,
        Frame::Own(..) => Class::Temporary,
    };
    let (first, last) = (b.birth / l.turn, b.death / l.turn);
    Span { first, last, offset: b.offset, bytes: b.bytes, class }
}

/// A shared frame as a call of a microbatch knows it.
fn shared(l: &Layout, f: usize, microbatch: Option<usize>) -> Frame {
    let micro = l.objects[l.shared[f].1[0]].kind == Kind::Micro;
    Frame::Shared(f, microbatch.filter(|_| micro))
}

/// The frames of a list and the moments between which they are in use.
fn blocks(l: &Layout, list: &[Instr]) -> Vec<Block> {
    let mut at: HashMap<Frame, usize> = HashMap::new();
    let mut out: Vec<Block> = vec![];
    let mut offers: BTreeMap<usize, VecDeque<Frame>> = BTreeMap::new();
    let mut touch = |frame: Frame, bytes: usize, i: usize, (first, last): (usize, usize)| {
        let b = *at.entry(frame).or_insert_with(|| {
            out.push(Block { frame, bytes, birth: i * l.turn + first, death: 0, offset: 0 });
            out.len() - 1
        });
        out[b].death = i * l.turn + last;
    };
    let all = (0, l.turn - 1);
    for (i, instr) in list.iter().enumerate() {
        match instr {
            Instr::Call(c) => {
                for (number, part) in l.scratch[c.func].parts.iter().enumerate() {
                    touch(Frame::Own(i, number), part.bytes, i, part.within);
                }
                for b in &l.bound[c.func] {
                    if let Bound::Shared(f) = *b {
                        let within = l.within.get(&(c.func, f)).copied().unwrap_or(all);
                        touch(shared(l, f, c.microbatch), l.shared[f].0, i, within);
                    }
                }
            }
            Instr::Send(t) | Instr::Recv(t) => {
                let Some(&f) = l.frame_of.get(&(t.func, t.value)) else { continue };
                let frame = shared(l, f, t.microbatch);
                touch(frame, l.shared[f].0, i, all);
                if matches!(instr, Instr::Send(_)) {
                    offers.entry(t.with).or_default().push_back(frame);
                }
            }
            Instr::Sent { to } => {
                if let Some(frame) = offers.get_mut(to).and_then(VecDeque::pop_front) {
                    touch(frame, 0, i, all);
                }
            }
        }
    }
    out
}

/// Blocks beyond which only the fast way is tried.
const MANY: usize = 8192;
/// Comparisons of two blocks that looking for a better order may cost, and most orders looked at.
const WORK: usize = 1 << 24;
const ROUNDS: usize = 200;

/// Gives blocks their offsets. Several orders are tried, and the one that needs least is kept. If
/// none comes close to what is alive at once, what lies highest is placed first, again and again.
fn place(blocks: &mut [Block], turn: usize) {
    by_birth(blocks);
    let count = blocks.iter().filter(|b| b.bytes > 0).count();
    if count > MANY || count == 0 {
        return;
    }
    let length = |b: &Block| b.death - b.birth + 1;
    let sorted = |key: &dyn Fn(&Block) -> (usize, usize), blocks: &[Block]| {
        let mut order: Vec<usize> = (0..blocks.len()).filter(|&b| blocks[b].bytes > 0).collect();
        order.sort_by_key(|&b| std::cmp::Reverse(key(&blocks[b])));
        order
    };
    let early = |b: &Block| usize::MAX - b.birth;
    let orders = [
        sorted(&|b| (length(b), b.bytes), blocks),
        sorted(&|b| (b.bytes, early(b)), blocks),
        sorted(&|b| (b.bytes.saturating_mul(length(b)), early(b)), blocks),
        sorted(&|b| (early(b), b.bytes), blocks),
        sorted(&|b| (b.death, b.bytes), blocks),
    ];
    let enough = most_alive(blocks) / 100 * 102;
    let beside = Beside::of(blocks, turn);
    let cost = beside.cost(blocks).max(1);
    let offsets = |all: &[Block]| all.iter().map(|b| b.offset).collect::<Vec<_>>();
    let mut best = (top(blocks), offsets(blocks));
    'orders: for mut order in orders {
        for _ in 0..ROUNDS.min(WORK / cost).max(1) {
            let now = lowest(blocks, &order, &beside);
            if now < best.0 {
                best = (now, offsets(blocks));
            }
            if best.0 <= enough {
                break 'orders;
            }
            let reaches = |b: &usize| blocks[*b].offset + padded(blocks[*b].bytes) >= now;
            order.sort_by_key(|b| !reaches(b));
        }
    }
    blocks.iter_mut().zip(best.1).for_each(|(b, offset)| b.offset = offset);
}

fn top(blocks: &[Block]) -> usize {
    blocks.iter().map(|b| b.offset + padded(b.bytes)).max().unwrap_or(0)
}

/// The most bytes of blocks that are alive at one moment.
fn most_alive(blocks: &[Block]) -> usize {
    let mut changes: Vec<(usize, bool, usize)> = vec![];
    for b in blocks {
        // What begins at a moment is there before what ends at it is gone.
        changes.extend([(b.birth, false, padded(b.bytes)), (b.death, true, padded(b.bytes))]);
    }
    changes.sort();
    let (mut now, mut most) = (0, 0);
    for (_, ends, bytes) in changes {
        now = if ends { now - bytes } else { now + bytes };
        most = most.max(now);
    }
    most
}

/// Blocks beside which a block may be alive.
struct Beside {
    turn: usize,
    /// By instruction, those that are in use at some moment of it.
    at: Vec<Vec<usize>>,
}

impl Beside {
    fn of(blocks: &[Block], turn: usize) -> Beside {
        let last = blocks.iter().map(|b| b.death / turn).max().unwrap_or(0);
        let mut at = vec![vec![]; last + 1];
        for (i, b) in blocks.iter().enumerate().filter(|b| b.1.bytes > 0) {
            (b.birth / turn..=b.death / turn).for_each(|instr| at[instr].push(i));
        }
        Beside { turn, at }
    }

    /// Most blocks are there for one instruction: few others are then.
    fn few(&self, b: &Block) -> Option<&[usize]> {
        let instr = b.birth / self.turn;
        (instr == b.death / self.turn).then(|| &*self.at[instr])
    }

    /// About the comparisons that placing all of them takes.
    fn cost(&self, blocks: &[Block]) -> usize {
        let all = blocks.iter().filter(|b| b.bytes > 0);
        all.map(|b| self.few(b).map_or(blocks.len(), |few| few.len())).sum()
    }
}

/// Gives each block the lowest place that is free while it lives; the end of the highest.
fn lowest(blocks: &mut [Block], order: &[usize], beside: &Beside) -> usize {
    // Placed blocks by offset.
    let mut placed: Vec<usize> = vec![];
    let mut is_placed = vec![false; blocks.len()];
    let mut few: Vec<usize> = vec![];
    for &b in order {
        let (birth, death) = (blocks[b].birth, blocks[b].death);
        let size = padded(blocks[b].bytes);
        let others = match beside.few(&blocks[b]) {
            Some(all) => {
                few.clear();
                few.extend(all.iter().filter(|p| is_placed[**p]));
                few.sort_unstable_by_key(|&p| (blocks[p].offset, p));
                &few
            }
            None => &placed,
        };
        let mut at = 0;
        for other in others.iter().map(|&p| &blocks[p]) {
            if other.birth <= death && other.death >= birth {
                if other.offset >= at + size {
                    break;
                }
                at = at.max(other.offset + padded(other.bytes));
            }
        }
        blocks[b].offset = at;
        is_placed[b] = true;
        let i = placed.partition_point(|&p| blocks[p].offset <= at);
        placed.insert(i, b);
    }
    top(blocks)
}

/// First fit in order of birth; of what begins together, what lives longest lies lowest.
fn by_birth(blocks: &mut [Block]) {
    let mut order: Vec<usize> = (0..blocks.len()).collect();
    order.sort_by_key(|&b| (blocks[b].birth, std::cmp::Reverse(blocks[b].death), b));
    let mut free = FreeList::default();
    let mut dying: BTreeSet<(usize, usize)> = BTreeSet::new();
    for b in order {
        while let Some(&(death, d)) = dying.first().filter(|x| x.0 < blocks[b].birth) {
            dying.remove(&(death, d));
            free.give(blocks[d].offset, padded(blocks[d].bytes));
        }
        if blocks[b].bytes > 0 {
            blocks[b].offset = free.take(padded(blocks[b].bytes));
            dying.insert((blocks[b].death, b));
        }
    }
}

/// Writes the offsets into the instructions.
fn bind(l: &Layout, list: &mut [Instr], blocks: &[Block]) {
    let at: HashMap<Frame, usize> = blocks.iter().map(|b| (b.frame, b.offset)).collect();
    for (i, instr) in list.iter_mut().enumerate() {
        match instr {
            Instr::Call(c) => {
                c.frames.extend([0, at[&Frame::Own(i, 0)]]);
                for b in &l.bound[c.func] {
                    c.frames.push(match *b {
                        Bound::Shared(f) => at[&shared(l, f, c.microbatch)],
                        Bound::Own(part) => at[&Frame::Own(i, part)],
                        Bound::Input(o, bytes) => {
                            l.objects[o].offset + c.microbatch.unwrap_or(0) * bytes
                        }
                    });
                }
            }
            Instr::Send(t) | Instr::Recv(t) => {
                let place = l.places[t.func][t.value.0 as usize];
                let frame = l.frame_of.get(&(t.func, t.value));
                let base = frame.map_or(0, |&f| at[&shared(l, f, t.microbatch)]);
                t.offset = base + place.offset;
            }
            Instr::Sent { .. } => {}
        }
    }
}

/// Bytes by class at the peak, and the largest values alive then. Gaps, of alignment and of first
/// fit, count as temporary.
fn account(
    m: &Module,
    l: &Layout,
    list: &[Instr],
    alive: &[&Block],
    peak: usize,
) -> (ByClass, Live) {
    let mut by: BTreeMap<Class, usize> = BTreeMap::new();
    let mut live: Vec<(String, Class, usize)> = vec![];
    let name = |f: usize, v| m.funcs[f].name(v).to_string();
    for o in l.objects.iter().filter(|o| !o.kind.is_framed()) {
        *by.entry(o.class).or_default() += o.bytes;
        live.push((name(o.name.0, o.name.1), o.class, o.bytes));
    }
    let mut copies: BTreeMap<usize, usize> = BTreeMap::new();
    for b in alive {
        match b.frame {
            Frame::Shared(f, _) => *copies.entry(f).or_default() += 1,
            Frame::Own(i, part) => {
                let Instr::Call(c) = &list[i] else { continue };
                let part = &l.scratch[c.func].parts[part];
                part.at_peak.iter().for_each(|(c, n)| *by.entry(*c).or_default() += n);
                live.extend(part.live.iter().map(|&(v, c2, n)| (name(c.func, v), c2, n)));
            }
        }
    }
    for (f, n) in copies {
        for o in l.shared[f].1.iter().map(|&o| &l.objects[o]) {
            *by.entry(o.class).or_default() += n * o.bytes;
            let name = name(o.name.0, o.name.1);
            let name = if n > 1 { format!("{name} of {n} microbatches") } else { name };
            live.push((name, o.class, n * o.bytes));
        }
    }
    let used: usize = by.values().sum();
    *by.entry(Class::Temporary).or_default() += peak.saturating_sub(used);
    live.sort_by(|a, b| b.2.cmp(&a.2).then_with(|| a.0.cmp(&b.0)));
    live.truncate(LISTED);
    (by.into_iter().collect(), live)
}

/// The most bytes alive at once in a step.
fn live(l: &Layout, list: &[Instr], blocks: &[Block]) -> usize {
    let whole: usize = l.objects.iter().filter(|o| !o.kind.is_framed()).map(|o| o.bytes).sum();
    // Frames in use, in order of their first and of their last instruction.
    let bytes = |f: usize| l.shared[f].1.iter().map(|&o| l.objects[o].bytes).sum::<usize>();
    let shared = |b: &&Block| matches!(b.frame, Frame::Shared(..));
    let mut change = vec![0i64; list.len() + 1];
    for b in blocks.iter().filter(shared) {
        let Frame::Shared(f, _) = b.frame else { continue };
        change[b.birth / l.turn] += bytes(f) as i64;
        change[b.death / l.turn + 1] -= bytes(f) as i64;
    }
    let (mut now, mut most) = (0i64, 0usize);
    for (i, instr) in list.iter().enumerate() {
        now += change[i];
        let here = match instr {
            Instr::Call(c) => {
                let counted: usize = l.counted[c.func].iter().map(|&f| bytes(f)).sum();
                (now as usize).saturating_sub(counted) + l.scratch[c.func].busiest
            }
            // What waits for its receiver may be alive beside what was received.
            Instr::Send(_) | Instr::Recv(_) | Instr::Sent { .. } => now as usize,
        };
        most = most.max(here);
    }
    whole + most
}
