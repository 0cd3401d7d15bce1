//! Looks for the schedule with the least makespan that fits in memory.
//!
//! It tries every named schedule that is legal, and what the list scheduler makes of many policies,
//! placements and limits of memory; each is replayed with the real times. The order in which they
//! are tried is fixed, and so is their number, so the same question has the same answer.

use shardc_ir::diag::{Diag, Result, exact_bytes};
use shardc_ir::schedule::{Held, Schedule, Times, replay};

use super::list::{ActionPriority, Policy, SchedulePattern, Task, Time, run};
use super::{Named, legal, make};

/// Which rank holds each stage.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Placement {
    /// Round and round: stage s on rank `s % p`.
    Loop,
    /// There and back: stages 0 to p-1 on ranks 0 to p-1, the next p on ranks p-1 to 0, and so on.
    V,
}

impl Placement {
    /// The rank of each of `p v` stages.
    pub fn owner(self, p: usize, v: usize) -> Vec<usize> {
        let back = |s: usize| self == Placement::V && s / p % 2 == 1;
        (0..p * v).map(|s| if back(s) { p - 1 - s % p } else { s % p }).collect()
    }
}

/// What a cut of the model into stages costs.
#[derive(Clone, PartialEq, Debug)]
pub struct CutCosts {
    /// By stage.
    pub times: Times,
    /// What a microbatch holds, by stage.
    pub held: Vec<Held>,
    /// What a rank has for it, by rank; `u64::MAX` if it does not matter.
    pub limit: Vec<u64>,
}

/// The best schedule that [`search`] knows.
#[derive(Clone, PartialEq, Debug)]
pub struct Found {
    pub schedule: Schedule,
    /// Its name, if it has one.
    pub named: Option<Named>,
    pub chunks: usize,
    pub placement: Placement,
    pub makespan: f64,
    /// What the rank that holds most holds at once.
    pub peak: u64,
}

/// Most actions that the list scheduler runs, over all it tries: under a second of work.
const BUDGET: usize = 1_500_000;

/// A cut of the model that is tried.
struct Cut {
    placement: Placement,
    chunks: usize,
    owner: Vec<usize>,
    costs: CutCosts,
}

/// The schedule of least makespan, and of these the one of least memory, for p ranks, any of the
/// given numbers of chunks per rank, and m microbatches. `costs` says what each cut costs.
///
/// Never worse than a named schedule of these numbers that fits. If nothing fits, says by how much
/// (`schedule-memory`).
pub fn search(
    p: usize,
    chunks: &[usize],
    m: usize,
    costs: &dyn Fn(Placement, usize) -> CutCosts,
) -> Result<Found> {
    front(p, chunks, m, costs).map(|mut all| all.found.swap_remove(0))
}

/// What [`front`] knows.
#[derive(Clone, PartialEq, Debug)]
pub struct Front {
    /// From the least makespan to the least memory; none that another beats in one and equals in
    /// the other. Never empty.
    pub found: Vec<Found>,
    /// Schedules that were replayed.
    pub tried: usize,
}

/// As [`search`], with what takes longer and less memory.
pub fn front(
    p: usize,
    chunks: &[usize],
    m: usize,
    costs: &dyn Fn(Placement, usize) -> CutCosts,
) -> Result<Front> {
    let cuts = cuts(p, chunks, m, costs)?;
    let (mut best, mut tried): (Vec<Found>, usize) = (vec![], 0);
    for cut in &cuts {
        for named in Named::ALL.into_iter().filter(|n| n.placement() == cut.placement) {
            if let Ok(schedule) = make(named, p, cut.chunks, m) {
                consider(&mut best, schedule, Some(named), cut)?;
                tried += 1;
            }
        }
    }
    let mut budget = BUDGET;
    // Policy by policy, so that a small budget is shared by the cuts.
    for policy in policies() {
        for cut in &cuts {
            for limit in limits(p, m, cut) {
                let work = 3 * cut.owner.len() * m;
                if work > budget {
                    continue;
                }
                budget -= work;
                let task = Task {
                    owner: &cut.owner,
                    ranks: p,
                    microbatches: m,
                    times: &cut.costs.times,
                    held: &cut.costs.held,
                    limit: &limit,
                };
                if let Some(ranks) = run(&task, policy) {
                    let schedule = Schedule { owner: cut.owner.clone(), microbatches: m, ranks };
                    consider(&mut best, schedule, None, cut)?;
                    tried += 1;
                }
            }
        }
    }
    best.sort_by_key(|f| Time(f.makespan));
    match best.is_empty() {
        true => Err(nothing_fits(p, m, &cuts)),
        false => Ok(Front { found: best, tried }),
    }
}

/// Numbers of chunks that make sense, each along both placements where these differ.
fn cuts(
    p: usize,
    chunks: &[usize],
    m: usize,
    costs: &dyn Fn(Placement, usize) -> CutCosts,
) -> Result<Vec<Cut>> {
    let mut cuts = vec![];
    let mut refused = legal(Named::LoopedBfs, p, 0, m);
    for &v in chunks {
        // Looped BFS takes whatever makes sense.
        refused = legal(Named::LoopedBfs, p, v, m);
        if refused.is_err() {
            continue;
        }
        for placement in [Placement::Loop, Placement::V] {
            if placement == Placement::V && (p == 1 || v == 1) {
                continue;
            }
            let (owner, costs) = (placement.owner(p, v), costs(placement, v));
            assert_eq!(costs.held.len(), owner.len(), "search: one Held per stage");
            assert_eq!(costs.limit.len(), p, "search: one limit per rank");
            costs.times.check(owner.len())?;
            cuts.push(Cut { placement, chunks: v, owner, costs });
        }
    }
    if cuts.is_empty() { refused.map(|()| cuts) } else { Ok(cuts) }
}

