//! A list scheduler: builds a schedule by running it.
//!
//! Whenever a rank is free it takes the best action that can begin: one whose inputs are there and,
//! for a forward, for which there is memory. What is best is a [`Policy`]. W waits until a rank has
//! nothing better to do, which is how W comes to fill the bubbles (Qi et al., "Zero Bubble Pipeline
//! Parallelism", 2024, section 3.1).
//!
//! With [`Policy::reserve`] it cannot get stuck: a forward of a younger microbatch leaves room on
//! its rank for what the oldest one that is not yet forward everywhere still needs there, so the
//! oldest one always comes through, and then gives back all its memory.

use std::cmp::Ordering;
use std::collections::{BTreeSet, VecDeque};

use shardc_ir::schedule::{Action, ActionKind, Held, Schedule, Times, replay};

/// What is to be scheduled.
pub(super) struct Task<'a> {
    /// Rank of each stage.
    pub owner: &'a [usize],
    pub ranks: usize,
    pub microbatches: usize,
    pub times: &'a Times,
    /// What a microbatch holds in each stage.
    pub held: &'a [Held],
    /// What each rank can hold.
    pub limit: &'a [u64],
}

/// What is best.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Policy {
    pub order: ActionPriority,
    /// Where a forward comes first but lacks memory, W goes before any backward.
    pub free_first: bool,
    /// Keep room for the oldest microbatch. Without, more fits, and the run may get stuck.
    pub reserve: bool,
    /// A rank begins no W that would delay an input known to come.
    pub patient: bool,
}

/// Which action comes first. Ties go to the stage that is further along.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum ActionPriority {
    /// I before F.
    BackwardFirst,
    /// F before I.
    ForwardFirst,
    /// By the time at which a steady state would run it.
    Steady(SchedulePattern),
}

/// A block of F and I of one microbatch that repeats every `period`, as in Qi et al., "Pipeline
/// Parallelism with Controllable Memory", 2024, section 3; times in actions of mean length.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct SchedulePattern {
    /// From a stage to the next one if that is on a higher rank, for F and for I: the offsets
    /// delta of the paper. Long ones make a block live long, and take memory.
    pub up: (f64, f64),
    /// The same if it is on the same rank or a lower one.
    pub down: f64,
    /// Between the last F and the first I.
    pub gap: f64,
    /// How far an action may overtake one whose input is still to come.
    pub window: f64,
}

/// Ranks in order of the time at which there may be something to do.
type Wakes = BTreeSet<(Time, usize)>;

struct Sim<'a> {
    t: &'a Task<'a>,
    policy: Policy,
    /// Stages of each rank.
    stages: Vec<Vec<usize>>,
    /// Microbatches that began their forward and backward, by stage.
    forwards: Vec<usize>,
    backwards: Vec<usize>,
    /// When F and I end, by stage and microbatch.
    f_end: Vec<f64>,
    b_end: Vec<f64>,
    /// Times of a [`SchedulePattern`] for microbatch 0, by stage, and from one microbatch to the next.
    steady_f: Vec<f64>,
    steady_b: Vec<f64>,
    period: f64,
    window: f64,
    /// W whose I has begun, oldest first, by rank.
    weights: Vec<VecDeque<Action>>,
    live: Vec<u64>,
    free_at: Vec<f64>,
    lists: Vec<Vec<Action>>,
}

/// Runs a task. None if a rank cannot hold even one microbatch, or if the run got stuck.
pub(super) fn run(t: &Task, policy: Policy) -> Option<Vec<Vec<Action>>> {
    let mut sim = Sim::new(t, policy);
    for (stages, &limit) in sim.stages.iter().zip(t.limit) {
        let whole = stages.iter().fold(0u64, |n, &s| n.saturating_add(sum(t.held[s])));
        if whole > limit {
            return None;
        }
    }
    let mut left = 3 * t.owner.len() * t.microbatches;
    let mut wakes: Wakes = (0..t.ranks).map(|r| (Time(0.0), r)).collect();
    let mut now = 0.0;
    while left > 0 {
        if let Some((Time(time), rank)) = wakes.pop_first() {
            now = time;
            while sim.free_at[rank] <= now
                && let Some(a) = sim.choose(rank, now, false)
            {
                sim.begin(rank, a, now, &mut wakes);
                left -= 1;
            }
            continue;
        }
        // Nothing is under way: the ranks wait for each other's better action. Take any.
        let mut any = (0..t.ranks).filter_map(|r| Some((r, sim.choose(r, now, true)?)));
        let (rank, a) = any.next()?;
        sim.begin(rank, a, now, &mut wakes);
        left -= 1;
    }
    Some(sim.lists)
}

