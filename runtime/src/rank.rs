//! One rank: its arena, its kernels, its thread.

use crate::arena::Arena;
use crate::batch::{self, StepData};
use crate::exec::Executor;
use crate::region::{Region, copy, dense_block};
use crate::session::{Done, LoadFn, Options, Timing};
use crate::transport::Transport;
use crate::wiring::{Port, Wiring, owns, piece};
use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::func::RoleKind;
use shardc_ir::kernel::{Elem, Kernel, Program};
use shardc_ir::mesh::PIPELINE;
use shardc_ir::plan::{Call, Instr, Place, Transfer};
use shardc_ir::types::Type;
use smallvec::SmallVec;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

/// Elements that a padded weight is loaded through at a time.
const STAGING: usize = 1 << 18;

/// What a rank is asked to do.
pub(crate) enum Command {
    Step(Arc<StepData>),
    /// This rank's piece of the value in a place, if it is its owner.
    Fetch {
        func: usize,
        value: shardc_ir::func::Value,
    },
}

/// A rank's piece of an output, dense.
pub(crate) struct Piece {
    /// Number of the output among [`Wiring::results`].
    pub output: usize,
    pub microbatch: usize,
    pub data: Vec<f32>,
}

pub(crate) struct Reply {
    pub pieces: Vec<Piece>,
    /// High-water mark of the arena, in bytes.
    pub touched: usize,
    pub timings: Vec<Timing>,
}

/// A failure, and whether it began here.
pub(crate) struct Failed {
    pub own: bool,
    pub cause: Diag,
}

pub(crate) struct Rank {
    rank: usize,
    class: usize,
    coords: Vec<usize>,
    wiring: Arc<Wiring>,
    program: Program,
    arena: Arena,
    executor: Executor,
    /// Function and node at work, one word of each rank's: `func << 32 | node`.
    at: Arc<Vec<AtomicUsize>>,
    /// When the session began, if times are noted.
    clock: Option<Instant>,
    timings: Vec<Timing>,
}

fn out_of_arena() -> Diag {
    Diag::new("plan", "a place of the plan is not in its arena")
        .help("compile the plan again with this version of shardc")
        .exit(Exit::Environment)
}

impl Rank {
    /// Makes the arena and fills parameters; state begins as 0.
    pub fn new(
        wiring: Arc<Wiring>,
        program: Program,
        transport: Box<dyn Transport>,
        (how, began): (Options, Instant),
        at: Arc<Vec<AtomicUsize>>,
        load: &LoadFn,
    ) -> Result<Rank> {
        let rank = transport.rank();
        let class = wiring.plan.class_of(rank);
        wiring.check_program(class, &program)?;
        let bytes = wiring.plan.classes[class].memory.peak_bytes;
        let arena = Arena::new(bytes, how.poison).ok_or_else(out_of_arena)?;
        let coords = wiring.mesh().coords(rank);
        let executor = Executor::new(transport, how.threads).with(how.native.clone());
        let (clock, timings) = (how.trace.then_some(began), vec![]);
        let mut r =
            Rank { rank, class, coords, wiring, program, arena, executor, at, clock, timings };
        r.fill(load)?;
        Ok(r)
    }

    fn fill(&mut self, load: &LoadFn) -> Result<()> {
        let w = self.wiring.clone();
        let mut done: Vec<Place> = vec![];
        let own = |p: &Port| w.class_of[p.func] == self.class;
        let params: Vec<Port> = w.args(RoleKind::Param).filter(own).collect();
        let state: Vec<Port> = w.args(RoleKind::State).filter(own).collect();
        for p in params {
            if !done.contains(&p.place) {
                done.push(p.place);
                self.load(&p, load)?;
            }
        }
        for p in state {
            self.arena.elements(p.place.offset, p.place.bytes).ok_or_else(out_of_arena)?.fill(0.0);
        }
        Ok(())
    }

