//! Ways out of a plan that does not fit: changes of the options, each compiled; the cheapest, and of them what needs
//! least first.

use super::ways::mesh_text;
use super::{Price, Prices, all, searches, settled, trial};
use crate::Output;
use shardc_ir::diag::{Diag, Result, bytes};
use shardc_ir::mesh::PIPELINE;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{Options, Order};
use shardc_passes::schedule::Named;
use shardc_passes::shard::auto::MOST_EXACT;
use shardc_plans::flags::{Flags, default_microbatch};
use shardc_plans::input::{Input, read_model};
use shardc_plans::rules;
use std::path::Path;

/// Most changes that are proposed, beside all stages of ZeRO that are enough.
const PROPOSED: usize = 3;
/// Sets of changes that are tried with one more if none is enough: those that need least.
const PAIRED: usize = 6;
/// Most changes in a set.
const TOGETHER: usize = 4;

/// Layouts that are chosen by price are offered if a step with them takes less than this part of the time.
const MUCH: f64 = 0.9;

/// Microbatches from which on smaller ones are not tried.
const MANY: usize = 1024;

/// What a change is about; two of one kind do not go together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Topic {
    Recompute,
    Microbatch,
    Mesh,
    Zero,
    Schedule,
    Sequence,
    Layouts,
}

/// One change of the options.
#[derive(Clone, PartialEq, Debug)]
enum OptionChange {
    Recompute(Recompute),
    Microbatch(usize),
    Mesh(Vec<(String, usize)>),
    Schedule(Named),
    Sequence,
    Zero(u8),
    /// Layouts are chosen by price.
    Layouts,
}

impl OptionChange {
    fn kind(&self) -> Topic {
        match self {
            OptionChange::Recompute(_) => Topic::Recompute,
            OptionChange::Microbatch(_) => Topic::Microbatch,
            OptionChange::Mesh(_) => Topic::Mesh,
            OptionChange::Zero(_) => Topic::Zero,
            OptionChange::Schedule(_) => Topic::Schedule,
            OptionChange::Sequence => Topic::Sequence,
            OptionChange::Layouts => Topic::Layouts,
        }
    }

    fn apply(&self, o: &mut Options) {
        match self {
            OptionChange::Recompute(policy) => o.recompute = policy.clone(),
            OptionChange::Microbatch(n) => o.microbatch = *n,
            OptionChange::Mesh(mesh) => o.mesh.clone_from(mesh),
            OptionChange::Schedule(n) => {
                o.schedule = Order::Named(n.name().into());
                o.chunks = o.chunks.map(|_| n.default_chunks());
            }
            OptionChange::Sequence => o.sp = true,
            OptionChange::Layouts => o.auto = true,
            OptionChange::Zero(stage) => {
                o.zero = *stage;
                if o.axis("dp_shard") == 1 {
                    let axes = o.mesh.iter_mut().filter(|a| a.0 == "dp_replicate");
                    axes.for_each(|a| a.0 = "dp_shard".into());
                }
            }
        }
    }
}

/// Options that were compiled.
struct Tried {
    changes: Vec<OptionChange>,
    options: Options,
    peak: usize,
    price: Price,
}

/// The refusal of a plan that does not fit, with ways out, of which the flags leave `--shard auto` or do not.
pub fn advise(d: Diag, model: &Path, o: &Options, flags: &Flags) -> Diag {
    let d = match flags.text("memory").filter(|_| d.code == "out-of-memory") {
        Some(text) => d.at(format!("--memory {text}")),
        None => d,
    };
    // What is chosen by price was chosen for this memory.
    let asked = o.memory.filter(|_| d.code == "out-of-memory" && !o.auto);
    let Some(limit) = asked else { return d };
    // The model compiled up to its memory a moment ago; if it does not now, there is no advice.
    let lines = read_model(model, o).and_then(|input| {
        let o = crate::options_for(&input, o)?;
        lines(&input, &o, limit, flags.left_to_price(&o).is_ok())
    });
    let own = d.help.clone();
    let mut d = Diag { help: lines.unwrap_or_default(), ..d };
    d.help.extend(own);
    d
}

