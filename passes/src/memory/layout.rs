//! What is in the frames of every function, and where in them.

use super::lifetimes::{Buffer, Lifetime, Lifetimes, NONE, Object};
use super::pieces::{LiveRange, fullest, most_alive, offsets, padded};
use shardc_ir::func::{Node, Value, ValueMap};
use shardc_ir::maps::HashMap;
use shardc_ir::plan::{FramePlace, MemoryClass};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// Frame of what lives through a step, and of what one call needs for itself, in every function.
pub(super) const WHOLE: u32 = 0;
pub(super) const SCRATCH: u32 = 1;

/// What one call needs for itself.
#[derive(Clone, Debug, Default)]
pub(super) struct Scratch {
    /// The frame that is there for the whole call, and those for some of its nodes.
    pub parts: Vec<CallFrame>,
    /// The most bytes alive at once, with what the call itself makes for others and what it is the
    /// last to use.
    pub busiest: usize,
}

/// A frame of what a call needs for itself.
#[derive(Clone, Debug, Default)]
pub(super) struct CallFrame {
    pub bytes: usize,
    /// The nodes between which it is needed.
    pub within: (usize, usize),
    /// At its fullest node, of those at which it is in use to its end: bytes by class, and values.
    pub at_peak: BTreeMap<MemoryClass, usize>,
    pub live: Vec<(Value, MemoryClass, usize)>,
}

/// The frames of a rank of the pipeline.
#[derive(Debug, Default)]
pub(super) struct Frames {
    pub places: Vec<ValueMap<FramePlace>>,
    pub workspaces: Vec<Vec<FramePlace>>,
    /// Sizes, by function and number of the frame in it.
    pub frames: Vec<Vec<usize>>,
    /// Bytes of what lives through a step.
    pub whole: usize,
    pub objects: Vec<Object>,
    /// Frames of microbatches, and of parts of a step: bytes and objects.
    pub shared: Vec<(usize, Vec<usize>)>,
    /// By function: what stands behind its frames from the third on.
    pub bound: Vec<Vec<Bound>>,
    pub scratch: Vec<Scratch>,
    /// By function and value: the shared frame it lies in.
    pub frame_of: HashMap<(usize, Value), usize>,
    /// By function: frames that it makes or is the last to use.
    pub counted: Vec<BTreeSet<usize>>,
    /// By function and shared frame: the nodes between which a call that makes the frame,
    /// or is the last to use it, needs it.
    pub within: HashMap<(usize, usize), (usize, usize)>,
    /// Moments from one instruction to the next: more than any function has nodes.
    pub turn: usize,
}

/// What a frame of a function is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Bound {
    /// Data, an object: from there one microbatch after the other, of so many bytes.
    Input(usize, usize),
    Shared(usize),
    /// What the call needs for itself for some of its nodes: a part of its own.
    Own(usize),
}

/// What the values of a frame have in common: kind, who makes them, layer, who uses them, whether
/// they are sent, and a number for what is received.
type FrameKey = (Lifetime, Option<usize>, Option<u32>, SmallVec<[usize; 4]>, bool, usize);

/// How frames are laid out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameLayout {
    /// What a layer saves for a microbatch is one frame, and so is what a call needs for itself.
    Together,
    /// What a call needs for itself has a frame for all that begins in one layer and ends in the same one.
    Layers,
    /// Every value has a frame of its own, but for what is small and only a call needs.
    Values,
}

/// Lays out the frames; notes in objects and buffers where they are, in place of where they were.
pub(super) fn layout(l: &mut Lifetimes, way: FrameLayout) -> Frames {
    let (m, funcs) = (l.m, l.funcs);
    let n = m.funcs.len();
    let mut out = Frames {
        places: vec![ValueMap::default(); n],
        workspaces: vec![vec![]; n],
        frames: vec![vec![]; n],
        bound: vec![vec![]; n],
        scratch: vec![Scratch::default(); n],
        counted: vec![BTreeSet::new(); n],
        turn: m.funcs.iter().map(|f| f.nodes.len()).max().unwrap_or(0) + 2,
        ..Frames::default()
    };
    share(l, way == FrameLayout::Values, &mut out);
    for &f in funcs {
        scratch(l, f, way, &mut out);
        function(l, f, &mut out);
    }
    out.objects = l.objects.clone();
    out
}

