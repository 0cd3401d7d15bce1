//! Seconds of a step of a compiled plan: every launch and exchange of its programs, in the order of its
//! instructions, on the clocks of all ranks of the pipeline.

mod clock;
pub mod launch;
pub mod scores;

use crate::device::Device;
use crate::parts::Parts;
pub use clock::Moments;
use launch::{Pricer, Work};
use shardc_ir::axes::{AxisRole, ROLES, Splits};
use shardc_ir::diag::Result;
use shardc_ir::func::{Func, FuncKind};
use shardc_ir::group::launches;
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::{self, Sends};
use shardc_ir::overlap::awaited;
use shardc_ir::plan::{Plan, RankClass, calls};
use std::collections::HashSet;

/// Part of an exchange that is seen although work goes on beside it.
const SEEN: f64 = 0.15;

/// A launch or exchange with its price.
#[derive(Clone, Debug)]
pub struct Item {
    pub work: Work,
    /// Seconds, of an exchange whether seen or not.
    pub seconds: f64,
    /// Seconds by which its function is longer for it.
    pub seen: f64,
    /// Number of its first node in its function.
    pub node: usize,
    /// Under which part it is counted.
    pub part: Part,
}

/// The part of a step's seconds under which a launch is counted.
pub type Part = fn(&mut Parts) -> &mut f64;

/// A function with the prices of all that it does.
#[derive(Clone, Debug, Default)]
pub struct FuncPrice {
    pub items: Vec<Item>,
    pub parts: Parts,
    /// Multiplications and additions of products and attention.
    pub flops: f64,
}

/// What a step of a plan costs.
#[derive(Clone, Debug)]
pub struct PlanPrice {
    /// Seconds of a step.
    pub total: f64,
    /// Of the rank of the pipeline that waits least; they sum to the total.
    pub parts: Parts,
    /// That rank.
    pub class: usize,
    /// By function of the plan; empty where no step calls it.
    pub funcs: Vec<FuncPrice>,
    /// By class: FLOPs of products and attention of one rank in a step, what is computed twice included.
    pub flops: Vec<f64>,
    /// By class and instruction of its step: when it begins and ends.
    pub moments: Vec<Vec<Moments>>,
}

/// The price of a step. `speeds` are those of `--speeds`: of each rank of the pipeline relative to the device, 1 where
/// the list ends; exchanges go at the speed of their links whatever the ranks' is.
///
/// # Errors
/// `device` if the device lacks products of an element type.
pub fn price(plan: &Plan, device: &Device, speeds: &[f64]) -> Result<PlanPrice> {
    let mut pricer = Pricer::new(&plan.module.mesh, device, plan.settings.tokens);
    let mut funcs = vec![FuncPrice::default(); plan.module.funcs.len()];
    let forward = names(plan);
    let of_experts = expert_atoms(plan);
    for (rank, class) in plan.classes.iter().enumerate() {
        let speed = speeds.get(rank).copied().unwrap_or(1.0);
        for call in calls(&class.step) {
            if !funcs[call.func].items.is_empty() {
                continue;
            }
            let f = &plan.module.funcs[call.func];
            let all = launches(f);
            let until = match device.overlaps {
                true => awaited(f, &all, &class.memory, call),
                false => (1..=all.len()).collect(),
            };
            let mut items = vec![];
            for x in &all {
                let work = pricer.work(f, x);
                let seconds = match work {
                    Work::Exchange { .. } => pricer.seconds(&work)?,
                    _of_a_rank => pricer.seconds(&work)? / speed,
                };
                let part = part_of(plan, f, x.nodes.clone(), &work, &forward, of_experts);
                items.push(Item { work, seconds, seen: seconds, node: x.nodes.start, part });
            }
            hide(&mut items, &until);
            let mut own = FuncPrice::default();
            for item in &items {
                *(item.part)(&mut own.parts) += item.seen;
                own.flops += Pricer::flops(&item.work);
            }
            own.items = items;
            funcs[call.func] = own;
        }
    }
    let clock::ClockedStep { total, class, parts, moments } = clock::run(plan, device, &funcs);
    let of = |c: &RankClass| calls(&c.step).map(|c| funcs[c.func].flops).sum();
    let flops = plan.classes.iter().map(of).collect();
    Ok(PlanPrice { total, parts, class, funcs, flops, moments })
}

/// An exchange that goes on: its item, the launch that waits for it, seconds that are left of it.
type Running = (usize, usize, f64);

/// What exchanges are seen: they run one after the other beside launches, from where they stand to where
/// they are waited for.
fn hide(items: &mut [Item], until: &[usize]) {
    let mut running: Vec<Running> = vec![];
    for (at, &until) in until.iter().enumerate() {
        await_ended(items, &mut running, at);
        let item = &mut items[at];
        if let Work::Exchange { .. } = item.work {
            let hides = if until > at + 1 { 1.0 - SEEN } else { 1.0 };
            item.seen = (1.0 - hides) * item.seconds;
            running.push((at, until, hides * item.seconds));
            continue;
        }
        let mut left = item.seconds;
        for r in &mut running {
            let hidden = left.min(r.2);
            (left, r.2) = (left - hidden, r.2 - hidden);
        }
    }
    await_ended(items, &mut running, until.len());
}

