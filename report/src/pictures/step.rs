//! A step of a plan against the clock: its actions, what stands before and after them, memory over time.

use super::measure::timeline;
use super::palette::STACK;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::FuncKind;
use shardc_ir::plan::{Instr, Memory, MemoryClass, Mode, Plan, RankClass, Span};
use shardc_ir::schedule::{ActionKind, Slot, Timeline, Times};
use shardc_passes::options::Options;
use shardc_passes::step::instructions::Index;

/// How long everything takes: actions by stage, the functions before and after them by pipeline rank.
#[derive(Clone, PartialEq, Debug)]
pub struct Lengths {
    pub actions: Times,
    pub enter: Vec<f64>,
    pub finish: Vec<f64>,
}

impl Lengths {
    /// F, I and W take one unit each, on a rank of half the speed two; so do enter and finish, which may
    /// really take any time.
    pub fn unit(plan: &Plan, o: &Options) -> Lengths {
        let s = &plan.schedule;
        let of = |rank: usize| 1.0 / o.speeds.get(rank).copied().unwrap_or(1.0);
        let actions: Vec<f64> = s.owner.iter().map(|&rank| of(rank)).collect();
        let around: Vec<f64> = (0..s.ranks.len()).map(of).collect();
        let actions = Times { forward: actions.clone(), input: actions.clone(), weight: actions };
        Lengths { actions, enter: around.clone(), finish: around }
    }
}

/// Bytes at a moment, by kind in the order of [`STACK`]; they stay until the next.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sample {
    pub time: f64,
    pub bytes: [usize; STACK.len()],
}

impl Sample {
    pub fn total(&self) -> usize {
        self.bytes.iter().fold(0, |sum, n| sum.saturating_add(*n))
    }
}

/// From when to when something is done.
pub type Moments = (f64, f64);

/// A step of all pipeline ranks.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Step {
    pub timeline: Timeline,
    /// By pipeline rank: from when to when it works before its first action, and after its last.
    pub enter: Vec<Moments>,
    pub finish: Vec<Moments>,
    /// By pipeline rank, every instruction of its step.
    pub clock: Vec<Vec<Moments>>,
}

impl Step {
    /// The actions of a schedule alone.
    pub fn of_actions(timeline: Timeline) -> Step {
        Step { timeline, ..Step::default() }
    }

    /// The step of a plan, whose first action begins at 0; without a backward, what an inference does.
    ///
    /// # Errors
    /// Those of the replay of a schedule, and `plan` if functions and schedule do not fit; a plan that was made or
    /// read has been replayed.
    pub fn of(plan: &Plan, l: Lengths) -> Result<Step> {
        let timeline = timeline(plan, l.actions)?;
        let has = |kind: FuncKind, c: &RankClass| {
            let mut calls = c.calls().filter(|c| c.microbatch.is_none());
            calls.any(|c| plan.module.funcs[c.func].kind == kind)
        };
        let length = |all: &[f64], rank: usize, kind: FuncKind| match has(kind, &plan.classes[rank])
        {
            true => all.get(rank).copied().unwrap_or(0.0),
            false => 0.0,
        };
        let before = |rank: usize| {
            let first = timeline.ranks[rank].first().map(|s| s.start.min(0.0));
            let end = first.filter(|t| t.is_finite()).unwrap_or(0.0);
            (end - length(&l.enter, rank, FuncKind::StepPrologue), end)
        };
        let after = |rank: usize| {
            let last = timeline.ranks[rank].last().map(|s| s.end);
            let begin = last.filter(|t| t.is_finite()).unwrap_or(0.0);
            (begin, begin + length(&l.finish, rank, FuncKind::OptimizerStep))
        };
        let ranks = 0..plan.classes.len();
        let (enter, finish) =
            (ranks.clone().map(before).collect(), ranks.clone().map(after).collect());
        let mut step = Step { timeline, enter, finish, clock: vec![] };
        let index = indexed(plan)?;
        step.clock = ranks.map(|rank| step.instructions(plan, &index, rank)).collect();
        Ok(step)
    }

