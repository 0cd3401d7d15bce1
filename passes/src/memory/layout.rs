//! What is in the frames of every function, and where in them.

use super::free::FreeList;
use crate::step::instructions::Lists;
use shardc_ir::func::{Func, Module, Node, Role, RoleKind, Value};
use shardc_ir::group::{Launch, launches};
use shardc_ir::mesh::Mesh;
use shardc_ir::plan::{ALIGN, Class, Instr, Place};
use shardc_ir::types::DType;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Frame of what lives through a step, and of what one call needs for itself, in every function.
pub(super) const WHOLE: u32 = 0;
pub(super) const SCRATCH: u32 = 1;

/// A value that outlives a call.
#[derive(Clone, Debug)]
pub(super) struct Object {
    pub kind: Kind,
    pub bytes: usize,
    pub class: Class,
    /// A function and the value's name there.
    pub name: (usize, Value),
    /// Offset in its frame; in the arena, if it lives through a step.
    pub offset: usize,
    /// Its frame, if it has one.
    pub frame: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Kind {
    /// Lives through a step.
    Whole,
    /// A step's data, one microbatch after the other.
    Input,
    /// Belongs to a microbatch.
    Micro,
    /// Lives from who makes it to who uses it last.
    Part,
}

impl Kind {
    /// True if it lies in a frame with others like it.
    pub fn is_framed(self) -> bool {
        matches!(self, Kind::Micro | Kind::Part)
    }
}

/// What one call needs for itself.
#[derive(Clone, Debug, Default)]
pub(super) struct Scratch {
    pub bytes: usize,
    /// At the node with the highest place: bytes by class, and values.
    pub at_peak: BTreeMap<Class, usize>,
    pub live: Vec<(Value, Class, usize)>,
    /// The most bytes alive at once, with what the call itself makes for others and what it is the
    /// last to use.
    pub busiest: usize,
}

/// The frames of a rank of the pipeline.
#[derive(Debug, Default)]
pub(super) struct Layout {
    pub places: Vec<Vec<Place>>,
    pub workspaces: Vec<Vec<Place>>,
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
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Bound {
    /// Data, an object: from there one microbatch after the other, of so many bytes.
    Input(usize, usize),
    Shared(usize),
}

/// A piece of memory and its life, in node positions of one function.
struct Buffer {
    bytes: usize,
    birth: usize,
    death: usize,
    class: Class,
    name: Value,
    object: Option<usize>,
    offset: usize,
    /// Merged into another buffer.
    into: Option<usize>,
}

const NONE: usize = usize::MAX;

/// What the values of a frame have in common: kind, who makes them, layer, who uses them, whether they are
/// sent, and a number for what is received.
type Group = (Kind, Option<usize>, Option<u32>, Vec<usize>, bool, usize);

struct Planner<'a> {
    m: &'a Module,
    microbatches: usize,
    funcs: &'a [usize],
    looped: HashSet<usize>,
    /// Values that are offered to other ranks.
    sent: HashSet<(usize, Value)>,
    /// The last function that takes a role, as a position in `funcs`.
    last_user: HashMap<&'a Role, usize>,
    /// The same for an object: that of all its roles.
    last: Vec<usize>,
    /// Stages whose functions take a role, and those that take an object.
    role_stages: HashMap<&'a Role, BTreeSet<&'a str>>,
    stages: Vec<BTreeSet<&'a str>>,
    by_role: HashMap<&'a Role, usize>,
    /// Roles whose value a function adds to.
    summed: HashSet<&'a Role>,
    objects: Vec<Object>,
    /// By object: who makes it, who uses it, and whether it is sent.
    makers: Vec<Option<usize>>,
    users: Vec<BTreeSet<usize>>,
    offered: Vec<bool>,
    /// By function.
    launches: Vec<Vec<Launch>>,
    buffers: Vec<Vec<Buffer>>,
    of: Vec<Vec<usize>>,
    work: Vec<Vec<usize>>,
    apart: bool,
    /// Names of parameters of which a cast is used.
    cast: HashSet<&'a str>,
}

/// Lays out the frames. `apart`: every value that a microbatch keeps has a frame of its own.
pub(super) fn layout(
    m: &Module,
    microbatches: usize,
    funcs: &[usize],
    lists: &Lists,
    apart: bool,
) -> Layout {
    let (mut last_user, mut role_stages) = (HashMap::new(), HashMap::new());
    for (i, &f) in funcs.iter().enumerate() {
        for a in &m.funcs[f].args {
            if let Some(r) = &a.role {
                last_user.insert(r, i);
                let stage = m.funcs[f].name.rsplit_once('.').map_or("", |n| n.1);
                role_stages.entry(r).or_insert_with(BTreeSet::new).insert(stage);
            }
        }
    }
    let mut summed = HashSet::new();
    for &f in funcs {
        let taken: HashSet<&Role> =
            m.funcs[f].args.iter().filter_map(|a| a.role.as_ref()).collect();
        let made = m.funcs[f].results.iter().filter_map(|r| r.role.as_ref());
        summed.extend(made.filter(|r| taken.contains(r)));
    }
    let (mut looped, mut sent) = (HashSet::new(), HashSet::new());
    for i in lists.step.iter().chain(&lists.evaluation) {
        match i {
            Instr::Call(c) if c.microbatch.is_some() => drop(looped.insert(c.func)),
            Instr::Send(t) => drop(sent.insert((t.func, t.value))),
            Instr::Call(_) | Instr::Sent { .. } | Instr::Recv(_) => {}
        }
    }
    // Weights that are a cast of what is stored.
    let ports = funcs.iter().flat_map(|&f| m.funcs[f].results.iter().map(move |r| (f, r)));
    let cast = ports.filter_map(|(f, r)| {
        let half = m.funcs[f].ty(r.value).dtype != DType::F32;
        Some(&*r.role.as_ref().filter(|r| half && r.kind == RoleKind::Ready)?.name)
    });
    let n = m.funcs.len();
    let mut p = Planner {
        m,
        microbatches,
        funcs,
        looped,
        sent,
        last_user,
        last: vec![],
        role_stages,
        stages: vec![],
        by_role: HashMap::new(),
        summed,
        objects: vec![],
        makers: vec![],
        users: vec![],
        offered: vec![],
        launches: m.funcs.iter().map(launches).collect(),
        buffers: (0..n).map(|_| vec![]).collect(),
        of: vec![vec![]; n],
        work: vec![vec![]; n],
        apart,
        cast: cast.collect(),
    };
    for &f in funcs {
        p.lifetimes(f);
    }
    for &f in funcs {
        p.in_place(f);
        p.workspaces(f);
    }
    p.frames()
}

impl<'a> Planner<'a> {
    fn bytes(&self, f: usize, v: Value) -> usize {
        self.m.funcs[f].ty(v).local_bytes(&self.m.mesh)
    }

