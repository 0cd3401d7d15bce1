//! The one list of the passes, in their order.

use crate::autodiff::differentiate::differentiate;
use crate::autodiff::split::{split, split_forward};
use crate::checks::{check_source, only_outputs, trains};
use crate::globs;
use crate::group::group;
use crate::memory::memory;
use crate::options::{CpMode, Options, TpMode, TpSteps, Transport};
use crate::overlap::overlap;
use crate::precision::precision;
use crate::rewrite::orders::orders;
use crate::rewrite::{RuleSet, rewrite};
use crate::schedule;
use crate::shard::annotate::annotate;
use crate::shard::grid::Grid;
use crate::shard::partition::partition;
use crate::shard::propagate::{Cause, propagate};
use crate::stages::{not_too_many, stages};
use crate::step;
use crate::step::assemble::assemble;
use crate::step::combine::combine;
use crate::step::instructions::{Index, Lists, instructions};
use crate::warnings::warnings;
use crate::window::ragged::ragged;
use crate::window::ring::ring;
use crate::window::summa::summa;
use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::func::{Func, FuncKind, Module, RoleKind};
use shardc_ir::plan::{Mode, Plan, RankClass, Settings};
use shardc_ir::schedule::{Schedule, Times, replay};
pub use shardc_ir::source::Source;
use shardc_ir::types::DType;
use shardc_ir::verify::{Phase, verify};
use std::time::Instant;

/// A plan, and what explains it.
#[derive(Debug)]
pub struct Compiled {
    pub plan: Plan,
    /// The model with propagated shardings, and why each stands.
    pub sharded: Module,
    pub causes: Vec<Cause>,
    /// Milliseconds per pass, in order.
    pub phases: Vec<(&'static str, f64)>,
    pub warnings: Vec<Diag>,
}

/// Names of the passes, in order.
pub const PASSES: [&str; 19] = [
    "rewrite",
    "precision",
    "stages",
    "annotate",
    "propagate",
    "partition",
    "differentiate",
    "summa",
    "ragged",
    "split",
    "rewrite-collectives",
    "ring",
    "step",
    "combine",
    "group",
    "overlap",
    "schedule",
    "memory",
    "verify",
];

/// Called after each pass with its name and the module as it then is.
pub type Watch<'a> = &'a mut dyn FnMut(&str, &Module);

/// Times the passes and shows what each leaves.
struct Manager<'a, 'b> {
    watch: Watch<'a>,
    phases: &'b mut Vec<(&'static str, f64)>,
    since: Instant,
}

impl Manager<'_, '_> {
    fn done(&mut self, pass: &'static str, m: &Module) {
        self.phases.push((pass, self.since.elapsed().as_secs_f64() * 1e3));
        (self.watch)(pass, m);
        self.since = Instant::now();
    }
}

