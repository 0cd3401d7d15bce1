//! `--schedule search`: the fastest schedule that fits.
//!
//! What a stage costs is read from compiled plans of two microbatches, or one, for every cut of
//! the model that is tried: with backwards in one, where exchanges may hide behind gradients of weights, and in two.
//! With these times all named schedules, and what [`shardc_passes::schedule::front`] finds, are replayed, which says how
//! long they take at least; they are compiled and priced in that order, until none that is left can be faster than
//! one that fits. So no named schedule that fits is faster by the price of its plan.

use super::price::StageTimes;
use super::{Price, Prices, against, all, trial, trial_without};
use shardc_ir::diag::{Diag, Result, bytes, count, time};
use shardc_ir::func::{Role, RoleKind};
use shardc_ir::mesh::PIPELINE;
use shardc_ir::plan::Plan;
use shardc_ir::schedule::{Action, ActionKind, Held, Schedule, replay, write_csv};
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{Options, Order};
use shardc_passes::schedule::{CutCosts, Named, Placement, front, make};
use shardc_passes::step::instructions::Index;
use shardc_plans::input::Input;
use std::collections::{BTreeMap, HashSet};

/// A cut of the model into stages, and what it costs.
struct Cut {
    placement: Placement,
    chunks: usize,
    /// With whole backwards, and with backwards in two.
    together: StageTimes,
    apart: StageTimes,
    held: Vec<Held>,
    /// By rank: what lives through a step.
    whole: Vec<usize>,
    /// By rank: what one microbatch holds in all of its stages.
    own: Vec<u64>,
    /// By rank: what it needs beside that.
    rest: Vec<usize>,
}

/// A schedule that may be chosen.
struct ScheduleChoice {
    name: Option<Named>,
    chunks: usize,
    schedule: Schedule,
    /// Seconds that a step takes at least.
    seconds: f64,
    /// No plan of it needs less.
    least: u64,
}

impl ScheduleChoice {
    fn name(&self) -> String {
        match self.name {
            Some(n) if n.default_chunks() == self.chunks => n.name().into(),
            Some(n) => format!("{} of {}", n.name(), count(self.chunks, "chunk", "chunks")),
            None => format!("found, of {} per rank", count(self.chunks, "chunk", "chunks")),
        }
    }
}

/// Parts of the memory in which the list scheduler looks, in turn, for one that fits: what it holds
/// is known to the byte, what lies between only when a plan is compiled. At the end there is room
/// for one microbatch.
const PARTS: [f64; 8] = [1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.0];
/// Candidates that are compiled at once.
const AT_ONCE: usize = 2;
/// What the order of additions may make of a time, as a part of it.
const ROUNDING: f64 = 1e-9;

/// What a compiled plan needs and takes.
#[derive(Clone, Copy)]
struct Known {
    peak: usize,
    step: f64,
}

