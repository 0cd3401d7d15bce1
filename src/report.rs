//! What a plan costs: collectives and memory per rank, as `compile --format json` prints them.

use serde::Serialize;
use shardc_ir::mesh::{Mesh, PIPELINE};
use shardc_ir::plan::{Class, Instr, Plan, RankClass};
use shardc_passes::step::instructions::base;
use std::collections::BTreeMap;

/// The report of a compilation.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub schema: u32,
    pub ranks: usize,
    pub classes: usize,
    /// From model to written plan, kernels not included.
    pub compile_ms: f64,
    /// Making code of kernels for devices, if that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_ms: Option<f64>,
    pub phases: Vec<PhaseTime>,
    pub per_class: Vec<ClassReport>,
}

#[derive(Clone, Debug, Serialize)]
pub struct PhaseTime {
    pub name: String,
    pub ms: f64,
}

/// One rank class: ranks that run the same program.
#[derive(Clone, Debug, Serialize)]
pub struct ClassReport {
    pub class: usize,
    pub stages: Vec<usize>,
    pub ranks: usize,
    /// Ranges of rank numbers.
    pub rank_list: String,
    pub peak_bytes: usize,
    /// The most bytes alive at once: no arena can be smaller.
    pub live_bytes: usize,
    pub weights_bytes: usize,
    pub grads_bytes: usize,
    pub optimizer_bytes: usize,
    pub activation_bytes: usize,
    pub collective_buffer_bytes: usize,
    pub temporary_bytes: usize,
    pub input_bytes: usize,
    pub collectives: Vec<CollectiveReport>,
}

/// All calls of one kind over one axis in one scope and phase, per rank and optimizer step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CollectiveReport {
    pub phase: &'static str,
    pub kind: &'static str,
    pub axis: String,
    pub scope: String,
    /// Calls, after combining.
    pub count: usize,
    /// Tensors in these calls.
    pub tensors: usize,
    /// Bytes one rank sends, under the ring cost; of experts, if all are used alike.
    pub bytes: f64,
    /// The most that these bytes may be.
    pub bytes_max: f64,
}

/// Axis names of a set, canonical, joined by `+`.
fn axis_names(mesh: &Mesh, s: shardc_ir::mesh::AtomSet) -> String {
    mesh.names(s, "+")
}

/// Phase of a function in the report.
pub fn phase_of(func: &str) -> &'static str {
    match base(func) {
        "forward" => "forward",
        "backward" | "weight" => "backward",
        _ => "step",
    }
}