    fn find(&self, f: usize, mut b: usize) -> usize {
        while let Some(next) = self.buffers[f][b].into {
            b = next;
        }
        b
    }

    fn root(&self, f: usize, v: Value) -> usize {
        self.find(f, self.of[f][v.0 as usize])
    }

    /// The same; `NONE` if the value has no memory.
    fn root_if_any(&self, f: usize, v: Value) -> usize {
        let b = self.of[f][v.0 as usize];
        if b == NONE { NONE } else { self.find(f, b) }
    }

    fn buffer(&mut self, f: usize, v: Value, birth: usize, class: Class) -> usize {
        let bytes = self.bytes(f, v);
        let (death, name) = (birth, v);
        let new = Buffer { bytes, birth, death, class, name, object: None, offset: 0, into: None };
        self.buffers[f].push(new);
        self.buffers[f].len() - 1
    }

    fn object(&mut self, f: usize, v: Value, role: &'a Role, maker: Option<usize>) -> usize {
        let ty = self.m.funcs[f].ty(v);
        let kind = match role.kind {
            RoleKind::Stash | RoleKind::Edge => Kind::Micro,
            RoleKind::Input if ty.rank() > 1 => Kind::Input,
            RoleKind::Grad if !self.summed.contains(role) => Kind::Part,
            _lasting => Kind::Whole,
        };
        let class = match role.kind {
            // A master copy is the optimizer's, and the weight is its cast.
            RoleKind::Param if ty.dtype == DType::F32 && self.cast.contains(&*role.name) => {
                Class::Optimizer
            }
            RoleKind::Ready if ty.dtype != DType::F32 => Class::Weights,
            kind => class_of_role(kind),
        };
        let bytes = self.bytes(f, v);
        self.objects.push(Object { kind, bytes, class, name: (f, v), offset: 0, frame: NONE });
        self.makers.push(maker);
        self.users.push(BTreeSet::new());
        self.offered.push(false);
        self.last.push(0);
        self.stages.push(BTreeSet::new());
        let o = self.objects.len() - 1;
        self.name(role, o);
        o
    }

    /// Gives an object a role, or one more.
    fn name(&mut self, role: &'a Role, o: usize) {
        self.by_role.insert(role, o);
        let last = self.last_user.get(role).copied().unwrap_or(0);
        self.last[o] = self.last[o].max(last);
        self.stages[o].extend(self.role_stages.get(role).into_iter().flatten());
    }

