//! `--recompute fit`: the least recomputation with which the plan fits.
//!
//! The ladder: nothing, each op whose results are saved, the groups, element-wise work, everything cheap, that with
//! attention, runs of layers, whole layers. The steps that save most for what they cost are then
//! taken together, one more each time. Of all that fit, the one that adds least work is chosen.

use super::{Price, against, all, price, trial};
use crate::Input;
use crate::report::bytes;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{FuncKind, RoleKind};
use shardc_ir::plan::Plan;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::Options;
use std::collections::BTreeSet;

/// A policy with what its plan needs and costs.
#[derive(Clone)]
struct Step {
    policy: Recompute,
    peak: usize,
    price: Price,
}

/// The options with the cheapest policy that fits, and how it was found. If none fits, the one that
/// needs least.
pub(super) fn resolve(input: &Input, o: &Options) -> Result<(Options, String)> {
    let Some(limit) = o.memory else {
        return Err(Diag::new("flag", "there is no memory to fit in")
            .at("--recompute fit")
            .rule("--recompute fit is for a given --memory")
            .help("give --memory 24GiB, or what a rank has"));
    };
    let with = |policy: Recompute| Options { recompute: policy, ..o.clone() };
    let plan = trial(input, o, &with(Recompute::None))?;
    let none = Step {
        policy: Recompute::None,
        peak: plan.peak_bytes(),
        price: price(&plan, &o.hardware, &o.speeds)?,
    };
    if none.peak <= limit {
        return Ok((with(Recompute::None), "recompute: none, which fits".into()));
    }
    let ops = saved(&plan);
    drop(plan);
    let names = |text: &str| Recompute::Ops(text.split(',').map(String::from).collect());
    let attempt = |policies: &[Recompute]| -> Result<Vec<Step>> {
        let one = |policy: &Recompute| {
            let plan = trial(input, o, &with(policy.clone()))?;
            let price = price(&plan, &o.hardware, &o.speeds)?;
            Ok(Step { policy: policy.clone(), peak: plan.peak_bytes(), price })
        };
        all(policies, one).into_iter().collect()
    };
    let mut tried = attempt(&[Recompute::Sqrt, Recompute::Full])?;
    if tried.iter().all(|s| s.peak > limit) {
        let least = tried.into_iter().min_by_key(|s| s.peak).expect("two were tried");
        let text = format!("recompute: {} needs least, and does not fit", least.policy);
        return Ok((with(least.policy), text));
    }
    let mut ladder: Vec<Recompute> = ops.iter().map(|op| names(op)).collect();
    ladder.extend(["norms", "activations", "norms,activations"].map(names));
    ladder.extend([Recompute::Elementwise, Recompute::Selective]);
    ladder.push(names("selective,attention"));
    let singles = attempt(&ladder)?;
    let greedy = greedy(&none, &singles);
    tried.extend(singles);
    tried.extend(attempt(&greedy)?);
    let mut count = tried.len() + 1;
    let fits = tried.into_iter().filter(|s| s.peak <= limit);
    let best = fits.min_by(|a, b| a.price.work.total_cmp(&b.price.work).then(a.peak.cmp(&b.peak)));
    let mut best = best.expect("sqrt or full fits");
    // Names that are not needed beside the others.
    let taken = match &best.policy {
        Recompute::Ops(names) if names.len() > 1 => names.clone(),
        _alone => vec![],
    };
    for name in &taken {
        let Recompute::Ops(now) = &best.policy else { break };
        let less: Vec<String> = now.iter().filter(|n| *n != name).cloned().collect();
        if less.is_empty() {
            break;
        }
        for s in attempt(&[Recompute::Ops(less)])? {
            count += 1;
            if s.peak <= limit && s.price.work <= best.price.work {
                best = s;
            }
        }
    }
    let text = format!(
        "recompute: {} of {count} policies: a rank needs {} of {} (none: {}), {} FLOPs, {} work",
        best.policy,
        bytes(best.peak),
        bytes(limit),
        bytes(none.peak),
        against(best.price.flops, none.price.flops),
        against(best.price.work, none.price.work),
    );
    Ok((with(best.policy), text))
}

/// Names of the ops of decoder layers whose results are saved, in order.
fn saved(plan: &Plan) -> Vec<String> {
    let mut out = BTreeSet::new();
    for f in plan.module.of_kind(FuncKind::Forward) {
        let makers = f.makers();
        let stashes = f.results.iter().filter(|r| {
            r.role.as_ref().is_some_and(|r| matches!(r.kind, RoleKind::Stash | RoleKind::Edge))
        });
        for n in stashes.filter_map(|r| makers[r.value.0 as usize]) {
            let n = &f.nodes[n as usize];
            if f.scope_info(n.scope).layer.is_some() && !n.op.gathers() {
                out.insert(n.op.mnemonic().to_string());
            }
        }
    }
    out.into_iter().collect()
}

/// The steps that save something, the least cost per byte first, one more in each policy.
fn greedy(none: &Step, singles: &[Step]) -> Vec<Recompute> {
    let cost = |s: &Step| {
        let bytes = none.peak.saturating_sub(s.peak) as f64;
        (s.price.work - none.price.work).max(0.0) / bytes
    };
    let mut order: Vec<&Step> = singles.iter().filter(|s| s.peak < none.peak).collect();
    order.sort_by(|a, b| cost(a).total_cmp(&cost(b)).then(b.peak.cmp(&a.peak)));
    let mut taken: Vec<String> = vec![];
    let mut out: Vec<Recompute> = vec![];
    for s in order {
        let more = match &s.policy {
            Recompute::Ops(names) => names.clone(),
            Recompute::Selective => vec!["selective".into()],
            _whole => continue,
        };
        taken.extend(more);
        taken.sort();
        taken.dedup();
        let policy = Recompute::Ops(taken.clone());
        if taken.len() > 1 && !out.contains(&policy) && singles.iter().all(|s| s.policy != policy) {
            out.push(policy);
        }
    }
    out
}