/// What to do, each line compiled: first on the ranks there are, with one change, then with several;
/// only if nothing fits there, on more ranks.
fn lines(input: &Input, asked: &Options, limit: usize, auto: bool) -> Result<Vec<String>> {
    let o = &settled(input, asked)?;
    let base = trial(input, o, o)?;
    let prices = &Prices::of(o)?;
    let (peak, across) = (base.peak_bytes(), crate::across(&base.module.mesh, o).len());
    drop(base);
    let attempt = |changes: &Vec<OptionChange>| -> Option<Tried> {
        let mut options = o.clone();
        changes.iter().for_each(|c| c.apply(&mut options));
        if options.auto {
            // With other layouts asked for, the flag is refused.
            if !auto || !leaves_layouts(&Options { auto: false, ..options.clone() }) {
                return None;
            }
            // As the flag would: corrected by the peak of the plan.
            let asked = Options { memory: Some(limit), ..options };
            options = crate::within_memory(&input.source, &asked).ok()?;
        }
        // Bounded as flags are, and by the rules that the model has.
        let facts = input.facts.as_ref();
        if facts.is_some_and(|f| !rules::violations(f, &options).is_empty()) {
            return None;
        }
        let plan = trial(input, o, &options).ok()?;
        // Groups that leave their node are what nobody wants for less memory.
        if crate::across(&plan.module.mesh, &options).len() > across {
            return None;
        }
        let price = prices.price(&plan, &options.speeds).ok()?;
        Some(Tried { changes: changes.clone(), options, peak: plan.peak_bytes(), price })
    };
    let tried = sets(o, asked, input.facts.is_some(), (limit, peak), attempt);
    // Every rank costs: a step in half the time on twice the ranks is not a gain.
    let cost = |t: &Tried| t.price.step * ranks(&t.options) as f64;
    let (mut fit, mut rest): (Vec<Tried>, Vec<Tried>) =
        tried.into_iter().partition(|t| t.peak <= limit);
    fit.sort_by(|a, b| cost(a).total_cmp(&cost(b)).then(a.peak.cmp(&b.peak)));
    let line = |t: &Tried| {
        let flags = flags(t, asked);
        // What is searched for takes the memory there is where that is cheaper.
        let least = if searches(asked) { "as little as " } else { "" };
        let mut line = format!("use {flags}: a rank then needs {least}{}", bytes(t.peak));
        if ranks(&t.options) != ranks(o) {
            line += &format!(" of {} ranks", ranks(&t.options));
        }
        line
    };
    if !fit.is_empty() {
        let zero = |t: &Tried| matches!(t.changes[..], [OptionChange::Zero(_)]);
        let mut some: Vec<&Tried> = fit.iter().take(PROPOSED).collect();
        some.extend(fit.iter().skip(PROPOSED).filter(|t| zero(t)));
        some.sort_by_key(|t| t.peak);
        return Ok(some.into_iter().map(line).collect());
    }
    rest.sort_by_key(|t| t.peak);
    let least = rest.first().filter(|t| t.peak < peak);
    Ok(least
        .map(|t| {
            let (flags, needs) = (flags(t, asked), bytes(t.peak));
            format!("the least that was found is {needs} ({} B), with {flags}", t.peak)
        })
        .into_iter()
        .collect())
}

fn ranks(o: &Options) -> usize {
    o.mesh.iter().map(|a| a.1).product::<usize>().max(1)
}

