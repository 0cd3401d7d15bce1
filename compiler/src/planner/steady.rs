//! Steps of many microbatches by those of few. Once the ranks of a pipeline are full, a schedule does the same with
//! every p microbatches, or every 2p, until they drain: more of them change neither what is in memory at most nor what happens at
//! the ends, and a step is longer by as much for each period.

use super::Asked;
use shardc_cost::parts::Parts;
use shardc_cost::plan::{self as of_plan, PlanPrice};
use shardc_ir::diag::Result;
use shardc_ir::mesh::PIPELINE;
use shardc_ir::plan::{Plan, RankClass};
use shardc_passes::options::{Options, Order};
use shardc_plans::input::Input;

/// Times p microbatches with which every schedule that is planned has been full, and has begun to drain only then.
const FULL: usize = 3;

/// Of what a plan needs, the part by which pieces of memory may be packed otherwise with more microbatches: a tiny model's
/// were by a 300th, those of 8B were not.
const PACKING: usize = 100;

/// A plan that has the memory of the one that is asked for, and the time of a step of that.
pub struct Steady {
    pub plan: Plan,
    /// Seconds of a step.
    pub seconds: f64,
    pub parts: Parts,
}

/// Microbatches after which a schedule does the same again: those that fill the ranks, and of a list-scheduled one, whose
/// ranks fill with two laps, twice as many.
fn period(o: &Options) -> usize {
    let p = o.axis(PIPELINE);
    match &o.schedule {
        Order::Named(n) if ["1f1b", "interleaved", "gpipe"].contains(&n.as_str()) => p,
        _another => 2 * p,
    }
}

/// So few of `m` microbatches, and a period more, that tell of all over `p` ranks; `None` if it takes as many. Both leave
/// over the period what `m` leaves, as schedules ask for such numbers.
fn few(p: usize, period: usize, m: usize) -> Option<[usize; 2]> {
    let few = FULL * p + (m - (FULL * p).min(m)) % period;
    (few + period < m).then_some([few, few + period])
}

/// The price of a plan.
fn price(asked: &Asked, plan: &Plan, o: &Options) -> Result<PlanPrice> {
    of_plan::price(plan, &asked.device, &o.speeds)
}

/// Compiles what tells of a layout's plan, and prices it; the plan itself if that is so large that it is not sure
/// whether it fits in `room` bytes.
///
/// # Errors
/// Those of compiling it, and `device`.
pub fn compiled(asked: &Asked, input: &Input, o: &Options, room: usize) -> Result<Steady> {
    let all = o.microbatches();
    if let Some([first, second]) = few(o.axis(PIPELINE), period(o), all) {
        let with = |m| Options { global_batch: o.global_batch / all * m, ..o.clone() };
        let [less, mut plan] = asked.trials(input, [&with(first), &with(second)])?;
        let [before, price] = [price(asked, &less, o)?, price(asked, &plan, o)?];
        // What lies in memory for the whole step has the tokens of all microbatches.
        let whole = |c: &RankClass| c.memory.whole.iter().map(|w| w.1).sum::<usize>();
        for (before, now) in less.classes.iter().zip(&mut plan.classes) {
            let each = whole(now).saturating_sub(whole(before)) / (second - first);
            now.memory.peak_bytes += each * (all - second);
        }
        let near = plan.peak_bytes().abs_diff(room) <= room / PACKING;
        // Parts are those of one rank.
        if before.class == price.class && !near {
            let more = (all - second) as f64 / (second - first) as f64;
            let parts = price.parts.with(before.parts, |now, before| now + more * (now - before));
            return Ok(Steady { plan, seconds: parts.total(), parts });
        }
    }
    let plan = asked.trial(input, o)?;
    let price = price(asked, &plan, o)?;
    Ok(Steady { plan, seconds: price.total, parts: price.parts })
}
