//! What a call does to the arena, as its callers see it.
//!
//! A function is replayed node by node once, and then stands for all its calls. That is sound because of what
//! the replay of a call depends on:
//!
//! - A value that the call makes is read where it lies if no later write of the call lay over it. That
//!   follows from which places of the call overlap, and from nothing that was there before.
//! - An argument is read where it lies if it lay there when the call began, and no write of the call lay
//!   over it. The second follows from the places again; the first, [`Effect::reads`], is asked of the
//!   arena in every call.
//! - What a call leaves behind, [`Effect::writes`] and [`Effect::results`], are its last writes.
//!
//! Places are in frames, and a frame has another offset in another call. Which places overlap is the same
//! in two calls if they have the same [`Layout::overlaps`]: so there is an effect for each of those.

use super::arena::{Slots, Span, Spans};
use shardc_ir::func::{Func, Value, ValueMap};
use shardc_ir::group::{Launch, Roles, launches};
use shardc_ir::maps::HashMap;
use shardc_ir::plan::{ALIGN, Call, FramePlace, Memory};
use smallvec::SmallVec;
use std::ops::Range;

/// A launch of a function, with what is the same in every call.
struct Step {
    launch: Launch,
    /// Its kernels, if they are several.
    kernels: Vec<Launch>,
    /// Results that are other names of operands.
    views: SmallVec<[Value; 1]>,
    has_epilogue: bool,
}

/// Bytes next to each other in a frame, all of which a function may use.
#[derive(Clone, Copy)]
struct Piece {
    frame: usize,
    from: usize,
    to: usize,
}

/// A function of a class, with what is the same in every call.
pub(super) struct Function<'a> {
    pub f: &'a Func,
    roles: Roles<'a>,
    steps: Vec<Step>,
    places: &'a ValueMap<FramePlace>,
    /// Places that are used, each once: those of most layers are the same.
    used: Vec<FramePlace>,
    /// By value, if it is used, and by node of its workspace: the number of its place among these.
    of_value: ValueMap<Option<u32>>,
    of_work: Vec<u32>,
    /// In order of frames and offsets.
    pieces: Vec<Piece>,
    effects: HashMap<Vec<(usize, usize, usize)>, Effect>,
}

/// Where the pieces of a function lie in one call.
pub(super) struct Layout {
    /// By piece.
    begin: Vec<usize>,
    /// The pieces in order of their beginnings, and where groups of those that overlap begin and end in it.
    order: Vec<usize>,
    groups: Vec<usize>,
}

/// An argument, as a value that is or views it, is read where it lay when the call began.
pub(super) struct Read {
    /// The piece it lies in, and the bytes of it.
    piece: usize,
    span: Span,
    /// Which argument, and the value.
    pub arg: usize,
    pub value: Value,
    /// The how-manieth read of the call.
    pub order: usize,
}

/// Bytes behind the beginning of a piece that a call has written.
pub(super) struct Write {
    piece: usize,
    span: Span,
    /// The number of the value, if it is a result: nobody reads others after the call.
    pub value: Option<usize>,
}

/// What a result is.
#[derive(Clone, Copy)]
pub(super) enum Source {
    /// An argument.
    Arg(usize),
    /// Made by the call: its number among the values that are.
    Made(usize),
}

/// What a call asks of the arena and leaves in it.
pub(super) struct Effect {
    /// In order of pieces and bytes.
    pub reads: Vec<Read>,
    /// By group of overlapping pieces, in order of bytes.
    pub writes: Vec<Vec<Write>>,
    /// By result.
    pub results: Vec<Source>,
    /// Results that the call makes.
    pub made: usize,
}

impl Layout {
    /// Which pieces overlap, and how: equal in calls that differ only in where frames lie that are apart.
    /// The number of a group of several pieces, a piece of it, and where that begins behind the first.
    fn overlaps(&self) -> Vec<(usize, usize, usize)> {
        let mut several: Vec<&[usize]> = self.groups().filter(|g| g.len() > 1).collect();
        several.sort_unstable();
        let place = |(i, g): (usize, &&'_ [usize])| {
            let first = self.begin[g[0]];
            g.iter().map(|&p| (i, p, self.begin[p] - first)).collect::<Vec<_>>()
        };
        several.iter().enumerate().flat_map(place).collect()
    }