/// Waits for the exchanges that a launch needs, and for those that began before them.
fn await_ended(items: &mut [Item], running: &mut Vec<Running>, at: usize) {
    let Some(last) = running.iter().filter(|r| r.1 <= at).map(|r| r.0).max() else { return };
    for r in running.iter_mut().filter(|r| r.0 <= last) {
        items[r.0].seen += r.2;
        r.2 = 0.0;
    }
    running.retain(|r| r.1 > at);
}

/// Names of what forward computes: backward that computes something of them again has them, too.
fn names(plan: &Plan) -> HashSet<String> {
    let forward = plan.module.funcs.iter().filter(|f| f.kind == FuncKind::Forward);
    let of = |f: &Func| -> Vec<String> {
        f.nodes.iter().flat_map(|n| n.outs.iter().map(|v| f.name(*v).to_string())).collect()
    };
    forward.flat_map(of).collect()
}

/// The atoms over which experts are split.
fn expert_atoms(plan: &Plan) -> AtomSet {
    let mut all = AtomSet::EMPTY;
    for f in &plan.module.funcs {
        for n in &f.nodes {
            if let Some(c) = n.op.collective()
                && let Sends::Rows { .. } = c.sends()
            {
                all = all.union(c.atoms());
            }
        }
    }
    all
}

/// What an exchange is counted under: what the first axis with an atom in it splits.
fn split_of(mesh: &Mesh, atoms: AtomSet) -> Splits {
    let [stages, others @ ..] = &ROLES;
    let has = |r: &&AxisRole| mesh.axis(r.name).is_some_and(|x| x.meets(atoms));
    others.iter().chain([stages]).find(has).map_or(Splits::Width, |r| r.splits)
}

/// Under which part a launch is counted.
fn part_of(
    plan: &Plan,
    f: &Func,
    nodes: std::ops::Range<usize>,
    work: &Work,
    forward: &HashSet<String>,
    experts: AtomSet,
) -> Part {
    let (mesh, first) = (&plan.module.mesh, &f.nodes[nodes.start]);
    if let Work::Exchange { atoms, sends, .. } = work {
        if matches!(sends, Sends::Rows { .. }) || (!experts.is_empty() && *atoms == experts) {
            return |p| &mut p.ep;
        }
        return match split_of(mesh, *atoms) {
            Splits::Tokens => |p| &mut p.cp,
            Splits::Width => |p| &mut p.tp,
            Splits::Layers => |p| &mut p.send,
            Splits::Rows => |p| &mut p.dp,
        };
    }
    let once = matches!(f.kind, FuncKind::StepPrologue | FuncKind::OptimizerStep);
    if once || first.op.facts().kind == ops::Kind::Update {
        return |p| &mut p.optimizer;
    }
    let made =
        |n: usize| f.nodes[n].outs.iter().all(|v| forward.contains(&*f.name(*v).to_string()));
    if f.kind != FuncKind::Forward && nodes.clone().all(made) {
        return |p| &mut p.recompute;
    }
    match work {
        Work::Product { .. } | Work::Grouped { .. } => |p| &mut p.products,
        Work::Attention { .. } => |p| &mut p.attention,
        Work::View | Work::Rows { .. } | Work::Exchange { .. } => |p| &mut p.memory,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(exchange: bool, seconds: f64) -> Item {
        let group = crate::collective::Group { size: 2.0, per_domain: 2.0 };
        let (sends, atoms) = (Sends::SumToAll, AtomSet::EMPTY);
        let work = match exchange {
            true => Work::Exchange { op: "all_reduce", sends, group, stride: 1, bytes: 1.0, atoms },
            false => Work::Rows { bytes: 1.0 },
        };
        Item { work, seconds, seen: seconds, node: 0, part: |p| &mut p.memory }
    }

    fn seen(all: &[(bool, f64)], until: &[usize]) -> Vec<f64> {
        let mut items: Vec<Item> = all.iter().map(|x| item(x.0, x.1)).collect();
        hide(&mut items, until);
        items.iter().map(|i| (i.seen * 100.0).round() / 100.0).collect()
    }

    #[test]
    fn exchanges_hide_behind_what_stands_before_they_are_waited_for() {
        let all = [(true, 1.0), (false, 0.5), (false, 3.0)];
        assert_eq!(seen(&all, &[1, 2, 3]), [1.0, 0.5, 3.0]);
        assert_eq!(seen(&all, &[2, 2, 3]), [0.5, 0.5, 3.0]);
        assert_eq!(seen(&all, &[3, 2, 3]), [0.15, 0.5, 3.0]);
    }

    /// Two at once share what they hide behind, and the later one waits for the earlier.
    #[test]
    fn the_stream_of_exchanges_has_an_order() {
        let all = [(true, 1.0), (true, 1.0), (false, 1.0), (false, 1.0)];
        assert_eq!(seen(&all, &[4, 4, 3, 4]), [0.15, 0.15, 1.0, 1.0]);
        assert_eq!(seen(&all, &[4, 3, 3, 4]), [0.15, 0.85, 1.0, 1.0]);
        assert_eq!(seen(&all, &[4, 2, 3, 4]), [1.0, 1.0, 1.0, 1.0]);
    }
}