/// The options with the fastest schedule that fits, and how it was found. If none fits, the one
/// that needs least.
pub(super) fn resolve(input: &Input, o: &Options) -> Result<(Options, String)> {
    let prices = &Prices::of(o)?;
    let cuts = cuts(input, o, prices)?;
    let with = |c: &ScheduleChoice| match c.name {
        Some(n) => {
            let schedule = Order::Named(n.name().into());
            Options { schedule, chunks: Some(c.chunks), ..o.clone() }
        }
        None => Options { schedule: Order::Csv(write_csv(&c.schedule)), ..o.clone() },
    };
    let compile = |c: &ScheduleChoice| -> Result<Known> {
        let plan = trial(input, o, &with(c))?;
        let Price { step, .. } = prices.price(&plan, &o.speeds)?;
        let least = c.seconds <= step * (1.0 + ROUNDING);
        debug_assert!(least, "{}: {} > {step} s", c.name(), c.seconds);
        Ok(Known { peak: plan.peak_bytes(), step })
    };
    let limit = o.memory.unwrap_or(usize::MAX);
    let mut tried = named(&cuts, o)?;
    let mut count = 0;
    let mut known: BTreeMap<usize, Known> = BTreeMap::new();
    // Seconds of the fastest that fits, and its number.
    let mut fits: Option<(f64, usize)> = None;
    let mut rooms = vec![];
    for part in PARTS {
        let room = room(&cuts, o, part);
        if rooms.contains(&room) {
            continue;
        }
        let from = if rooms.is_empty() { 0 } else { tried.len() };
        let (more, replayed) = found(&cuts, o, &room)?;
        rooms.push(room);
        count += replayed;
        for c in more {
            if !tried.iter().any(|t| t.schedule == c.schedule) {
                tried.push(c);
            }
        }
        if tried.is_empty() {
            return Err(no_schedule(o));
        }
        // Of equally fast ones the one that needs less, and then one with a name.
        tried[from..].sort_by(|a, b| a.seconds.total_cmp(&b.seconds).then(a.least.cmp(&b.least)));
        let may: Vec<usize> =
            (from..tried.len()).filter(|&i| tried[i].least <= limit as u64).collect();
        for some in may.chunks(AT_ONCE) {
            if fits.is_some_and(|f| f.0 <= tried[some[0]].seconds * (1.0 + ROUNDING)) {
                break;
            }
            for (&i, made) in some.iter().zip(all(some, |&i| compile(&tried[i]))) {
                let (c, made) = (&tried[i], made?);
                let needs = made.peak;
                debug_assert!(c.least <= needs as u64, "{}: {} > {needs}", c.name(), c.least);
                known.insert(i, made);
                let faster = fits.is_none_or(|f| made.step * (1.0 + ROUNDING) < f.0);
                if needs <= limit && faster {
                    fits = Some((made.step, i));
                }
            }
        }
        if fits.is_some() {
            break;
        }
    }
    let peak = |c: &ScheduleChoice| Ok(compile(c)?.peak);
    let Some((seconds, best)) = fits else {
        let peaks = known.iter().map(|(i, k)| (*i, k.peak)).collect();
        let best = least(&tried, peaks, &peak)?;
        let text = format!("schedule: {} needs least, and does not fit", best.name());
        return Ok((with(best), text));
    };
    let (compiled, needs, best) = (known.len(), known[&best].peak, &tried[best]);
    let base = tried.iter().position(|c| c.name == Some(Named::OneFOneB) && c.chunks == 1);
    let base = base.map(|i| known.get(&i).map_or_else(|| compile(&tried[i]), |k| Ok(*k)));
    let base = base.transpose()?.map(|k| k.step);
    let mut text = format!("schedule: {}{}", best.name(), compared(prices, seconds, base));
    text += &match o.memory {
        Some(limit) => format!("; a rank needs {} of {}", bytes(needs), bytes(limit)),
        None => format!("; a rank needs {}", bytes(needs)),
    };
    text += &format!("; {count} schedules tried, {compiled} compiled");
    Ok((with(best), text))
}

/// How long it takes, on a machine, and how that compares with 1F1B.
fn compared(prices: &Prices, seconds: f64, base: Option<f64>) -> String {
    let against = |base: f64| match &*against(seconds, base) {
        "as much" => "as long as 1f1b".to_string(),
        other => format!("{other} time than 1f1b"),
    };
    match (prices.machine(), base) {
        (None, None) => String::new(),
        (None, Some(base)) => format!(" ({})", against(base)),
        (Some(name), None) => format!(", {} on {name}", time(seconds)),
        (Some(name), Some(base)) => {
            format!(", {} on {name} ({}, {})", time(seconds), against(base), time(base))
        }
    }
}

fn no_schedule(o: &Options) -> Diag {
    let (p, m) = (o.axis(PIPELINE), o.microbatches());
    Diag::new("schedule-rule", format!("no schedule takes p={p}, m={m}"))
        .rule("some schedule takes the numbers of ranks, chunks and microbatches")
        .help("use --chunks 1")
}

/// The candidate whose plan needs least. What cannot need less is not compiled.
fn least<'a>(
    tried: &'a [ScheduleChoice],
    mut known: BTreeMap<usize, usize>,
    peak: &dyn Fn(&ScheduleChoice) -> Result<usize>,
) -> Result<&'a ScheduleChoice> {
    let mut order: Vec<usize> = (0..tried.len()).collect();
    order.sort_by_key(|&i| (tried[i].least, i));
    let mut best: Option<(usize, usize)> = known.iter().map(|(&i, &p)| (p, i)).min();
    for i in order {
        if best.is_some_and(|b| tried[i].least >= b.0 as u64) {
            break;
        }
        let here = match known.remove(&i) {
            Some(p) => p,
            None => peak(&tried[i])?,
        };
        best = Some(best.map_or((here, i), |b| b.min((here, i))));
    }
    Ok(&tried[best.expect("there are candidates").1])
}

