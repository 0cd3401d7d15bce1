//! One rank: its arena, its kernels, its thread.

mod asked;
mod call;

use crate::batch::{self, StepData};
use crate::call_plan::CallPlans;
use crate::engine::{Engine, OnHost, out_of_arena};
use crate::exec::Executor;
use crate::flight_recorder::{Done, FlightRecorder, Timing};
use crate::holdings::{self, Holding, Sink, Task};
use crate::options::{First, LoadFn, Options, Wanted};
use crate::region::{Region, copy, dense_block};
use crate::transport::Transport;
use crate::wiring::{Port, Wiring, owns, piece};
pub(crate) use asked::{Command, Order, OutputPiece, Reply};
use call::{NEVER, Open};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{RoleKind, StateInit};
use shardc_ir::kernel::Program;
use shardc_ir::overlap::Late;
use shardc_ir::plan::{FramePlace, Instr, Transfer};
use shardc_ir::tensor;
use shardc_ir::types::{DType, Type};
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

/// Elements that a padded weight is loaded through at a time.
const STAGING: usize = 1 << 18;

/// Fills the elements of a slice.
type Fill<'a> = dyn Fn(&[Range<usize>], &mut [f32]) -> Result<()> + 'a;

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
    engine: Box<dyn Engine>,
    recorder: Arc<FlightRecorder>,
    /// When the session began, if times are noted.
    clock: Option<Instant>,
    timings: Vec<Timing>,
    call_plans: CallPlans,
    /// Of a step and of an evaluation, what goes on beside later instructions; and what does now, the oldest first.
    late: [Late; 2],
    open: VecDeque<Open>,
}

/// A failure of this rank's own.
fn own(cause: Diag) -> Failed {
    Failed { own: true, cause }
}

fn found<T>(x: Option<T>) -> std::result::Result<T, Failed> {
    x.ok_or_else(|| own(out_of_arena()))
}

/// The memory and the executor of a rank.
fn engine(how: &Options, transport: Box<dyn Transport>, bytes: usize) -> Result<Box<dyn Engine>> {
    match &how.devices {
        Some(d) => Ok(Box::new(d.engine(transport, bytes, how.poison)?)),
        None => {
            let executor = Executor::new(transport, how.threads).crowded(how.crowded);
            let executor = executor.with(how.native.clone());
            Ok(Box::new(OnHost::new(bytes, how.poison, executor)?))
        }
    }
}

/// Refuses what f16 has no number for: what is infinite already may stay so.
fn fits(name: &str, all: &[f32]) -> Result<()> {
    let large = |x: &&f32| x.is_finite() && x.abs() >= 65520.0;
    match all.iter().find(large) {
        None => Ok(()),
        Some(x) => {
            Err(Diag::new("weights", format!("`{name}` has {x}, which is too large for f16"))
                .rule("f16 ends at 65504")
                .help("recompile with --dtype bf16 or f32"))
        }
    }
}

impl Rank {
    /// Makes the arena and fills parameters and states.
    pub fn new(
        wiring: Arc<Wiring>,
        program: Program,
        transport: Box<dyn Transport>,
        (how, began): (Options, Instant),
        recorder: Arc<FlightRecorder>,
        load: &LoadFn,
    ) -> Result<Rank> {
        let rank = transport.rank();
        let class = wiring.plan.class_of(rank);
        wiring.check_program(class, &program)?;
        let bytes = wiring.plan.classes[class].memory.peak_bytes;
        let engine = engine(&how, transport, bytes)?;
        let coords = wiring.mesh().coords(rank);
        let (clock, timings) = (how.trace.then_some(began), vec![]);
        let call_plans = CallPlans::default();
        let mut r = Rank {
            rank,
            class,
            coords,
            wiring,
            program,
            engine,
            recorder,
            clock,
            timings,
            call_plans,
            late: [Late::new(), Late::new()],
            open: VecDeque::new(),
        };
        r.fill(load)?;
        r.prepare()?;
        Ok(r)
    }

    fn fill(&mut self, load: &LoadFn) -> Result<()> {
        let w = self.wiring.clone();
        let mut done: Vec<FramePlace> = vec![];
        let class = self.class;
        let own = |p: &Port| w.class_of[p.func] == class;
        let kept = |k| matches!(k, RoleKind::Param | RoleKind::State(_));
        for p in w.args(kept).filter(own) {
            if done.contains(&p.place) {
                continue;
            }
            done.push(p.place);
            let first = match w.init(p.role)? {
                StateInit::Number(x) => {
                    // What no kernel has written, padding, is 0.
                    self.engine.clear(p.place.offset, p.place.bytes)?;
                    First::Number(x)
                }
                StateInit::File => First::Weight(w.weight(p.role)?),
            };
            let wanted = Wanted { role: p.role, shape: &p.ty.sizes(), first };
            self.load(&p, &|ranges, out| load(wanted, ranges, out))?;
        }
        Ok(())
    }

