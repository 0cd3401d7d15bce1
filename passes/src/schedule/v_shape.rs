//! ZB-V, V-half and V-min: two chunks per rank along a V, the backward cut into I and W.
//!
//! Rank r holds stages r and `2 p - 1 - r`, so the last stage is on the first rank, and the memory
//! of a microbatch is the same on every rank. V-half and V-min: Qi et al., "Pipeline Parallelism
//! with Controllable Memory", 2024 (arXiv 2405.15362), section 3; ZB-V: the same authors' "Zero
//! Bubble Pipeline Parallelism", section 6. In chunks, of which 1F1B holds `2 p` on its first rank,
//! and in units of one action on one chunk, of which 1F1B idles `6 (p-1)`:
//!
//! | | chunks held | bubble |
//! |-|-|-|
//! | ZB-V | `2 p` | 0 for `m >= 2 p - 1` |
//! | V-half | `2 ((p + 2) / 2)` | half of that of 1F1B, `3 (p-1)` |
//! | V-min | `2 ((p + 4) / 3)` | two thirds, `4 (p-1)` |
//!
//! Divisions round down. The figures are those that the authors give with their scheduler
//! (huggingface.co/spaces/sail/pipeline-parallelism-with-controllable-memory). Memory is counted to
//! the end of W, and is a limit here. The bubble is that of the longest span. The tests hold all
//! three to these figures and, for small m, to those of the authors' program.

use std::collections::VecDeque;

use shardc_ir::schedule::{Action, ActionKind};

use super::Placement;
use super::list::{ActionPriority, Policy, SchedulePattern, best, run_all};

/// No idle time, in the memory of 1F1B.
pub(super) fn zb_v(p: usize, m: usize) -> Vec<Vec<Action>> {
    let by_hand = |m| (0..p).map(|r| zb_v_rank(p, m, r)).collect();
    if m >= 2 * p - 1 {
        return by_hand(m);
    }
    // Too few microbatches for the steady state.
    let policy = |order| Policy { order, free_first: true, reserve: true, patient: false };
    let policies = [policy(ActionPriority::BackwardFirst), policy(ActionPriority::ForwardFirst)];
    let owner = Placement::V.owner(p, 2);
    let mut tries = run_all(&owner, p, m, 2 * p as u64, &policies);
    tries.extend((m >= p).then(|| by_hand(m)));
    best(&owner, m, tries)
}

/// The list of rank r, meant for `m >= 2 p - 1`.
///
/// The first rank runs forwards of chunk 0 without a pause until the first microbatch comes back,
/// at `2 p - 1`; from then on every rank repeats I1 W F0 I0 W F1. The ranks further down have less
/// to warm up with, but the same amount of work in each round, so none ever waits.
fn zb_v_rank(p: usize, m: usize, r: usize) -> Vec<Action> {
    let left = p - 1 - r;
    let mut rank = VRank::begun(p, m, r);
    for _ in 0..m - p {
        rank.b(1, true);
        rank.w();
        // Forwards of chunk 0 end first; the round goes on without.
        rank.f(0);
        rank.b(0, true);
        rank.w();
        rank.f(1);
    }
    for _ in 0..r + 1 {
        rank.b(1, true);
        rank.b(0, true);
    }
    for _ in 0..left {
        rank.w();
        rank.b(0, true);
    }
    (0..2 * m).for_each(|_| rank.w());
    rank.list
}

/// The list of one rank along a V, as it grows. Chunk 0 is stage r, on the way down; chunk 1 is
/// stage `2 p - 1 - r`. Microbatches come in order; what has run for all of them is left out.
pub(super) struct VRank {
    stages: [usize; 2],
    m: usize,
    /// Next microbatch to go forward and back in each chunk.
    forwards: [usize; 2],
    backwards: [usize; 2],
    /// W whose I is done, oldest first.
    weights: VecDeque<Action>,
    pub list: Vec<Action>,
}

impl VRank {
    /// With forwards of chunk 0, then of both, and first backwards of chunk 1, cut, between its forwards.
    pub fn begun(p: usize, m: usize, r: usize) -> VRank {
        let left = p - 1 - r;
        let mut rank = VRank {
            stages: [r, 2 * p - 1 - r],
            m,
            forwards: [0; 2],
            backwards: [0; 2],
            weights: VecDeque::new(),
            list: vec![],
        };
        (0..2 * left).for_each(|_| rank.f(0));
        for _ in 0..r + 1 {
            rank.f(0);
            rank.f(1);
        }
        for _ in 0..left {
            rank.b(1, true);
            rank.w();
            rank.f(1);
        }
        rank
    }

    /// F.
    pub fn f(&mut self, chunk: usize) {
        let (stage, microbatch) = (self.stages[chunk], self.forwards[chunk]);
        if microbatch < self.m {
            self.list.push(Action { kind: ActionKind::Forward, stage, microbatch });
            self.forwards[chunk] += 1;
        }
    }

    /// B, or I with its W left for later.
    pub fn b(&mut self, chunk: usize, cut: bool) {
        let (stage, microbatch) = (self.stages[chunk], self.backwards[chunk]);
        if microbatch < self.m {
            let kind = if cut { ActionKind::Input } else { ActionKind::Backward };
            self.list.push(Action { kind, stage, microbatch });
            let weight = Action { kind: ActionKind::Weight, stage, microbatch };
            self.weights.extend(cut.then_some(weight));
            self.backwards[chunk] += 1;
        }
    }

    /// The oldest W that is left, if any.
    pub fn w(&mut self) {
        self.list.extend(self.weights.pop_front());
    }
}

/// Half the memory of 1F1B, and of its bubble.
pub(super) fn v_half(p: usize, m: usize) -> Vec<Vec<Action>> {
    let p_half = (p + 2) / 2 * 2;
    let forward_first = Policy {
        order: ActionPriority::ForwardFirst,
        free_first: false,
        reserve: false,
        patient: false,
    };
    let policies = [
        steady((3.0, 2.0), 1.0, 3.0, 10.0, (true, true)),
        steady((1.0, 1.0), 2.0, 3.0, 2.0, (false, false)),
        forward_first,
    ];
    let owner = Placement::V.owner(p, 2);
    best(&owner, m, run_all(&owner, p, m, p_half as u64, &policies))
}

/// A third of the memory of 1F1B, two thirds of its bubble.
pub(super) fn v_min(p: usize, m: usize) -> Vec<Vec<Action>> {
    let p_third = (p + 4) / 3 * 2;
    let policies = [
        steady((1.0, 1.0), 1.0, 3.0, 4.0, (true, false)),
        steady((1.0, 1.0), 2.0, 3.0, 10.0, (true, true)),
        steady((1.0, 1.0), 1.0, 0.0, 0.0, (false, false)),
    ];
    let owner = Placement::V.owner(p, 2);
    best(&owner, m, run_all(&owner, p, m, p_third as u64, &policies))
}

/// A policy by the block that repeats, with (`free_first`, `reserve`). Which ones serve all p and
/// m best was found by trying 1,200 of them on p up to 16 and m up to 40.
fn steady(
    up: (f64, f64),
    down: f64,
    gap: f64,
    window: f64,
    (free_first, reserve): (bool, bool),
) -> Policy {
    let order = ActionPriority::Steady(SchedulePattern { up, down, gap, window });
    Policy { order, free_first, reserve, patient: false }
}
