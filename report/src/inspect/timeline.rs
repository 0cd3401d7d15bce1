//! `inspect --timeline`: the schedule drawn, with memory over time in the SVG.

use crate::pictures::step::{Lengths, Step, gaps};
use crate::pictures::svg::{BEGIN, Drawn, Memory, svg};
use crate::pictures::timeline::text;
use crate::report::Chosen;
use serde_json::json;
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::files::{self, FileFormat};
use shardc_ir::plan::{Mode, Plan};
use shardc_ir::schedule::{Timeline, Times};
use shardc_plans::stored::Stored;
use shardc_process::terminal::{Shown, colours, json_line};
use std::collections::BTreeMap;
use std::path::Path;

/// What is asked of a timeline.
#[derive(Clone, Copy, Debug, Default)]
pub struct TimelineOptions<'a> {
    /// A file of `run --trace`, whose times are taken.
    pub times: Option<&'a Path>,
    /// Where to write the picture.
    pub svg: Option<&'a Path>,
    /// The one pipeline rank to show.
    pub class: Option<usize>,
    pub json: bool,
}

/// Draws the schedule of a plan: F, I and W take one unit of time on a rank of speed 1, a whole backward two,
/// or all of them what they took in a run.
///
/// # Errors
/// `output` and `file` if the SVG cannot be written, `file` if the trace of a run cannot be read.
pub fn timeline(s: &Stored, asked: TimelineOptions) -> Result<Shown> {
    let plan = &s.plan;
    let lengths = match asked.times {
        Some(file) => measured(&read(file, s)?, file, plan)?,
        None => Lengths::unit(plan, &s.options),
    };
    let step = Step::of(plan, lengths)?;
    let chunks = plan.schedule.owner.len() / plan.schedule.ranks.len().max(1);
    let unit = unit(s, asked.times.is_some());
    if let Some(file) = asked.svg {
        shardc_process::terminal::doing("drawing the plan");
        let ranks = 0..plan.classes.len();
        let ranks = ranks.map(|r| step.memory(plan, r)).collect();
        let arenas = plan.classes.iter().map(|c| c.memory.peak_bytes).collect();
        let gaps = plan.classes.iter().map(|c| gaps(&c.memory)).collect();
        let memory = Memory { ranks, arenas, gaps, limit: s.options.memory };
        let (title, memory) = (&title(s), Some(&memory));
        let text = svg(&step, &Drawn { chunks, title, unit: &unit, memory, only: asked.class });
        files::replace(file, &SVG, |out| {
            let fail = |e| files::io_error("cannot write the file", file, &e);
            out.write_all(text.as_bytes()).map_err(fail)
        })?;
    }
    if asked.json {
        let mut out = as_object(&step, &unit, asked.class);
        out["options"] = json!(Chosen::of(&s.options));
        return Ok(json_line("inspect-timeline", out).into());
    }
    let drawn = Shown::own(text(&step.timeline, chunks, colours(), asked.class));
    Ok(drawn.then(&format!("time in {unit}\n{}", Chosen::of(&s.options).line())))
}

/// What a time of 1 is.
pub fn unit(s: &Stored, measured: bool) -> String {
    if measured {
        return "milliseconds, the means of the run".into();
    }
    let schedule = &s.plan.schedule;
    let take = match schedule.splits_backward() {
        true => "F, I and W take 1",
        false => "F takes 1, B takes 2",
    };
    let of = match schedule.owner.len() / schedule.ranks.len().max(1) {
        0 | 1 => String::new(),
        chunks => format!(", each for one of the {chunks} stages of a rank"),
    };
    let slower = s.options.speeds.iter().any(|x| *x != 1.0);
    let speed = if slower { ", where the speed is 1" } else { "" };
    format!("units: {take}{of}{speed}")
}

/// What the picture is of: model, mesh, schedule, element type.
fn title(s: &Stored) -> String {
    let mesh = &s.plan.module.mesh;
    let axes: Vec<String> = mesh.axes.iter().map(|a| format!("{} {}", a.name, a.size)).collect();
    let of = if axes.is_empty() { String::new() } else { format!(" ({})", axes.join(" × ")) };
    let ranks = count(mesh.ranks(), "rank", "ranks");
    let schedule = match s.plan.schedule.ranks.len() {
        1 => String::new(),
        _ => format!(", {}", s.options.schedule.name()),
    };
    let m = s.plan.schedule.microbatches;
    let microbatches = count(m, "microbatch", "microbatches");
    let name = s.name.as_deref().unwrap_or(&s.family);
    format!("{name}, {ranks}{of}{schedule}, {microbatches}, {}", s.options.dtype.name())
}