    /// The step of a plan in which every instruction has its moments. An action goes from its first call to its
    /// last.
    ///
    /// # Errors
    /// `plan` if functions and schedule do not fit, as of no plan that was read.
    pub fn of_moments(plan: &Plan, clock: Vec<Vec<Moments>>) -> Result<Step> {
        let index = indexed(plan)?;
        let mut step = Step { clock, ..Step::default() };
        for (rank, c) in plan.classes.iter().enumerate() {
            let calls = |looped: bool| {
                let all = c.step.iter().zip(&step.clock[rank]);
                all.filter_map(move |(i, at)| match i {
                    Instr::Call(call) if call.microbatch.is_some() == looped => Some((call, *at)),
                    _other => None,
                })
            };
            let once = |kind: FuncKind| {
                let found = calls(false).find(|x| plan.module.funcs[x.0.func].kind == kind);
                found.map(|x| x.1)
            };
            let (enter, finish) = (once(FuncKind::StepPrologue), once(FuncKind::OptimizerStep));
            let mut looped = calls(true);
            let mut slots = vec![];
            for &action in &plan.schedule.ranks[rank] {
                if plan.settings.mode != Mode::Train && action.kind != ActionKind::Forward {
                    continue;
                }
                let two =
                    action.kind == ActionKind::Backward && index.weight[action.stage].is_some();
                let Some((_, (start, first))) = looped.next() else { break };
                let last = if two { looped.next() } else { None };
                slots.push(Slot { action, start, end: last.map_or(first, |x| x.1.1) });
            }
            let ends = step.clock[rank].iter().fold(0.0f64, |a, x| a.max(x.1));
            step.enter.push(enter.unwrap_or((0.0, 0.0)));
            step.finish.push(finish.unwrap_or((ends, ends)));
            step.timeline.ranks.push(slots);
        }
        Ok(step)
    }

    /// The part of all ranks' time, from 0 to 1, in which they do not work, from the beginning of the first to the
    /// end of the last.
    pub fn idle(&self) -> f64 {
        let (begin, end) = self.span();
        let slots = self.timeline.ranks.iter().flatten().map(|s| s.end - s.start);
        let around = self.enter.iter().chain(&self.finish).map(|x| x.1 - x.0);
        let whole = (end - begin) * self.timeline.ranks.len() as f64;
        let busy = slots.chain(around).sum::<f64>();
        if whole > 0.0 { (1.0 - busy / whole).clamp(0.0, 1.0) } else { 0.0 }
    }

    /// From when to when a pipeline rank works before its first action.
    pub fn enter(&self, rank: usize) -> Moments {
        self.enter.get(rank).copied().unwrap_or_default()
    }

    /// From when to when it works after its last action.
    pub fn finish(&self, rank: usize) -> Moments {
        let none = || {
            let last = self.timeline.ranks[rank].last().map(|s| s.end).filter(|t| t.is_finite());
            last.map_or((0.0, 0.0), |end| (end, end))
        };
        self.finish.get(rank).copied().unwrap_or_else(none)
    }

    /// When the first of all ranks begins and the last ends.
    pub fn span(&self) -> (f64, f64) {
        let (begin, length) = super::measure::span(&self.timeline);
        let around = self.enter.iter().chain(&self.finish);
        let all = around.chain(self.clock.iter().flatten());
        all.fold((begin, begin + length), |(from, to), x| (from.min(x.0), to.max(x.1)))
    }