/// What several policies make of a task in which all times are 1 and a rank can hold `limit` pairs
/// of a stage and a microbatch.
pub(super) fn run_all(
    owner: &[usize],
    ranks: usize,
    microbatches: usize,
    limit: u64,
    policies: &[Policy],
) -> Vec<Vec<Vec<Action>>> {
    let times = Times::unit(owner.len());
    let held = vec![Held { input: 0, weight: 1 }; owner.len()];
    let limit = vec![limit; ranks];
    let task = Task { owner, ranks, microbatches, times: &times, held: &held, limit: &limit };
    policies.iter().filter_map(|&policy| run(&task, policy)).collect()
}

/// Of several lists those of least longest span, then least makespan, then least memory, then the
/// first. Those that get stuck do not count; one must not.
pub(super) fn best(
    owner: &[usize],
    microbatches: usize,
    tries: Vec<Vec<Vec<Action>>>,
) -> Vec<Vec<Action>> {
    let times = Times::unit(owner.len());
    let tried = tries.into_iter().filter_map(|ranks| {
        let s = Schedule { owner: owner.to_vec(), microbatches, ranks };
        let line = replay(&s, &times).ok()?;
        let live = (0..s.ranks.len()).map(|r| line.live(r)).max().unwrap_or(0);
        Some((Time(line.longest_span()), Time(line.makespan()), live, s.ranks))
    });
    let least = tried.min_by_key(|&(span, makespan, live, _)| (span, makespan, live));
    least.expect("a policy that reserves gets through").3
}

fn sum(h: Held) -> u64 {
    h.input.saturating_add(h.weight)
}

/// A finite time, ordered.
#[derive(PartialEq, Clone, Copy)]
pub(super) struct Time(pub f64);
impl Eq for Time {}
impl Ord for Time {
    fn cmp(&self, o: &Time) -> Ordering {
        self.0.total_cmp(&o.0)
    }
}
impl PartialOrd for Time {
    fn partial_cmp(&self, o: &Time) -> Option<Ordering> {
        Some(self.cmp(o))
    }
}

