//! `inspect --timeline`: the schedule drawn, with memory over time in the SVG.

use crate::pictures::measure::timeline as timed;
use crate::pictures::svg::{Area, Memory, svg};
use crate::pictures::timeline::text;
use crate::plan_dir::Stored;
use serde_json::json;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files::{self, FileFormat};
use shardc_ir::plan::{Instr, MemoryClass, Mode, Plan, RankClass};
use shardc_ir::schedule::{ActionKind, Timeline, Times};
use shardc_passes::step::instructions::Index;
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::Path;

/// Draws the schedule of a plan: F, I and W take one unit of time, a whole backward two, or all of them
/// what they took in a run.
///
/// # Errors
/// `output` and `file` if the SVG cannot be written, `file` if the trace of a run cannot be read.
pub fn timeline(
    s: &Stored,
    trace: Option<&Path>,
    file: Option<&Path>,
    as_json: bool,
) -> Result<String> {
    let plan = &s.plan;
    let stages = plan.schedule.owner.len();
    let took = trace.map(|file| measured(file, stages, plan.settings.mode)).transpose()?;
    let t = timed(plan, took.unwrap_or(Times::unit(stages)))?;
    let chunks = plan.schedule.owner.len() / plan.schedule.ranks.len().max(1);
    if let Some(file) = file {
        let mesh = crate::commands::compile::mesh_line(plan);
        let title = format!("{}, {mesh}, {} microbatches", s.family, plan.schedule.microbatches);
        let ranks = plan.classes.iter().enumerate();
        let ranks = ranks.map(|(r, c)| areas(plan, c, &t, r)).collect::<Result<_>>()?;
        let arenas = plan.classes.iter().map(|c| c.memory.peak_bytes).collect();
        let memory = Memory { ranks, arenas, limit: s.options.memory };
        let text = svg(&t, chunks, &title, Some(&memory));
        files::replace(file, &SVG, |out| {
            let fail = |e| files::io_error("cannot write the file", file, &e);
            out.write_all(text.as_bytes()).map_err(fail)
        })?;
    }
    if as_json {
        return Ok(format!("{}\n", as_object(&t)));
    }
    let mut out = text(&t, chunks, std::io::stdout().is_terminal());
    if trace.is_some() {
        out += "times in milliseconds, the means of the run\n";
    }
    Ok(out)
}

/// What `--svg` writes.
const SVG: FileFormat = FileFormat { name: "SVG", is: |begin| begin.starts_with(b"<svg") };

/// Largest trace that is read, in bytes.
const MAX_TRACE: u64 = 4 << 30;

/// Milliseconds of the actions of every stage in a run: the mean over its steps and ranks. A whole
/// backward counts half as I and half as W.
fn measured(file: &Path, stages: usize, mode: Mode) -> Result<Times> {
    let bad = |m: String| {
        Diag::new("file", m)
            .at(format!("--times {}", file.display()))
            .help(format!("give a file of `shardc run --trace` of this plan, of {stages} stages"))
    };
    let text = files::read(file, MAX_TRACE)?;
    let trace: serde_json::Value = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
    let events = trace["traceEvents"].as_array().ok_or_else(|| bad("no traceEvents".into()))?;
    let step = |e: &serde_json::Value| e["args"]["step"].as_str().and_then(|s| s.parse().ok());
    let steps: Vec<usize> = events.iter().filter_map(step).collect();
    let last = steps.iter().max().copied().unwrap_or(1);
    let mut sums: BTreeMap<(usize, char), (f64, f64)> = BTreeMap::new();
    for e in events.iter().filter(|e| step(e).is_some_and(|s| s > 1 || last == 1)) {
        let action = e["name"].as_str().and_then(action);
        if let (Some((stage, kind)), Some(us)) = (action, e["dur"].as_f64()) {
            let (sum, n) = sums.entry((stage, kind)).or_default();
            (*sum, *n) = (*sum + us / 1e3, *n + 1.0);
        }
    }
    let mean = |stage: usize, kind: char| sums.get(&(stage, kind)).map(|(sum, n)| sum / n);
    let part = |stage: usize, kind: char| {
        let whole = || mean(stage, 'B').map(|b| b / 2.0);
        mean(stage, kind).or_else(whole)
    };
    let all = |kind: char| -> Result<Vec<f64>> {
        let one = |stage: usize| {
            let found = match kind {
                'F' => mean(stage, kind),
                _ if mode == Mode::Infer => Some(0.0),
                _ => part(stage, kind),
            };
            found.ok_or_else(|| bad(format!("the trace has no {stage}{kind}")))
        };
        (0..stages).map(one).collect()
    };
    Ok(Times { forward: all('F')?, input: all('I')?, weight: all('W')? })
}

