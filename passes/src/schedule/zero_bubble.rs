//! ZB-H1 and ZB-H2: one chunk per rank, the backward cut into I and W.
//!
//! Qi et al., "Zero Bubble Pipeline Parallelism", 2024 (arXiv 2401.10241), sections 2.1 and 2.2.
//! With T the time of an action, section 2.3 has bubbles of
//!
//! - 1F1B: `(p-1) (T_F + T_I + T_W)`,
//! - ZB-H1: `(p-1) (T_F + T_I - T_W)`,
//! - ZB-H2: `(p-1) (T_F + T_I - 2 T_W)`,
//!
//! so longest spans of `3 m + 3 (p-1)`, `3 m + (p-1)` and `3 m` where all take 1. Spans, because
//! the papers let a rank go on to the next step without a barrier.
//!
//! Memory, counted to the end of W: `p` microbatches on every rank for ZB-H1 (1F1B has p on the
//! first rank), `2 p - 1` for ZB-H2: the sum of the paper's M_B and M_W terms where W frees as much
//! as B. Both are limits here, and the list scheduler fills them.
//!
//! The first rank decides: before its first I, at `2 p - 1`, it can run only forwards, and has
//! memory for c of them, so no schedule has a longest span below `3 m + 2 p - 1 - min(m, c)`. Both
//! reach this bound for every p and m that the tests try.

use shardc_ir::schedule::Action;

use super::Placement;
use super::list::{ActionPriority, Policy, SchedulePattern, best, run_all};

/// 1F1B with the backward cut: c = p.
pub(super) fn zb_h1(p: usize, m: usize) -> Vec<Vec<Action>> {
    fill(p, m, p)
}

/// As many more forwards in the warm-up as keep the first rank busy: c = 2 p - 1.
pub(super) fn zb_h2(p: usize, m: usize) -> Vec<Vec<Action>> {
    fill(p, m, 2 * p - 1)
}

fn fill(p: usize, m: usize, limit: usize) -> Vec<Vec<Action>> {
    let policy = |order| Policy { order, free_first: false, reserve: true, patient: false };
    // Where memory is short, backwards that come early must not run ahead of the forwards.
    let steady = |up, gap| {
        policy(ActionPriority::Steady(SchedulePattern {
            up: (up, 1.0),
            down: 1.0,
            gap,
            window: 0.0,
        }))
    };
    let policies = [
        policy(ActionPriority::BackwardFirst),
        steady(1.0, 0.0),
        steady(1.0, 1.0),
        steady(1.0, 2.0),
        steady(2.0, 0.0),
    ];
    let owner = Placement::Loop.owner(p, 1);
    best(&owner, m, run_all(&owner, p, m, limit as u64, &policies))
}
