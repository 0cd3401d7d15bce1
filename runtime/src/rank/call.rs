//! Calls of functions: launch after launch, with collectives that go on meanwhile.

use super::{Failed, Rank, own};
use crate::alarm::Call as Number;
use crate::call_plan::{CallPlan, Run};
use crate::engine::{Queued, out_of_arena};
use crate::flight_recorder::{Done, Timing};
use crate::wiring::Wiring;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::kernel::Kernel;
use shardc_ir::overlap::{Turn, late};
use shardc_ir::plan::{Call, FramePlace, Instr, calls};
use smallvec::SmallVec;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

/// Behind all lists.
pub(super) const NEVER: Turn = (usize::MAX, 0);

/// What goes on beside work.
pub(super) struct Open {
    /// Where it is waited for.
    until: Turn,
    what: What,
}

enum What {
    /// An offer to a rank, of this instruction that waits for it.
    Offer { to: usize, instr: usize },
    /// A collective, of this launch of a function, with its number among the operations of the transport.
    Collective { func: usize, launch: usize, lane: usize, number: Option<Number> },
}

impl What {
    /// Things of a queue are done in their order.
    fn queue(&self) -> (bool, usize) {
        match *self {
            What::Offer { to, .. } => (false, to),
            What::Collective { lane, .. } => (true, lane),
        }
    }
}

impl Rank {
    /// Runs all launches of a function, which is called by instruction `at` of a list.
    pub(super) fn call(
        &mut self,
        w: &Wiring,
        (evaluates, at): (bool, usize),
        c: &Call,
    ) -> std::result::Result<(), Failed> {
        let call_plan = self.call_plan(w, c);
        let mut runs = call_plan.runs.iter().peekable();
        let (mut i, end) = (0, w.bound[c.func].len());
        while i < end {
            let run = runs.next_if(|r| r.launches.start == i);
            self.reach(w, (at, run.map_or(i, |r| r.launches.end - 1)))?;
            if let Some(run) = run {
                self.repeat(w, c, run)?;
                i = run.launches.end;
                continue;
            }
            let until = match call_plan.awaited.get(i) {
                Some(&until) if until == end => {
                    let late = self.late[usize::from(evaluates)].get(&(at, Some(i)));
                    late.copied().unwrap_or((at, end))
                }
                until => (at, until.copied().unwrap_or(i + 1)),
            };
            let axes = match &self.program[c.func][i] {
                Kernel::Collective(k) => Some(k.axes),
                _alone => None,
            };
            let deferred = until > (at, i + 1) && axes.is_some();
            let number = match self.launch(w, c, i, deferred) {
                Ok(number) => number,
                Err(f) => return Err(self.first_of(w, f)),
            };
            if deferred {
                let lane = axes.map_or(0, |axes| self.engine.transport().lane(axes));
                self.open(until, What::Collective { func: c.func, launch: i, lane, number });
            }
            i += 1;
        }
        self.reach(w, (at, end))
    }

    /// What failed: an operation, or one of those under way, which says so where it is waited for.
    pub(super) fn first_of(&mut self, w: &Wiring, f: Failed) -> Failed {
        if f.own { f } else { self.reach(w, NEVER).err().unwrap_or(f) }
    }

    /// Waits for an offer, which instruction `at` of a list does; later if its memory is not needed before.
    pub(super) fn offered(
        &mut self,
        w: &Wiring,
        (evaluates, at): (bool, usize),
        to: usize,
    ) -> std::result::Result<(), Failed> {
        let late = self.late[usize::from(evaluates)].get(&(at, None));
        self.open(late.copied().unwrap_or((at, 0)), What::Offer { to, instr: at });
        self.reach(w, (at, 0))
    }

    /// Says that something goes on until it is waited for.
    fn open(&mut self, until: Turn, what: What) {
        let queue = what.queue();
        self.open.push_back(Open { until, what });
        let mut least = until;
        for earlier in self.open.iter_mut().rev().filter(|o| o.what.queue() == queue) {
            least = least.min(earlier.until);
            earlier.until = least;
        }
    }

    /// Waits for all that is waited for up to a place of the list.
    pub(super) fn reach(&mut self, w: &Wiring, at: Turn) -> std::result::Result<(), Failed> {
        while let Some(i) = self.open.iter().position(|o| o.until <= at) {
            let o = self.open.remove(i).expect("it is there");
            match o.what {
                What::Offer { to, instr } => self.sent(to, instr)?,
                What::Collective { func, launch, lane, number } => {
                    self.finish(w, (func, launch, lane), number)?;
                }
            }
        }
        Ok(())
    }

    /// Waits for the oldest offer to a rank.
    fn sent(&mut self, to: usize, instr: usize) -> std::result::Result<(), Failed> {
        let start = self.now();
        self.recorder.begin(Done::Instr(instr), None);
        let done = self.engine.transport().sent(to);
        done.map_err(|cause| Failed { own: false, cause })?;
        self.recorder.end();
        self.note(Done::Instr(instr), start);
        Ok(())
    }