/// Offsets of what lives through a step, and the frames that objects share.
fn share(l: &mut Lifetimes, apart: bool, out: &mut Frames) {
    // What one layer makes, used by the same functions and sent or not, is one frame: so frames
    // of like layers have one size, and one fits where another was.
    let mut groups: HashMap<FrameKey, usize> = HashMap::default();
    for o in 0..l.objects.len() {
        let kept = l.users[o].iter().any(|&f| Some(f) != l.makers[o]);
        if !l.objects[o].kind.is_framed() {
            l.objects[o].offset = padded(out.whole);
            out.whole = padded(out.whole) + l.objects[o].bytes;
            continue;
        }
        // What is received for one function alone is a buffer of the transfer.
        let received = l.makers[o].is_none() && l.users[o].len() == 1;
        if l.objects[o].kind == Lifetime::Micro && (received || !kept) {
            l.objects[o].class = MemoryClass::CollectiveBuffer;
        }
        let users = l.users[o].clone();
        let (f, v) = l.objects[o].name;
        let layer = l.m.funcs[f].name(v).layer;
        let kind = l.objects[o].kind;
        let together = kind == Lifetime::Micro && l.makers[o].is_some() && !apart;
        let alone = if together { 0 } else { o };
        let key = (kind, l.makers[o], layer, users, l.offered[o], alone);
        let frame = *groups.entry(key).or_insert_with(|| {
            out.shared.push((0, vec![]));
            out.shared.len() - 1
        });
        let (bytes, members) = &mut out.shared[frame];
        (l.objects[o].frame, l.objects[o].offset) = (frame, padded(*bytes));
        *bytes = padded(*bytes) + l.objects[o].bytes;
        members.push(o);
    }
}

/// Where the values of a function lie, and its frames.
fn function(l: &mut Lifetimes, f: usize, out: &mut Frames) {
    let func = &l.m.funcs[f];
    let parts = &out.scratch[f].parts;
    let mut frames = vec![out.whole, parts[0].bytes];
    let mut bound: Vec<Bound> = vec![];
    let mut numbers: HashMap<Bound, u32> = HashMap::default();
    let mut number = |b: Bound, bytes: usize| {
        *numbers.entry(b).or_insert_with(|| {
            bound.push(b);
            frames.push(bytes);
            frames.len() as u32 - 1
        })
    };
    let mut own = |b: &Buffer, bytes: usize| {
        let frame = match b.part {
            0 => SCRATCH,
            part => number(Bound::Own(part), parts[part].bytes),
        };
        FramePlace { frame, offset: b.offset, bytes }
    };
    let buffer = |v: Value| match l.of[f][v] {
        NONE => None, // only its type is asked for
        _ => Some(&l.buffers[f][l.root(f, v)]),
    };
    let mut places = func.per_value(FramePlace::default());
    // In the order of the text, so that a plan that is read has the frames of the one that was made.
    let outs = func.nodes.iter().flat_map(|n| &n.outs).copied();
    let order: Vec<Value> = func.args.iter().map(|a| a.value).chain(outs).collect();
    for &v in &order {
        let Some(b) = buffer(v).filter(|b| b.object.is_none()) else { continue };
        places[v] = own(b, l.bytes(f, v));
    }
    let work = l.work[f].iter().map(|&b| match b {
        NONE => FramePlace::default(),
        b => own(&l.buffers[f][b], l.buffers[f][b].bytes),
    });
    out.workspaces[f] = work.collect();
    for value in order {
        let Some(b) = buffer(value) else { continue };
        let Some(i) = b.object else { continue };
        let o = &l.objects[i];
        let bytes = l.bytes(f, value);
        places[value] = match o.kind {
            Lifetime::Whole => FramePlace { frame: WHOLE, offset: o.offset, bytes },
            Lifetime::Input => {
                let frame = number(Bound::Input(i, b.bytes), b.bytes);
                FramePlace { frame, offset: 0, bytes: bytes.min(o.bytes) }
            }
            Lifetime::Micro | Lifetime::Part => {
                out.frame_of.insert((f, value), o.frame);
                let frame = number(Bound::Shared(o.frame), out.shared[o.frame].0);
                FramePlace { frame, offset: o.offset, bytes }
            }
        };
    }
    (out.places[f], out.frames[f], out.bound[f]) = (places, frames, bound);
}

