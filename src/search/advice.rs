//! Ways out of a plan that does not fit: changes of the options, each compiled, the cheapest first.

use super::{Price, against, all, price, searches, settled, trial};
use crate::report::bytes;
use crate::{Input, read_model, rules};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::mesh::PIPELINE;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{Options, Order};
use shardc_passes::schedule::Named;
use std::path::Path;

/// Most changes that are proposed.
const PROPOSED: usize = 3;
/// Changes that are tried in pairs if none is enough: those that need least, by kind.
const PAIRED: usize = 6;

/// Microbatches from which on smaller ones are not tried.
const MANY: usize = 1024;

/// What a change is about; two of one kind do not go together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Recompute,
    Microbatch,
    Mesh,
    Schedule,
    Sequence,
}

/// One change of the options.
#[derive(Clone, PartialEq, Debug)]
enum Change {
    Recompute(Recompute),
    Microbatch(usize),
    Mesh(Vec<(String, usize)>),
    Schedule(Named),
    Sequence,
    Zero(u8),
}

impl Change {
    fn kind(&self) -> Kind {
        match self {
            Change::Recompute(_) => Kind::Recompute,
            Change::Microbatch(_) => Kind::Microbatch,
            Change::Mesh(_) | Change::Zero(_) => Kind::Mesh,
            Change::Schedule(_) => Kind::Schedule,
            Change::Sequence => Kind::Sequence,
        }
    }

