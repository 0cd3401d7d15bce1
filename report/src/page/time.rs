//! Where the time goes: by price on a machine, and as a run took it.

use super::{Priced, timeline::row};
use crate::inspect::measured as means;
use crate::pictures::step::{Lengths, Moments, Step};
use crate::prices::{trust, utilisation, words};
use serde_json::{Value as Json, json};
use shardc_cost::beside;
use shardc_cost::device::Device;
use shardc_cost::plan::{FuncPrice, PlanPrice, launch::Work};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::FuncKind;
use shardc_ir::schedule::{Action, ActionKind, Slot, Times};
use shardc_passes::step::instructions::Index;
use shardc_plans::machine::precision;
use shardc_plans::stored::Stored;
use std::collections::BTreeMap;
use std::path::Path;

/// Launches that are listed, those that take most of a step.
const LISTED: usize = 24;

/// A step on a machine, in milliseconds.
///
/// # Errors
/// `plan` if the functions do not fit the schedule, as of no plan that was read.
pub fn step(s: &Stored, p: &PlanPrice) -> Result<Step> {
    let ms = |all: &Vec<Moments>| all.iter().map(|x| (x.0 * 1e3, x.1 * 1e3)).collect();
    Step::of_moments(&s.plan, p.moments.iter().map(ms).collect())
}

/// Milliseconds of every action on a machine.
///
/// # Errors
/// Those of [`step`].
fn lengths(s: &Stored, p: &PlanPrice) -> Result<Lengths> {
    let plan = &s.plan;
    let index = Index::of(&plan.module, &plan.schedule, plan.settings.mode)
        .map_err(|m| Diag::new("plan", m).help("recompile the plan with this version of shardc"))?;
    let ms = |f: Option<usize>| f.map_or(0.0, |f| p.funcs[f].parts.total() * 1e3);
    let stages = 0..plan.schedule.owner.len();
    let split = |stage: usize| index.weight[stage].is_some();
    let back = |stage: usize| ms(index.backward[stage]);
    // A whole backward of one function is drawn as two halves.
    let input = |stage: usize| if split(stage) { back(stage) } else { back(stage) / 2.0 };
    let weight = |stage: usize| match split(stage) {
        true => ms(index.weight[stage]),
        false => back(stage) / 2.0,
    };
    Ok(Lengths {
        actions: Times {
            forward: stages.clone().map(|i| ms(Some(index.forward[i]))).collect(),
            input: stages.clone().map(input).collect(),
            weight: stages.map(weight).collect(),
        },
        enter: index.enter.iter().map(|&f| ms(Some(f))).collect(),
        finish: index.finish.iter().map(|&f| ms(f)).collect(),
    })
}

/// The price of a step: its parts, its functions, its largest launches.
pub fn parts(s: &Stored, d: &Device, p: &PlanPrice) -> Json {
    let set = &s.plan.settings;
    let parts: Vec<Json> =
        p.parts.list().into_iter().filter(|x| x.1 > 0.0).map(|(n, s)| json!([n, s])).collect();
    let calls = |f: usize| s.plan.classes[p.class].calls().filter(|c| c.func == f).count();
    let func = |(i, own): (usize, &FuncPrice)| {
        let n = calls(i);
        (n > 0).then(|| {
            json!({ "name": s.plan.module.funcs[i].name, "calls": n, "seconds": own.parts.total() })
        })
    };
    let mut launches: BTreeMap<String, (usize, f64)> = BTreeMap::new();
    for (i, own) in p.funcs.iter().enumerate() {
        let n = calls(i);
        for item in own.items.iter().filter(|x| n > 0 && x.work != Work::View) {
            let one = launches.entry(words(&item.work)).or_default();
            *one = (one.0 + n, one.1 + item.seen * n as f64);
        }
    }
    let mut launches: Vec<(String, (usize, f64))> = launches.into_iter().collect();
    launches.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
    launches.truncate(LISTED);
    let launches = launches
        .into_iter()
        .map(|(what, (n, s))| json!({ "what": what, "calls": n, "seconds": s }));
    json!({
        "device": d.name,
        "step_s": p.total,
        "class": p.class,
        "precision": format!("{:?}", precision(&s.options)).to_lowercase(),
        "tokens_per_s": (set.global_batch * set.seq) as f64 / p.total,
        "mfu": utilisation(s, d, p.total),
        "trust": trust(d),
        "memory": d.memory,
        "beside": if d.is_gpu() { beside::bytes(&s.plan) } else { 0 },
        "parts": parts,
        "functions": p.funcs.iter().enumerate().filter_map(func).collect::<Vec<_>>(),
        "launches": launches.collect::<Vec<_>>(),
    })
}

