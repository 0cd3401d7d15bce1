//! What plans are compared by: the model of costs with which passes compare programs, or a machine, on which it is the
//! price that `shardc price` shows.

use crate::machine;
use shardc_cost::collective::send;
use shardc_cost::device::Device;
use shardc_cost::plan as of_plan;
use shardc_ir::diag::Result;
use shardc_ir::func::{Func, Node};
use shardc_ir::hardware::Hardware;
use shardc_ir::mesh::PIPELINE;
use shardc_ir::plan::{Instr, Plan, Transfer, calls};
use shardc_ir::price;
use shardc_ir::schedule::{Slot, Timeline, Times, replay};
use shardc_passes::options::Options;
use shardc_passes::step::instructions::Index;
use std::collections::HashMap;

/// What plans are compared by.
#[derive(Clone, Debug)]
pub enum Prices {
    /// A few round numbers, which are never shown as a time.
    Generic(Hardware),
    /// A machine.
    Machine(Box<Device>),
}

/// The cost of a step.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Price {
    /// Seconds of a step: the schedule as it runs, and what stands before and after it.
    pub step: f64,
    /// Seconds of work of one rank of every class, without waiting.
    pub work: f64,
    /// Floating-point operations of one rank of every class.
    pub flops: f64,
}

/// Times of what a schedule calls, for schedules that are not compiled.
#[derive(Clone, PartialEq, Debug)]
pub struct StageTimes {
    /// Seconds of the actions of every stage: what their functions do, and their transfers.
    pub actions: Times,
    /// Seconds before the first action of all.
    before: f64,
    /// By rank of the pipeline, seconds behind its last action.
    after: Vec<f64>,
}

impl StageTimes {
    /// Seconds of a step that runs so. On a machine ranks wait for each other's memory, too: there it takes as long or
    /// longer.
    pub fn step(&self, line: &Timeline) -> f64 {
        let ends = line.ranks.iter().zip(&self.after);
        let end = |(slots, after): (&Vec<Slot>, &f64)| slots.last().map_or(0.0, |s| s.end) + after;
        self.before + ends.map(end).fold(0.0, f64::max)
    }
}

impl Prices {
    /// Those of `--hardware`.
    ///
    /// # Errors
    /// Those of reading a machine.
    pub fn of(o: &Options) -> Result<Prices> {
        Ok(match &o.machine {
            None => Prices::Generic(o.hardware.clone()),
            Some(word) => Prices::Machine(Box::new(machine::in_nodes(machine::device(word)?, o)?)),
        })
    }

    /// The machine's name.
    pub fn machine(&self) -> Option<&str> {
        match self {
            Prices::Generic(_) => None,
            Prices::Machine(d) => Some(&d.name),
        }
    }

    /// Seconds of every function that a step calls.
    fn functions(&self, plan: &Plan, speeds: &[f64]) -> Result<Vec<f64>> {
        Ok(match self {
            Prices::Generic(hw) => {
                let mut out = vec![0.0; plan.module.funcs.len()];
                for (rank, c) in plan.classes.iter().enumerate() {
                    let speed = speeds.get(rank).copied().unwrap_or(1.0);
                    for &f in &c.funcs {
                        out[f] = time(plan, hw, &plan.module.funcs[f]) / speed;
                    }
                }
                out
            }
            Prices::Machine(d) => {
                let all = of_plan::price(plan, d, speeds)?.funcs;
                all.iter().map(|f| f.parts.total()).collect()
            }
        })
    }

    /// Seconds of a transfer between ranks of the pipeline.
    fn transfer(&self, plan: &Plan, from: usize, t: &Transfer) -> f64 {
        let bytes = t.bytes as f64;
        match self {
            Prices::Generic(hw) => hw.latency + bytes / hw.link_of(PIPELINE),
            Prices::Machine(d) => send(d, plan.peer(0, t.with).abs_diff(plan.peer(0, from)), bytes),
        }
    }