/// What was tried until something fits the limit: sets of ever more changes on the ranks there are;
/// then the best of them with more ranks. `peak` is that without a change.
fn sets(
    o: &Options,
    asked: &Options,
    batch: bool,
    (limit, peak): (usize, usize),
    attempt: impl Fn(&Vec<OptionChange>) -> Option<Tried> + Sync,
) -> Vec<Tried> {
    let own = |c: &OptionChange| {
        let mut new = o.clone();
        c.apply(&mut new);
        ranks(&new) == ranks(o)
    };
    let (own, more): (Vec<OptionChange>, Vec<OptionChange>) =
        changes(o, asked, batch).into_iter().partition(own);
    let singles: Vec<Vec<OptionChange>> = own.iter().map(|c| vec![c.clone()]).collect();
    let fits = |tried: &[Tried]| tried.iter().any(|t| t.peak <= limit);
    let mut tried: Vec<Tried> = all(&singles, &attempt).into_iter().flatten().collect();
    for _ in 1..TOGETHER {
        if fits(&tried) {
            return tried;
        }
        let sets = extended(&mut tried, &own, peak);
        tried.extend(all(&sets, &attempt).into_iter().flatten());
    }
    if !fits(&tried) {
        tried.sort_by_key(|t| t.peak);
        let mut sets: Vec<Vec<OptionChange>> = more.iter().map(|c| vec![c.clone()]).collect();
        for t in tried.iter().take(PAIRED) {
            let new = more.iter().filter(|c| t.changes.iter().all(|x| x.kind() != c.kind()));
            sets.extend(new.map(|c| [&t.changes[..], std::slice::from_ref(c)].concat()));
        }
        tried.extend(all(&sets, &attempt).into_iter().flatten());
    }
    tried
}

/// The largest sets that need least so far, each with one change more of a kind that it has not.
fn extended(tried: &mut [Tried], singles: &[OptionChange], peak: usize) -> Vec<Vec<OptionChange>> {
    tried.sort_by_key(|t| t.peak);
    let deepest = tried.iter().map(|t| t.changes.len()).max().unwrap_or(0);
    let kinds = |t: &Tried| t.changes.iter().map(OptionChange::kind).collect::<Vec<_>>();
    let mut best: Vec<&Tried> = vec![];
    for t in tried.iter().filter(|t| t.changes.len() == deepest && t.peak < peak) {
        // Of changes of one kind the best two: others are worse at the same.
        let alike = best.iter().filter(|b| kinds(b) == kinds(t)).count();
        if alike < 2 && best.len() < PAIRED {
            best.push(t);
        }
    }
    let mut out: Vec<Vec<OptionChange>> = vec![];
    for t in best {
        for c in singles.iter().filter(|c| !kinds(t).contains(&c.kind())) {
            let set = [&t.changes[..], std::slice::from_ref(c)].concat();
            if !out.iter().any(|s| set.iter().all(|c| s.contains(c))) {
                out.push(set);
            }
        }
    }
    out
}

/// The changes of a candidate as flags in place of those of the same name.
fn flags(t: &Tried, asked: &Options) -> String {
    let mut out: Vec<String> = vec![];
    for c in &t.changes {
        match c {
            OptionChange::Recompute(policy) => out.push(format!("--recompute {policy}")),
            OptionChange::Microbatch(_) => {}
            OptionChange::Mesh(_) => {}
            OptionChange::Zero(stage) => out.push(format!("--zero {stage}")),
            OptionChange::Schedule(n) => {
                out.push(format!("--schedule {}", n.name()));
                if let Some(v) = t.options.chunks.filter(|_| t.options.chunks != asked.chunks) {
                    out.push(format!("--chunks {v}"));
                }
            }
            OptionChange::Sequence => out.push("--sp".into()),
            OptionChange::Layouts => out.push("--shard auto".into()),
        }
    }
    let meshes = |c: &OptionChange| matches!(c, OptionChange::Mesh(_) | OptionChange::Zero(_));
    if t.changes.iter().any(meshes) {
        out.push(format!("--mesh {}", mesh_text(&t.options)));
    }
    // One that is not the default was asked for, and stays.
    let changed = t.options.microbatch != asked.microbatch;
    let by_default = asked.microbatch == default_microbatch(asked);
    if changed || (by_default && t.options.microbatch != default_microbatch(&t.options)) {
        out.push(format!("--microbatch {}", t.options.microbatch));
    }
    out.join(" ")
}

