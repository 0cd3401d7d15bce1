//! Where every frame lies in the arena, from which instruction to which.

use super::layout::{Bound, FreeList, Kind, Layout, padded};
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
    /// Of a microbatch (or, between stages at step scope, of none).
    Micro(usize, Option<usize>),
    /// What the call that is instruction `i` needs for itself.
    Scratch(usize),
}

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
        place(list);
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
    for o in l.objects.iter().filter(|o| o.kind != Kind::Micro) {
        *whole.entry(o.class).or_default() += o.bytes;
    }
    let whole = whole.into_iter().collect();
    let spans = blocks[0].iter().filter(|b| b.bytes > 0).map(|b| span(l, b)).collect();
    let found = Found { peak_bytes: bytes, at_peak, live_at_peak, live_bytes, whole, spans };
    (step, evaluation, found)
}

fn span(l: &Layout, b: &Block) -> Span {
    let class = match b.frame {
        Frame::Micro(f, _) => l.objects[l.micro[f].1[0]].class,
        Frame::Scratch(_) => Class::Temporary,
    };
    Span { first: b.birth, last: b.death, offset: b.offset, bytes: b.bytes, class }
}

/// The frames of a list and the instructions between which they are in use.
fn blocks(l: &Layout, list: &[Instr]) -> Vec<Block> {
    let mut at: HashMap<Frame, usize> = HashMap::new();
    let mut out: Vec<Block> = vec![];
    let mut offers: BTreeMap<usize, VecDeque<Frame>> = BTreeMap::new();
    let mut touch = |frame: Frame, bytes: usize, i: usize| {
        let b = *at.entry(frame).or_insert_with(|| {
            out.push(Block { frame, bytes, birth: i, death: i, offset: 0 });
            out.len() - 1
        });
        out[b].death = i;
    };
    for (i, instr) in list.iter().enumerate() {
        match instr {
            Instr::Call(c) => {
                touch(Frame::Scratch(i), l.scratch[c.func].bytes, i);
                for b in &l.bound[c.func] {
                    if let Bound::Micro(f) = *b {
                        touch(Frame::Micro(f, c.microbatch), l.micro[f].0, i);
                    }
                }
            }
            Instr::Send(t) | Instr::Recv(t) => {
                let Some(&f) = l.frame_of.get(&(t.func, t.value)) else { continue };
                let frame = Frame::Micro(f, t.microbatch);
                touch(frame, l.micro[f].0, i);
                if matches!(instr, Instr::Send(_)) {
                    offers.entry(t.with).or_default().push_back(frame);
                }
            }
            Instr::Sent { to } => {
                if let Some(frame) = offers.get_mut(to).and_then(VecDeque::pop_front) {
                    touch(frame, 0, i);
                }
            }
        }
    }
    out
}

/// Blocks beyond which only the fast way is tried.
const MANY: usize = 4096;

/// Gives blocks their offsets: in order of birth, or the long-lived first, whichever needs less.
fn place(blocks: &mut [Block]) {
    by_birth(blocks);
    if blocks.len() > MANY {
        return;
    }
    let top = |all: &[Block]| all.iter().map(|b| b.offset + b.bytes).max().unwrap_or(0);
    let (first, before) = (top(blocks), blocks.iter().map(|b| b.offset).collect::<Vec<_>>());
    by_length(blocks);
    if top(blocks) >= first {
        blocks.iter_mut().zip(before).for_each(|(b, offset)| b.offset = offset);
    }
}

/// Lowest fit, what lives longest first.
fn by_length(blocks: &mut [Block]) {
    let mut order: Vec<usize> = (0..blocks.len()).filter(|&b| blocks[b].bytes > 0).collect();
    let length = |b: &Block| b.death - b.birth;
    order.sort_by_key(|&b| std::cmp::Reverse((length(&blocks[b]), blocks[b].bytes)));
    // Placed blocks by offset.
    let mut placed: Vec<usize> = vec![];
    for b in order {
        let (birth, death) = (blocks[b].birth, blocks[b].death);
        let size = padded(blocks[b].bytes);
        let mut at = 0;
        for other in placed.iter().map(|&p| &blocks[p]) {
            if other.birth <= death && other.death >= birth {
                if other.offset >= at + size {
                    break;
                }
                at = at.max(other.offset + padded(other.bytes));
            }
        }
        blocks[b].offset = at;
        let i = placed.partition_point(|&p| blocks[p].offset <= at);
        placed.insert(i, b);
    }
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
                c.frames.extend([0, at[&Frame::Scratch(i)]]);
                for b in &l.bound[c.func] {
                    c.frames.push(match *b {
                        Bound::Micro(f) => at[&Frame::Micro(f, c.microbatch)],
                        Bound::Input(o, bytes) => {
                            l.objects[o].offset + c.microbatch.unwrap_or(0) * bytes
                        }
                    });
                }
            }
            Instr::Send(t) | Instr::Recv(t) => {
                let place = l.places[t.func][t.value.0 as usize];
                let frame = l.frame_of.get(&(t.func, t.value));
                let base = frame.map_or(0, |&f| at[&Frame::Micro(f, t.microbatch)]);
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
    for o in l.objects.iter().filter(|o| o.kind != Kind::Micro) {
        *by.entry(o.class).or_default() += o.bytes;
        live.push((name(o.name.0, o.name.1), o.class, o.bytes));
    }
    let mut copies: BTreeMap<usize, usize> = BTreeMap::new();
    for b in alive {
        match b.frame {
            Frame::Micro(f, _) => *copies.entry(f).or_default() += 1,
            Frame::Scratch(i) => {
                let Instr::Call(c) = &list[i] else { continue };
                let s = &l.scratch[c.func];
                s.at_peak.iter().for_each(|(c, n)| *by.entry(*c).or_default() += n);
                live.extend(s.live.iter().map(|&(v, c2, n)| (name(c.func, v), c2, n)));
            }
        }
    }
    for (f, n) in copies {
        for o in l.micro[f].1.iter().map(|&o| &l.objects[o]) {
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
    let whole: usize = l.objects.iter().filter(|o| o.kind != Kind::Micro).map(|o| o.bytes).sum();
    // Frames in use, in order of their first and of their last instruction.
    let bytes = |f: usize| l.micro[f].1.iter().map(|&o| l.objects[o].bytes).sum::<usize>();
    let micro = |b: &&Block| matches!(b.frame, Frame::Micro(..));
    let mut change = vec![0i64; list.len() + 1];
    for b in blocks.iter().filter(micro) {
        let Frame::Micro(f, _) = b.frame else { continue };
        change[b.birth] += bytes(f) as i64;
        change[b.death + 1] -= bytes(f) as i64;
    }
    let (mut now, mut most) = (0i64, 0usize);
    for (i, instr) in list.iter().enumerate() {
        now += change[i];
        let Instr::Call(c) = instr else { continue };
        let counted: usize = l.counted[c.func].iter().map(|&f| bytes(f)).sum();
        let here = (now as usize).saturating_sub(counted) + l.scratch[c.func].busiest;
        most = most.max(here);
    }
    whole + most
}