/// Every way to cut the model that is tried, with its costs.
fn cuts(input: &Input, o: &Options, prices: &Prices) -> Result<Vec<Cut>> {
    let p = o.axis(PIPELINE);
    let chunks = o.chunks.map_or(vec![1, 2], |v| vec![v]);
    let mut asked = vec![];
    for v in chunks.into_iter().filter(|&v| p > 1 || v == 1) {
        asked.push((Placement::Loop, v));
        if p > 1 && v > 1 {
            asked.push((Placement::V, v));
        }
    }
    let cut = |&(placement, chunks): &(Placement, usize)| -> Result<Cut> {
        // Two, if gradients are to be summed.
        let m = o.microbatches().min(2);
        let made = |backward: &[ActionKind]| {
            let schedule = probe(placement.owner(p, chunks), p, m, backward);
            let one = Options {
                global_batch: m * o.microbatch_rows(),
                schedule: Order::Csv(write_csv(&schedule)),
                ..o.clone()
            };
            // Where gradients are summed depends on the schedule.
            trial_without(input, o, &one, Some("early-sums"))
        };
        let together = prices.times(&made(&[ActionKind::Backward])?, &o.speeds)?;
        let plan = made(&[ActionKind::Input, ActionKind::Weight])?;
        let (held, whole) = (held(&plan), (0..p).map(|r| whole(&plan, r)).collect());
        let on = |r: usize| -> u64 {
            plan.schedule.stages_of(r).into_iter().map(|s| held[s].input + held[s].weight).sum()
        };
        let own: Vec<u64> = (0..p).map(on).collect();
        let peak = |r: usize| plan.classes[r].memory.peak_bytes;
        let rest = (0..p).map(|r| peak(r).saturating_sub(own[r] as usize)).collect();
        let apart = prices.times(&plan, &o.speeds)?;
        Ok(Cut { placement, chunks, together, apart, held, whole, own, rest })
    };
    let mut refused = None;
    let mut out = vec![];
    for c in all(&asked, cut) {
        match c {
            Ok(c) => out.push(c),
            Err(d) => refused = refused.or(Some(d)),
        }
    }
    match refused {
        Some(d) if out.is_empty() => Err(d),
        // More than one chunk on one rank is not a pipeline.
        None if out.is_empty() => make(Named::OneFOneB, p, o.chunks.unwrap_or(1), 1).map(|_| out),
        _ => Ok(out),
    }
}

/// One microbatch after the other through all stages and back, with backwards of these actions.
fn probe(owner: Vec<usize>, p: usize, microbatches: usize, backward: &[ActionKind]) -> Schedule {
    let mut ranks: Vec<Vec<Action>> = vec![vec![]; p];
    for microbatch in 0..microbatches {
        let mut act =
            |kind, stage: usize| ranks[owner[stage]].push(Action { kind, stage, microbatch });
        (0..owner.len()).for_each(|s| act(ActionKind::Forward, s));
        for s in (0..owner.len()).rev() {
            backward.iter().for_each(|kind| act(*kind, s));
        }
    }
    Schedule { owner, microbatches, ranks }
}

/// Bytes on a rank of what lives through a step.
fn whole(plan: &Plan, rank: usize) -> usize {
    let c = &plan.classes[rank];
    c.funcs.iter().filter_map(|&f| c.memory.frames[f].first()).copied().max().unwrap_or(0)
}