/// Stage and kind of `3F12`.
fn action(name: &str) -> Option<(usize, char)> {
    let at = name.find(|c: char| "FBIW".contains(c))?;
    name[at + 1..].parse::<usize>().ok()?;
    Some((name[..at].parse().ok()?, name[at..].chars().next()?))
}

fn as_object(t: &Timeline) -> serde_json::Value {
    let slot = |s: &shardc_ir::schedule::Slot| {
        let (kind, a) = (s.action.kind.letter().to_string(), s.action);
        json!({
            "kind": kind, "stage": a.stage, "microbatch": a.microbatch, "start": s.start, "end": s.end
        })
    };
    let rank = |(r, slots): (usize, &Vec<shardc_ir::schedule::Slot>)| {
        json!({
            "rank": r, "span": t.span(r), "bubble": t.bubble(r), "live": t.live(r),
            "actions": slots.iter().map(slot).collect::<Vec<_>>()
        })
    };
    let ranks: Vec<_> = t.ranks.iter().enumerate().map(rank).collect();
    json!({ "makespan": t.makespan(), "longest_span": t.longest_span(), "ranks": ranks })
}

/// When every instruction of a class begins and ends: calls as their actions do, transfers at the
/// call beside them.
fn clock(plan: &Plan, c: &RankClass, t: &Timeline, rank: usize) -> Result<Vec<(f64, f64)>> {
    let index = Index::of(&plan.module, &plan.schedule, plan.settings.mode).map_err(|m| {
        Diag::new("plan", m).help("compile the plan again with this version of shardc")
    })?;
    let mut slots = t.ranks[rank].iter();
    // What is left of an action that is two calls.
    let mut rest: Option<(f64, f64)> = None;
    let mut now = 0.0;
    let mut out = vec![];
    for i in &c.step {
        let at = match i {
            Instr::Call(call) if call.microbatch.is_some() => match rest.take() {
                Some(r) => r,
                None => slots.next().map_or((now, now), |s| {
                    let whole = s.action.kind == ActionKind::Backward;
                    let two = whole && index.weight[s.action.stage].is_some();
                    let half = if two { (s.start + s.end) / 2.0 } else { s.end };
                    rest = two.then_some((half, s.end));
                    (s.start, half)
                }),
            },
            Instr::Call(_) | Instr::Send(_) | Instr::Sent { .. } | Instr::Recv(_) => (now, now),
        };
        now = at.1;
        out.push(at);
    }
    // What is received is there when the call after it begins.
    let mut next = now;
    for (i, at) in c.step.iter().zip(&mut out).rev() {
        match i {
            Instr::Recv(_) => *at = (next, next),
            Instr::Call(_) => next = at.0,
            Instr::Send(_) | Instr::Sent { .. } => {}
        }
    }
    Ok(out)
}

/// Bytes over time of one rank of the pipeline, by class.
fn areas(plan: &Plan, c: &RankClass, t: &Timeline, rank: usize) -> Result<Vec<Area>> {
    let clock = clock(plan, c, t, rank)?;
    let mut all: Vec<Area> = vec![];
    for &(class, bytes) in c.memory.whole.iter().filter(|x| x.1 > 0) {
        all.push(Area { name: class.name().into(), points: vec![(0.0, bytes)] });
    }
    for class in [MemoryClass::Activation, MemoryClass::CollectiveBuffer, MemoryClass::Temporary] {
        let mut changes: Vec<(f64, i64)> = vec![];
        for s in c.memory.spans.iter().filter(|s| s.class == class) {
            let (from, to) = (clock[s.first].0, clock[s.last].1);
            if to > from {
                changes.push((from, s.bytes as i64));
                changes.push((to, -(s.bytes as i64)));
            }
        }
        // At one time, what ends goes before what begins.
        changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let mut points: Vec<(f64, usize)> = vec![];
        let mut sum = 0;
        for run in changes.chunk_by(|a, b| a.0 == b.0) {
            if points.is_empty() && run[0].0 > 0.0 {
                points.push((0.0, 0));
            }
            sum += run.iter().map(|c| c.1).sum::<i64>();
            points.push((run[0].0, sum.max(0) as usize));
        }
        if !points.is_empty() {
            all.push(Area { name: class.name().into(), points });
        }
    }
    Ok(all)
}