    fn apply(&self, o: &mut Options) {
        match self {
            Change::Recompute(policy) => o.recompute = policy.clone(),
            Change::Microbatch(n) => o.microbatch = *n,
            Change::Mesh(mesh) => o.mesh.clone_from(mesh),
            Change::Schedule(n) => {
                o.schedule = Order::Named(n.name().into());
                o.chunks = o.chunks.map(|_| n.default_chunks());
            }
            Change::Sequence => o.sp = true,
            Change::Zero(stage) => {
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
    changes: Vec<Change>,
    options: Options,
    peak: usize,
    price: Price,
}

/// The refusal of a plan that does not fit, with ways out.
pub fn advise(d: Diag, model: &Path, o: &Options) -> Diag {
    let Some(limit) = o.memory.filter(|_| d.code == "out-of-memory") else { return d };
    // The model compiled up to its memory a moment ago; if it does not now, there is no advice.
    let lines = read_model(model, o).and_then(|input| {
        let o = crate::with_mesh(&input.source.module.mesh, o)?;
        lines(&input, &o, limit)
    });
    let own = d.help.clone();
    let mut d = Diag { help: lines.unwrap_or_default(), ..d };
    d.help.extend(own);
    d
}

/// What to do, each line compiled.
fn lines(input: &Input, asked: &Options, limit: usize) -> Result<Vec<String>> {
    let o = &settled(asked);
    let base = trial(input, o, o)?;
    let (peak, now) = (base.peak_bytes(), price(&base, &o.speeds)?);
    drop(base);
    let attempt = |changes: &Vec<Change>| -> Option<Tried> {
        let mut options = o.clone();
        changes.iter().for_each(|c| c.apply(&mut options));
        // Bounded as flags are, and by the rules that the model has.
        let facts = input.facts.as_ref();
        if facts.is_some_and(|f| !rules::violations(f, &options).is_empty()) {
            return None;
        }
        let plan = trial(input, o, &options).ok()?;
        let price = price(&plan, &options.speeds).ok()?;
        Some(Tried { changes: changes.clone(), options, peak: plan.peak_bytes(), price })
    };
    let singles: Vec<Vec<Change>> =
        changes(o, asked, input.facts.is_some()).into_iter().map(|c| vec![c]).collect();
    let mut tried: Vec<Tried> = all(&singles, attempt).into_iter().flatten().collect();
    tried.sort_by_key(|t| t.peak);
    if tried.iter().all(|t| t.peak > limit) {
        let best: Vec<&Change> =
            tried.iter().filter(|t| t.peak < peak).take(PAIRED).map(|t| &t.changes[0]).collect();
        let mut pairs = vec![];
        for (i, a) in best.iter().enumerate() {
            for b in best[i + 1..].iter().filter(|b| b.kind() != a.kind()) {
                pairs.push(vec![(*a).clone(), (*b).clone()]);
            }
        }
        tried.extend(all(&pairs, attempt).into_iter().flatten());
    }
    let ranks = |o: &Options| o.mesh.iter().map(|a| a.1).product::<usize>().max(1);
    // Every rank costs: a step in half the time on twice the ranks is no gain.
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
        line + &format!(", a step takes about {} time", against(t.price.step, now.step))
    };
    if !fit.is_empty() {
        return Ok(fit.iter().take(PROPOSED).map(line).collect());
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

/// The changes of a candidate as flags in place of those of the same name.
fn flags(t: &Tried, asked: &Options) -> String {
    let mut out: Vec<String> = vec![];
    for c in &t.changes {
        match c {
            Change::Recompute(policy) => out.push(format!("--recompute {policy}")),
            Change::Microbatch(_) => {}
            Change::Mesh(_) | Change::Zero(_) => {
                if let Change::Zero(stage) = c {
                    out.push(format!("--zero {stage}"));
                }
                // With ZeRO `dp` is another axis: say which.
                let zero = t.options.zero > 0;
                let axis = |(name, size): &(String, usize)| match &**name {
                    "dp_replicate" if !zero => format!("dp={size}"),
                    name => format!("{name}={size}"),
                };
                let axes: Vec<String> = t.options.mesh.iter().map(axis).collect();
                out.push(format!("--mesh {}", axes.join(",")));
            }
            Change::Schedule(n) => {
                out.push(format!("--schedule {}", n.name()));
                if let Some(v) = t.options.chunks.filter(|_| t.options.chunks != asked.chunks) {
                    out.push(format!("--chunks {v}"));
                }
            }
            Change::Sequence => out.push("--sp".into()),
        }
    }
    // Without the flag a microbatch is the whole batch of a rank.
    let whole = t.options.global_batch / t.options.data_parallel().max(1);
    let all = asked.global_batch / asked.data_parallel().max(1);
    let changed = t.options.microbatch != asked.microbatch;
    if changed || (t.options.microbatch != whole && whole != all) {
        out.push(format!("--microbatch {}", t.options.microbatch));
    }
    out.join(" ")
}

/// The changes that are tried, one at a time.
fn changes(o: &Options, asked: &Options, batch: bool) -> Vec<Change> {
    let mut out = vec![];
    if o.mode == shardc_ir::plan::Mode::Train {
        let policies = [Recompute::Selective, Recompute::Sqrt, Recompute::Full];
        // What is searched for has tried the first of them.
        let others = policies.into_iter().filter(|p| {
            *p != o.recompute && !(asked.recompute == Recompute::Fit && *p == Recompute::Selective)
        });
        out.extend(others.map(Change::Recompute));
    }
    let has = |axis: &str| o.axis(axis);
    let rows = o.global_batch / o.data_parallel().max(1);
    if batch {
        let mut n = o.microbatch;
        while n % 2 == 0 && (n == o.microbatch || rows / n < MANY) {
            n /= 2;
            out.push(Change::Microbatch(n));
        }
        let times = |axis: &str, more: usize, less: usize| {
            let speeds = axis != PIPELINE || o.speeds.is_empty();
            let dp = has("dp_replicate");
            let mesh =
                (speeds && dp % less == 0).then(|| mesh(o, axis, has(axis) * more, dp / less));
            mesh.map(Change::Mesh)
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
        out.extend(named.into_iter().filter(|&n| Some(n) != now).map(Change::Schedule));
    }
    if has("tp") > 1 && !o.sp {
        out.push(Change::Sequence);
    }
    if o.data_parallel() > 1 && o.mode == shardc_ir::plan::Mode::Train {
        out.extend((o.zero + 1..=3).map(Change::Zero));
    }
    out
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