/// By stage, what a microbatch keeps from F on: until I, or until W. What several stages of a rank
/// use counts with the first of them, which has it longest.
fn held(plan: &Plan) -> Vec<Held> {
    let (m, s) = (&plan.module, &plan.schedule);
    let index = Index::of(m, s, plan.settings.mode).expect("a compiled plan has its functions");
    let kept = |r: &Role| matches!(r.kind, RoleKind::Stash | RoleKind::Edge);
    let made: HashSet<&str> = index
        .forward
        .iter()
        .flat_map(|&f| m.funcs[f].results.iter().filter_map(|r| r.role.as_ref()))
        .filter(|r| kept(r))
        .map(|r| &*r.name)
        .collect();
    let mut seen: HashSet<(usize, &str)> = HashSet::new();
    let mut out = vec![Held::default(); s.owner.len()];
    for (stage, held) in out.iter_mut().enumerate() {
        for (f, last) in [(index.weight[stage], true), (index.backward[stage], false)] {
            let Some(f) = f.map(|f| &m.funcs[f]) else { continue };
            for a in &f.args {
                let role = a.role.as_ref().filter(|r| kept(r) && made.contains(&*r.name));
                if role.is_some_and(|r| seen.insert((s.owner[stage], &r.name))) {
                    let part = if last { &mut held.weight } else { &mut held.input };
                    *part += f.ty(a.value).local_bytes(&m.mesh) as u64;
                }
            }
        }
    }
    out
}

/// A schedule of a cut as a candidate.
fn candidate(
    cut: &Cut,
    o: &Options,
    name: Option<Named>,
    schedule: Schedule,
) -> Result<ScheduleChoice> {
    let times = if schedule.splits_backward() { &cut.apart } else { &cut.together };
    let line = replay(&schedule, &times.actions)?;
    let held = |r: usize| line.held(r, &|s| cut.held[s]).saturating_add(cut.whole[r] as u64);
    // Runs of layers depend on the schedule: what the cut was measured with says nothing.
    let bound = o.recompute != Recompute::Sqrt;
    let least = (0..cut.whole.len()).map(held).max().filter(|_| bound).unwrap_or(0);
    let seconds = times.at_least(&line);
    Ok(ScheduleChoice { name, chunks: cut.chunks, schedule, seconds, least })
}

/// All named schedules that are legal.
fn named(cuts: &[Cut], o: &Options) -> Result<Vec<ScheduleChoice>> {
    let (p, m) = (o.axis(PIPELINE), o.microbatches());
    let mut out = vec![];
    for cut in cuts {
        for name in Named::ALL.into_iter().filter(|n| n.placement() == cut.placement) {
            if let Ok(schedule) = make(name, p, cut.chunks, m) {
                out.push(candidate(cut, o, Some(name), schedule)?);
            }
        }
    }
    Ok(out)
}

/// What each rank of each cut has for microbatches, in a part of the memory: at least what one
/// takes.
fn room(cuts: &[Cut], o: &Options, part: f64) -> Vec<Vec<u64>> {
    let memory = o.memory.map(|l| (l as f64 * part) as usize);
    let one = |cut: &Cut| {
        let room = |(rest, own): (&usize, &u64)| {
            memory.map_or(u64::MAX, |l| (l.saturating_sub(*rest) as u64).max(*own))
        };
        cut.rest.iter().zip(&cut.own).map(room).collect()
    };
    cuts.iter().map(one).collect()
}

/// What the list scheduler finds where ranks have so much, and how many schedules it tried, those
/// with a name among them.
fn found(cuts: &[Cut], o: &Options, room: &[Vec<u64>]) -> Result<(Vec<ScheduleChoice>, usize)> {
    let (p, m) = (o.axis(PIPELINE), o.microbatches());
    let mut chunks: Vec<usize> = cuts.iter().map(|c| c.chunks).collect();
    chunks.dedup();
    let of = |placement, chunks: usize| {
        cuts.iter().position(|c| c.placement == placement && c.chunks == chunks)
    };
    let costs = |placement, chunks: usize| {
        // Of a cut that is not possible nothing is taken below.
        let cut = of(placement, chunks).or_else(|| cuts.iter().position(|c| c.chunks == chunks));
        let i = cut.expect("only these numbers of chunks are searched");
        let (times, held) = (cuts[i].apart.actions.clone(), cuts[i].held.clone());
        CutCosts { times, held, limit: room[i].clone() }
    };
    let front = match front(p, &chunks, m, &costs) {
        Err(d) if d.code == "schedule-memory" => return Ok((vec![], 0)),
        front => front?,
    };
    let mut out = vec![];
    for f in front.found.into_iter().filter(|f| f.named.is_none()) {
        if let Some(i) = of(f.placement, f.chunks) {
            out.push(candidate(&cuts[i], o, None, f.schedule)?);
        }
    }
    Ok((out, front.tried))
}
