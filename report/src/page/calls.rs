//! Collectives: one layer as a lane, all calls as rows, and why each is there.

use crate::explain::{Why, brief};
use crate::inspect::{Where, layer_collectives, numbered};
use crate::report::{Experts, collectives};
use serde_json::{Map, Value as Json, json};
use shardc_ir::func::FuncKind;
use shardc_plans::stored::Stored;
use std::collections::BTreeMap;

/// All calls of a rank of a class, as `inspect --summary` counts them, and transfers between stages.
pub fn rows(s: &Stored, class: usize) -> Json {
    let plan = &s.plan;
    let c = layer_collectives(plan, class);
    let mut out = vec![];
    for section in &c.sections {
        let (first, last, place) = match &section.part {
            Where::Layers { first, last } => (Some(*first), Some(*last), String::new()),
            Where::Scope { path } => (None, None, path.clone()),
            Where::Step => (None, None, "once per step".into()),
        };
        let times = section.times(c.microbatches);
        for x in &section.calls {
            out.push(json!({
                "where": place, "first": first, "last": last, "phase": x.phase, "kind": x.kind,
                "axis": x.axis, "tensors": x.tensors, "gradients": x.gradients,
                "calls": x.calls, "bytes": x.bytes as u64,
                "calls_per_step": x.calls * times, "bytes_per_step": x.bytes as u64 * times as u64,
                "numbers": x.numbers.iter().take(8).collect::<Vec<_>>(),
            }));
        }
    }
    let between = collectives(plan, &plan.classes[class]).into_iter();
    for t in between.filter(|t| matches!(t.kind, "send" | "recv")) {
        let each = if t.count > 0 { t.bytes as u64 / t.count as u64 } else { 0 };
        let place = if t.scope.is_empty() { "once per step" } else { &*t.scope };
        out.push(json!({
            "where": place, "first": null, "last": null, "phase": t.phase, "kind": t.kind,
            "axis": t.axis, "tensors": 1, "gradients": 0, "calls": 1, "bytes": each,
            "calls_per_step": t.count, "bytes_per_step": t.bytes as u64, "numbers": [],
        }));
    }
    out.into()
}

/// One layer of a class in the order of its programs: work by scope, and collectives between.
pub fn lane(s: &Stored, class: usize) -> Json {
    let (plan, experts) = (&s.plan, Experts::of(&s.plan));
    let mesh = &plan.module.mesh;
    let of = |f: usize| {
        plan.module.funcs[f]
            .nodes
            .iter()
            .map(move |n| plan.module.funcs[f].scope_info(n.scope).layer)
    };
    let funcs = &plan.classes[class].funcs;
    let mut layers: Vec<u32> = funcs.iter().flat_map(|&f| of(f)).flatten().collect();
    layers.sort_unstable();
    layers.dedup();
    // One inside: the first and the last may have more to do.
    let Some(&layer) = layers.get(layers.len() / 2) else { return json!(null) };
    let numbers: BTreeMap<(usize, usize), usize> =
        numbered(plan).into_iter().enumerate().map(|(i, at)| (at, i + 1)).collect();
    let mut out = vec![];
    for &fi in funcs {
        let f = &plan.module.funcs[fi];
        let phase = match f.kind {
            FuncKind::Forward => "forward",
            FuncKind::Backward => "backward",
            FuncKind::Weight => "weight",
            // It does what the others do; the sums that it starts are among the calls of a step.
            FuncKind::BackwardLast | FuncKind::WeightLast => continue,
            FuncKind::Model
            | FuncKind::StepPrologue
            | FuncKind::OptimizerStep
            | FuncKind::Evaluate => continue,
        };
        let mut items: Vec<Json> = vec![];
        let mut work: Option<(String, usize)> = None;
        let end = |work: &mut Option<(String, usize)>, items: &mut Vec<Json>| {
            if let Some((scope, ops)) = work.take() {
                items.push(json!({ "scope": scope, "ops": ops }));
            }
        };
        for (ni, n) in f.nodes.iter().enumerate() {
            let info = f.scope_info(n.scope);
            if info.layer != Some(layer) {
                continue;
            }
            if let Some(c) = n.op.collective() {
                end(&mut work, &mut items);
                let sent = n.ins.iter().zip(&n.outs);
                let sent = sent.map(|(&x, &y)| c.ring_bytes(mesh, f.ty(x), f.ty(y))).sum::<f64>();
                items.push(json!({
                    "kind": c.kind(), "axis": experts.axis(mesh, f, n, c.atoms()),
                    "bytes": sent.ceil() as u64, "number": numbers.get(&(fi, ni)),
                }));
            } else if !n.op.def().is_view() {
                let scope = info.path.rsplit('.').take(2).collect::<Vec<_>>();
                let scope = scope.into_iter().rev().filter(|p| p.parse::<u32>().is_err());
                let scope = scope.collect::<Vec<_>>().join(".");
                match &mut work {
                    Some((same, ops)) if *same == scope => *ops += 1,
                    _other => {
                        end(&mut work, &mut items);
                        work = Some((scope, 1));
                    }
                }
            }
        }
        end(&mut work, &mut items);
        if !items.is_empty() {
            out.push(json!({ "phase": phase, "items": items }));
        }
    }
    json!({ "layer": layer, "phases": out })
}

/// Why each collective is there that a row or a lane of a class names first, by its number.
pub fn explanations(why: &Why, classes: &Json) -> Json {
    let mut numbers: Vec<u64> = vec![];
    for c in classes.as_array().into_iter().flatten() {
        let rows = c["calls"].as_array().into_iter().flatten();
        numbers.extend(rows.filter_map(|r| r["numbers"][0].as_u64()));
        let phases = c["lane"]["phases"].as_array().into_iter().flatten();
        let items = phases.flat_map(|p| p["items"].as_array().into_iter().flatten());
        numbers.extend(items.filter_map(|i| i["number"].as_u64()));
    }
    numbers.sort_unstable();
    numbers.dedup();
    let mut out = Map::new();
    for n in numbers {
        if let Some(answer) = brief(why, n as usize) {
            out.insert(n.to_string(), answer);
        }
    }
    Json::Object(out)
}