    /// The pieces in groups of those that overlap; groups, and pieces in them, in order of their beginnings.
    fn groups(&self) -> impl Iterator<Item = &[usize]> {
        self.groups.windows(2).map(|w| &self.order[w[0]..w[1]])
    }

    /// The bytes of the arena that a read is of.
    pub fn read(&self, r: &Read) -> Span {
        (self.begin[r.piece] + r.span.0, self.begin[r.piece] + r.span.1)
    }

    /// The bytes of the arena that were written.
    pub fn written(&self, w: &Write) -> Span {
        (self.begin[w.piece] + w.span.0, self.begin[w.piece] + w.span.1)
    }
}

impl<'a> Function<'a> {
    pub fn of(f: &'a Func, number: usize, memory: &'a Memory) -> Function<'a> {
        let roles = Roles::of(f);
        let one = |launch: Launch| {
            let nodes = &f.nodes[launch.nodes.clone()];
            let views = nodes.iter().filter(|n| n.op.def().is_view()).map(|n| n.outs[0]);
            Step {
                kernels: if launch.is_several(f) { launch.kernels(f) } else { vec![] },
                views: views.collect(),
                has_epilogue: nodes.len() > 1 && launch.has_epilogue(&roles),
                launch,
            }
        };
        let steps: Vec<Step> = launches(f).into_iter().map(one).collect();
        let (places, workspaces) = (&memory.places[number], &memory.workspaces[number][..]);
        let values = steps.iter().flat_map(|s| s.launch.ins.iter().chain(&s.launch.outs));
        let mut used = vec![];
        let mut numbers: HashMap<FramePlace, u32> = HashMap::default();
        let mut number = |p: FramePlace| {
            *numbers.entry(p).or_insert_with(|| {
                used.push(p);
                used.len() as u32 - 1
            })
        };
        let mut of_value = f.per_value(None);
        for v in values.copied().chain(f.results.iter().map(|r| r.value)) {
            let own = &mut of_value[v];
            *own = own.or_else(|| Some(number(places[v])));
        }
        let of_work = workspaces.iter().map(|&p| number(p)).collect();
        let pieces = pieces(used.iter().filter(|p| p.bytes > 0).copied().collect());
        let effects = HashMap::default();
        Function { f, roles, steps, places, used, of_value, of_work, pieces, effects }
    }

    /// The number of the place of a value that is used.
    fn number(&self, v: Value) -> u32 {
        self.of_value[v].expect("launches and results name it")
    }

    /// Where its pieces lie in a call; an error if that is outside of the arena.
    pub fn layout(&self, c: &Call, peak: usize) -> Result<Layout, String> {
        let mut begin = Vec::with_capacity(self.pieces.len());
        for p in &self.pieces {
            let base = c.frames.get(p.frame).copied().unwrap_or(0);
            if base + p.to > peak {
                let (from, to) = (base + p.from, base + p.to);
                return Err(format!("bytes {from}..{to} are outside the arena of {peak}"));
            }
            begin.push(base + p.from);
        }
        let mut order: Vec<usize> = (0..begin.len()).collect();
        order.sort_by_key(|&p| begin[p]);
        let mut groups = Vec::with_capacity(order.len() + 1);
        let mut end = 0;
        for (i, &p) in order.iter().enumerate() {
            if i == 0 || begin[p] >= end {
                groups.push(i);
            }
            end = end.max(begin[p] + self.pieces[p].to - self.pieces[p].from);
        }
        groups.push(order.len());
        Ok(Layout { begin, order, groups })
    }

    /// What a call does; an error if it reads what it has written over.
    pub fn effect(&mut self, c: &Call, layout: &Layout) -> Result<&Effect, String> {
        let overlaps = layout.overlaps();
        if !self.effects.contains_key(&overlaps) {
            let effect = CallReplay::of(self, c, layout).run()?;
            self.effects.insert(overlaps.clone(), effect);
        }
        Ok(&self.effects[&overlaps])
    }
}

/// Where a place lies in a call.
fn span(c: &Call, p: FramePlace) -> Span {
    let from = c.frames.get(p.frame as usize).copied().unwrap_or(0) + p.offset;
    (from, from + p.bytes)
}