/// Keeps a schedule if it fits and nothing we have is as good; drops what it is as good as.
fn consider(
    best: &mut Vec<Found>,
    schedule: Schedule,
    named: Option<Named>,
    cut: &Cut,
) -> Result<()> {
    let c = &cut.costs;
    let line = replay(&schedule, &c.times)?;
    let held: Vec<u64> = (0..c.limit.len()).map(|r| line.held(r, &|s| c.held[s])).collect();
    if held.iter().zip(&c.limit).any(|(h, l)| h > l) {
        return Ok(());
    }
    let (makespan, peak) = (line.makespan(), held.into_iter().max().unwrap_or(0));
    let as_good = |b: &Found| Time(b.makespan) <= Time(makespan) && b.peak <= peak;
    if !best.iter().any(as_good) {
        best.retain(|b| Time(b.makespan) < Time(makespan) || b.peak < peak);
        let (placement, chunks) = (cut.placement, cut.chunks);
        best.push(Found { schedule, named, chunks, placement, makespan, peak });
    }
    Ok(())
}

/// The list scheduler gets through wherever one microbatch fits; so somewhere none does.
fn nothing_fits(p: usize, m: usize, cuts: &[Cut]) -> Diag {
    let mut d =
        Diag::new("schedule-memory", format!("no schedule for p={p}, m={m} fits in memory"))
            .rule("a rank holds at least one microbatch in all of its stages");
    for cut in cuts {
        let needs = whole(p, cut).into_iter().zip(&cut.costs.limit).enumerate();
        let lacks = needs.max_by_key(|(_, (need, has))| need.saturating_sub(**has));
        let Some((r, (need, has))) = lacks else { continue };
        let v = cut.chunks;
        d = d
            .why(format!(
                "with v={v}, a microbatch takes {} on rank {r}, which has {}",
                exact_bytes(need as usize),
                exact_bytes(*has as usize)
            ))
            .help(format!(
                "v={v}: give rank {r} {} more",
                exact_bytes(need.saturating_sub(*has) as usize)
            ));
    }
    d
}

/// What one microbatch holds on each rank.
fn whole(p: usize, cut: &Cut) -> Vec<u64> {
    let mut whole = vec![0u64; p];
    for (h, &rank) in cut.costs.held.iter().zip(&cut.owner) {
        whole[rank] = whole[rank].saturating_add(h.input).saturating_add(h.weight);
    }
    whole
}

/// Limits to try: what there is, and less, which makes for other orders: the memory of V-min,
/// V-half, 1F1B and ZB-H2.
fn limits(p: usize, m: usize, cut: &Cut) -> Vec<Vec<u64>> {
    let whole = whole(p, cut);
    let mut all = vec![];
    for microbatches in [m, 2 * p - 1, p, (p + 2) / 2, (p + 4) / 3] {
        let n = microbatches.min(m) as u64;
        let limit = whole.iter().zip(&cut.costs.limit).map(|(w, &l)| l.min(w.saturating_mul(n)));
        let limit: Vec<u64> = limit.collect();
        if !all.contains(&limit) {
            all.push(limit);
        }
    }
    all
}

/// Policies to try, the most useful first.
fn policies() -> Vec<Policy> {
    let simple =
        |order, free_first, reserve, patient| Policy { order, free_first, reserve, patient };
    let steady = |up, down, gap, window, (free_first, reserve, patient)| Policy {
        order: ActionPriority::Steady(SchedulePattern { up, down, gap, window }),
        free_first,
        reserve,
        patient,
    };
    vec![
        simple(ActionPriority::BackwardFirst, false, true, false),
        simple(ActionPriority::ForwardFirst, true, true, false),
        simple(ActionPriority::ForwardFirst, false, false, false),
        steady((3.0, 2.0), 1.0, 3.0, 10.0, (true, true, false)),
        steady((1.0, 1.0), 1.0, 3.0, 4.0, (true, false, false)),
        steady((1.0, 1.0), 2.0, 3.0, 2.0, (false, false, false)),
        steady((1.0, 1.0), 2.0, 3.0, 10.0, (true, true, false)),
        steady((1.0, 1.0), 1.0, 0.0, 0.0, (false, true, false)),
        simple(ActionPriority::BackwardFirst, false, true, true),
        simple(ActionPriority::ForwardFirst, true, true, true),
        steady((3.0, 2.0), 1.0, 3.0, 10.0, (true, true, true)),
        steady((1.0, 1.0), 1.0, 3.0, 4.0, (true, false, true)),
        steady((1.0, 1.0), 2.0, 3.0, 2.0, (false, false, true)),
        steady((5.0, 5.0), 2.0, 0.0, f64::INFINITY, (true, false, false)),
        steady((1.0, 1.0), 1.0, 2.0, f64::INFINITY, (true, true, true)),
        steady((2.0, 1.0), 1.0, 0.0, 0.0, (false, true, true)),
    ]
}
