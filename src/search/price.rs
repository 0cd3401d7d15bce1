//! What a step of a plan costs, by the model with which the passes compare programs.

use shardc_ir::diag::Result;
use shardc_ir::func::Func;
use shardc_ir::hardware::Hardware;
use shardc_ir::mesh::PIPELINE;
use shardc_ir::plan::{Call, Instr, Plan, calls};
use shardc_ir::price::{self, flops};
use shardc_ir::schedule::{Times, replay};
use shardc_passes::step::instructions::Index;
use std::collections::HashMap;

/// The cost of a step.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Price {
    /// Picoseconds of a step: the schedule as it runs, and what stands before and after it.
    pub step: f64,
    /// Picoseconds of work of one rank of every class, without waiting.
    pub work: f64,
    /// Floating-point operations of one rank of every class.
    pub flops: f64,
}

/// Picoseconds of a function on one rank.
fn time(plan: &Plan, hw: &Hardware, f: &Func) -> f64 {
    let mesh = &plan.module.mesh;
    let one = |n: &shardc_ir::func::Node| {
        let ins: Vec<_> = n.ins.iter().map(|&v| f.ty(v)).collect();
        price::op(hw, mesh, &n.op, &ins, f.ty(n.outs[0])) as f64
    };
    f.nodes.iter().map(one).sum()
}

/// Times of the actions of every stage, in picoseconds: what their functions do and send. Slower
/// ranks take longer; `speeds` is by rank of the pipeline, 1 where it ends.
///
/// # Panics
/// If the plan has not the functions of its schedule, which no compilation makes.
pub fn times(plan: &Plan, hw: &Hardware, speeds: &[f64]) -> Times {
    let s = &plan.schedule;
    let index =
        Index::of(&plan.module, s, plan.settings.mode).expect("a compiled plan has its functions");
    let mut sent: HashMap<usize, f64> = HashMap::new();
    for c in &plan.classes {
        for i in &c.step {
            if let Instr::Send(t) = i
                && t.microbatch == Some(0)
            {
                let ps = (hw.latency + t.bytes as f64 / hw.link_of(PIPELINE)) * 1e12;
                *sent.entry(t.func).or_default() += ps;
            }
        }
    }
    let speed = |stage: usize| speeds.get(s.owner[stage]).copied().unwrap_or(1.0);
    let of = |stage: usize, f: Option<usize>| {
        let all = |f: usize| {
            time(plan, hw, &plan.module.funcs[f]) + sent.get(&f).copied().unwrap_or_default()
        };
        f.map_or(0.0, |f| all(f) / speed(stage))
    };
    let stages = 0..s.owner.len();
    Times {
        forward: stages.clone().map(|i| of(i, Some(index.forward[i]))).collect(),
        input: stages.clone().map(|i| of(i, index.backward[i])).collect(),
        weight: stages.map(|i| of(i, index.weight[i])).collect(),
    }
}

/// What a step of the plan costs.
pub fn price(plan: &Plan, hw: &Hardware, speeds: &[f64]) -> Result<Price> {
    let makespan = replay(&plan.schedule, &times(plan, hw, speeds))?.makespan();
    let mut p = Price::default();
    let mesh = &plan.module.mesh;
    // Time, time at step scope and FLOPs by function; a plan of equal layers has few of them.
    let time: Vec<f64> = plan.module.funcs.iter().map(|f| time(plan, hw, f)).collect();
    let count = |f: &Func| -> f64 {
        let one = |n: &shardc_ir::func::Node| {
            let ins: Vec<_> = n.ins.iter().map(|&v| f.ty(v)).collect();
            if n.op.collective().is_some() || n.op.def().is_view() {
                return 0.0;
            }
            flops(mesh, &n.op, &ins, f.ty(n.outs[0]))
        };
        f.nodes.iter().map(one).sum()
    };
    let count: Vec<f64> = plan.module.funcs.iter().map(count).collect();
    let mut around = 0.0f64;
    for c in &plan.classes {
        let once = |c: &&Call| c.microbatch.is_none();
        let here: f64 = calls(&c.step).filter(once).map(|c| time[c.func]).sum();
        around = around.max(here);
        p.work += calls(&c.step).map(|c| time[c.func]).sum::<f64>();
        p.flops += calls(&c.step).map(|c| count[c.func]).sum::<f64>();
    }
    p.step = makespan + around;
    Ok(p)
}