    /// Buffers of arguments, nodes and results, with views and roles tied together.
    fn lifetimes(&mut self, f: usize) {
        let func: &'a Func = &self.m.funcs[f];
        let end = func.nodes.len() + 1;
        self.of[f] = vec![NONE; func.values.len()];
        let mut own: HashMap<&Role, usize> = HashMap::new();
        for a in &func.args {
            let b = self.buffer(f, a.value, 0, Class::Input);
            self.of[f][a.value.0 as usize] = b;
            let Some(role) = &a.role else { continue };
            let o = match self.by_role.get(role) {
                Some(&o) => o,
                None => self.object(f, a.value, role, None),
            };
            if self.objects[o].kind == Kind::Input {
                let parts = if self.looped.contains(&f) { self.microbatches } else { 1 };
                let all = self.bytes(f, a.value) * parts;
                self.objects[o].bytes = self.objects[o].bytes.max(all);
            }
            self.users[o].insert(f);
            let dies = self.objects[o].kind.is_framed()
                && !self.offered[o]
                // Only within a stage is the last function also the last to run.
                && self.stages[o].len() == 1
                && self.funcs[self.last[o]] == f;
            let buffer = &mut self.buffers[f][b];
            (buffer.object, buffer.class) = (Some(o), self.objects[o].class);
            buffer.death = if dies { 0 } else { NONE };
            own.insert(role, b);
        }
        for x in &self.launches[f].clone() {
            // A launch takes no time: its results live from its first node on, what it reads to its
            // last.
            let (from, until) = (x.nodes.start + 1, x.nodes.end);
            x.ins.iter().for_each(|&v| self.touch(f, v, until));
            for (n, &o) in
                func.nodes[x.nodes.clone()].iter().flat_map(|n| n.outs.iter().map(move |o| (n, o)))
            {
                let b = match n.op.def().is_view() {
                    true => self.root_if_any(f, n.ins[0]),
                    false if !x.outs.contains(&o) => NONE,
                    false if n.op.collective().is_some() => {
                        self.buffer(f, o, from, Class::CollectiveBuffer)
                    }
                    false => self.buffer(f, o, from, Class::Temporary),
                };
                self.of[f][o.0 as usize] = b;
            }
        }
        for r in &func.results {
            self.touch(f, r.value, end);
            let Some(role) = &r.role else { continue };
            let b = self.root(f, r.value);
            if let Some(&old) = own.get(role) {
                // The new value of something this function was given: written over the old.
                let old = self.find(f, old);
                self.merge(f, b, old);
                continue;
            }
            if role.kind == RoleKind::Output {
                continue;
            }
            let o = match self.buffers[f][b].object {
                Some(o) => {
                    self.name(role, o);
                    o
                }
                None => {
                    let o = self.object(f, r.value, role, Some(f));
                    self.buffers[f][b].object = Some(o);
                    self.buffers[f][b].class = self.objects[o].class;
                    o
                }
            };
            self.offered[o] |= self.sent.contains(&(f, r.value));
        }
    }

    fn touch(&mut self, f: usize, v: Value, at: usize) {
        let b = self.root(f, v);
        self.buffers[f][b].death = self.buffers[f][b].death.max(at);
    }

    fn merge(&mut self, f: usize, from: usize, into: usize) {
        if from == into {
            return;
        }
        let (birth, death) = (self.buffers[f][from].birth, self.buffers[f][from].death);
        let object = self.buffers[f][from].object;
        self.buffers[f][from].into = Some(into);
        let b = &mut self.buffers[f][into];
        (b.birth, b.death) = (b.birth.min(birth), b.death.max(death));
        b.object = b.object.or(object);
    }

    /// Results written over operands that die at their launch.
    fn in_place(&mut self, f: usize) {
        let func: &'a Func = &self.m.funcs[f];
        for x in &self.launches[f].clone() {
            for (k, &o) in x.outs.iter().enumerate() {
                let from = self.root(f, o);
                // What has its place already, as the new value of an argument, keeps it.
                if self.buffers[f][from].birth <= x.nodes.start {
                    continue;
                }
                let over = x.over(func, k).into_iter().find(|&v| {
                    let into = self.root(f, v);
                    let once = x.ins.iter().filter(|&&v| self.root(f, v) == into).count() == 1;
                    let (a, b) = (&self.buffers[f][from], &self.buffers[f][into]);
                    let apart = a.object.is_none() || b.object.is_none();
                    let taken = x.outs[..k].iter().any(|&o| self.root(f, o) == into);
                    let dies = b.death == x.nodes.end && !taken;
                    from != into && once && apart && dies && a.bytes == b.bytes
                });
                if let Some(v) = over {
                    let into = self.root(f, v);
                    self.merge(f, from, into);
                }
            }
        }
    }

