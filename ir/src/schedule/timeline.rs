//! What a replay tells: length, idle time, and how much each rank holds on to.

use super::{ActionKind, Slot, Timeline};

/// What one microbatch in one stage keeps in memory from the start of its forward.
///
/// The zero-bubble papers call the sum of the two M_B, and `weight` alone M_W (Qi et al., "Zero
/// Bubble Pipeline Parallelism", section 2.3).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Held {
    /// Let go at the end of I, or of B.
    pub input: u64,
    /// Let go at the end of W, or of B.
    pub weight: u64,
}

impl Timeline {
    /// When the last action ends; the first one starts at 0.
    pub fn makespan(&self) -> f64 {
        self.ranks.iter().filter_map(|r| r.last()).fold(0.0, |t, slot| t.max(slot.end))
    }

    /// From the first start to the last end of a rank. Where the optimizer needs no barrier, steps
    /// follow each other at the longest span, not at the makespan ("Zero Bubble Pipeline
    /// Parallelism", section 4).
    pub fn span(&self, rank: usize) -> f64 {
        match (self.ranks[rank].first(), self.ranks[rank].last()) {
            (Some(first), Some(last)) => last.end - first.start,
            _ => 0.0,
        }
    }

    /// The longest [`span`](Self::span).
    pub fn longest_span(&self) -> f64 {
        (0..self.ranks.len()).fold(0.0, |t, r| t.max(self.span(r)))
    }

    /// Part of the makespan in which a rank works.
    pub fn busy(&self, rank: usize) -> f64 {
        let work: f64 = self.ranks[rank].iter().map(|s| s.end - s.start).sum();
        let all = self.makespan();
        if all > 0.0 { work / all } else { 1.0 }
    }

    /// Part of the makespan in which a rank waits.
    pub fn bubble(&self, rank: usize) -> f64 {
        1.0 - self.busy(rank)
    }

    /// Most pairs of a stage and a microbatch that a rank holds at once, from the start of F to the
    /// end of B, or of W if the backward is cut.
    pub fn live(&self, rank: usize) -> u64 {
        self.held(rank, &|_| Held { input: 0, weight: 1 })
    }

    /// As [`live`](Self::live), but to the end of I: what remains if I frees everything.
    pub fn live_to_input(&self, rank: usize) -> u64 {
        self.held(rank, &|_| Held { input: 1, weight: 0 })
    }

    /// Most that a rank holds at once, given what a microbatch holds in each stage.
    pub fn held(&self, rank: usize, per_stage: &dyn Fn(usize) -> Held) -> u64 {
        self.steps(rank, per_stage).iter().map(|&(_, n)| n).max().unwrap_or(0)
    }

    /// What a rank holds over time: (from, amount), each until the next begins.
    pub fn steps(&self, rank: usize, per_stage: &dyn Fn(usize) -> Held) -> Vec<(f64, u64)> {
        let mut now = 0u64;
        let mut steps: Vec<(f64, u64)> = vec![];
        for &Slot { action, start, end } in &self.ranks[rank] {
            let h = per_stage(action.stage);
            let (at, then) = match action.kind {
                ActionKind::Forward => {
                    (start, now.saturating_add(h.input).saturating_add(h.weight))
                }
                ActionKind::Backward => (end, now.saturating_sub(h.input).saturating_sub(h.weight)),
                ActionKind::Input => (end, now.saturating_sub(h.input)),
                ActionKind::Weight => (end, now.saturating_sub(h.weight)),
            };
            if then != now {
                now = then;
                steps.push((at, now));
            }
        }
        steps
    }
}
