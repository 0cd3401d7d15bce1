//! `--recompute fit`: the least recomputation with which the plan fits.
//!
//! Each policy of a short list is compiled for all layers. What a rank needs is close to linear in the number of
//! layers of a policy, and there is one limit: so of all mixes the cheapest is one of two policies, of which one
//! does not fit and one does (a linear program with one constraint beside the sum has such an optimum). How many
//! layers the second one needs is then found with plans, by secants and halves: the last number that fits, and
//! one less, which does not, are both compiled.

use super::{Price, Prices, against, all, trial};
use shardc_ir::diag::{Diag, Result, bytes};
use shardc_ir::func::FuncKind;
use shardc_ir::plan::Plan;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::Options;
use shardc_plans::input::Input;
use shardc_report::report::layers_of;

/// A policy with what its plan needs and costs.
#[derive(Clone)]
struct PolicyTrial {
    policy: Recompute,
    peak: usize,
    price: Price,
    /// What is to be least: on a machine seconds of a step, else of work.
    cost: f64,
}

/// The policies of single layers beside `none`.
fn policies() -> Vec<Recompute> {
    let ops = |names: [&str; 2]| Recompute::Ops(names.map(String::from).to_vec());
    vec![
        Recompute::Elementwise,
        Recompute::Selective,
        ops(["dot", "selective"]),
        ops(["attention", "selective"]),
        Recompute::Full,
    ]
}

/// The options with the cheapest policy that fits, and how it was found. If none fits, the one that
/// needs least.
pub(super) fn resolve(input: &Input, o: &Options) -> Result<(Options, String)> {
    let Some(limit) = o.memory else {
        return Err(Diag::new("flag", "the memory limit is not given")
            .at("--recompute fit")
            .rule("--recompute fit is for a given --memory")
            .help("give --memory 24GiB, or what a rank has"));
    };
    let with = |policy: Recompute| Options { recompute: policy, ..o.clone() };
    let prices = Prices::of(o)?;
    let on_machine = prices.machine().is_some();
    let step = |policy: &Recompute, plan: &Plan| -> Result<PolicyTrial> {
        let price = prices.price(plan, &o.speeds)?;
        let cost = if on_machine { price.step } else { price.work };
        Ok(PolicyTrial { policy: policy.clone(), peak: plan.peak_bytes(), price, cost })
    };
    let one = |policy: &Recompute| step(policy, &trial(input, o, &with(policy.clone()))?);
    let plan = trial(input, o, &with(Recompute::None))?;
    let none = step(&Recompute::None, &plan)?;
    if none.peak <= limit {
        return Ok((with(Recompute::None), "recompute: none, which fits".into()));
    }
    let layers = layers(&plan);
    drop(plan);
    // Other policies are of layers: of a model that marks none they are refused.
    let applies = |p: &Recompute| layers > 0 || *p == Recompute::Elementwise;
    let policies: Vec<Recompute> = policies().into_iter().filter(applies).collect();
    let mut tried: Vec<PolicyTrial> = all(&policies, one).into_iter().collect::<Result<_>>()?;
    tried.push(none.clone());
    if applies(&Recompute::Sqrt) && tried.iter().all(|s| s.peak > limit) {
        tried.push(one(&Recompute::Sqrt)?);
    }
    if tried.iter().all(|s| s.peak > limit) {
        let least = tried.into_iter().min_by_key(|s| s.peak).expect("some were tried");
        let text = format!("recompute: {} needs least, and does not fit", least.policy);
        return Ok((with(least.policy), text));
    }
    let mut bound = f64::NEG_INFINITY;
    if let Some((over, under)) = pair(&tried, limit) {
        let (more, fewer) = between(over, under, layers, limit, one, &mut tried)?;
        bound = at(&more, &fewer, limit);
    }
    let count = tried.len();
    let fits = tried.into_iter().filter(|s| s.peak <= limit);
    let best = fits.min_by(|a, b| a.cost.total_cmp(&b.cost).then(a.peak.cmp(&b.peak)));
    let best = best.expect("one fits");
    let bound = if bound > none.cost { bound.min(best.cost) } else { best.cost };
    let text = format!(
        "recompute: {} of {count} plans: a rank needs {} of {} (none: {}), {} FLOPs, {} {}; in parts of layers it would be {}",
        best.policy,
        bytes(best.peak),
        bytes(limit),
        bytes(none.peak),
        against(best.price.flops, none.price.flops),
        against(best.cost, none.cost),
        if on_machine { "time" } else { "work" },
        against(bound, none.cost),
    );
    Ok((with(best.policy), text))
}

/// Most decoder layers of a stage.
fn layers(plan: &Plan) -> usize {
    plan.module.of_kind(FuncKind::Forward).map(|f| layers_of(f).len()).max().unwrap_or(0)
}

/// Cost where a line through two plans needs the limit.
fn at(over: &PolicyTrial, under: &PolicyTrial, limit: usize) -> f64 {
    let part = (over.peak - limit) as f64 / (over.peak - under.peak) as f64;
    over.cost + part * (under.cost - over.cost)
}

/// The two policies of the cheapest mix, unless one by itself is as cheap: one that does not fit, and one
/// that does.
fn pair(tried: &[PolicyTrial], limit: usize) -> Option<(PolicyTrial, PolicyTrial)> {
    let by_itself = |s: &&PolicyTrial| !matches!(s.policy, Recompute::Sqrt);
    let (over, under): (Vec<&PolicyTrial>, Vec<&PolicyTrial>) =
        tried.iter().filter(by_itself).partition(|s| s.peak > limit);
    let pairs = under.iter().flat_map(|u| over.iter().map(move |o| (*o, *u)));
    let (over, under) = pairs
        .filter(|(o, u)| o.cost < u.cost)
        .min_by(|a, b| at(a.0, a.1, limit).total_cmp(&at(b.0, b.1, limit)))?;
    let alone = tried.iter().filter(|s| s.peak <= limit).map(|s| s.cost);
    let cheaper = alone.fold(f64::INFINITY, f64::min) > at(over, under, limit);
    cheaper.then(|| (over.clone(), under.clone()))
}

/// Layer by layer from a policy that does not fit to one that does: the mix with most layers of the first that
/// fits, behind the one with one layer more, which does not. All that was compiled is in `tried`.
fn between(
    over: PolicyTrial,
    under: PolicyTrial,
    layers: usize,
    limit: usize,
    compile: impl Fn(&Recompute) -> Result<PolicyTrial>,
    tried: &mut Vec<PolicyTrial>,
) -> Result<(PolicyTrial, PolicyTrial)> {
    let (first, rest) = (under.policy.clone(), over.policy.clone());
    let (mut low, mut high) = ((0, over), (layers, under));
    let mut halve = false;
    while high.0 - low.0 > 1 {
        let width = high.0 - low.0;
        let part = (low.1.peak - limit) as f64 / (low.1.peak - high.1.peak) as f64;
        let step = if halve { width / 2 } else { (width as f64 * part).ceil() as usize };
        let n = low.0 + step.clamp(1, width - 1);
        let s = compile(&Recompute::Mix(vec![(n, first.clone())], Box::new(rest.clone())))?;
        tried.push(s.clone());
        match s.peak > limit {
            true => low = (n, s),
            false => high = (n, s),
        }
        halve = high.0 - low.0 > width / 2;
    }
    Ok((low.1, high.1))
}