impl<'a> Sim<'a> {
    fn new(t: &'a Task<'a>, policy: Policy) -> Sim<'a> {
        let (stages, n) = (t.owner.len(), t.owner.len() * t.microbatches);
        let mut of_rank = vec![vec![]; t.ranks];
        for (stage, &rank) in t.owner.iter().enumerate() {
            of_rank[rank].push(stage);
        }
        let mut sim = Sim {
            t,
            policy,
            stages: of_rank,
            forwards: vec![0; stages],
            backwards: vec![0; stages],
            f_end: vec![f64::INFINITY; n],
            b_end: vec![f64::INFINITY; n],
            steady_f: vec![0.0; stages],
            steady_b: vec![0.0; stages],
            period: 0.0,
            window: f64::INFINITY,
            weights: vec![VecDeque::new(); t.ranks],
            live: vec![0; t.ranks],
            free_at: vec![0.0; t.ranks],
            lists: vec![vec![]; t.ranks],
        };
        if let ActionPriority::Steady(p) = policy.order {
            sim.lay_out(p);
        }
        sim
    }

    /// The times of a pattern.
    fn lay_out(&mut self, p: SchedulePattern) {
        let (owner, times) = (self.t.owner, self.t.times);
        let work = |s: usize| times.forward[s] + times.input[s] + times.weight[s];
        let unit = (0..owner.len()).map(work).sum::<f64>() / (3 * owner.len()) as f64;
        let of_rank = |stages: &Vec<usize>| stages.iter().map(|&s| work(s)).sum::<f64>();
        self.period = self.stages.iter().map(of_rank).fold(0.0, f64::max);
        self.window = p.window * unit;
        let last = owner.len() - 1;
        for s in 1..=last {
            let hop = if owner[s] > owner[s - 1] { p.up.0 } else { p.down };
            self.steady_f[s] = self.steady_f[s - 1] + hop * unit;
        }
        self.steady_b[last] = self.steady_f[last] + (1.0 + p.gap) * unit;
        for s in (0..last).rev() {
            let hop = if owner[s] > owner[s + 1] { p.up.1 } else { p.down };
            self.steady_b[s] = self.steady_b[s + 1] + hop * unit;
        }
    }

    /// The best action that can begin now. `forced`: even one that overtakes a better one.
    fn choose(&self, rank: usize, now: f64, forced: bool) -> Option<Action> {
        let weight = self.weights[rank].front().copied();
        let mut best: Option<(Action, bool)> = None;
        // When the next input comes, and which action still to come is the first in the order.
        let (mut next, mut head) = (f64::INFINITY, f64::INFINITY);
        for &stage in &self.stages[rank] {
            for kind in [ActionKind::Forward, ActionKind::Input] {
                let Some((a, at)) = self.head(stage, kind) else { continue };
                if at > now {
                    next = next.min(at);
                    head = head.min(self.steady(a));
                    continue;
                }
                let fits = kind == ActionKind::Input || self.fits(rank, a);
                // A forward without memory counts only where that makes W go before a backward.
                let counts = fits || (self.policy.free_first && weight.is_some());
                if counts && best.is_none_or(|(b, _)| self.before(a, b)) {
                    best = Some((a, fits));
                }
            }
        }
        if let Some((a, true)) = best
            && (forced || self.steady(a) <= head + self.window)
        {
            return Some(a);
        }
        weight.filter(|w| {
            let end = now + self.t.times.of(ActionKind::Weight, w.stage);
            !self.policy.patient || best.is_some() || next >= end || next == f64::INFINITY
        })
    }

    /// The next F or I of a stage, and when its input is there.
    fn head(&self, stage: usize, kind: ActionKind) -> Option<(Action, f64)> {
        let m = self.t.microbatches;
        let forward = kind == ActionKind::Forward;
        let microbatch = if forward { self.forwards[stage] } else { self.backwards[stage] };
        if microbatch == m {
            return None;
        }
        let at = match stage {
            0 if forward => 0.0,
            s if forward => self.f_end[(s - 1) * m + microbatch],
            s if s + 1 == self.t.owner.len() => self.f_end[s * m + microbatch],
            s => self.f_end[s * m + microbatch].max(self.b_end[(s + 1) * m + microbatch]),
        };
        Some((Action { kind, stage, microbatch }, at))
    }

    /// When a steady state would run F or I, if that is the order.
    fn steady(&self, a: Action) -> f64 {
        let first = if a.kind == ActionKind::Forward { &self.steady_f } else { &self.steady_b };
        first[a.stage] + self.period * a.microbatch as f64
    }

    /// Whether a rank has memory for a forward, and for what the oldest microbatch that is not yet
    /// forward in all stages of the rank still needs there.
    fn fits(&self, rank: usize, a: Action) -> bool {
        let stages = &self.stages[rank];
        let held = |n: u64, &s: &usize| n.saturating_add(sum(self.t.held[s]));
        let oldest = stages.iter().map(|&s| self.forwards[s]).min().unwrap_or(0);
        let need = match self.policy.reserve && a.microbatch != oldest {
            true => stages.iter().filter(|&&s| self.forwards[s] == oldest).fold(0, held),
            false => 0,
        };
        held(self.live[rank].saturating_add(need), &a.stage) <= self.t.limit[rank]
    }

    /// Whether `a` goes before `b`.
    fn before(&self, a: Action, b: Action) -> bool {
        // How far along its microbatch is.
        let far = |x: Action| match x.kind {
            ActionKind::Forward => x.stage,
            _ => 2 * self.t.owner.len() - 1 - x.stage,
        };
        let forward = |x: Action| x.kind == ActionKind::Forward;
        match self.policy.order {
            ActionPriority::BackwardFirst => far(a) > far(b),
            ActionPriority::ForwardFirst => (forward(a), far(a)) > (forward(b), far(b)),
            ActionPriority::Steady(_) => {
                let order = self.steady(a).total_cmp(&self.steady(b));
                order.then(far(b).cmp(&far(a))) == Ordering::Less
            }
        }
    }

    /// Begins an action, and wakes the ranks it concerns when it ends.
    fn begin(&mut self, rank: usize, a: Action, now: f64, wakes: &mut Wakes) {
        let id = a.stage * self.t.microbatches + a.microbatch;
        let held = self.t.held[a.stage];
        let end = now + self.t.times.of(a.kind, a.stage);
        let waiter = match a.kind {
            ActionKind::Forward => {
                self.live[rank] = self.live[rank].saturating_add(sum(held));
                self.forwards[a.stage] += 1;
                self.f_end[id] = end;
                self.t.owner.get(a.stage + 1)
            }
            // A rank does one thing at a time, so what ends here is free for whatever is next.
            ActionKind::Input | ActionKind::Backward => {
                self.live[rank] = self.live[rank].saturating_sub(held.input);
                self.weights[rank].push_back(Action { kind: ActionKind::Weight, ..a });
                self.backwards[a.stage] += 1;
                self.b_end[id] = end;
                a.stage.checked_sub(1).map(|s| &self.t.owner[s])
            }
            ActionKind::Weight => {
                self.live[rank] = self.live[rank].saturating_sub(held.weight);
                self.weights[rank].pop_front();
                None
            }
        };
        wakes.insert((Time(end), rank));
        wakes.extend(waiter.map(|&r| (Time(end), r)));
        self.free_at[rank] = end;
        self.lists[rank].push(a);
    }
}