    /// Runs a launch of a function, or, if it is deferred, begins it; its number among operations.
    fn launch(
        &mut self,
        w: &Wiring,
        c: &Call,
        i: usize,
        deferred: bool,
    ) -> std::result::Result<Option<Number>, Failed> {
        let func = c.func;
        // A launch is known by its first node.
        let n = w.launches[func][i].nodes.start;
        let memory = self.memory(w, c, i).map_err(own)?;
        let group = match &self.program[func][i] {
            Kernel::Collective(k) => Some(k.axes),
            _alone => None,
        };
        let exchanges = group.is_some();
        match deferred {
            true => self.engine.transport().defer(),
            false if exchanges && self.clock.is_some() => self.engine.transport().settle(),
            false => {}
        }
        // What is deferred is noted when it has ended.
        let start = if deferred { None } else { self.now() };
        let number = self.recorder.begin(Done::Launch(func, n), group);
        // SAFETY: `check_program` has compared what the kernel reaches with the sizes of these
        // places, and the arena has checked that they lie inside it. The plan keeps operands
        // and results apart.
        let done = unsafe { self.engine.run((func, i), &self.program[func][i], &memory) };
        self.note(Done::Launch(func, n), start);
        // A transport may report what happened to another rank.
        done.map_err(|cause| Failed { own: !exchanges, cause: self.placed(w, func, n, cause) })?;
        if !deferred {
            self.recorder.end();
        }
        Ok(number)
    }

    /// Runs launches that are the same each time: at once, if the engine has kept them.
    fn repeat(&mut self, w: &Wiring, c: &Call, run: &Run) -> std::result::Result<(), Failed> {
        let n = w.launches[c.func][run.launches.start].nodes.start;
        self.recorder.begin(Done::Launch(c.func, n), None);
        // SAFETY: a run's number is that of its function and frames, whose places were checked when it
        // was kept.
        let kept = unsafe { self.engine.replay(run.number) };
        if kept.map_err(|cause| own(self.placed(w, c.func, n, cause)))? {
            self.recorder.end();
            return Ok(());
        }
        run.launches.clone().try_for_each(|i| self.launch(w, c, i, false).map(|_| ()))
    }

    /// The memory of a launch of a function.
    fn memory(&mut self, w: &Wiring, c: &Call, i: usize) -> Result<SmallVec<[*mut f32; 16]>> {
        let mut at =
            |p: &FramePlace| self.engine.at(c.frames[p.frame as usize] + p.offset, p.bytes);
        w.bound[c.func][i].iter().map(|p| at(p).ok_or_else(out_of_arena)).collect()
    }

    /// Makes ready what steps need of a device beside memory, before any of them: what is repeated, and room for what
    /// is exchanged. Making it may wait for all that the device does, and that may wait for another rank.
    pub(super) fn prepare(&mut self) -> Result<()> {
        let w = self.wiring.clone();
        let class = &w.plan.classes[self.class];
        let mut known = BTreeSet::new();
        if !(self.clock.is_some() && self.engine.queues()) {
            let lists = [&class.step, &class.evaluation];
            self.late = lists.map(|l| late(&w.plan.module, &w.launches, class, l));
            for (list, late) in lists.iter().zip(&self.late) {
                for &(at, launch) in late.values() {
                    if let Some(Instr::Call(c)) = list.get(at) {
                        self.call_plans.cut(c, launch);
                    }
                }
            }
        }
        let exchanges = self.engine.transport().rehearse(true)?;
        for c in class.calls().chain(calls(&class.evaluation)) {
            if !self.engine.queues() || !known.insert((c.func, c.frames.clone())) {
                continue;
            }
            for i in 0..self.program[c.func].len() {
                self.engine.prepare(&self.program[c.func][i])?;
                if !exchanges {
                    continue;
                }
                let memory = self.memory(&w, c, i)?;
                // SAFETY: as in `launch`.
                unsafe { self.engine.rehearse(&self.program[c.func][i], &memory)? };
            }
            for run in &self.call_plan(&w, c).runs {
                let queued = |i| {
                    let memory = self.memory(&w, c, i)?;
                    Ok((i, memory))
                };
                let all: Vec<_> = run.launches.clone().map(queued).collect::<Result<_>>()?;
                let queued = |(i, memory)| {
                    let kernel = &self.program[c.func][i];
                    Queued { launch: (c.func, i), kernel, memory }
                };
                let all: Vec<Queued> = all.into_iter().map(queued).collect();
                // SAFETY: as in `launch`.
                unsafe { self.engine.keep(run.number, run.queued, &all)? };
            }
        }
        self.engine.transport().rehearse(false)?;
        Ok(())
    }

    /// A failure of a launch, with its place if it has none.
    fn placed(&self, w: &Wiring, func: usize, node: usize, cause: Diag) -> Diag {
        let place = || format!("{}, {}", w.rank_text(self.rank), w.node_text(func, node));
        if cause.place.is_none() { cause.at(place()) } else { cause }
    }

    /// How a call goes: one launch after the other if what a device does is timed.
    fn call_plan(&mut self, w: &Wiring, c: &Call) -> Arc<CallPlan> {
        if self.clock.is_some() && self.engine.queues() {
            return Arc::default();
        }
        self.call_plans.of((w, self.class), c, &self.program, &mut *self.engine)
    }

    /// Waits for the oldest collective under way.
    fn finish(
        &mut self,
        w: &Wiring,
        (func, launch, lane): (usize, usize, usize),
        number: Option<Number>,
    ) -> std::result::Result<(), Failed> {
        let n = w.launches[func][launch].nodes.start;
        let done = self.engine.transport().finish(lane);
        let placed = |cause| Failed { own: false, cause: self.placed(w, func, n, cause) };
        let took = done.map_err(placed)?;
        self.recorder.ended(number);
        if let Some((began, took)) = self.clock.zip(took) {
            let since = |at: Instant| at.saturating_duration_since(began);
            let (start, end) = (since(took.begun), since(took.done));
            self.timings.push(Timing { what: Done::Launch(func, n), start, end });
        }
        Ok(())
    }
}