/// What the ranks of a class send and receive in a step, in program order; transfers between stages
/// come last.
pub fn collectives(plan: &Plan, class: &RankClass) -> Vec<CollectiveReport> {
    let mesh = &plan.module.mesh;
    let mut at: BTreeMap<(usize, &'static str, u32, u32), usize> = BTreeMap::new();
    let mut out: Vec<CollectiveReport> = vec![];
    for &fi in &class.funcs {
        let f = &plan.module.funcs[fi];
        let calls = class.calls().filter(|c| c.func == fi).count();
        if calls == 0 {
            continue; // only an evaluation runs it
        }
        for n in &f.nodes {
            let Some(c) = n.op.collective() else { continue };
            let key = (fi, c.kind(), c.atoms().0, n.scope.0);
            let i = *at.entry(key).or_insert_with(|| {
                out.push(CollectiveReport {
                    phase: phase_of(&f.name),
                    kind: c.kind(),
                    axis: axis_names(mesh, c.atoms()),
                    scope: f.scope_info(n.scope).path.to_string(),
                    count: 0,
                    tensors: 0,
                    bytes: 0.0,
                    bytes_max: 0.0,
                });
                out.len() - 1
            });
            let pairs = || n.ins.iter().zip(&n.outs).map(|(&x, &y)| (f.ty(x), f.ty(y)));
            let bytes: f64 = pairs().map(|(x, y)| c.ring_bytes(mesh, x, y)).sum();
            let most: f64 = pairs().map(|(x, y)| c.max_bytes(mesh, x, y)).sum();
            out[i].count += calls;
            out[i].tensors += calls * n.outs.len();
            out[i].bytes += bytes * calls as f64;
            out[i].bytes_max += most * calls as f64;
        }
    }
    out.extend(transfers(plan, class));
    out
}

/// The sends and receives of a class, by phase and scope. Who receives sends nothing.
fn transfers(plan: &Plan, class: &RankClass) -> Vec<CollectiveReport> {
    let mut out: Vec<CollectiveReport> = vec![];
    for i in &class.step {
        let (kind, t) = match i {
            Instr::Send(t) => ("send", t),
            Instr::Recv(t) => ("recv", t),
            Instr::Call(_) | Instr::Sent { .. } => continue,
        };
        let f = &plan.module.funcs[t.func];
        let phase = if t.microbatch.is_some() { phase_of(&f.name) } else { "step" };
        let at = |n: &&shardc_ir::func::Node| match kind {
            "send" => n.outs.contains(&t.value),
            _received => n.ins.contains(&t.value),
        };
        let scope = f.nodes.iter().find(at).map_or("", |n| &*f.scope_info(n.scope).path);
        let same = |x: &CollectiveReport| (x.phase, x.kind, &*x.scope) == (phase, kind, scope);
        let i = out.iter().position(same).unwrap_or_else(|| {
            out.push(CollectiveReport {
                phase,
                kind,
                axis: PIPELINE.into(),
                scope: scope.into(),
                count: 0,
                tensors: 0,
                bytes: 0.0,
                bytes_max: 0.0,
            });
            out.len() - 1
        });
        out[i].count += 1;
        out[i].tensors += 1;
        out[i].bytes += if kind == "send" { t.bytes as f64 } else { 0.0 };
        out[i].bytes_max = out[i].bytes;
    }
    out
}

/// Ranges of rank numbers: `0-3, 8-11`.
fn ranges(ranks: &[usize]) -> String {
    let mut out: Vec<String> = vec![];
    for run in ranks.chunk_by(|a, b| a + 1 == *b) {
        out.push(match run {
            [one] => one.to_string(),
            _ => format!("{}-{}", run[0], run[run.len() - 1]),
        });
    }
    out.join(", ")
}

/// The report of a plan; times are added by whoever measured them.
pub fn report(plan: &Plan, phases: &[(&'static str, f64)], compile_ms: f64) -> Report {
    let ranks = plan.module.mesh.ranks();
    let per_class: Vec<ClassReport> =
        plan.classes.iter().enumerate().map(|(i, c)| class_report(plan, i, c)).collect();
    let phases = phases.iter().map(|(n, ms)| PhaseTime { name: n.to_string(), ms: *ms }).collect();
    let (schema, classes) = (crate::SCHEMA, per_class.len());
    Report { schema, ranks, classes, compile_ms, kernel_ms: None, phases, per_class }
}

fn class_report(plan: &Plan, number: usize, c: &RankClass) -> ClassReport {
    let of = |c2: Class| c.memory.at_peak.iter().find(|x| x.0 == c2).map_or(0, |x| x.1);
    let all = plan.module.mesh.ranks();
    let own: Vec<usize> = match plan.classes.len() {
        1 => (0..all).collect(),
        _ => (0..all).filter(|&r| plan.class_of(r) == number).collect(),
    };
    ClassReport {
        class: number,
        stages: c.stages.clone(),
        ranks: own.len(),
        rank_list: ranges(&own),
        peak_bytes: c.memory.peak_bytes,
        live_bytes: c.memory.live_bytes,
        weights_bytes: of(Class::Weights),
        grads_bytes: of(Class::Grads),
        optimizer_bytes: of(Class::Optimizer),
        activation_bytes: of(Class::Activation),
        collective_buffer_bytes: of(Class::CollectiveBuffer),
        temporary_bytes: of(Class::Temporary),
        input_bytes: of(Class::Input),
        collectives: collectives(plan, c),
    }
}

/// `n` bytes for people.
pub fn bytes(n: usize) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut x = n as f64;
    let mut u = 0;
    while x >= 1024.0 && u + 1 < units.len() {
        x /= 1024.0;
        u += 1;
    }
    if u == 0 { format!("{n} B") } else { format!("{x:.2} {}", units[u]) }
}