/// Places by frame, those next to each other joined.
fn pieces(mut used: Vec<FramePlace>) -> Vec<Piece> {
    used.sort_unstable_by_key(|p| (p.frame, p.offset));
    let mut out: Vec<Piece> = vec![];
    for p in used {
        let (frame, to) = (p.frame as usize, p.offset + p.bytes);
        match out.last_mut().filter(|l| l.frame == frame && p.offset < l.to + ALIGN) {
            Some(last) => last.to = last.to.max(to),
            None => out.push(Piece { frame, from: p.offset, to }),
        }
    }
    out
}

/// What a value holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Content {
    None,
    /// What an argument held when the call began.
    Arg(usize),
    /// Written in the call.
    Stamp(u64),
}

/// A call while it is replayed.
struct CallReplay<'a, 'b> {
    function: &'b Function<'a>,
    call: &'b Call,
    layout: &'b Layout,
    /// What the call has written so far, and by number of a place which slots it is.
    slots: Slots,
    within: Vec<Range<usize>>,
    next: u64,
    content: ValueMap<Content>,
    /// By value: it was read as an argument.
    seen: ValueMap<bool>,
    reads: Vec<Read>,
}

impl<'a, 'b> CallReplay<'a, 'b> {
    fn of(function: &'b Function<'a>, call: &'b Call, layout: &'b Layout) -> CallReplay<'a, 'b> {
        let f = function.f;
        let mut content = f.per_value(Content::None);
        for (i, a) in f.args.iter().enumerate() {
            content[a.value] = Content::Arg(i);
        }
        let spans = || function.used.iter().map(|&p| span(call, p));
        let slots = Slots::of(spans());
        let within = spans().map(|span| slots.within(span)).collect();
        let (seen, reads) = (f.per_value(false), vec![]);
        CallReplay { function, call, layout, slots, within, next: 0, content, seen, reads }
    }

    fn place(&self, v: Value) -> Span {
        span(self.call, self.function.places[v])
    }

    fn write(&mut self, place: u32) -> u64 {
        self.next += 1;
        self.slots.write(self.within[place as usize].clone(), self.next);
        self.next
    }

    fn run(mut self) -> Result<Effect, String> {
        let f = self.function.f;
        for Step { launch: x, kernels, views, has_epilogue } in &self.function.steps {
            for &v in &x.ins {
                self.read(v)?;
            }
            for &work in &self.function.of_work[x.nodes.clone()] {
                self.write(work);
            }
            let nodes = &f.nodes[x.nodes.clone()];
            if kernels.is_empty() {
                self.written_over(x, views)?;
            }
            for kernel in kernels {
                self.written_over(kernel, views)?;
            }
            for &o in x.outs.iter().filter(|o| !views.contains(o)) {
                let stamp = self.write(self.function.number(o));
                self.content[o] = Content::Stamp(stamp);
            }
            // A product reads its operands while what becomes of it is written.
            if *has_epilogue {
                for &v in &nodes[0].ins {
                    self.read(v)?;
                }
            }
            if !kernels.is_empty() {
                self.apart(kernels)?;
            }
            for n in nodes.iter().filter(|n| views.contains(&n.outs[0])) {
                self.content[n.outs[0]] = self.content[n.ins[0]];
            }
        }
        for r in &f.results {
            self.read(r.value)?;
        }
        Ok(self.effect())
    }

    /// A kernel reads its operands while it writes, and so do the other ranks of a collective: a
    /// result lies on no operand, but for those that its op may write over, element by element.
    fn written_over(&self, x: &Launch, views: &[Value]) -> Result<(), String> {
        let f = self.function.f;
        let ins = Spans::of(x.ins.iter().map(|&v| self.place(v)));
        let mut overs = None;
        for (k, &o) in x.outs.iter().enumerate().filter(|o| !views.contains(o.1)) {
            let span = self.place(o);
            for i in ins.meeting(span).filter(|_| span.0 < span.1) {
                let overs = overs.get_or_insert_with(|| x.overs(&self.function.roles));
                if self.place(x.ins[i]) != span || !overs[k].contains(&x.ins[i]) {
                    return Err(format!(
                        "@{}: {} lies on {}, which is read while it is written",
                        f.name,
                        f.name(o),
                        f.name(x.ins[i])
                    ));
                }
            }
        }
        Ok(())
    }

