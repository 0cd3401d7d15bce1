//! Runs a schedule against a clock: when each action begins and ends, and whether it can.
//!
//! What an action waits for, besides its place in the list of its rank:
//!
//! - `sFj` for `(s-1)Fj`;
//! - `sBj` and `sIj` for `sFj`, and for the B or I of microbatch j in stage s+1;
//! - `sWj` for `sIj`.
//!
//! Sends and receives take no time here: what crosses ranks is there when its maker ends.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::check::check;
use super::{Action, ActionKind, Schedule};
use crate::diag::{Diag, Result};

/// How long each action takes, per stage, in any unit. A whole backward takes `input + weight`.
#[derive(Clone, PartialEq, Debug)]
pub struct Times {
    pub forward: Vec<f64>,
    pub input: Vec<f64>,
    pub weight: Vec<f64>,
}

impl Times {
    /// F, I and W take 1 each in every stage: the unit of the zero-bubble papers.
    pub fn unit(stages: usize) -> Times {
        Times { forward: vec![1.0; stages], input: vec![1.0; stages], weight: vec![1.0; stages] }
    }

    /// Time of one action.
    pub fn of(&self, kind: ActionKind, stage: usize) -> f64 {
        match kind {
            ActionKind::Forward => self.forward[stage],
            ActionKind::Backward => self.input[stage] + self.weight[stage],
            ActionKind::Input => self.input[stage],
            ActionKind::Weight => self.weight[stage],
        }
    }

    /// Refuses all but one finite time of at least 0 for each stage and kind.
    pub fn check(&self, stages: usize) -> Result<()> {
        let lists = [("forward", &self.forward), ("input", &self.input), ("weight", &self.weight)];
        for (name, list) in lists {
            if list.len() != stages {
                return Err(Diag::new(
                    "schedule",
                    format!("{} times of {name} for {stages} stages", list.len()),
                )
                .rule("one time per stage for F, I and W")
                .help(format!("give {stages} times")));
            }
            if let Some(s) = list.iter().position(|t| !t.is_finite() || *t < 0.0) {
                let t = list[s];
                return Err(Diag::new("schedule", format!("{name} of stage {s} takes {t}"))
                    .rule("times are finite and at least 0")
                    .help(format!("give stage {s} a time of at least 0")));
            }
        }
        Ok(())
    }
}

/// An action with its time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Slot {
    pub action: Action,
    pub start: f64,
    pub end: f64,
}

/// A schedule as it runs: every action begins when its rank is free and what it needs is there.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Timeline {
    /// By rank of the pipeline, in order.
    pub ranks: Vec<Vec<Slot>>,
    /// All actions in an order in which they can run one after the other: (rank, index). Starts
    /// never decrease along it; of equal starts the lower rank comes first where it can.
    pub order: Vec<(usize, usize)>,
}

/// Replays a schedule. Refuses one that is not complete (`schedule`) and one that gets stuck
/// (`deadlock`).
pub fn replay(s: &Schedule, t: &Times) -> Result<Timeline> {
    check(s)?;
    t.check(s.owner.len())?;
    let mut run = Run {
        s,
        t,
        at: vec![0; s.ranks.len()],
        forward: vec![None; s.owner.len() * s.microbatches],
        backward: vec![None; s.owner.len() * s.microbatches],
        line: Timeline {
            ranks: s.ranks.iter().map(|r| Vec::with_capacity(r.len())).collect(),
            order: Vec::with_capacity(s.ranks.iter().map(Vec::len).sum()),
        },
    };
    let mut ready: BinaryHeap<Ready> = (0..s.ranks.len()).filter_map(|r| run.ready(r)).collect();
    while let Some(Ready { start, rank }) = ready.pop() {
        let a = run.take(rank, start);
        ready.extend(run.ready(rank));
        // The one action elsewhere that may have waited for this one.
        let waiter = match a.kind {
            ActionKind::Forward => a.stage.checked_add(1).filter(|&n| n < s.owner.len()),
            ActionKind::Backward | ActionKind::Input => a.stage.checked_sub(1),
            ActionKind::Weight => None,
        };
        let Some(stage) = waiter else { continue };
        let (other, forward) = (s.owner[stage], a.kind == ActionKind::Forward);
        let head = s.ranks[other].get(run.at[other]);
        let waits = head.is_some_and(|h| {
            let same = h.stage == stage && h.microbatch == a.microbatch;
            same && h.kind != ActionKind::Weight && (h.kind == ActionKind::Forward) == forward
        });
        if waits && other != rank {
            ready.extend(run.ready(other));
        }
    }
    match (0..s.ranks.len()).find(|&r| run.at[r] < s.ranks[r].len()) {
        Some(stuck) => Err(run.deadlock(stuck)),
        None => Ok(run.line),
    }
}