/// What a run took: the actions of its last step on the first rank of every class, and the mean of every kind
/// of action beside its price.
///
/// # Errors
/// `file` if it is not a trace of this plan.
pub fn measured(s: &Stored, file: &Path, priced: Priced) -> Result<Json> {
    let (plan, trace) = (&s.plan, crate::inspect::read_trace(file, s)?);
    let took = means(&trace, file, plan)?;
    let planned = priced.map(|p| lengths(s, p)).transpose()?;
    let stages = plan.schedule.owner.len();
    let mut rows = vec![];
    for stage in 0..stages {
        // A backward that the schedule has as one action is one row: its halves are for drawing alone.
        let mut all = plan.schedule.ranks.iter().flatten();
        let split = all.any(|a| a.stage == stage && a.kind == ActionKind::Input);
        let backward = match split {
            true => &[ActionKind::Input, ActionKind::Weight][..],
            false => &[ActionKind::Backward],
        };
        for &kind in [ActionKind::Forward].iter().chain(backward) {
            let ms = took.actions.of(kind, stage);
            if ms > 0.0 {
                rows.push(json!({
                    "stage": stage, "kind": kind.letter().to_string(), "measured_ms": ms,
                    "planned_ms": planned.as_ref().map(|p| p.actions.of(kind, stage)),
                }));
            }
        }
    }
    let around = [(FuncKind::StepPrologue, &took.enter), (FuncKind::OptimizerStep, &took.finish)];
    for (kind, all) in around {
        for (rank, ms) in all.iter().enumerate().filter(|x| *x.1 > 0.0) {
            let own = planned
                .as_ref()
                .map(|p| if kind == FuncKind::StepPrologue { &p.enter } else { &p.finish });
            rows.push(json!({
                "stage": rank, "kind": kind.name(), "measured_ms": ms,
                "planned_ms": own.map(|all| all[rank]),
            }));
        }
    }
    Ok(json!({ "unit": "milliseconds", "rows": rows, "ranks": last_step(&trace, s) }))
}

/// The last step of a trace on the first rank of each class, from when the first of them begins.
fn last_step(trace: &Json, s: &Stored) -> Json {
    let plan = &s.plan;
    let events = || trace["traceEvents"].as_array().into_iter().flatten();
    let step = |e: &Json| e["args"]["step"].as_str().and_then(|s| s.parse::<usize>().ok());
    let last = events().filter_map(step).max();
    let mut ranks: Vec<Run> = vec![Run::default(); plan.classes.len()];
    for e in events().filter(|e| step(e).is_some() && step(e) == last) {
        let class =
            (0..plan.classes.len()).find(|&c| e["pid"].as_u64() == Some(plan.peer(0, c) as u64));
        let times = e["ts"].as_f64().zip(e["dur"].as_f64());
        let (Some(class), Some((ts, dur))) = (class, times) else { continue };
        let at = (ts / 1e3, (ts + dur) / 1e3);
        if !at.0.is_finite() || !at.1.is_finite() {
            continue;
        }
        let own = &mut ranks[class];
        match e["name"].as_str().unwrap_or_default() {
            "step_prologue" if e["args"]["value"].is_null() => own.enter = Some(at),
            "optimizer_step" if e["args"]["value"].is_null() => own.finish = Some(at),
            name => {
                own.slots.extend(action(name).map(|action| Slot { action, start: at.0, end: at.1 }))
            }
        }
    }
    let zero = ranks.iter().flat_map(Run::begins).fold(f64::INFINITY, f64::min);
    ranks.into_iter().map(|r| r.row(zero)).collect()
}

/// The action that is called so in a trace.
fn action(name: &str) -> Option<Action> {
    let at = name.find(|c: char| "FBIW".contains(c))?;
    let kind = match &name[at..at + 1] {
        "F" => ActionKind::Forward,
        "B" => ActionKind::Backward,
        "I" => ActionKind::Input,
        _ => ActionKind::Weight,
    };
    let (stage, microbatch) = (name[..at].parse().ok()?, name[at + 1..].parse().ok()?);
    Some(Action { kind, stage, microbatch })
}

/// A pipeline rank in a run, in milliseconds.
#[derive(Clone, Default)]
struct Run {
    enter: Option<Moments>,
    finish: Option<Moments>,
    slots: Vec<Slot>,
}

impl Run {
    /// When everything in it begins.
    fn begins(&self) -> Vec<f64> {
        let around = self.enter.iter().chain(&self.finish).map(|x| x.0);
        around.chain(self.slots.iter().map(|s| s.start)).collect()
    }

    /// As a page has it, from `zero` on.
    fn row(mut self, zero: f64) -> Json {
        let moved = |at: Option<Moments>| at.map_or((0.0, 0.0), |x| (x.0 - zero, x.1 - zero));
        self.slots.sort_by(|a, b| a.start.total_cmp(&b.start));
        self.slots.iter_mut().for_each(|s| (s.start, s.end) = (s.start - zero, s.end - zero));
        row(moved(self.enter), moved(self.finish), &self.slots)
    }
}
