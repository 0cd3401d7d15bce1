//! Checks that a schedule is complete: each action once, on the rank that holds its stage.

use super::{Action, ActionKind, Schedule};
use crate::diag::{Diag, Result, count};

/// Most pairs of a stage and a microbatch.
pub const MAX_PAIRS: usize = 1 << 22;
/// Most stages of a pipeline.
pub const MAX_STAGES: usize = 1 << 16;
/// Most microbatches of a step: every rank has a list of what it does for each, which is made, and
/// replayed twice.
pub const MAX_MICROBATCHES: usize = 1 << 17;
/// Most ranks of the pipeline.
pub(super) const MAX_RANKS: usize = 1 << 16;

const RULE: &str = "one F and one B, or one F, one I and one W, for every stage and microbatch, \
                    on the rank of the stage, in this order";

fn problem(message: String) -> Diag {
    Diag::new("schedule", message).rule(RULE)
}

/// Refuses sizes that would cost memory without bounds.
pub(super) fn check_size(ranks: usize, stages: usize, microbatches: usize) -> Result<()> {
    let pairs = stages.checked_mul(microbatches).is_some_and(|n| n <= MAX_PAIRS);
    let fits = pairs && stages <= MAX_STAGES && microbatches <= MAX_MICROBATCHES;
    if fits && ranks <= MAX_RANKS {
        return Ok(());
    }
    let what = format!(
        "{}, {} and {}",
        count(ranks, "rank", "ranks"),
        count(stages, "stage", "stages"),
        count(microbatches, "microbatch", "microbatches")
    );
    Err(Diag::new("schedule", format!("a schedule of {what}"))
        .rule(format!(
            "ranks <= {MAX_RANKS}, stages <= {MAX_STAGES}, microbatches <= {MAX_MICROBATCHES}, \
             stages * microbatches <= {MAX_PAIRS}"
        ))
        .help(match stages {
            0..=MAX_STAGES => {
                let most = (MAX_PAIRS / stages.max(1)).min(MAX_MICROBATCHES);
                format!("nearest legal: {}", count(most, "microbatch", "microbatches"))
            }
            _ => format!(
                "nearest legal: {MAX_STAGES} stages, {} microbatches",
                MAX_PAIRS / MAX_STAGES
            ),
        }))
}

/// Refuses missing, double and misplaced actions.
pub(super) fn check(s: &Schedule) -> Result<()> {
    let (stages, m) = (s.owner.len(), s.microbatches);
    check_size(s.ranks.len(), stages, m)?;
    if stages == 0 || m == 0 {
        return Err(problem(
            "a schedule without stages or microbatches leaves nothing to do".into(),
        )
        .help("give at least 1 stage and 1 microbatch"));
    }
    let mut has_stage = vec![false; s.ranks.len()];
    for (stage, &rank) in s.owner.iter().enumerate() {
        match has_stage.get_mut(rank) {
            Some(h) => *h = true,
            None => {
                let n = s.ranks.len();
                return Err(problem(format!("stage {stage} is on rank {rank} of {n} ranks"))
                    .help(format!("put it on one of the ranks 0 to {}", n.saturating_sub(1))));
            }
        }
    }
    if let Some(r) = has_stage.iter().position(|h| !h) {
        return Err(problem(format!("rank {r} has no stage"))
            .help(format!("use at most {stages} ranks for {stages} stages")));
    }
    let mut seen = vec![0u8; stages * m];
    for (rank, list) in s.ranks.iter().enumerate() {
        for (i, &a) in list.iter().enumerate() {
            check_one(s, rank, a, &mut seen)
                .map_err(|d| d.at(format!("rank {rank}, action {i}")))?;
        }
    }
    for (i, &has) in seen.iter().enumerate() {
        let lacks = match has {
            0b0011 | 0b1101 => continue,
            0 => ActionKind::Forward,
            0b0001 => ActionKind::Backward,
            _ => ActionKind::Weight,
        };
        let a = Action { kind: lacks, stage: i / m, microbatch: i % m };
        let rank = s.owner[a.stage];
        return Err(problem(format!("{a} is missing from rank {rank}"))
            .help(format!("add {a} to rank {rank}")));
    }
    Ok(())
}

fn bit(k: ActionKind) -> u8 {
    match k {
        ActionKind::Forward => 0b0001,
        ActionKind::Backward => 0b0010,
        ActionKind::Input => 0b0100,
        ActionKind::Weight => 0b1000,
    }
}

/// One action against what came before it.
fn check_one(s: &Schedule, rank: usize, a: Action, seen: &mut [u8]) -> Result<()> {
    if a.stage >= s.owner.len() {
        return Err(problem(format!("{a} names stage {} of {}", a.stage, s.owner.len()))
            .help(format!("stages go from 0 to {}", s.owner.len() - 1)));
    }
    if a.microbatch >= s.microbatches {
        let (j, m) = (a.microbatch, s.microbatches);
        return Err(problem(format!("{a} names microbatch {j} of {m}"))
            .help(format!("microbatches go from 0 to {}", m - 1)));
    }
    let owner = s.owner[a.stage];
    if owner != rank {
        return Err(problem(format!("{a} is on rank {rank}, but stage {} on {owner}", a.stage))
            .help(format!("move {a} to rank {owner}")));
    }
    let has = &mut seen[a.stage * s.microbatches + a.microbatch];
    let other = |kind| Action { kind, ..a };
    if *has & bit(a.kind) != 0 {
        return Err(problem(format!("{a} is on rank {rank} twice"))
            .help(format!("remove one {a} from rank {rank}")));
    }
    // What must have come before, and what excludes this action.
    let (before, against): (Option<ActionKind>, &[ActionKind]) = match a.kind {
        ActionKind::Forward => (None, &[]),
        ActionKind::Backward => {
            (Some(ActionKind::Forward), &[ActionKind::Input, ActionKind::Weight])
        }
        ActionKind::Input => (Some(ActionKind::Forward), &[ActionKind::Backward]),
        ActionKind::Weight => (Some(ActionKind::Input), &[ActionKind::Backward]),
    };
    if let Some(&k) = against.iter().find(|&&k| *has & bit(k) != 0) {
        return Err(problem(format!("rank {rank} has both {} and {a}", other(k)))
            .help(format!("remove {a}, or write {} as I and W", other(ActionKind::Backward))));
    }
    if let Some(k) = before.filter(|&k| *has & bit(k) == 0) {
        let b = other(k);
        return Err(problem(format!("{a} comes before {b} on rank {rank}, or {b} is missing"))
            .help(format!("put {b} before {a} on rank {rank}")));
    }
    *has |= bit(a.kind);
    Ok(())
}