    /// When every instruction of a pipeline rank begins and ends: calls as their actions do, what is sent
    /// when the call before it ends, what is received when the call after it begins.
    fn instructions(&self, plan: &Plan, index: &Index, rank: usize) -> Vec<Moments> {
        let mut slots = self.timeline.ranks[rank].iter();
        // What is left of an action that is two calls.
        let mut rest: Option<Moments> = None;
        let mut now = self.enter(rank).0;
        let mut out: Vec<Moments> = vec![];
        let step = &plan.classes[rank].step;
        for i in step {
            let at = match i {
                Instr::Call(call) if call.microbatch.is_some() => match rest.take() {
                    Some(r) => r,
                    None => slots.next().map_or((now, now), |s| {
                        let whole = s.action.kind == ActionKind::Backward;
                        let two = whole && index.weight[s.action.stage].is_some();
                        let half = if two { (s.start + s.end) / 2.0 } else { s.end };
                        rest = two.then_some((half, s.end));
                        (s.start, half)
                    }),
                },
                Instr::Call(call) => match plan.module.funcs[call.func].kind {
                    FuncKind::StepPrologue => self.enter(rank),
                    FuncKind::OptimizerStep => self.finish(rank),
                    _other => (now, now),
                },
                Instr::Send(_) | Instr::Sent { .. } | Instr::PostRecv(_) | Instr::Recv(_) => {
                    (now, now)
                }
            };
            now = at.1;
            out.push(at);
        }
        let mut next = now;
        for (i, at) in step.iter().zip(&mut out).rev() {
            match i {
                Instr::Recv(_) => *at = (next, next),
                Instr::Call(_) => next = at.0,
                Instr::Send(_) | Instr::Sent { .. } | Instr::PostRecv(_) => {}
            }
        }
        // What stands behind a receive is done after it.
        let mut now = f64::NEG_INFINITY;
        for at in &mut out {
            now = now.max(at.0);
            *at = (now, now.max(at.1));
            now = at.1;
        }
        out
    }

    /// Bytes of a pipeline rank over time, moment by moment of its calls. Of what happens at one time all
    /// is there, in its order.
    pub fn memory(&self, plan: &Plan, rank: usize) -> Vec<Sample> {
        let (c, clock) = (&plan.classes[rank], &self.clock[rank]);
        let mut bytes = [0usize; STACK.len()];
        c.memory.whole.iter().for_each(|&(class, n)| bytes[place(class)] += n);
        // At one moment, what ends goes before what begins.
        let mut changes: Vec<((usize, usize), bool, Span)> = vec![];
        for &s in &c.memory.spans {
            changes.push(((s.first, s.from_node), true, s));
            changes.push((end(plan, c, &s), false, s));
        }
        changes.sort_by_key(|c| (c.0, c.1));
        let begin = clock.first().map_or(0.0, |t| t.0);
        let mut out = vec![Sample { time: begin, bytes }];
        for run in changes.chunk_by(|a, b| a.0 == b.0) {
            for (_, begins, s) in run {
                let n = &mut bytes[place(s.class)];
                *n = if *begins { *n + s.bytes } else { n.saturating_sub(s.bytes) };
            }
            let (instr, node) = run[0].0;
            let time = match clock.get(instr) {
                Some(&(from, to)) => {
                    from + (to - from) * (node as f64 / moments(plan, c, instr) as f64).min(1.0)
                }
                None => clock.last().map_or(begin, |t| t.1),
            };
            out.push(Sample { time, bytes });
        }
        out
    }
}

/// The functions of a plan, by what they are for.
fn indexed(plan: &Plan) -> Result<Index> {
    Index::of(&plan.module, &plan.schedule, plan.settings.mode)
        .map_err(|m| Diag::new("plan", m).help("recompile the plan with this version of shardc"))
}

/// What of the peak of an arena is between the tensors that are alive there.
pub fn gaps(m: &Memory) -> usize {
    m.peak_bytes.saturating_sub(m.alive.iter().map(|a| a.bytes).sum())
}

/// Moments of an instruction: one per node of a call, one before and one after them.
fn moments(plan: &Plan, c: &RankClass, instr: usize) -> usize {
    match &c.step[instr] {
        Instr::Call(call) => plan.module.funcs[call.func].nodes.len() + 2,
        Instr::Send(_) | Instr::Sent { .. } | Instr::PostRecv(_) | Instr::Recv(_) => 1,
    }
}

/// The first moment at which a frame is no longer in use.
fn end(plan: &Plan, c: &RankClass, s: &Span) -> (usize, usize) {
    match s.to_node + 1 >= moments(plan, c, s.last) {
        true => (s.last + 1, 0),
        false => (s.last, s.to_node + 1),
    }
}

/// Where a kind stands in [`STACK`].
pub fn place(class: MemoryClass) -> usize {
    STACK.iter().position(|c| *c == class).expect("all kinds stand in the stack")
}