/// Places of what only this call needs.
fn scratch(l: &mut Lifetimes, f: usize, way: FrameLayout, out: &mut Frames) {
    let busiest = busiest(l, f, out);
    let is_scratch = |b: &Buffer| b.into.is_none() && b.object.is_none() && b.bytes > 0;
    let mut order: Vec<usize> =
        (0..l.buffers[f].len()).filter(|&b| is_scratch(&l.buffers[f][b])).collect();
    order.sort_by_key(|&b| (l.buffers[f][b].birth, b));
    let mut members = vec![vec![]];
    match way {
        FrameLayout::Together => members[0] = order,
        _cut => by_layers(l, f, &order, (busiest, way), &mut members),
    }
    let mut parts = vec![];
    for (number, members) in members.iter().enumerate() {
        let piece = |&b: &usize| {
            let Buffer { bytes, birth, death, .. } = l.buffers[f][b];
            LiveRange { bytes, birth, death }
        };
        let pieces: Vec<LiveRange> = members.iter().map(piece).collect();
        let most = most_alive(&pieces);
        let enough = most + most * SLACK / 100;
        let (offsets, bytes) = offsets(&pieces, enough, WORK);
        let at = fullest(&pieces, &offsets, bytes);
        let mut part = CallFrame { bytes, within: (0, out.turn - 1), ..CallFrame::default() };
        if number > 0 {
            let [births, deaths] = [|p: &LiveRange| p.birth, |p: &LiveRange| p.death];
            let first = pieces.iter().map(births).min().expect("a part has members");
            part.within = (first, pieces.iter().map(deaths).max().expect("as above"));
        }
        for (&b, offset) in members.iter().zip(offsets) {
            let b = &mut l.buffers[f][b];
            (b.part, b.offset) = (number, offset);
            if b.birth <= at && b.death >= at {
                *part.at_peak.entry(b.class).or_default() += b.bytes;
                part.live.push((b.name, b.class, b.bytes));
            }
        }
        parts.push(part);
    }
    out.scratch[f] = Scratch { parts, busiest };
}

/// The most bytes of a function's buffers that are alive at once, but for what lives through the step
/// and what others have made that lives on. Notes the nodes between which each frame is needed.
fn busiest(l: &Lifetimes, f: usize, out: &mut Frames) -> usize {
    let end = l.m.funcs[f].nodes.len() + 1;
    // Bytes that begin to live (or end, negative) at each node.
    let mut change = vec![0i64; end + 2];
    for b in l.buffers[f].iter().filter(|b| b.into.is_none()) {
        if let Some(o) = b.object {
            if !l.objects[o].kind.is_framed() {
                continue;
            }
            let frame = l.objects[o].frame;
            let within = out.within.entry((f, frame)).or_insert((b.birth, 0));
            *within = (within.0.min(b.birth), within.1.max(b.death.min(end)));
            if l.makers[o] != Some(f) && b.death == NONE {
                continue;
            }
            out.counted[f].insert(frame);
        }
        change[b.birth] += b.bytes as i64;
        change[b.death.min(end) + 1] -= b.bytes as i64;
    }
    let live = change.iter().scan(0, |sum, c| {
        *sum += c;
        Some(*sum)
    });
    live.max().unwrap_or(0).max(0) as usize
}

/// What is less than one in so many of the busiest node's bytes gets no frame of its own.
const FINE: usize = 2048;
/// Percent of gaps above which there is a search for a better layout, and comparisons that one within a
/// frame may cost.
pub(super) const SLACK: usize = 2;
const WORK: usize = 1 << 20;

/// Buffers, in order of birth, that begin in one layer and end in the same one, alike: so what
/// one layer needs may lie where what another has saved was. What is small lies in the first part.
fn by_layers(
    l: &Lifetimes,
    f: usize,
    order: &[usize],
    (busiest, way): (usize, FrameLayout),
    parts: &mut Vec<Vec<usize>>,
) {
    let func = &l.m.funcs[f];
    // By node, the number of the run of nodes of one layer in which it stands.
    let mut runs: Vec<usize> = vec![0];
    for (i, n) in func.nodes.iter().enumerate() {
        let layer = |n: &Node| func.scope_info(n.scope).layer;
        let new = i > 0 && layer(n) != layer(&func.nodes[i - 1]);
        runs.push(runs[i] + usize::from(new));
    }
    let run = |at: usize| runs[at.min(runs.len() - 1)];
    // With the buffer itself, if it is alone.
    let key = |b: usize| {
        let Buffer { bytes, birth, death, .. } = l.buffers[f][b];
        (
            run(birth),
            run(death),
            Some(b).filter(|_| way == FrameLayout::Values && bytes * FINE >= busiest),
        )
    };
    let mut bytes: HashMap<_, usize> = HashMap::default();
    for &b in order {
        *bytes.entry(key(b)).or_default() += l.buffers[f][b].bytes;
    }
    let mut numbers: HashMap<_, usize> = HashMap::default();
    for &b in order {
        let part = match bytes[&key(b)] * FINE < busiest {
            true => 0,
            false => *numbers.entry(key(b)).or_insert_with(|| {
                parts.push(vec![]);
                parts.len() - 1
            }),
        };
        parts[part].push(b);
    }
}