    /// Fills one parameter: at once if its piece is dense f32, else some rows at a time.
    fn load(&mut self, p: &Port, load: &LoadFn) -> Result<()> {
        let mesh = self.wiring.mesh();
        let weight =
            self.wiring.plan.weights.iter().find(|x| x.param == p.name).ok_or_else(|| {
                Diag::new(
                    "weight-missing",
                    format!("the plan does not say where `{}` comes from", p.name),
                )
                .help(format!(
                    "list it among the plan's {} weights",
                    self.wiring.plan.weights.len()
                ))
            })?;
        let block = piece(mesh, p.ty, &self.coords).ok_or_else(out_of_arena)?;
        let whole: Vec<Range<usize>> = (0..p.ty.rank())
            .map(|d| p.ty.extent(mesh, d, &self.coords))
            .map(|e| e.offset..e.offset + e.len)
            .collect();
        if block.is_empty() {
            return Ok(());
        }
        if block.end() * block.elem.bytes() > p.place.bytes {
            return Err(out_of_arena());
        }
        // Padding of the first dim lies behind the rest.
        let row: usize = block.extents.iter().skip(1).product();
        let dense = block.view.strides.first().is_none_or(|&s| s == row);
        if dense && block.elem == Elem::F32 {
            let to = self.arena.elements(p.place.offset, p.place.bytes);
            return load(weight, &whole, &mut to.ok_or_else(out_of_arena)?[..block.len()]);
        }
        let to = self.arena.at(p.place.offset, p.place.bytes).ok_or_else(out_of_arena)?.as_ptr();
        // A scalar is a row of one.
        let (all, stride) = (*block.extents.first().unwrap_or(&1), block.view.strides.first());
        let rows = (STAGING / row.max(1)).max(1);
        let mut staging = vec![0.0; rows.min(all) * row];
        let mut first = 0;
        while first < all {
            let n = rows.min(all - first);
            let mut ranges = whole.clone();
            let mut part = block.clone();
            if let (Some(r), Some(e)) = (ranges.first_mut(), part.extents.first_mut()) {
                (*r, *e) = (r.start + first..r.start + first + n, n);
            }
            load(weight, &ranges, &mut staging[..n * row])?;
            let from = dense_block(&part.extents);
            part.view.offset = first * stride.copied().unwrap_or(0);
            // SAFETY: both blocks lie in memory of ours: these rows are part of the piece, whose
            // end was compared with the place above.
            unsafe {
                let from = Region::new(staging.as_mut_ptr(), &from);
                copy(&from, &Region::new(to, &part), 0..n * row);
            }
            first += n;
        }
        Ok(())
    }

    /// Answers commands until the session is gone.
    pub fn serve(
        mut self,
        commands: &Receiver<Command>,
        replies: &Sender<std::result::Result<Reply, Failed>>,
    ) {
        while let Ok(command) = commands.recv() {
            let done = catch_unwind(AssertUnwindSafe(|| match &command {
                Command::Step(data) => self.step(data),
                Command::Fetch { func, value } => self.fetch(*func, *value),
            }));
            let done = done.unwrap_or_else(|panic| Err(self.panicked(&*panic)));
            if let Err(f) = &done {
                self.executor.transport().abort(f.cause.clone());
            }
            if replies.send(done).is_err() {
                return;
            }
        }
    }

    fn panicked(&self, panic: &(dyn std::any::Any + Send)) -> Failed {
        let text = panic.downcast_ref::<&str>().map(|s| s.to_string());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        let at = self.at[self.rank].load(Ordering::Relaxed);
        let who = self.wiring.rank_text(self.rank);
        let cause = Diag::new("rank-failed", format!("{who} panicked: {text}"))
            .at(self.wiring.node_text(at >> 32, at & 0xffff_ffff))
            .help("this is a bug of shardc: report it with the plan and these 2 lines")
            .exit(Exit::RankFailed);
        Failed { own: true, cause }
    }

    fn own<T>(&self, x: Option<T>) -> std::result::Result<T, Failed> {
        x.ok_or_else(|| Failed { own: true, cause: out_of_arena() })
    }

    fn step(&mut self, data: &StepData) -> std::result::Result<Reply, Failed> {
        let w = self.wiring.clone();
        let wrote = batch::write(&w, self.class, &mut self.arena, &self.coords, data);
        self.own(wrote)?;
        let mut pieces = vec![];
        let class = &w.plan.classes[self.class];
        let list = if data.evaluate { &class.evaluation } else { &class.step };
        let outputs: Vec<(usize, Port)> = w.results(RoleKind::Output).enumerate().collect();
        for (i, instr) in list.iter().enumerate() {
            let start = self.now();
            match instr {
                Instr::Call(c) => {
                    self.call(&w, c)?;
                    for (output, p) in outputs.iter().filter(|(_, p)| p.func == c.func) {
                        if data.observe || p.ty.elements() == 1 {
                            let at = c.frames[p.place.frame as usize] + p.place.offset;
                            let piece = self.read(p.ty, at, p.place.bytes);
                            let (output, microbatch) = (*output, c.microbatch.unwrap_or(0));
                            let piece = self.own(piece)?;
                            pieces.extend(piece.map(|data| Piece { output, microbatch, data }));
                        }
                    }
                }
                Instr::Send(t) | Instr::Recv(t) => self.transfer(&w, instr, t)?,
                Instr::Sent { to } => {
                    let to = self.peer(&w, *to);
                    let done = self.executor.transport().sent(to);
                    done.map_err(|cause| Failed { own: false, cause })?;
                }
            }
            self.note(Done::Instr(i), start);
        }
        let timings = std::mem::take(&mut self.timings);
        Ok(Reply { pieces, touched: self.arena.touched(), timings })
    }

    /// Time since the session began, if times are noted.
    fn now(&self) -> Option<Duration> {
        self.clock.map(|c| c.elapsed())
    }

    fn note(&mut self, what: Done, start: Option<Duration>) {
        if let Some((start, end)) = start.zip(self.now()) {
            self.timings.push(Timing { what, start, end });
        }
    }