    /// Kernels of one launch run in any order: what one writes, no other reads or writes.
    fn apart(&self, kernels: &[Launch]) -> Result<(), String> {
        let f = self.function.f;
        let all = |x: &Launch| x.ins.iter().chain(&x.outs).copied().collect::<Vec<_>>();
        let used: Vec<(usize, Value)> = kernels
            .iter()
            .enumerate()
            .flat_map(|(i, x)| all(x).into_iter().map(move |v| (i, v)))
            .collect();
        let spans = Spans::of(used.iter().map(|u| self.place(u.1)));
        for (i, x) in kernels.iter().enumerate() {
            for &o in &x.outs {
                let span = self.place(o);
                if span.0 < span.1 && spans.meeting(span).any(|u| used[u].0 != i) {
                    let name = f.name(o);
                    return Err(format!(
                        "@{}: {name} lies on what another kernel of its launch uses",
                        f.name
                    ));
                }
            }
        }
        Ok(())
    }

    fn read(&mut self, v: Value) -> Result<(), String> {
        let (f, span) = (self.function.f, self.place(v));
        let within = self.within[self.function.number(v) as usize].clone();
        let holds = match self.content[v] {
            _nothing_to_read if span.0 == span.1 => true,
            Content::None => false,
            Content::Arg(arg) => {
                if !std::mem::replace(&mut self.seen[v], true) {
                    let order = self.reads.len();
                    let (piece, part) = self.in_piece(v);
                    self.reads.push(Read { piece, span: part, arg, value: v, order });
                }
                self.slots.hold(within, Slots::UNWRITTEN)
            }
            Content::Stamp(stamp) => self.slots.hold(within, stamp),
        };
        match holds {
            true => Ok(()),
            false => Err(lost(f, v, span)),
        }
    }

    /// The piece that a value lies in, and its bytes there.
    fn in_piece(&self, v: Value) -> (usize, Span) {
        let p = self.function.places[v];
        let frame = p.frame as usize;
        let before = |x: &Piece| (x.frame, x.from) <= (frame, p.offset);
        let piece = self.function.pieces.partition_point(before).saturating_sub(1);
        let from = p.offset - self.function.pieces[piece].from;
        (piece, (from, from + p.bytes))
    }

    fn effect(self) -> Effect {
        let CallReplay { function, layout, slots, content, mut reads, .. } = self;
        reads.sort_unstable_by_key(|r| (r.piece, r.span, r.order));
        let mut numbers: HashMap<u64, usize> = HashMap::default();
        let results = function.f.results.iter().map(|r| match content[r.value] {
            Content::Arg(a) => Source::Arg(a),
            Content::Stamp(s) => {
                let next = numbers.len();
                Source::Made(*numbers.entry(s).or_insert(next))
            }
            Content::None => unreachable!("a result was read, so it holds something"),
        });
        let results: Vec<Source> = results.collect();
        // What was written, by group of pieces that overlap.
        let mut writes: Vec<Vec<Write>> = vec![];
        let mut groups = layout.groups().map(|g| (g[0], layout.begin[g[0]])).peekable();
        let mut at = (0, 0);
        for ((from, to), stamp) in slots.written() {
            while let Some(next) = groups.next_if(|g| g.1 <= from) {
                at = next;
                writes.push(vec![]);
            }
            let span = (from - at.1, to - at.1);
            let value = numbers.get(&stamp).copied();
            let own = writes.last_mut().expect("what is written is in a piece");
            match own.last_mut().filter(|w| w.value.is_none() && w.span.1 == span.0) {
                Some(last) if value.is_none() => last.span.1 = span.1,
                _other => own.push(Write { piece: at.0, span, value }),
            }
        }
        writes.retain(|w| !w.is_empty());
        Effect { reads, writes, results, made: numbers.len() }
    }
}

/// A value is not there any more when it is read.
pub(super) fn lost(f: &Func, v: Value, (from, to): Span) -> String {
    let name = f.name(v);
    format!("@{}: {name} was overwritten before it was read (bytes {from}..{to})", f.name)
}
