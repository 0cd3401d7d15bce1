//! What a plan costs: collectives and memory per rank, as `compile --format json` prints them.

use serde::Serialize;
use shardc_ir::mesh::Mesh;
use shardc_ir::plan::{Class, Plan};
use std::collections::BTreeMap;

/// The report of a compilation.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub schema: u32,
    pub ranks: usize,
    pub classes: usize,
    /// From model to written plan, kernels not included.
    pub compile_ms: f64,
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
    /// Bytes one rank sends, under the ring cost.
    pub bytes: f64,
    pub bytes_max: f64,
}

/// Axis names of a set, canonical, joined by `+`.
fn axis_names(mesh: &Mesh, s: shardc_ir::mesh::AtomSet) -> String {
    mesh.names(s, "+")
}

/// Phase of a function in the report.
pub fn phase_of(func: &str) -> &'static str {
    match func {
        "forward" => "forward",
        "backward" => "backward",
        _ => "step",
    }
}

/// The collectives of a plan, in program order.
pub fn collectives(plan: &Plan) -> Vec<CollectiveReport> {
    let mesh = &plan.module.mesh;
    let mut at: BTreeMap<(usize, &'static str, u32, u32), usize> = BTreeMap::new();
    let mut out: Vec<CollectiveReport> = vec![];
    for (fi, f) in plan.module.funcs.iter().enumerate() {
        let calls = plan.actions.iter().filter(|a| a.func == fi).count();
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
            let bytes: f64 = n
                .ins
                .iter()
                .zip(&n.outs)
                .map(|(&x, &y)| c.ring_bytes(mesh, f.ty(x), f.ty(y)))
                .sum();
            out[i].count += calls;
            out[i].tensors += calls * n.ins.len();
            out[i].bytes += bytes * calls as f64;
            out[i].bytes_max = out[i].bytes;
        }
    }
    out
}

/// The report of a plan; times are added by whoever measured them.
pub fn report(plan: &Plan, phases: &[(&'static str, f64)], compile_ms: f64) -> Report {
    let ranks = plan.module.mesh.ranks();
    let class = |c: Class| plan.memory.at_peak.iter().find(|x| x.0 == c).map_or(0, |x| x.1);
    let one = ClassReport {
        class: 0,
        stages: vec![0],
        ranks,
        rank_list: if ranks == 1 { "0".into() } else { format!("0-{}", ranks - 1) },
        peak_bytes: plan.memory.peak_bytes,
        weights_bytes: class(Class::Weights),
        grads_bytes: class(Class::Grads),
        optimizer_bytes: class(Class::Optimizer),
        activation_bytes: class(Class::Activation),
        collective_buffer_bytes: class(Class::CollectiveBuffer),
        temporary_bytes: class(Class::Temporary),
        input_bytes: class(Class::Input),
        collectives: collectives(plan),
    };
    let phases = phases.iter().map(|(n, ms)| PhaseTime { name: n.to_string(), ms: *ms }).collect();
    Report { schema: crate::SCHEMA, ranks, classes: 1, compile_ms, phases, per_class: vec![one] }
}