    /// Times of the stages of a plan. A whole backward that is not cut is `input`, and its `weight` takes no time.
    /// `speeds` is by rank of the pipeline, 1 where it ends.
    ///
    /// # Errors
    /// `device` if the machine lacks products of an element type.
    ///
    /// # Panics
    /// If the plan has not the functions of its schedule, which no compilation makes.
    pub fn times(&self, plan: &Plan, speeds: &[f64]) -> Result<StageTimes> {
        let s = &plan.schedule;
        let index = Index::of(&plan.module, s, plan.settings.mode);
        let index = index.expect("a compiled plan has its functions");
        let mut own = self.functions(plan, speeds)?;
        let mut once: Vec<f64> = vec![0.0; plan.classes.len()];
        for (rank, c) in plan.classes.iter().enumerate() {
            once[rank] =
                calls(&c.step).filter(|c| c.microbatch.is_none()).map(|c| own[c.func]).sum();
        }
        let (before, after) = match self {
            Prices::Generic(_) => {
                let most = once.iter().copied().fold(0.0, f64::max);
                (0.0, vec![most; once.len()])
            }
            Prices::Machine(_) => {
                let finish = |f: &Option<usize>| f.map_or(0.0, |f| own[f]);
                (own[index.enter[s.owner[0]]], index.finish.iter().map(finish).collect())
            }
        };
        for (rank, c) in plan.classes.iter().enumerate() {
            let mut moves: HashMap<usize, f64> = HashMap::new();
            // Who takes it waits while it moves. On a machine that is priced from the lists, if it may move
            // before: these times are to be no longer.
            let hidden = matches!(self, Prices::Machine(_)) && plan.settings.early_receives;
            for i in c.step.iter().filter(|_| !hidden) {
                if let Instr::Recv(t) = i
                    && t.microbatch == Some(0)
                {
                    *moves.entry(t.func).or_default() += self.transfer(plan, rank, t);
                }
            }
            moves.into_iter().for_each(|(f, seconds)| own[f] += seconds);
        }
        let of = |f: Option<usize>| f.map_or(0.0, |f| own[f]);
        let actions = Times {
            forward: index.forward.iter().map(|&f| own[f]).collect(),
            input: index.backward.iter().map(|&f| of(f)).collect(),
            weight: index.weight.iter().map(|&f| of(f)).collect(),
        };
        Ok(StageTimes { actions, before, after })
    }

    /// What a step of the plan costs.
    ///
    /// # Errors
    /// `device` if the machine lacks products of an element type.
    pub fn price(&self, plan: &Plan, speeds: &[f64]) -> Result<Price> {
        let (own, step) = match self {
            Prices::Generic(_) => {
                let times = self.times(plan, speeds)?;
                let step = times.step(&replay(&plan.schedule, &times.actions)?);
                (self.functions(plan, speeds)?, step)
            }
            Prices::Machine(d) => {
                let p = of_plan::price(plan, d, speeds)?;
                (p.funcs.iter().map(|f| f.parts.total()).collect(), p.total)
            }
        };
        let all = plan.classes.iter().flat_map(|c| calls(&c.step));
        let work = all.map(|c| own[c.func]).sum();
        Ok(Price { step, work, flops: flops(plan) })
    }
}

/// Seconds of a function on one rank, by the model of rewrites.
fn time(plan: &Plan, hw: &Hardware, f: &Func) -> f64 {
    let mesh = &plan.module.mesh;
    let one = |n: &Node| {
        let ins: Vec<_> = n.ins.iter().map(|&v| f.ty(v)).collect();
        price::op(hw, mesh, &n.op, &ins, f.ty(n.outs[0])) as f64
    };
    f.nodes.iter().map(one).sum::<f64>() * 1e-12
}

/// Floating-point operations of a step, of one rank of every class.
pub fn flops(plan: &Plan) -> f64 {
    let mesh = &plan.module.mesh;
    let count = |f: &Func| -> f64 {
        let one = |n: &Node| {
            let ins: Vec<_> = n.ins.iter().map(|&v| f.ty(v)).collect();
            if n.op.collective().is_some() || n.op.def().is_view() {
                return 0.0;
            }
            price::flops(mesh, &n.op, &ins, f.ty(n.outs[0]))
        };
        f.nodes.iter().map(one).sum()
    };
    let count: Vec<f64> = plan.module.funcs.iter().map(count).collect();
    plan.classes.iter().flat_map(|c| calls(&c.step)).map(|c| count[c.func]).sum()
}
