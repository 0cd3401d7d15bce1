//! `inspect --summary`: the mesh, memory at the peak, collectives per layer, and what a step sends.

use super::layers::{Calls, LayerCollectives, Part, Section, layer_collectives};
use crate::commands::bytes;
use crate::commands::compile::mesh_line;
use crate::plan_dir::Stored;
use comfy_table::{CellAlignment, Table, presets};
use serde_json::json;
use shardc_ir::plan::Plan;

/// Most call numbers of one line.
const MAX_NUMBERS: usize = 4;

/// A table as text without blanks at line ends.
pub fn trimmed(t: &Table) -> String {
    t.lines().map(|l| l.trim_end().to_string() + "\n").collect()
}

/// Every line with something before it.
pub fn lines(before: &str, text: &str) -> String {
    text.lines().map(|l| format!("{before}{l}").trim_end().to_string() + "\n").collect()
}

/// A table without lines; columns in `right` are set to the right.
fn table(rows: impl IntoIterator<Item = Vec<String>>, right: &[usize]) -> Table {
    let mut t = Table::new();
    t.load_preset(presets::NOTHING);
    t.add_rows(rows);
    for &i in right {
        if let Some(c) = t.column_mut(i) {
            c.set_cell_alignment(CellAlignment::Right);
        }
    }
    t
}

/// The summary, for people or as JSON.
pub fn summary(s: &Stored, as_json: bool) -> String {
    let c = layer_collectives(&s.plan);
    if as_json { as_object(s, &c) } else { human(s, &c) }
}

fn as_object(s: &Stored, c: &LayerCollectives) -> String {
    let (plan, mesh) = (&s.plan, &s.plan.module.mesh);
    let axes: Vec<_> =
        mesh.axes.iter().map(|a| json!({ "name": a.name, "size": a.size })).collect();
    let by_class: Vec<_> =
        plan.memory.at_peak.iter().map(|(c, n)| json!({ "class": c, "bytes": n })).collect();
    let live = plan.memory.live_at_peak.iter();
    let live: Vec<_> =
        live.map(|(v, c, n)| json!({ "value": v, "class": c, "bytes": n })).collect();
    let (calls, sent) = c.total();
    let out = json!({
        "family": s.family,
        "mesh": axes,
        "ranks": mesh.ranks(),
        "rank_order": order(plan),
        "settings": plan.settings,
        "memory": {
            "peak_bytes": plan.memory.peak_bytes, "at_peak": by_class, "live_at_peak": live
        },
        "collectives": c,
        "per_step": { "calls": calls, "bytes": sent },
    });
    format!("{out}\n")
}

/// How rank numbers follow from coordinates: `rank = dp_replicate*2 + tp`.
fn order(plan: &Plan) -> String {
    let axes = &plan.module.mesh.axes;
    let term = |i: usize| match axes[i + 1..].iter().map(|a| a.size).product::<usize>() {
        1 => axes[i].name.clone(),
        n => format!("{}*{n}", axes[i].name),
    };
    let terms: Vec<String> = (0..axes.len()).map(term).collect();
    format!("rank = {}", if terms.is_empty() { "0".into() } else { terms.join(" + ") })
}

fn human(s: &Stored, c: &LayerCollectives) -> String {
    let plan = &s.plan;
    let (set, m) = (&plan.settings, &plan.memory);
    let parameters: usize = plan.weights.iter().map(|w| w.shape.iter().product::<usize>()).sum();
    let share = |n: usize| format!("{:.1} %", n as f64 * 100.0 / m.peak_bytes.max(1) as f64);
    let classes = m.at_peak.iter().filter(|x| x.1 > 0).map(|&(c, n)| (c.name(), n));
    let classes = classes.chain([("peak", m.peak_bytes)]);
    let row = |(c, n): (&str, usize)| vec![c.into(), bytes(n), format!("{n} B"), share(n)];
    let classes = table(classes.map(row), &[1, 2, 3]);
    let live = m.live_at_peak.iter();
    let live =
        live.map(|(v, c, n)| vec![v.clone(), (*c).name().into(), bytes(*n), format!("{n} B")]);
    let live = table(live, &[2, 3]);
    let mut out = format!(
        "model  {}, {parameters} parameters\n\
         mesh   {}; {}\n\
         step   {} sequences of {} tokens in {} microbatches\n",
        s.family,
        mesh_line(plan),
        order(plan),
        set.global_batch,
        set.seq,
        set.microbatches,
    );
    out += "\nmemory of one rank at the peak\n";
    out += &lines(" ", &trimmed(&classes));
    out += "\nlargest tensors alive at the peak\n";
    out += &lines(" ", &trimmed(&live));
    out += "\ncollectives of one rank\n";
    if c.sections.is_empty() {
        out += "  none\n";
    }
    for sec in &c.sections {
        out += &format!(
            "  {}\n{}",
            heading(sec),
            lines("   ", &trimmed(&table(sec.calls.iter().map(calls), &[1, 3])))
        );
    }
    let (n, sent) = c.total();
    out += &format!("  in all per step: {n} calls, {} sent by one rank\n", bytes(sent as usize));
    out
}

fn heading(s: &Section) -> String {
    match &s.part {
        Part::Layers { first, last } if first == last => format!("layer {first}, per microbatch"),
        Part::Layers { first, last } => format!("layers {first}-{last}, per layer and microbatch"),
        Part::Scope { path } if path.is_empty() => "outside all scopes, per microbatch".into(),
        Part::Scope { path } => format!("{path}, per microbatch"),
        Part::Step => "once per step".into(),
    }
}

fn calls(c: &Calls) -> Vec<String> {
    let some: Vec<String> = c.numbers.iter().take(MAX_NUMBERS).map(usize::to_string).collect();
    let more = if c.numbers.len() > MAX_NUMBERS { ", …" } else { "" };
    let mut what = format!("collective:{}{more}", some.join(","));
    if c.tensors != c.calls {
        what += &format!("   {} tensors", c.tensors);
    }
    if c.gradients > 0 {
        what += &format!("   gradients of {} parameters", c.gradients);
    }
    let kind = format!("{} over {}", c.kind, c.axis);
    vec![c.phase.into(), c.calls.to_string(), kind, bytes(c.bytes as usize), what]
}