    /// The rank with these coordinates in another class.
    fn peer(&self, w: &Wiring, class: usize) -> usize {
        let mut at = self.coords.clone();
        let pipeline = w.mesh().axis(PIPELINE).unwrap_or_default();
        let mut rest = class;
        for a in pipeline.iter().collect::<Vec<_>>().into_iter().rev() {
            at[a.0 as usize] = rest % w.mesh().size(a);
            rest /= w.mesh().size(a);
        }
        w.mesh().rank(&at)
    }

    fn transfer(
        &mut self,
        w: &Wiring,
        instr: &Instr,
        t: &Transfer,
    ) -> std::result::Result<(), Failed> {
        self.at[self.rank].store(t.func << 32 | 0xffff_ffff, Ordering::Relaxed);
        let peer = self.peer(w, t.with);
        let at = self.arena.at(t.offset, t.bytes);
        let first = self.own(at)?.as_ptr();
        let elem = Elem::of(w.plan.module.funcs[t.func].ty(t.value).dtype);
        let elem = self.own(elem)?;
        // SAFETY: the arena has checked that the bytes lie inside it. What is sent stays until it
        // was waited for, and what is received is used by nobody yet: the plan's instructions say so.
        let region = unsafe { Region::adjacent(first, elem, t.bytes / elem.bytes()) };
        let done = match instr {
            Instr::Send(_) => self.executor.transport().send(peer, &region),
            Instr::Recv(_) | Instr::Call(_) | Instr::Sent { .. } => {
                self.executor.transport().recv(peer, &region)
            }
        };
        done.map_err(|cause| {
            let f = &w.plan.module.funcs[t.func];
            let place = format!("{}, @{} {}", w.rank_text(self.rank), f.name, f.name(t.value));
            let cause = if cause.place.is_none() { cause.at(place) } else { cause };
            Failed { own: false, cause }
        })
    }

    /// Runs all launches of a function.
    fn call(&mut self, w: &Wiring, c: &Call) -> std::result::Result<(), Failed> {
        let func = c.func;
        for (i, bound) in w.bound[func].iter().enumerate() {
            // A launch is known by its first node.
            let n = w.launches[func][i].nodes.start;
            self.at[self.rank].store(func << 32 | n, Ordering::Relaxed);
            let mut memory: SmallVec<[*mut f32; 16]> = SmallVec::new();
            for p in bound {
                let at = self.arena.at(c.frames[p.frame as usize] + p.offset, p.bytes);
                memory.push(self.own(at)?.as_ptr());
            }
            // SAFETY: `check_program` has compared what the kernel reaches with the sizes of these
            // places, and the arena has checked that they lie inside it. The plan keeps operands
            // and results apart.
            let kernel = &self.program[func][i];
            let exchanges = matches!(kernel, Kernel::Collective(_));
            let start = if exchanges { self.now() } else { None };
            let done = unsafe { self.executor.run(kernel, &memory) };
            self.note(Done::Collective(func, n), start);
            done.map_err(|cause| {
                let place = format!("{}, {}", w.rank_text(self.rank), w.node_text(func, n));
                let cause = if cause.place.is_none() { cause.at(place) } else { cause };
                // A transport may report what happened to another rank.
                Failed { own: !exchanges, cause }
            })?;
        }
        Ok(())
    }

    /// This rank's piece of a value after a step, if its class has it.
    fn fetch(
        &mut self,
        func: usize,
        value: shardc_ir::func::Value,
    ) -> std::result::Result<Reply, Failed> {
        let w = self.wiring.clone();
        let class = &w.plan.classes[self.class];
        let last = class.calls().filter(|c| c.func == func).last();
        let mut pieces = vec![];
        if let Some(c) = last {
            let p = w.places[func][value.0 as usize];
            let at = c.frames[p.frame as usize] + p.offset;
            let piece = self.read(w.plan.module.funcs[func].ty(value), at, p.bytes);
            let data = self.own(piece)?;
            pieces.extend(data.map(|data| Piece { output: 0, microbatch: 0, data }));
        }
        Ok(Reply { pieces, touched: self.arena.touched(), timings: vec![] })
    }

    /// The dense elements of this rank's piece, in f32, if it is its owner; `None` outside if the
    /// place is too small for the type.
    fn read(&mut self, ty: &Type, at: usize, bytes: usize) -> Option<Option<Vec<f32>>> {
        let mesh = self.wiring.mesh();
        if !owns(mesh, ty, &self.coords) {
            return Some(None);
        }
        let block = piece(mesh, ty, &self.coords)?;
        let from = self.arena.at(at, bytes)?.as_ptr();
        if block.end() * block.elem.bytes() > bytes {
            return None;
        }
        let mut data = vec![0.0; block.len()];
        // SAFETY: the block lies in the place, as was just checked; the copy is dense.
        unsafe {
            let to = Region::new(data.as_mut_ptr(), &dense_block(&block.extents));
            copy(&Region::new(from, &block), &to, 0..block.len());
        }
        Some(Some(data))
    }
}