    /// Of nodes that are launches by themselves: those of several have no workspace.
    fn workspaces(&mut self, f: usize) {
        let func: &'a Func = &self.m.funcs[f];
        for x in self.launches[f].clone() {
            for (i, n) in x.nodes.clone().zip(&func.nodes[x.nodes.clone()]) {
                let alone = x.nodes.len() == 1;
                let bytes = if alone { workspace(&self.m.mesh, func, n) } else { 0 };
                let mut b = NONE;
                if bytes > 0 {
                    b = self.buffer(f, n.outs[0], i + 1, Class::Temporary);
                    self.buffers[f][b].bytes = bytes;
                }
                self.work[f].push(b);
            }
        }
    }

    /// Offsets in frames, and the frames of every function.
    fn frames(mut self) -> Layout {
        let n = self.m.funcs.len();
        let mut out = Layout {
            places: vec![vec![]; n],
            workspaces: vec![vec![]; n],
            frames: vec![vec![]; n],
            bound: vec![vec![]; n],
            scratch: vec![Scratch::default(); n],
            counted: vec![BTreeSet::new(); n],
            turn: self.m.funcs.iter().map(|f| f.nodes.len()).max().unwrap_or(0) + 2,
            ..Layout::default()
        };
        // What one layer makes, used by the same functions and sent or not, is one frame: so frames
        // of like layers have one size, and one fits where another was.
        let mut groups: BTreeMap<Group, usize> = BTreeMap::new();
        for o in 0..self.objects.len() {
            let kept = self.users[o].iter().any(|&f| Some(f) != self.makers[o]);
            if !self.objects[o].kind.is_framed() {
                self.objects[o].offset = padded(out.whole);
                out.whole = padded(out.whole) + self.objects[o].bytes;
                continue;
            }
            // What is received for one function alone is a buffer of the transfer.
            let received = self.makers[o].is_none() && self.users[o].len() == 1;
            if self.objects[o].kind == Kind::Micro && (received || !kept) {
                self.objects[o].class = Class::CollectiveBuffer;
            }
            let users: Vec<usize> = self.users[o].iter().copied().collect();
            let (f, v) = self.objects[o].name;
            let layer = self.m.funcs[f].name(v).layer;
            let kind = self.objects[o].kind;
            // Gradients of no layer are made at either end of backward.
            let far = kind == Kind::Part && layer.is_none();
            let alone = if self.makers[o].is_some() && !self.apart && !far { 0 } else { o };
            let key = (kind, self.makers[o], layer, users, self.offered[o], alone);
            let frame = *groups.entry(key).or_insert_with(|| {
                out.shared.push((0, vec![]));
                out.shared.len() - 1
            });
            let (bytes, members) = &mut out.shared[frame];
            (self.objects[o].frame, self.objects[o].offset) = (frame, padded(*bytes));
            *bytes = padded(*bytes) + self.objects[o].bytes;
            members.push(o);
        }
        for &f in self.funcs {
            self.function(f, &mut out);
        }
        out.objects = self.objects;
        out
    }

    fn function(&mut self, f: usize, out: &mut Layout) {
        self.scratch(f, out);
        let func: &'a Func = &self.m.funcs[f];
        let mut frames = vec![out.whole, out.scratch[f].bytes];
        let mut bound: Vec<Bound> = vec![];
        let mut number = |b: Bound, bytes: usize| {
            let known = bound.iter().position(|x| *x == b);
            (known.unwrap_or_else(|| {
                bound.push(b);
                frames.push(bytes);
                bound.len() - 1
            }) + 2) as u32
        };
        let mut places = vec![];
        for v in 0..func.values.len() {
            if self.of[f][v] == NONE {
                places.push(Place::default()); // only its type is asked for
                continue;
            }
            let value = Value(v as u32);
            let bytes = self.bytes(f, value);
            let b = &self.buffers[f][self.root(f, value)];
            places.push(match b.object.map(|o| (o, &self.objects[o])) {
                None => Place { frame: SCRATCH, offset: b.offset, bytes },
                Some((_, o)) if o.kind == Kind::Whole => {
                    Place { frame: WHOLE, offset: o.offset, bytes }
                }
                Some((i, o)) if o.kind == Kind::Input => {
                    let frame = number(Bound::Input(i, b.bytes), b.bytes);
                    Place { frame, offset: 0, bytes: bytes.min(o.bytes) }
                }
                Some((_, o)) => {
                    out.frame_of.insert((f, value), o.frame);
                    let frame = number(Bound::Shared(o.frame), out.shared[o.frame].0);
                    Place { frame, offset: o.offset, bytes }
                }
            });
        }
        let work = |&b: &usize| match b {
            NONE => Place::default(),
            b => {
                let b = &self.buffers[f][b];
                Place { frame: SCRATCH, offset: b.offset, bytes: b.bytes }
            }
        };
        out.workspaces[f] = self.work[f].iter().map(work).collect();
        (out.places[f], out.frames[f], out.bound[f]) = (places, frames, bound);
    }

