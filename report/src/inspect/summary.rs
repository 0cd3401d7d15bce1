//! `inspect --summary`: the mesh, memory at the peak, collectives per layer, and what a step sends.

use super::layers::{Calls, LayerCollectives, Section, Where, layer_collectives};
use crate::pictures::measure::bubble_of;
use crate::proof::Outcome;
use crate::report::{
    Chosen, CollectiveReport, Kept, beside_words, brief, bubble_line, layers_of, moments,
    padding_lines, step_words, wrapped,
};
use comfy_table::Table;
use serde::Deserialize;
use serde_json::json;
use shardc_cost::beside;
use shardc_ir::diag::{bytes, count, one_line};
use shardc_ir::func::FuncKind;
use shardc_ir::plan::{MemoryClass, Plan, RankClass};
use shardc_passes::options::Transport;
use shardc_plans::stored::Stored;
use shardc_process::terminal::{self, json_line};

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
    let mut t = terminal::table();
    t.add_rows(rows);
    terminal::numbers(&mut t, right.iter().copied());
    t
}

/// The summary, for people or as JSON.
///
/// Of several rank classes, that of this number is shown, or the one that needs most memory.
pub fn summary(s: &Stored, class: Option<usize>, as_json: bool) -> String {
    let peak = |i: &usize| (s.plan.classes[*i].memory.peak_bytes, std::cmp::Reverse(*i));
    let largest = || (0..s.plan.classes.len()).max_by_key(peak).unwrap_or(0);
    let class = class.unwrap_or_else(largest);
    let c = layer_collectives(&s.plan, class);
    if as_json { as_object(s, class, &c) } else { human(s, class, &c) }
}

fn as_object(s: &Stored, class: usize, c: &LayerCollectives) -> String {
    let memory = &s.plan.classes[class].memory;
    let (plan, mesh) = (&s.plan, &s.plan.module.mesh);
    let axes: Vec<_> =
        mesh.axes.iter().map(|a| json!({ "name": a.name, "size": a.size })).collect();
    let by_class: Vec<_> =
        memory.at_peak.iter().map(|(c, n)| json!({ "class": c, "bytes": n })).collect();
    let live = memory.live_at_peak.iter();
    let live: Vec<_> =
        live.map(|(v, c, n)| json!({ "value": v, "class": c, "bytes": n })).collect();
    let (calls, sent) = per_step(plan, class, c);
    let between = transfers(plan, &plan.classes[class]);
    let mut out = json!({
        "family": s.family,
        "mesh": axes,
        "ranks": mesh.ranks(),
        "rank_order": order(plan),
        "class": class,
        "stages": plan.classes.iter().map(|c| json!({
            "stages": c.stages, "layers": layers(plan, c), "peak_bytes": c.memory.peak_bytes,
        })).collect::<Vec<_>>(),
        "settings": plan.settings,
        "options": Chosen::of(&s.options),
        "bubble": bubble_of(plan),
        "proof": s.report.get("proof"),
        "memory": {
            "peak_bytes": memory.peak_bytes, "at_peak": by_class, "live_at_peak": live,
            "beside_bytes": beside_of(s),
        },
        "collectives": c,
        "transfers": between,
        "per_step": { "calls": calls, "bytes": sent as u64 },
    });
    for (name, value) in moments::json(plan, &plan.classes[class]) {
        out["memory"][name] = value;
    }
    json_line("inspect-summary", out)
}

/// Bytes that a GPU holds beside a plan that runs on one.
fn beside_of(s: &Stored) -> Option<usize> {
    (s.options.transport == Transport::Nccl).then(|| beside::bytes(&s.plan))
}

/// When a rank needs most, when it needs most of each kind, and what layers save.
fn over_time(s: &Stored, class: usize) -> String {
    let (plan, c) = (&s.plan, &s.plan.classes[class]);
    let mut out = format!("peak at {}\n", moments::peak(plan, c));
    if let Some(n) = beside_of(s) {
        out += &format!("{}\n", beside_words(n));
    }
    out += "\nmost of each kind, at its own moment\n";
    let rows = moments::most(plan, c).into_iter();
    let rows = rows.map(|m| vec![m.class.name().to_string(), bytes(m.bytes), m.at]);
    out += &lines(" ", &trimmed(&table(rows, &[1])));
    let saved = moments::saved_lines(plan, c);
    if !saved.is_empty() {
        out += "\nsaved for backward, of one microbatch\n";
        out += &lines(" ", &trimmed(&table(saved.into_iter().map(Vec::from), &[1])));
    }
    out
}

/// What is sent and received between stages, by phase and direction.
fn transfers(plan: &Plan, c: &RankClass) -> Vec<CollectiveReport> {
    let mut all = crate::report::collectives(plan, c);
    all.retain(|x| matches!(x.kind, "send" | "recv"));
    all
}

/// Calls and bytes of one rank of a class per step: collectives, and what it sends to other stages.
pub fn per_step(plan: &Plan, class: usize, c: &LayerCollectives) -> (usize, f64) {
    let all = transfers(plan, &plan.classes[class]);
    let sends = all.iter().filter(|t| t.kind == "send");
    sends.fold(c.total(), |(calls, bytes), t| (calls + t.count, bytes + t.bytes))
}

/// The same transfers as lines.
fn transfer_lines(plan: &Plan, c: &RankClass) -> String {
    let row = |x: &CollectiveReport| {
        let sent = if x.kind == "send" { bytes(x.bytes as usize) } else { String::new() };
        let what = format!("{} over {}", x.kind, x.axis);
        vec![x.phase.into(), x.count.to_string(), what, sent, x.scope.clone()]
    };
    trimmed(&table(transfers(plan, c).iter().map(row), &[1, 3]))
}