/// A rank whose next action can begin at `start`. The greatest is the first to run.
#[derive(PartialEq)]
struct Ready {
    start: f64,
    rank: usize,
}

impl Eq for Ready {}
impl Ord for Ready {
    fn cmp(&self, o: &Ready) -> Ordering {
        o.start.total_cmp(&self.start).then(o.rank.cmp(&self.rank))
    }
}
impl PartialOrd for Ready {
    fn partial_cmp(&self, o: &Ready) -> Option<Ordering> {
        Some(self.cmp(o))
    }
}

struct Run<'a> {
    s: &'a Schedule,
    t: &'a Times,
    /// Index of the next action of each rank.
    at: Vec<usize>,
    /// Ends of F, by stage and microbatch.
    forward: Vec<Option<f64>>,
    /// Ends of B or I.
    backward: Vec<Option<f64>>,
    line: Timeline,
}

impl Run<'_> {
    fn id(&self, stage: usize, microbatch: usize) -> usize {
        stage * self.s.microbatches + microbatch
    }

    /// The next action of a rank, if all that it waits for has ended.
    fn ready(&self, rank: usize) -> Option<Ready> {
        let a = *self.s.ranks[rank].get(self.at[rank])?;
        let free = self.line.ranks[rank].last().map_or(0.0, |l| l.end);
        // F, I and W of one stage are on one rank in this order: `check` saw to that.
        let start = match (a.kind, a.stage) {
            (ActionKind::Weight, _) | (ActionKind::Forward, 0) => free,
            (ActionKind::Forward, s) => free.max(self.forward[self.id(s - 1, a.microbatch)]?),
            (_, s) if s + 1 == self.s.owner.len() => free,
            (_, s) => free.max(self.backward[self.id(s + 1, a.microbatch)]?),
        };
        Some(Ready { start, rank })
    }

    /// Runs the next action of a rank.
    fn take(&mut self, rank: usize, start: f64) -> Action {
        let action = self.s.ranks[rank][self.at[rank]];
        let end = start + self.t.of(action.kind, action.stage);
        let id = self.id(action.stage, action.microbatch);
        match action.kind {
            ActionKind::Forward => self.forward[id] = Some(end),
            ActionKind::Backward | ActionKind::Input => self.backward[id] = Some(end),
            ActionKind::Weight => {}
        }
        self.line.order.push((rank, self.at[rank]));
        self.line.ranks[rank].push(Slot { action, start, end });
        self.at[rank] += 1;
        action
    }

    /// What the action at which a rank is stuck waits for.
    fn waits_for(&self, rank: usize) -> (Action, Action) {
        let a = self.s.ranks[rank][self.at[rank]];
        let (kind, stage) = match a.kind {
            ActionKind::Forward => (ActionKind::Forward, a.stage - 1),
            _ => (self.backward_of(a.stage + 1, a.microbatch), a.stage + 1),
        };
        (a, Action { kind, stage, microbatch: a.microbatch })
    }

    /// B or I, whichever the schedule has for this stage and microbatch.
    fn backward_of(&self, stage: usize, microbatch: usize) -> ActionKind {
        let b = Action { kind: ActionKind::Backward, stage, microbatch };
        let whole = self.s.ranks[self.s.owner[stage]].contains(&b);
        if whole { ActionKind::Backward } else { ActionKind::Input }
    }

    /// The circle of ranks that wait on each other, found from one that is stuck.
    fn deadlock(&self, stuck: usize) -> Diag {
        let next = |r: usize| self.s.owner[self.waits_for(r).1.stage];
        let mut seen = vec![false; self.s.ranks.len()];
        let mut first = stuck;
        while !std::mem::replace(&mut seen[first], true) {
            first = next(first);
        }
        let mut circle = vec![first];
        while next(circle[circle.len() - 1]) != first {
            circle.push(next(circle[circle.len() - 1]));
        }
        let (a, wanted) = self.waits_for(first);
        let (b, _) = self.waits_for(circle[circle.len() - 1]);
        let message = match circle.len() {
            1 => format!("rank {first} is at {a}, which waits for {wanted}, later in its own list"),
            n => format!(
                "{a} of rank {first} and {b} of rank {} wait on each other, in a circle of {n}",
                circle[n - 1]
            ),
        };
        let mut d = Diag::new("deadlock", message)
            .rule(
                "a rank runs its list in order; F waits for F of the stage before, B and I for \
                   B or I of the stage after",
            )
            .help(format!(
                "move {wanted} before {} in the list of rank {}",
                self.waits_for(next(first)).0,
                next(first)
            ));
        for &r in &circle {
            let (a, w) = self.waits_for(r);
            let o = self.s.owner[w.stage];
            d = d.why(format!("rank {r} is at {a}, which waits for {w} of rank {o}"));
        }
        d
    }
}
