//! What plans are compared by: the model of costs with which passes compare programs, or a machine, on which it is the
//! price that `shardc price` shows.

use shardc_cost::collective::send;
use shardc_cost::device::Device;
use shardc_cost::plan::launch::Work;
use shardc_cost::plan::{self as of_plan, FuncPrice};
use shardc_ir::diag::Result;
use shardc_ir::func::{Func, Node, Port, Role, RoleKind, Value};
use shardc_ir::hardware::Hardware;
use shardc_ir::mesh::PIPELINE;
use shardc_ir::plan::{Instr, Plan, RankClass, Transfer, calls};
use shardc_ir::price;
use shardc_ir::schedule::{Slot, Timeline, Times, replay};
use shardc_passes::options::Options;
use shardc_passes::step::instructions::Index;
use shardc_plans::machine;
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
    /// By rank of the pipeline, seconds behind its last action, and those by which this is longer than others like it.
    after: Vec<f64>,
    /// The same of any plan with these functions, wherever it sums gradients over ranks.
    least: Vec<f64>,
}

impl StageTimes {
    /// Seconds of a step that runs so. On a machine ranks wait for each other's memory, too: there it takes as long or
    /// longer.
    pub fn step(&self, line: &Timeline) -> f64 {
        self.until_end(line, &self.after)
    }

    /// Seconds that a step takes at least that runs so: which sums of gradients begin early, and are hidden, depends
    /// on the schedule, so none counts here.
    pub fn at_least(&self, line: &Timeline) -> f64 {
        self.until_end(line, &self.least)
    }

    fn until_end(&self, line: &Timeline, after: &[f64]) -> f64 {
        let ends = line.ranks.iter().zip(after);
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
            Prices::Generic(hw) => generic(plan, hw, speeds, &|_, _| true),
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
        let (before, after) = self.around(plan, &index, &own);
        let least = match plan.settings.early_receives {
            true => self.around(plan, &index, &self.unsummed(plan, speeds)?).1,
            false => after.clone(),
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
        Ok(StageTimes { actions, before, after, least })
    }

    /// Seconds before the first action of all, and by rank of the pipeline behind its last one.
    fn around(&self, plan: &Plan, index: &Index, own: &[f64]) -> (f64, Vec<f64>) {
        let finish = |f: &Option<usize>| f.map_or(0.0, |f| own[f]);
        if let Prices::Machine(_) = self {
            let first = index.enter[plan.schedule.owner[0]];
            return (own[first], index.finish.iter().map(finish).collect());
        }
        let once = |c: &RankClass| -> f64 {
            let calls = calls(&c.step).filter(|c| c.microbatch.is_none());
            // The last call of a microbatch may make more than others.
            let longer = index.last.iter().filter(|x| c.funcs.contains(x.1));
            calls.map(|c| own[c.func]).sum::<f64>()
                + longer.map(|(plain, last)| own[*last] - own[*plain]).sum::<f64>()
        };
        let most = plan.classes.iter().map(once).fold(0.0, f64::max);
        (0.0, vec![most; plan.classes.len()])
    }

    /// Seconds of every function at least, without sums over ranks of the gradients that it is given: it takes as
    /// long as its work, and as its other exchanges.
    fn unsummed(&self, plan: &Plan, speeds: &[f64]) -> Result<Vec<f64>> {
        let d = match self {
            Prices::Generic(hw) => return Ok(generic(plan, hw, speeds, &|f, n| !is_sum(f, n))),
            Prices::Machine(d) => d,
        };
        let all = of_plan::price(plan, d, speeds)?.funcs;
        let least = |(f, own): (&Func, &FuncPrice)| {
            let (mut work, mut exchanges) = (0.0, 0.0);
            for i in &own.items {
                match i.work {
                    Work::Exchange { .. } if is_sum(f, &f.nodes[i.node]) => {}
                    Work::Exchange { .. } => exchanges += i.seconds,
                    _of_a_rank => work += i.seconds,
                }
            }
            f64::max(work, exchanges)
        };
        Ok(plan.module.funcs.iter().zip(&all).map(least).collect())
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

/// True if a node sums a gradient over ranks that its function is given.
fn is_sum(f: &Func, n: &Node) -> bool {
    let is = |a: &Port| n.ins.contains(&a.value) && a.role.as_ref().is_some_and(of_gradient);
    n.op.collective().is_some() && f.args.iter().any(is)
}

fn of_gradient(r: &Role) -> bool {
    r.kind == RoleKind::Grad
}

/// Seconds of the nodes that count, by function, by the model of rewrites.
fn generic(
    plan: &Plan,
    hw: &Hardware,
    speeds: &[f64],
    counts: &dyn Fn(&Func, &Node) -> bool,
) -> Vec<f64> {
    let mut out = vec![0.0; plan.module.funcs.len()];
    for (rank, c) in plan.classes.iter().enumerate() {
        let speed = speeds.get(rank).copied().unwrap_or(1.0);
        for &i in &c.funcs {
            let f = &plan.module.funcs[i];
            let nodes = f.nodes.iter().filter(|n| counts(f, n));
            out[i] = nodes.map(|n| time(plan, hw, f, n)).sum::<f64>() / speed;
        }
    }
    out
}

/// Seconds of a node on one rank. One call of several tensors begins once.
fn time(plan: &Plan, hw: &Hardware, f: &Func, n: &Node) -> f64 {
    let mesh = &plan.module.mesh;
    let of = |ins: &[Value], out: Value| {
        let ins: Vec<_> = ins.iter().map(|&v| f.ty(v)).collect();
        price::op(hw, mesh, &n.op, &ins, f.ty(out)) as f64 * 1e-12
    };
    if n.op.collective().is_none() || n.ins.len() != n.outs.len() {
        return of(&n.ins, n.outs[0]);
    }
    let all: f64 = n.ins.iter().zip(&n.outs).map(|(&v, &out)| of(&[v], out)).sum();
    all - (n.ins.len() - 1) as f64 * hw.latency
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