/// Compiles a model to a plan: a pure function of its arguments.
pub fn compile(source: Source, o: &Options, watch: Watch) -> Result<Compiled> {
    let Source { module: mut m, weights, sequence, vocab } = source;
    check_source(&m.mesh, &m.funcs[0], o)?;
    if o.mode == Mode::Infer {
        only_outputs(&mut m.funcs[0])?;
    }
    schedule::possible(o)?;
    let mut phases = vec![];
    let frozen = globs::frozen(&weights, o)?;
    let frozen = |name: &str| frozen.contains(name);
    let mut run = Manager { watch, phases: &mut phases, since: Instant::now() };

    orders(&mut m.funcs[0]);
    // Annotations are about the values that there are.
    if m.mesh.axes.is_empty() && m.funcs[0].annotations.is_empty() {
        rewrite(&mut m, RuleSet::Algebra)?;
        run.done("rewrite", &m);
    }
    // Of a source that has been through it, it changes nothing.
    if o.dtype == DType::BF16 {
        precision(&mut m.funcs[0]);
        run.done("precision", &m);
    }

    not_too_many(&m.funcs[0], o)?;
    let schedule = schedule::chosen(o)?;
    stages(&mut m.funcs[0], o, &schedule)?;
    run.done("stages", &m);

    m.mesh = annotate(&m.mesh, &mut m.funcs[0], &weights, &sequence, o)?;
    run.done("annotate", &m);

    let causes = propagate(&m.mesh, &mut m.funcs[0]);
    run.done("propagate", &m);

    let sharded = m.clone();
    let grid = Grid::of(&m.mesh, o.tp_mode)?.stored;
    let trained = |name: &str| o.mode == Mode::Train && !frozen(name);
    let parts = partition(&m.mesh, &m.funcs[0], &frozen, &trained, o.zero(), grid)?;
    m.funcs[0] = parts.forward;
    if o.mode == Mode::Train && !o.observe {
        drop_outputs(&mut m.funcs[0]);
    }
    run.done("partition", &m);

    let flat = matches!(o.tp_mode, TpMode::TwoD | TpMode::TwoAndHalfD { .. });
    let in_steps = flat && o.tp_steps == TpSteps::Summa;
    if o.mode == Mode::Train {
        let joint = m.funcs.remove(0);
        let joint = differentiate(&m.mesh, joint, &frozen, &parts.params, o.grad_dtype);
        trains(&joint, o)?;
        m.funcs.push(joint);
        run.done("differentiate", &m);
    }

    if in_steps {
        summa(&m.mesh, &mut m.funcs[0]);
    }
    run.done("summa", &m);

    ragged(&m.mesh, &mut m.funcs[0]);
    run.done("ragged", &m);

    m.funcs = match o.mode {
        Mode::Train => {
            split(&m.mesh, &m.funcs[0], &o.recompute, !o.reshard_after_forward, &schedule)
        }
        Mode::Infer => split_forward(&m.funcs[0], schedule.owner.len()),
    };
    run.done("split", &m);

    rewrite(&mut m, RuleSet::Collectives)?;
    run.done("rewrite-collectives", &m);

    if let (CpMode::Ring, Some(cp)) = (o.cp_mode, m.mesh.axis("cp")) {
        m.funcs.iter_mut().try_for_each(|f| ring(&m.mesh, cp, f))?;
    }
    run.done("ring", &m);

    assemble(&mut m, &schedule, &parts.params, &weights, o);
    run.done("step", &m);

    for i in 0..m.funcs.len() {
        if m.funcs[i].kind == FuncKind::Finish {
            combine(&m.mesh, &mut m.funcs[i]);
        }
    }
    run.done("combine", &m);

    m.funcs.iter_mut().for_each(|f| group(&m.mesh, f, o.fuse));
    run.done("group", &m);

    if o.transport == Transport::Nccl {
        m.funcs.iter_mut().for_each(overlap);
    }
    run.done("overlap", &m);

    let lists = lists(&m, &schedule, o.mode)?;
    run.done("schedule", &m);

    let classes = classes(&m, &schedule, lists);
    run.done("memory", &m);

    if let Err(all) = verify(&m, Phase::Ranked) {
        let all: Vec<String> = all.iter().map(Diag::render).collect();
        panic!("the passes made a program that does not verify:\n{}", all.join("\n"));
    }
    run.done("verify", &m);

    let warnings = warnings(&m, &sharded.funcs[0], &parts.params, &weights, o);
    let settings = Settings {
        mode: o.mode,
        global_batch: o.global_batch,
        microbatches: o.microbatches(),
        seq: o.seq,
        tokens: o.tokens(),
        vocab,
        lr: o.lr,
        seed: o.seed,
    };
    let plan = Plan { module: m, classes, schedule, weights, settings };
    let since = Instant::now();
    if let Err(d) = step::replay::replay(&plan) {
        panic!("the passes made lists that do not fit together:\n{}", d.render());
    }
    if let Err(what) = crate::memory::replay::replay(&plan) {
        panic!("the passes planned memory that does not hold: {what}");
    }
    phases.push(("replay", since.elapsed().as_secs_f64() * 1e3));
    if let Some(limit) = o.memory.filter(|&l| plan.peak_bytes() > l) {
        return Err(too_large(&plan, limit));
    }
    Ok(Compiled { plan, sharded, causes, phases, warnings })
}

/// What every rank of the pipeline does; an error if the functions do not fit the schedule.
fn lists(m: &Module, s: &Schedule, mode: Mode) -> Result<(Index, Vec<Lists>)> {
    let broken = |what: String| {
        Diag::new("plan", what)
            .rule("the functions of a plan are those of its schedule")
            .help("compile the plan again with this version of shardc")
    };
    let timeline = replay(s, &Times::unit(s.owner.len()))?;
    let index = Index::of(m, s, mode).map_err(broken)?;
    let lists = instructions(m, s, &timeline, &index).map_err(broken)?;
    Ok((index, lists))
}

fn classes(m: &Module, s: &Schedule, (index, lists): (Index, Vec<Lists>)) -> Vec<RankClass> {
    let one = |(rank, lists): (usize, Lists)| {
        memory(m, s.microbatches, s.stages_of(rank), index.funcs(s, rank), lists)
    };
    lists.into_iter().enumerate().map(one).collect()
}

/// What every rank runs, and its memory: of a module whose passes are done.
///
/// # Errors
/// `deadlock`, `schedule`, and `plan` if functions and schedule do not fit together.
pub fn rank_classes(m: &Module, s: &Schedule, mode: Mode) -> Result<Vec<RankClass>> {
    Ok(classes(m, s, lists(m, s, mode)?))
}

/// A plan that needs more memory than a rank has. Other ways out are for the driver to find.
fn too_large(plan: &Plan, limit: usize) -> Diag {
    let m = plan.classes.iter().map(|c| &c.memory).max_by_key(|m| m.peak_bytes);
    let m = m.expect("a plan has ranks");
    let what = format!("a rank needs {} B, the limit is {limit} B", m.peak_bytes);
    let mut d = Diag::new("out-of-memory", what)
        .at(format!("--memory {limit}"))
        .rule("peak_bytes <= --memory")
        .exit(Exit::Infeasible);
    for (name, class, size) in &m.live_at_peak {
        d = d.why(format!("{name} holds {size} B ({}) at the peak", class.name()));
    }
    d.help(format!("use --memory {}", m.peak_bytes))
}

/// Results that only a person would look at are not computed in training.
fn drop_outputs(f: &mut Func) {
    f.results.retain(|r| r.role.as_ref().is_none_or(|r| r.kind != RoleKind::Output));
    f.drop_dead();
}