    /// Fills one parameter or state: at once if its piece is dense f32, else some rows at a time.
    fn load(&mut self, p: &Port, load: &Fill) -> Result<()> {
        let mesh = self.wiring.mesh();
        let block = piece(mesh, p.ty, &self.coords);
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
        let apart = block.view.strides.first().copied().unwrap_or(row);
        let dense = apart == row && block.elem == DType::F32;
        // A scalar is a row of one. An even number of rows begins at a multiple of 4 bytes.
        let all = *block.extents.first().unwrap_or(&1);
        let at_once = if dense { self.engine.at_once() / 4 } else { STAGING };
        let rows = (at_once / row.max(1)).clamp(1, all).next_multiple_of(2);
        let mut staging = vec![0.0; if dense { 0 } else { rows.min(all) * row }];
        let mut first = 0;
        while first < all {
            let n = rows.min(all - first);
            let mut ranges = whole.clone();
            let mut part = block.clone();
            if let (Some(r), Some(e)) = (ranges.first_mut(), part.extents.first_mut()) {
                (*r, *e) = (r.start + first..r.start + first + n, n);
            }
            let offset = p.place.offset + first * apart * block.elem.bytes();
            self.engine.write(offset, part.end() * block.elem.bytes(), &mut |to| {
                if dense {
                    // SAFETY: the part is dense, and so many bytes are there.
                    let to = unsafe { std::slice::from_raw_parts_mut(to, n * row) };
                    return load(&ranges, to);
                }
                load(&ranges, &mut staging[..n * row])?;
                if block.elem == DType::F16 {
                    fits(&p.role.name, &staging[..n * row])?;
                }
                let from = dense_block(&part.extents);
                // SAFETY: both blocks lie in memory of ours: the part ends where the bytes do.
                unsafe {
                    let from = Region::new(staging.as_mut_ptr(), &from);
                    copy(&from, &Region::new(to, &part), 0..n * row);
                }
                Ok(())
            })?;
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
                Command::Task(_, task) => self.perform(&**task),
            }));
            let done = done.unwrap_or_else(|panic| Err(self.panicked(&*panic)));
            if let Err(f) = &done {
                self.engine.transport().abort(f.cause.clone());
                // Work that is queued uses memory of other ranks, which is freed when all have
                // answered.
                let _ = self.engine.wait();
            }
            if replies.send(done).is_err() {
                return;
            }
        }
    }

    fn panicked(&self, panic: &(dyn std::any::Any + Send)) -> Failed {
        let text = panic.downcast_ref::<&str>().map(|s| s.to_string());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        let who = self.wiring.rank_text(self.rank);
        let cause = Diag::new("rank-failed", format!("{who} panicked: {text}"))
            .at(self.recorder.whereabouts(&self.wiring, self.rank, &[], None))
            .help("this is a bug of shardc: report it with the plan and these 2 lines");
        Failed { own: true, cause }
    }

    fn step(&mut self, data: &StepData) -> std::result::Result<Reply, Failed> {
        let w = self.wiring.clone();
        let wrote = batch::write(&w, self.class, &mut *self.engine, &self.coords, data);
        wrote.map_err(own)?;
        self.recorder.step(if data.evaluate { 0 } else { data.step });
        let mut pieces = vec![];
        let class = &w.plan.classes[self.class];
        let list = if data.evaluate { &class.evaluation } else { &class.step };
        let outputs: Vec<(usize, Port)> = w.results(RoleKind::is_shown).enumerate().collect();
        for (i, instr) in list.iter().enumerate() {
            self.reach(&w, (i, 0))?;
            if self.clock.is_some() && !matches!(instr, Instr::Call(_)) {
                // Its time is not that of what goes on beside it.
                self.engine.transport().settle();
            }
            let start = self.now();
            self.recorder.microbatch(instr.microbatch());
            if !matches!(instr, Instr::Call(_) | Instr::Sent { .. }) {
                self.recorder.begin(Done::Instr(i), None);
            }
            match instr {
                Instr::Call(c) => {
                    self.call(&w, (data.evaluate, i), c)?;
                    for (output, p) in outputs.iter().filter(|(_, p)| p.func == c.func) {
                        if data.observe || p.ty.elements() == 1 {
                            let at = c.frames[p.place.frame as usize] + p.place.offset;
                            let piece = self.read(p.ty, at, p.place.bytes).map_err(own)?;
                            let (output, microbatch) = (*output, c.microbatch.unwrap_or(0));
                            pieces.extend(piece.map(|data| OutputPiece {
                                output,
                                microbatch,
                                data,
                            }));
                        }
                    }
                }
                Instr::Send(t) | Instr::PostRecv(t) | Instr::Recv(t) => {
                    self.transfer(&w, instr, t).map_err(|f| self.first_of(&w, f))?;
                }
                Instr::Sent { to } => {
                    let offered = self.offered(&w, (data.evaluate, i), w.plan.peer(self.rank, *to));
                    offered.map_err(|f| self.first_of(&w, f))?;
                    continue;
                }
            }
            // A call has begun nothing of its own, and its last collective may go on.
            if !matches!(instr, Instr::Call(_)) {
                self.recorder.end();
            }
            self.note(Done::Instr(i), start);
        }
        self.reach(&w, NEVER)?;
        self.engine.wait().map_err(own)?;
        let timings = std::mem::take(&mut self.timings);
        Ok(Reply { pieces, touched: self.engine.touched(), timings, given: vec![] })
    }

    /// Time since the session began, if times are noted; then what was begun before is done. What went
    /// wrong with it is told at the end of the step.
    fn now(&mut self) -> Option<Duration> {
        let clock = self.clock?;
        let _ = self.engine.wait();
        Some(clock.elapsed())
    }

    fn note(&mut self, what: Done, start: Option<Duration>) {
        if let Some((start, end)) = start.zip(self.now()) {
            self.timings.push(Timing { what, start, end });
        }
    }

    fn transfer(
        &mut self,
        w: &Wiring,
        instr: &Instr,
        t: &Transfer,
    ) -> std::result::Result<(), Failed> {
        let peer = w.plan.peer(self.rank, t.with);
        let first = found(self.engine.at(t.offset, t.bytes))?;
        let elem = w.plan.module.funcs[t.func].ty(t.value).dtype;
        // SAFETY: the arena has checked that the bytes lie inside it. What is sent stays until it
        // was waited for, and what is received is used by nobody yet, from where it is posted on: the
        // plan's instructions say so.
        let region = unsafe { Region::adjacent(first, elem, t.bytes / elem.bytes()) };
        let done = match instr {
            Instr::Send(_) => self.engine.transport().send(peer, &region),
            Instr::PostRecv(_) => self.engine.transport().post_recv(peer, &region),
            Instr::Recv(_) | Instr::Call(_) | Instr::Sent { .. } => {
                self.engine.transport().recv(peer, &region)
            }
        };
        done.map_err(|cause| {
            let f = &w.plan.module.funcs[t.func];
            let place = format!("{}, @{} {}", w.rank_text(self.rank), f.name, f.name(t.value));
            let cause = if cause.place.is_none() { cause.at(place) } else { cause };
            Failed { own: false, cause }
        })
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
            let p = w.places[func][value];
            let at = c.frames[p.frame as usize] + p.offset;
            let data = self.read(w.plan.module.funcs[func].ty(value), at, p.bytes);
            let data = data.map_err(own)?;
            pieces.extend(data.map(|data| OutputPiece { output: 0, microbatch: 0, data }));
        }
        Ok(Reply { pieces, touched: self.engine.touched(), timings: vec![], given: vec![] })
    }

    fn perform(&mut self, task: &Task) -> std::result::Result<Reply, Failed> {
        let w = self.wiring.clone();
        let (rank, all) = (self.rank, holdings::of(&w, self.rank));
        let mut give = |h: &Holding, sink: &mut Sink| {
            let p = w.places[h.func][h.value];
            let ty = w.plan.module.funcs[h.func].ty(h.value);
            let block = piece(w.mesh(), ty, &self.coords);
            let together = block.view.strides == tensor::strides(&block.extents);
            if !together || block.elem != DType::F32 || block.end() * 4 > p.bytes {
                return sink(&self.read(ty, p.offset, p.bytes)?.ok_or_else(out_of_arena)?);
            }
            let mut done = Ok(());
            self.engine.read(p.offset, p.bytes, &mut |from| {
                // SAFETY: the elements lie together, inside the place.
                done = sink(unsafe { std::slice::from_raw_parts(from, block.len()) });
            })?;
            done
        };
        let given = task(rank, &all, &mut give).map_err(own)?;
        Ok(Reply { pieces: vec![], touched: self.engine.touched(), timings: vec![], given })
    }

    /// The dense elements of this rank's piece, in f32, if it is its owner.
    ///
    /// # Errors
    /// `plan` if the place is too small for the type, and those of the engine.
    fn read(&mut self, ty: &Type, at: usize, bytes: usize) -> Result<Option<Vec<f32>>> {
        let mesh = self.wiring.mesh();
        if !owns(mesh, ty, &self.coords) {
            return Ok(None);
        }
        let block = piece(mesh, ty, &self.coords);
        if block.end() * block.elem.bytes() > bytes {
            return Err(out_of_arena());
        }
        let mut data = vec![0.0; block.len()];
        self.engine.read(at, bytes, &mut |from| {
            // SAFETY: the block lies in the place, as was just checked; the copy is dense.
            unsafe {
                let to = Region::new(data.as_mut_ptr(), &dense_block(&block.extents));
                copy(&Region::new(from, &block), &to, 0..block.len());
            }
        })?;
        Ok(Some(data))
    }
}