    /// Places of what only this call needs: first fit in order of birth.
    fn scratch(&mut self, f: usize, out: &mut Layout) {
        let end = self.m.funcs[f].nodes.len() + 1;
        // Bytes that begin to live (or end, negative) at each node.
        let mut change = vec![0i64; end + 2];
        for b in self.buffers[f].iter().filter(|b| b.into.is_none()) {
            if let Some(o) = b.object {
                if !self.objects[o].kind.is_framed() {
                    continue;
                }
                let frame = self.objects[o].frame;
                let within = out.within.entry((f, frame)).or_insert((b.birth, 0));
                *within = (within.0.min(b.birth), within.1.max(b.death.min(end)));
                if self.makers[o] != Some(f) && b.death == NONE {
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
        let busiest = live.max().unwrap_or(0).max(0) as usize;
        let is_scratch = |b: &Buffer| b.into.is_none() && b.object.is_none() && b.bytes > 0;
        let mut order: Vec<usize> =
            (0..self.buffers[f].len()).filter(|&b| is_scratch(&self.buffers[f][b])).collect();
        order.sort_by_key(|&b| (self.buffers[f][b].birth, b));
        let pieces: Vec<Piece> = order.iter().map(|&b| Piece::of(&self.buffers[f][b])).collect();
        let mut offsets = by_birth(&pieces);
        let end = |offsets: &[usize]| pieces.iter().zip(offsets).map(|(p, o)| o + p.bytes).max();
        let most = |offsets: &[usize]| end(offsets).unwrap_or(0);
        if most(&offsets) > most_alive(&pieces) / 100 * (100 + super::SLACK) {
            let other = by_size(&pieces);
            if most(&other) < most(&offsets) {
                offsets = other;
            }
        }
        let peak = most(&offsets);
        let highest = pieces.iter().zip(&offsets).find(|(p, o)| *o + p.bytes == peak);
        let at = highest.map_or(0, |(p, _)| p.birth);
        for (&b, &offset) in order.iter().zip(&offsets) {
            self.buffers[f][b].offset = offset;
        }
        let s = &mut out.scratch[f];
        (s.bytes, s.busiest) = (peak, busiest);
        for b in order.iter().map(|&b| &self.buffers[f][b]) {
            if b.birth <= at && b.death >= at {
                *s.at_peak.entry(b.class).or_default() += b.bytes;
                s.live.push((b.name, b.class, b.bytes));
            }
        }
    }
}

/// Bytes, and the nodes at which they are needed.
#[derive(Clone, Copy)]
struct Piece {
    bytes: usize,
    birth: usize,
    death: usize,
}

impl Piece {
    fn of(b: &Buffer) -> Piece {
        Piece { bytes: b.bytes, birth: b.birth, death: b.death }
    }
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

/// Offsets of pieces from the largest to the smallest, each at the lowest place that is free all its
/// life (Pisarchyk and Lee, 2020: greedy by size).
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

fn workspace(mesh: &Mesh, f: &Func, n: &Node) -> usize {
    let ins: Vec<_> = n.ins.iter().map(|&v| f.ty(v)).collect();
    let outs: Vec<_> = n.outs.iter().map(|&v| f.ty(v)).collect();
    n.op.def().workspace(mesh, &ins, &outs)
}

fn class_of_role(k: RoleKind) -> Class {
    match k {
        RoleKind::Param => Class::Weights,
        RoleKind::Ready => Class::CollectiveBuffer,
        RoleKind::Grad => Class::Grads,
        RoleKind::State => Class::Optimizer,
        RoleKind::Input | RoleKind::Scalar => Class::Input,
        RoleKind::Stash | RoleKind::Edge => Class::Activation,
        RoleKind::Sum | RoleKind::Step | RoleKind::Output => Class::Temporary,
    }
}

pub(super) fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN)
}