/// The changes that are tried, one at a time.
fn changes(o: &Options, asked: &Options, batch: bool) -> Vec<OptionChange> {
    let mut out = vec![];
    if o.mode == shardc_ir::plan::Mode::Train {
        let policies =
            [Recompute::Elementwise, Recompute::Selective, Recompute::Sqrt, Recompute::Full];
        // What is searched for has tried the first of them.
        let others = policies.into_iter().filter(|p| {
            *p != o.recompute
                && !(asked.recompute == Recompute::Fit && *p == Recompute::Elementwise)
        });
        out.extend(others.map(OptionChange::Recompute));
    }
    let has = |axis: &str| o.axis(axis);
    let rows = o.global_batch / o.data_parallel().max(1);
    if batch {
        let mut n = o.microbatch;
        while n % 2 == 0 && (n == o.microbatch || rows / n < MANY) {
            n /= 2;
            out.push(OptionChange::Microbatch(n));
        }
        let times = |axis: &str, more: usize, less: usize| {
            let speeds = axis != PIPELINE || o.speeds.is_empty();
            let dp = has("dp_replicate");
            let mesh =
                (speeds && dp % less == 0).then(|| mesh(o, axis, has(axis) * more, dp / less));
            mesh.map(OptionChange::Mesh)
        };
        let dp = has("dp_replicate");
        // With ranks of data parallelism, or where there are none to take, with more ranks.
        let trades: &[(&str, usize, usize)] = match dp % 2 {
            0 => &[("tp", 2, 2), ("tp", 4, 4), (PIPELINE, 2, 2), (PIPELINE, 4, 4)],
            _ => &[("tp", 2, 1), (PIPELINE, 2, 1)],
        };
        out.extend(trades.iter().filter_map(|&(axis, more, less)| times(axis, more, less)));
    }
    if has(PIPELINE) > 1 {
        let named = [Named::OneFOneB, Named::VHalf, Named::VMin];
        let now = match &o.schedule {
            Order::Named(name) => Named::parse(name).ok(),
            Order::Csv(_) => None,
        };
        out.extend(named.into_iter().filter(|&n| Some(n) != now).map(OptionChange::Schedule));
    }
    if has("tp") > 1 && !o.sp {
        out.push(OptionChange::Sequence);
    }
    if leaves_layouts(o) {
        out.push(OptionChange::Layouts);
    }
    if o.data_parallel() > 1 && o.mode == shardc_ir::plan::Mode::Train {
        out.extend((o.zero + 1..=3).map(OptionChange::Zero));
    }
    out
}

/// Whether no option asks for a layout, and prices can choose over the mesh: `--shard auto` may be added.
fn leaves_layouts(o: &Options) -> bool {
    let plain = Options::default();
    let axes = o.mesh.iter().filter(|a| a.0 != PIPELINE && a.1 > 1).count();
    let asks = !o.shard.is_empty() || o.zero > 0 || o.sp || o.ep > 1 || o.etp.is_some();
    let modes = (o.tp_mode, o.cp_mode, o.cp_split) == (plain.tp_mode, plain.cp_mode, None);
    modes && !asks && !o.auto && (1..=MOST_EXACT).contains(&axes)
}

/// What `--shard auto` would gain, if it is much, and no flag is in its way.
pub fn gained(done: &Output, model: &Path, o: &Options, flags: &Flags) -> Option<String> {
    flags.left_to_price(o).ok()?;
    let by_price = Options { auto: true, ..o.clone() };
    let other =
        leaves_layouts(o).then(|| crate::compile(model, &by_price, &mut |_, _| {}))?.ok()?;
    let [own, other] = [done, &other].map(|d| crate::cost(&d.stored.plan, o));
    (other.0 < MUCH * own.0).then(|| {
        format!(
            "--shard auto would take {:.2} times as long by the same prices, and {} on a rank in place of {}",
            other.0 / own.0,
            bytes(other.1),
            bytes(own.1)
        )
    })
}

/// The mesh with an axis of another size, and the replicas of the model that are left.
fn mesh(o: &Options, axis: &str, size: usize, replicas: usize) -> Vec<(String, usize)> {
    let mut mesh = o.mesh.clone();
    mesh.retain(|a| a.0 != axis && (a.0 != "dp_replicate" || replicas > 1));
    for a in mesh.iter_mut().filter(|a| a.0 == "dp_replicate") {
        a.1 = replicas;
    }
    let at = if axis == PIPELINE { 0 } else { mesh.len() };
    mesh.insert(at, (axis.into(), size));
    mesh
}