/// What `--svg` writes.
const SVG: FileFormat =
    FileFormat { name: "an SVG", is: |begin| begin.starts_with(BEGIN.as_bytes()) };

/// Largest trace that is read, in bytes.
const MAX_TRACE: u64 = 4 << 30;

/// What is in a trace of a plan; older ones do not say which plan ran.
///
/// # Errors
/// `file` if it cannot be read, or is not JSON; `trace` if it is of another plan.
pub fn read(file: &Path, stored: &Stored) -> Result<serde_json::Value> {
    let text = files::read(file, MAX_TRACE)?;
    let bad = |code, what: String| {
        Diag::new(code, what)
            .at(file.display().to_string())
            .help("give a file of `shardc run --trace` of this plan")
    };
    let trace: serde_json::Value =
        serde_json::from_slice(&text).map_err(|e| bad("file", e.to_string()))?;
    match trace["otherData"]["plan"].as_str() {
        Some(plan) if plan != stored.hash() => {
            Err(bad("trace", "the trace is of another plan".into()))
        }
        _ => Ok(trace),
    }
}

/// Milliseconds of the actions of every stage in a run: the mean over its steps and ranks; and of what stands
/// before and after them, of which a run that was traced by an older version has nothing. A whole backward
/// counts half as I and half as W.
///
/// # Errors
/// `file` if it lacks an action of the plan.
pub fn measured(trace: &serde_json::Value, file: &Path, plan: &Plan) -> Result<Lengths> {
    let (stages, mode) = (plan.schedule.owner.len(), plan.settings.mode);
    let bad = |m: String| {
        Diag::new("file", m)
            .at(format!("--times {}", file.display()))
            .help(format!("give a file of `shardc run --trace` of this plan, of {stages} stages"))
    };
    let events = trace["traceEvents"].as_array().ok_or_else(|| bad("no traceEvents".into()))?;
    let step = |e: &serde_json::Value| e["args"]["step"].as_str().and_then(|s| s.parse().ok());
    let steps: Vec<usize> = events.iter().filter_map(step).collect();
    let last = steps.iter().max().copied().unwrap_or(1);
    let mut sums: BTreeMap<(usize, char), (f64, f64)> = BTreeMap::new();
    let ranks = plan.module.mesh.ranks();
    for e in events.iter().filter(|e| step(e).is_some_and(|s| s > 1 || last == 1)) {
        let name = e["name"].as_str().unwrap_or_default();
        let rank = e["pid"].as_u64().filter(|&r| r < ranks as u64);
        let call = e["args"]["value"].is_null();
        let key = match (name, rank) {
            ("step_prologue", Some(r)) if call => Some((plan.class_of(r as usize), '<')),
            ("optimizer_step", Some(r)) if call => Some((plan.class_of(r as usize), '>')),
            _ => action(name),
        };
        if let (Some(key), Some(us)) = (key, e["dur"].as_f64()) {
            let (sum, n) = sums.entry(key).or_default();
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
    let around = |kind: char| -> Vec<f64> {
        (0..plan.classes.len()).map(|rank| mean(rank, kind).unwrap_or(0.0)).collect()
    };
    let actions = Times { forward: all('F')?, input: all('I')?, weight: all('W')? };
    Ok(Lengths { actions, enter: around('<'), finish: around('>') })
}

/// Stage and kind of `3F12`.
fn action(name: &str) -> Option<(usize, char)> {
    let at = name.find(|c: char| "FBIW".contains(c))?;
    name[at + 1..].parse::<usize>().ok()?;
    Some((name[..at].parse().ok()?, name[at..].chars().next()?))
}

fn as_object(step: &Step, unit: &str, only: Option<usize>) -> serde_json::Value {
    let t: &Timeline = &step.timeline;
    let slot = |s: &shardc_ir::schedule::Slot| {
        let (kind, a) = (s.action.kind.letter().to_string(), s.action);
        json!({
            "kind": kind, "stage": a.stage, "microbatch": a.microbatch, "start": s.start, "end": s.end
        })
    };
    let edge = |(start, end): (f64, f64)| json!({ "start": start, "end": end });
    let rank = |(r, slots): (usize, &Vec<shardc_ir::schedule::Slot>)| {
        json!({
            "rank": r, "span": t.span(r), "bubble": t.bubble(r), "live": t.live(r),
            "enter": edge(step.enter(r)), "finish": edge(step.finish(r)),
            "actions": slots.iter().map(slot).collect::<Vec<_>>()
        })
    };
    let shown = t.ranks.iter().enumerate().filter(|x| only.is_none_or(|only| only == x.0));
    let ranks: Vec<_> = shown.map(rank).collect();
    json!({
        "makespan": t.makespan(), "longest_span": t.longest_span(), "unit": unit, "ranks": ranks
    })
}