/// How rank numbers follow from coordinates: `rank = dp_replicate*2 + tp`.
pub fn order(plan: &Plan) -> String {
    let axes = &plan.module.mesh.axes;
    let term = |i: usize| match axes[i + 1..].iter().map(|a| a.size).product::<usize>() {
        1 => axes[i].name.clone(),
        n => format!("{}*{n}", axes[i].name),
    };
    let terms: Vec<String> = (0..axes.len()).map(term).collect();
    format!("rank = {}", if terms.is_empty() { "0".into() } else { terms.join(" + ") })
}

/// The decoder layers of a class, stage by stage: `0-7`, `none`.
pub fn layers(plan: &Plan, c: &RankClass) -> Vec<String> {
    let of = |stage: &usize| {
        let mut all = plan.module.of_kind(FuncKind::Forward);
        let Some(f) = all.find(|f| f.stage == *stage) else { return "none".into() };
        let all = layers_of(f);
        match (all.first(), all.last()) {
            (Some(a), Some(b)) if a == b => a.to_string(),
            (Some(a), Some(b)) => format!("{a}-{b}"),
            _none => "none".into(),
        }
    };
    c.stages.iter().map(of).collect()
}

/// One line per rank class: what it holds, and its memory.
fn stages(plan: &Plan) -> String {
    let of = |c: &RankClass, k: MemoryClass| {
        c.memory.at_peak.iter().find(|x| x.0 == k).map_or(0, |x| x.1)
    };
    let head = ["class", "stages", "layers", "weights", "gradients", "optimizer", "activations"];
    let head = head.into_iter().chain(["peak"]).map(String::from).collect();
    let row = |(i, c): (usize, &RankClass)| {
        let stages: Vec<String> = c.stages.iter().map(usize::to_string).collect();
        let kinds = [
            MemoryClass::Weights,
            MemoryClass::Grads,
            MemoryClass::Optimizer,
            MemoryClass::Activation,
        ];
        let mut row = vec![i.to_string(), stages.join(", "), layers(plan, c).join(", ")];
        row.extend(kinds.map(|k| brief(of(c, k))));
        row.push(brief(c.memory.peak_bytes));
        row
    };
    let rows = std::iter::once(head).chain(plan.classes.iter().enumerate().map(row));
    lines(" ", &trimmed(&table(rows, &[3, 4, 5, 6, 7])))
}

fn human(s: &Stored, class: usize, c: &LayerCollectives) -> String {
    let plan = &s.plan;
    let m = &plan.classes[class].memory;
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
         step   {}\n",
        one_line(s.called()),
        mesh_line(plan),
        order(plan),
        step_words(plan),
    );
    out += &bubble_line(plan).map_or(String::new(), |l| wrapped("       ", &l));
    out += &Chosen::of(&s.options).line();
    out += &padding_lines(plan);
    out += &Outcome::of(s)
        .map_or(String::new(), |p| format!("proof  {p}, as recorded when compiled\n"));
    let of_class = match plan.classes.len() {
        1 => String::new(),
        _ => {
            out += "\nranks of the pipeline, at the peak of each\n";
            out += &stages(plan);
            format!(" of class {class}")
        }
    };
    out += &format!("\nmemory of one rank{of_class} at the peak\n");
    out += &lines(" ", &trimmed(&classes));
    out += &over_time(s, class);
    out += "\nlargest tensors alive at the peak\n";
    out += &lines(" ", &trimmed(&live));
    out += &format!("\ncollectives of one rank{of_class}\n");
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
    let between = transfer_lines(plan, &plan.classes[class]);
    if !between.is_empty() {
        out += &format!("  between stages, once per step\n{}", lines("   ", &between));
    }
    let (n, sent) = per_step(plan, class, c);
    let calls = count(n, "call", "calls");
    out += &format!("  in all per step: {calls}, {} sent by one rank\n", bytes(sent as usize));
    if let Ok(kept) = Kept::deserialize(&s.report["zero_accumulate"]) {
        out += &format!("  {kept}\n");
    }
    out
}

fn heading(s: &Section) -> String {
    match &s.part {
        Where::Layers { first, last } if first == last => format!("layer {first}, per microbatch"),
        Where::Layers { first, last } => format!("layers {first}-{last}, per layer and microbatch"),
        Where::Scope { path } if path.is_empty() => "outside all scopes, per microbatch".into(),
        Where::Scope { path } => format!("{path}, per microbatch"),
        Where::Step => "once per step".into(),
    }
}

fn calls(c: &Calls) -> Vec<String> {
    let some: Vec<String> = c.numbers.iter().take(MAX_NUMBERS).map(usize::to_string).collect();
    let more = if c.numbers.len() > MAX_NUMBERS { ", …" } else { "" };
    let mut what = format!("collective:{}{more}", some.join(","));
    if c.tensors != c.calls {
        what += &format!("   {}", count(c.tensors, "tensor", "tensors"));
    }
    if c.gradients > 0 {
        what += &format!("   gradients of {}", count(c.gradients, "parameter", "parameters"));
    }
    let kind = format!("{} over {}", c.kind, c.axis);
    vec![c.phase.into(), c.calls.to_string(), kind, bytes(c.bytes as usize), what]
}

/// The mesh as people write it, with the order of ranks.
pub fn mesh_line(plan: &Plan) -> String {
    let mesh = &plan.module.mesh;
    if mesh.axes.is_empty() {
        return "1 rank".into();
    }
    let axes: Vec<String> = mesh.axes.iter().map(|a| format!("{}={}", a.name, a.size)).collect();
    let inner = &mesh.axes[mesh.axes.len() - 1].name;
    let ranks = count(mesh.ranks(), "rank", "ranks");
    format!("{} = {ranks}, {inner} varies fastest", axes.join(" x "))
}
