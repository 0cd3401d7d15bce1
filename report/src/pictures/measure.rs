//! What the pictures say about a timeline in numbers.

use shardc_ir::diag::Result;
use shardc_ir::plan::{Mode, Plan};
use shardc_ir::schedule::{ActionKind, Slot, Timeline, Times, replay};

/// The schedule of a plan against the clock; without a backward, its forwards.
///
/// # Errors
/// Those of [`replay`]; a plan that was made or read has been replayed.
pub fn timeline(plan: &Plan, mut times: Times) -> Result<Timeline> {
    if plan.settings.mode == Mode::Train {
        return replay(&plan.schedule, &times);
    }
    times.input.fill(0.0);
    times.weight.fill(0.0);
    let mut t = replay(&plan.schedule, &times)?;
    t.ranks.iter_mut().for_each(|r| r.retain(|s| s.action.kind == ActionKind::Forward));
    Ok(t)
}

/// Idle over working time of 1F1B with as many ranks p, chunks v and microbatches m as a plan has: (p-1)/(v m), by
/// Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, section 2.2. Other schedules
/// have other formulas.
pub fn textbook_bubble(plan: &Plan) -> f64 {
    let (ranks, m) = (plan.schedule.ranks.len(), plan.schedule.microbatches);
    let stages = plan.schedule.owner.len();
    (ranks.max(1) - 1) as f64 * ranks as f64 / (stages.max(1) * m.max(1)) as f64
}

/// The bubble of a plan if every F, I and W takes one unit of time, as in `inspect --timeline`.
pub fn bubble_of(plan: &Plan) -> f64 {
    let unit = Times::unit(plan.schedule.owner.len());
    bubble(&timeline(plan, unit).expect("a plan's schedule was replayed when it was made or read"))
}

/// All kinds of actions, in the order of legends.
pub const KINDS: [ActionKind; 4] =
    [ActionKind::Forward, ActionKind::Backward, ActionKind::Input, ActionKind::Weight];

/// When the first action begins, and how long it takes from there to the end of the last.
pub fn span(t: &Timeline) -> (f64, f64) {
    let finite = |s: &&Slot| s.start.is_finite() && s.end.is_finite();
    let (begin, end) = t
        .ranks
        .iter()
        .flatten()
        .filter(finite)
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(begin, end), s| {
            (begin.min(s.start), end.max(s.end))
        });
    if begin <= end { (begin, end - begin) } else { (0.0, 0.0) }
}

/// The part of all ranks' time, from 0 to 1, in which nothing is done.
pub fn bubble(t: &Timeline) -> f64 {
    let whole = span(t).1 * t.ranks.len() as f64;
    let busy: f64 = t.ranks.iter().flatten().map(|s| s.end - s.start).sum();
    if whole > 0.0 { (1.0 - busy / whole).clamp(0.0, 1.0) } else { 0.0 }
}

/// The most activations a rank keeps at once: one per stage and microbatch, from its forward to
/// the end of its backward. Nothing if there is no backward that would free them.
pub fn live(t: &Timeline) -> Vec<usize> {
    if t.ranks.iter().flatten().all(|s| s.action.kind == ActionKind::Forward) {
        return vec![];
    }
    (0..t.ranks.len()).map(|r| t.live(r) as usize).collect()
}

/// Which chunk of its rank a stage is.
pub struct Chunks {
    /// Stages of each rank that do something, in the order of the model.
    stages: Vec<Vec<usize>>,
    /// Chunks per rank.
    pub count: usize,
}

impl Chunks {
    /// `count` is what the schedule has per rank; the timeline may show fewer, never more.
    pub fn new(t: &Timeline, count: usize) -> Chunks {
        let sorted = |slots: &Vec<Slot>| {
            let mut all: Vec<usize> = slots.iter().map(|s| s.action.stage).collect();
            all.sort_unstable();
            all.dedup();
            all
        };
        let stages: Vec<Vec<usize>> = t.ranks.iter().map(sorted).collect();
        let seen = stages.iter().map(Vec::len).max().unwrap_or(0);
        Chunks { stages, count: count.max(seen).max(1) }
    }
    /// From 0 on, in the order of the model.
    pub fn of(&self, rank: usize, stage: usize) -> usize {
        self.stages[rank].partition_point(|&s| s < stage)
    }
}

/// Lengths of the actions that take time, shortest first.
pub fn lengths(t: &Timeline) -> Vec<f64> {
    let all = t.ranks.iter().flatten().map(|s| s.end - s.start);
    let mut all: Vec<f64> = all.filter(|d| d.is_finite() && *d > 0.0).collect();
    all.sort_by(f64::total_cmp);
    all
}

/// The smallest of 1, 2, 5, 10, 20, … (and 0.5, 0.2, …) that is not below `least`.
pub fn round_step(least: f64) -> f64 {
    if least.is_nan() || least <= 0.0 {
        return 1.0;
    }
    if least > f64::MAX / 10.0 {
        return f64::MAX;
    }
    let ten = 10f64.powi(least.log10().floor() as i32);
    [1.0, 2.0, 5.0].map(|x| x * ten).into_iter().find(|&x| x >= least * 0.999).unwrap_or(ten * 10.0)
}

/// A time for people: whole numbers as such, others with four digits that count.
pub fn number(x: f64) -> String {
    if (x - x.round()).abs() < 1e-9 * x.abs().max(1e-3) && x.abs() < 1e15 {
        return format!("{:.0}", x.round() + 0.0);
    }
    if !(1e-4..1e15).contains(&x.abs()) {
        return format!("{x:.3e}");
    }
    let after = (3 - x.abs().log10().floor() as i32).max(0) as usize;
    let s = format!("{x:.after$}");
    if after == 0 { s } else { s.trim_end_matches('0').trim_end_matches('.').into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pictures::sample;

    #[test]
    fn numbers_are_short() {
        let of = [0.0, -0.0, 12.0, 0.5, 1.0 / 3.0, 1234.56, 98765.4, 2e-7, 1e12, 3e20];
        let want = [
            "0",
            "0",
            "12",
            "0.5",
            "0.3333",
            "1235",
            "98765",
            "2.000e-7",
            "1000000000000",
            "3.000e20",
        ];
        assert_eq!(of.map(number), want);
        assert_eq!(
            [0.9, 1.0, 1.1, 3.0, 6.0, 0.03].map(round_step),
            [1.0, 1.0, 2.0, 5.0, 10.0, 0.05]
        );
        assert_eq!(round_step(0.0), 1.0);
    }

    #[test]
    fn the_bubble_of_1f1b_is_the_known_one() {
        let t = sample::one_f_one_b(4, 8);
        assert_eq!(span(&t), (0.0, 33.0));
        assert!((bubble(&t) - 3.0 / 11.0).abs() < 1e-12);
        assert_eq!(live(&t), [4, 3, 2, 1]);
        assert_eq!(live(&sample::gpipe(3, 5)), [5, 5, 5]);
    }

    #[test]
    fn nothing_has_no_bubble() {
        let t = Timeline::default();
        assert_eq!((span(&t), bubble(&t), live(&t)), ((0.0, 0.0), 0.0, vec![]));
    }
}
