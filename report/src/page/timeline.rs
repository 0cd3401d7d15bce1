//! A step over time: actions, transfers between stages, memory.

use crate::pictures::measure::bubble;
use crate::pictures::palette::STACK;
use crate::pictures::step::{Moments, Sample, Step};
use crate::report::phase_of;
use serde_json::{Map, Value as Json, json};
use shardc_ir::plan::Instr;
use shardc_ir::schedule::Slot;
use shardc_plans::stored::Stored;
use std::collections::BTreeSet;

/// Moments of a rank's memory that a page shows, at most two samples in each.
const MOMENTS: usize = 480;

/// A time in as few digits as tell moments apart: six that count.
fn short(time: f64) -> f64 {
    if time == 0.0 || !time.is_finite() {
        return 0.0;
    }
    let scale = 10f64.powi(5 - time.abs().log10().floor() as i32);
    (time * scale).round() / scale
}

/// Actions of all pipeline ranks, and what crosses between them for one microbatch. `priced`: times are
/// milliseconds, and not units.
pub fn timeline(s: &Stored, step: &Step, priced: bool) -> Json {
    let unit = match priced {
        true => "milliseconds, by price".into(),
        false => crate::inspect::unit(s, false),
    };
    let t = &step.timeline;
    let rank = |r: usize| row(step.enter(r), step.finish(r), &t.ranks[r]);
    let (begin, end) = step.span();
    json!({
        "unit": unit,
        "begin": short(begin),
        "end": short(end),
        "bubble": if priced { step.idle() } else { bubble(t) },
        "owner": s.plan.schedule.owner,
        "ranks": (0..t.ranks.len()).map(rank).collect::<Vec<_>>(),
        "transfers": transfers(s),
    })
}

/// What a pipeline rank does, actions as columns: kinds as one text of letters, and lists of numbers as long.
pub fn row(enter: Moments, finish: Moments, slots: &[Slot]) -> Json {
    let of = |f: fn(&Slot) -> usize| slots.iter().map(f).collect::<Vec<_>>();
    let edge = |(start, end): Moments| json!([short(start), short(end)]);
    json!({
        "enter": edge(enter),
        "finish": edge(finish),
        "actions": {
            "kinds": slots.iter().map(|s| s.action.kind.letter()).collect::<String>(),
            "stages": of(|s| s.action.stage),
            "microbatches": of(|s| s.action.microbatch),
            "start": slots.iter().map(|s| short(s.start)).collect::<Vec<_>>(),
            "end": slots.iter().map(|s| short(s.end)).collect::<Vec<_>>(),
        },
    })
}

/// What goes from one pipeline rank to another for microbatch 0; the others send the same.
fn transfers(s: &Stored) -> Vec<Json> {
    let mut out = vec![];
    for (from, c) in s.plan.classes.iter().enumerate() {
        for i in &c.step {
            let Instr::Send(t) = i else { continue };
            if t.microbatch != Some(0) {
                continue;
            }
            let f = &s.plan.module.funcs[t.func];
            out.push(json!({
                "from": from, "to": t.with, "stage": f.stage, "phase": phase_of(f.kind),
                "value": f.name(t.value).to_string(), "bytes": t.bytes,
            }));
        }
    }
    out
}

/// Bytes of a pipeline rank over time, by kind: of every moment the most and the last. A kind that does not
/// change is one number.
pub fn memory(s: &Stored, step: &Step, rank: usize) -> Json {
    let all = thin(&step.memory(&s.plan, rank), step.span());
    let mut kinds = Map::new();
    for (k, class) in STACK.iter().enumerate() {
        let values: Vec<usize> = all.iter().map(|x| x.bytes[k]).collect();
        let different: BTreeSet<usize> = values.iter().copied().collect();
        let name = serde_json::to_value(class).unwrap_or_default();
        let value = match different.len() {
            0 => json!(0),
            1 => json!(values[0]),
            _ => json!(values),
        };
        kinds.insert(name.as_str().unwrap_or_default().into(), value);
    }
    let times: Vec<f64> = all.iter().map(|x| short(x.time)).collect();
    json!({ "t": times, "bytes": kinds })
}

/// At most two samples of each of [`MOMENTS`]: that of most bytes and the last, in their order.
fn thin(all: &[Sample], (begin, end): (f64, f64)) -> Vec<Sample> {
    let moment = |x: &Sample| {
        let part = (x.time - begin) / (end - begin);
        if part.is_finite() { (part * MOMENTS as f64) as usize } else { 0 }
    };
    let mut out: Vec<Sample> = vec![];
    for run in all.chunk_by(|a, b| moment(a) == moment(b)) {
        let last = run.len() - 1;
        let most = (0..run.len()).rev().max_by_key(|&i| run[i].total()).unwrap_or(last);
        out.push(run[most]);
        if most != last {
            out.push(run[last]);
        }
    }
    out.dedup_by(|b, a| a.bytes == b.bytes);
    out
}
