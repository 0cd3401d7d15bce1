//! The one list of the passes, in their order.

use crate::autodiff::differentiate::differentiate;
use crate::autodiff::recompute::Recompute;
use crate::autodiff::split::{StageFuncs, split, split_forward};
use crate::group::group;
use crate::memory::memory;
use crate::options::{CpMode, Options, TpMode, TpSteps, Transport, glob};
use crate::overlap::overlap;
use crate::precision::precision;
use crate::rewrite::{RuleSet, rewrite};
use crate::schedule;
use crate::shard::annotate::annotate;
use crate::shard::grid::Grid;
use crate::shard::partition::{Preparation, partition};
use crate::shard::propagate::{Cause, propagate};
use crate::shard::zero::Zero;
use crate::stages::{not_too_many, stages};
use crate::step;
use crate::step::combine::combine;
use crate::step::enter::enter;
use crate::step::finish::{Foreign, evaluate, finish};
use crate::step::instructions::{Index, Lists, base, instructions, named};
use crate::step::once::once;
use crate::window::ragged::ragged;
use crate::window::ring::ring;
use crate::window::summa::summa;
use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::func::{Func, Module, Port, RoleKind, Value};
use shardc_ir::mesh::{AtomSet, Mesh, PIPELINE};
use shardc_ir::plan::{Mode, Plan, RankClass, Settings, TokenOrder};
use shardc_ir::schedule::{Schedule, Times, replay};
use shardc_ir::types::{DType, Type};
use shardc_ir::verify::{Phase, verify};
use shardc_ir::weights::Weight;
use std::time::Instant;

/// A model on one device: what a frontend makes.
#[derive(Clone, Debug)]
pub struct Source {
    /// One function, `model`, for one microbatch; empty mesh.
    pub module: Module,
    pub weights: Vec<Weight>,
    /// Values of the residual stream with their sequence dim, which `--sp` splits.
    pub sequence: Vec<(Value, usize)>,
    pub vocab: usize,
}

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
    let mut phases = vec![];
    let frozen = |name: &str| o.freeze.iter().any(|g| glob(g, name));
    let mut run = Manager { watch, phases: &mut phases, since: Instant::now() };

    // A source with a mesh was rewritten and annotated when it was written.
    let new = m.mesh.axes.is_empty() && m.funcs[0].annotations.is_empty();
    if new {
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
    let stages = stages(&m.funcs[0], o, &schedule)?;
    run.done("stages", &m);

    if new {
        m.mesh = annotate(&mut m.funcs[0], &weights, &sequence, o)?;
    }
    run.done("annotate", &m);

    let causes = propagate(&m.mesh, &mut m.funcs[0]);
    run.done("propagate", &m);

    let sharded = m.clone();
    let grid = Grid::of(&m.mesh, o.tp_mode)?.stored;
    let trained = |name: &str| o.mode == Mode::Train && !frozen(name);
    let parts = partition(&m.mesh, &m.funcs[0], &frozen, &trained, Zero(o.zero), grid)?;
    m.funcs[0] = parts.forward;
    if o.mode == Mode::Train && !o.observe {
        drop_outputs(&mut m.funcs[0]);
    }
    run.done("partition", &m);

    let flat = matches!(o.tp_mode, TpMode::TwoD | TpMode::TwoAndHalfD { .. });
    let in_steps = flat && o.tp_steps == TpSteps::Summa;
    let loops = if o.mode == Mode::Train {
        let mut joint = differentiate(
            &m.mesh,
            m.funcs.remove(0),
            &frozen,
            &stages,
            &parts.params,
            o.grad_dtype,
        );
        m.funcs.push(std::mem::take(&mut joint.func));
        run.done("differentiate", &m);

        if in_steps {
            joint.backward_from = summa(&m.mesh, &mut m.funcs[0], joint.backward_from);
        }
        run.done("summa", &m);

        joint.backward_from = ragged(&m.mesh, &mut m.funcs[0], joint.backward_from);
        joint.of_data.resize(m.funcs[0].values.len(), false);
        run.done("ragged", &m);

        joint.func = m.funcs.remove(0);
        let keep = !o.reshard_after_forward;
        split(&m.mesh, joint, &o.recompute, keep, &stages, &schedule)
    } else {
        if in_steps {
            let all = m.funcs[0].nodes.len();
            summa(&m.mesh, &mut m.funcs[0], all);
        }
        run.done("summa", &m);

        let all = m.funcs[0].nodes.len();
        ragged(&m.mesh, &mut m.funcs[0], all);
        run.done("ragged", &m);

        split_forward(m.funcs.remove(0), &stages)
    };
    m.funcs = loops.into_iter().flat_map(StageFuncs::into_funcs).collect();
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
        if base(&m.funcs[i].name) == "finish" {
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

    let mut warnings = padding(&m.mesh, &sharded.funcs[0], &weights);
    warnings.extend(idle_axes(&m.mesh, &sharded.funcs[0]));
    warnings.extend(no_effect(&m.mesh, &parts.params, o));
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

/// Adds to the functions of the microbatches what every rank of the pipeline does around them.
fn assemble(m: &mut Module, s: &Schedule, params: &[Preparation], weights: &[Weight], o: &Options) {
    let ranks = s.ranks.len();
    let mut loops: Vec<Vec<Func>> = vec![vec![]; ranks];
    // Forwards in the order of the model, then what goes back, from the last stage on.
    let (forward, back): (Vec<Func>, Vec<Func>) =
        std::mem::take(&mut m.funcs).into_iter().partition(|f| base(&f.name) == "forward");
    let stage = |f: &Func| f.name.rsplit_once('.').and_then(|n| n.1.parse().ok()).unwrap_or(0);
    let mut back: Vec<Func> = back;
    back.sort_by_key(|f| std::cmp::Reverse(stage(f)));
    for f in forward.into_iter().chain(back) {
        loops[s.owner[stage(&f)]].push(f);
    }
    if s.microbatches == 1 {
        loops.iter_mut().for_each(|l| once(l));
    }
    let takes = |rank: usize, name: &str| {
        let is = |a: &Port| is_role(a, RoleKind::Ready, name);
        loops[rank].iter().any(|f| f.args.iter().any(is))
    };
    let adds_to = |rank: usize, name: &str| {
        let is = |r: &Port| is_role(r, RoleKind::Grad, name);
        loops[rank].iter().any(|f| f.results.iter().any(is))
    };
    // A parameter belongs to the first stage that uses it; one that nobody uses, to the first.
    let owner = |p: &Preparation| {
        let first = (0..s.owner.len()).map(|i| s.owner[i]);
        let name = &p.param.name;
        let mut using = first.filter(|&r| takes(r, name));
        using.next().unwrap_or(s.owner[0])
    };
    let owners: Vec<usize> = params.iter().map(owner).collect();
    for (rank, own_loops) in loops.iter().enumerate() {
        let all: Vec<&Func> = own_loops.iter().collect();
        let own = params.iter().zip(&owners).filter(|x| *x.1 == rank);
        let own: Vec<&Preparation> = own.map(|x| x.0).collect();
        let foreign: Vec<Foreign> = own
            .iter()
            .flat_map(|p| {
                let name = &*p.param.name;
                let others = (0..ranks).filter(move |&r| r != rank);
                let others = others.filter(move |&r| adds_to(r, name));
                others.map(|from| Foreign { param: p.param.name.to_string(), from })
            })
            .collect();
        let first = enter(&m.mesh, &named("enter", rank, ranks), &own, &all, o);
        let mut last = vec![];
        if o.mode == Mode::Train {
            let name = named("finish", rank, ranks);
            last.push(finish(&m.mesh, &name, &own, weights, &all, &foreign, o));
            last.extend(evaluate(&m.mesh, &named("evaluate", rank, ranks), &all));
        }
        m.funcs.push(first);
        m.funcs.extend(own_loops.clone());
        m.funcs.extend(last);
    }
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

/// Inputs that a step can fill.
const INPUTS: [&str; 3] = ["input_ids", "targets", "positions"];

/// What the passes assume of a model, whoever wrote it.
fn check_source(mesh: &Mesh, f: &Func, o: &Options) -> Result<()> {
    let bad = |what: String, rule: &str, help: String| {
        Err(Diag::new("source", what).at(format!("@{}", f.name)).rule(rule).help(help))
    };
    if o.microbatches() * o.microbatch_rows() != o.global_batch || o.global_batch == 0 {
        let (rows, global) = (o.microbatch_rows(), o.global_batch);
        return Err(Diag::new(
            "batch-not-divisible",
            format!("{global} sequences are no whole number of microbatches of {rows}"),
        )
        .rule("global_batch % (dp * microbatch) == 0")
        .help(format!(
            "use --global-batch {}",
            global.div_ceil(rows.max(1)).max(1) * rows.max(1)
        )));
    }
    if let TokenOrder::Zigzag { ranks } = o.tokens()
        && !o.tokens().fits(o.seq)
    {
        let what =
            format!("{} tokens are no 2 equal chunks for each of {ranks} ranks of cp", o.seq);
        let below = o.seq / (2 * ranks) * 2 * ranks;
        return Err(Diag::new("sequence-not-divisible", what)
            .rule("seq % (2 * cp) == 0 with --cp-split zigzag")
            .help(format!("use --seq {}, or --cp-split contiguous", below + 2 * ranks)));
    }
    let pipeline = mesh.axis(PIPELINE).unwrap_or_default();
    let asked =
        f.annotations.iter().flat_map(|(v, a)| a.dims.iter().map(move |d| (v, d.atoms.set())));
    let typed = (0..f.values.len()).map(|v| Value(v as u32));
    let typed = typed.map(|v| (v, f.ty(v).marked()));
    if let Some((v, _)) = asked.map(|(v, s)| (*v, s)).chain(typed).find(|x| x.1.meets(pipeline)) {
        return Err(Diag::new("pipeline-axis", format!("{} is split over {PIPELINE}", f.name(v)))
            .at(format!("@{}", f.name))
            .rule(format!("{PIPELINE} splits the model into stages, and no tensor"))
            .help(format!("take {PIPELINE} out of its type, or split it over 1 other axis")));
    }
    if o.recompute == Recompute::Fit {
        return Err(Diag::new("flag", "what `fit` stands for is not chosen yet")
            .at("--recompute fit")
            .help("use --recompute sqrt, or another that is said"));
    }
    let mut seen = std::collections::BTreeSet::new();
    for a in &f.args {
        let (name, ty) = (f.name(a.value), f.ty(a.value));
        let sizes = ty.sizes();
        let Some(role) = &a.role else {
            return bad(
                format!("{name} has no role"),
                "an argument is a parameter or an input",
                "write param \"NAME\" or input \"input_ids\" after its type".into(),
            );
        };
        if !seen.insert(role) {
            return bad(
                format!("two arguments are {} \"{}\"", role.kind.name(), role.name),
                "roles are unique",
                "give each its own name".into(),
            );
        }
        if role.kind == RoleKind::Input && !INPUTS.contains(&&*role.name) {
            return bad(
                format!("input \"{}\" is not known", role.name),
                "inputs are input_ids, targets and positions",
                format!("make {name} a param, or name it after one of them"),
            );
        }
        let batch = [o.microbatch_rows(), o.seq];
        let fits = match (role.kind, &*role.name) {
            (RoleKind::Param, _) => matches!(ty.dtype, DType::F32 | DType::BF16),
            (RoleKind::Input, "input_ids" | "targets") => {
                ty.dtype == DType::I32 && sizes[..] == batch
            }
            (RoleKind::Input, "positions") => ty.dtype == DType::I32 && sizes[..] == [o.seq],
            _ => false,
        };
        if !fits {
            let rule = "param: f32 or bf16; input_ids, targets: i32[microbatch * dp, seq]; positions: i32[seq]";
            let sizes = sizes.to_vec();
            return bad(
                format!("{} \"{}\" is {} {sizes:?}", role.kind.name(), role.name, ty.dtype.name()),
                rule,
                format!(
                    "write i32[{},{}] in the text, or give --microbatch and --seq as there",
                    batch[0], batch[1]
                ),
            );
        }
    }
    if o.mode == Mode::Infer {
        return Ok(());
    }
    let sums: Vec<_> = f.results.iter().filter(|r| is_role(r, RoleKind::Sum, "loss")).collect();
    let scalar = sums.len() == 1 && *f.ty(sums[0].value) == Type::f32(&[]);
    // The loss is a mean over targets: those of an argument that nothing reads are not known.
    let read = |a: &Port| f.nodes.iter().any(|n| n.ins.contains(&a.value));
    let targets = |a: &Port| is_role(a, RoleKind::Input, "targets") && read(a);
    if scalar && f.args.iter().any(targets) {
        return Ok(());
    }
    Err(Diag::new("no-loss", format!("@{} has no loss to train", f.name))
        .rule("one result f32[] `sum \"loss\"` and one argument `input \"targets\"` that is used")
        .help("add them, or compile with --mode infer"))
}

fn is_role(p: &shardc_ir::func::Port, kind: RoleKind, name: &str) -> bool {
    p.role.as_ref().is_some_and(|r| r.kind == kind && &*r.name == name)
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

/// A warning for each axis that splits nothing: its ranks all do the same work.
fn idle_axes(mesh: &Mesh, f: &Func) -> Vec<Diag> {
    let used = f.values.iter().fold(AtomSet::EMPTY, |s, v| s.union(v.ty.sharded()));
    let split = mesh.axes.iter().filter(|a| a.name != PIPELINE);
    let idle = split.filter(|a| mesh.axis(&a.name).is_none_or(|s| !s.meets(used)));
    let warn = |a: &shardc_ir::mesh::Axis| {
        Diag::new(
            "idle-axis",
            format!("axis {} splits nothing: {} ranks do the same work", a.name, a.size),
        )
        .help(format!("split something with --shard 'GLOB={},…', or use dp={}", a.name, a.size))
    };
    idle.map(warn).collect()
}

/// A warning for each option that changes nothing here, and for what ZeRO leaves whole.
fn no_effect(mesh: &Mesh, params: &[Preparation], o: &Options) -> Vec<Diag> {
    let mut out = vec![];
    let mut warn = |what: String, help: String| {
        out.push(Diag::new("no-effect", what).help(help));
    };
    let shard = mesh.axis("dp_shard");
    if o.zero > 0 && shard.is_none() {
        let help = "name the axis: --mesh dp_shard=2, or dp=2 with --zero".into();
        warn(format!("--zero {} splits nothing: the mesh has no dp_shard", o.zero), help);
    }
    if o.cp_mode != CpMode::AllGather && mesh.axis("cp").is_none() {
        warn("--cp-mode changes nothing: the mesh has no cp".into(), "add cp=2 to --mesh".into());
    }
    if o.cp_split.is_some() && mesh.axis("cp").is_none() {
        warn("--cp-split changes nothing: the mesh has no cp".into(), "add cp=2 to --mesh".into());
    }
    let grid = Grid::of(mesh, o.tp_mode).unwrap_or_default();
    if o.tp_mode != TpMode::OneD && !grid.cuts_stream() {
        let what = format!("--tp-mode {} changes nothing: the mesh has no tp", o.tp_mode);
        warn(what, "add tp=4 to --mesh".into());
    }
    if o.tp_steps == TpSteps::Summa
        && !matches!(o.tp_mode, TpMode::TwoD | TpMode::TwoAndHalfD { .. })
    {
        let what = format!("--tp-steps summa changes nothing with --tp-mode {}", o.tp_mode);
        warn(what, "use --tp-mode 2d or 2.5d, or leave it out".into());
    }
    let whole: Vec<&Preparation> =
        params.iter().filter(|p| !grid.stored.within(p.stored.sharded())).collect();
    if let Some(p) = whole.first() {
        let bytes: usize = whole.iter().map(|p| p.stored.local_bytes(mesh)).sum();
        let what = format!(
            "{} parameters of {bytes} B on a rank are not split over all of {}, {} first",
            whole.len(),
            mesh.names(grid.stored, "*"),
            p.param.name
        );
        warn(what, "use a tp that divides one of their dims".into());
    }
    if !o.reshard_after_forward && o.zero < 3 && !grid.cuts_stream() {
        let help = "use --zero 3, or leave it out".into();
        warn("--reshard-after-forward no changes nothing without --zero 3".into(), help);
    }
    if let Some(shard) = shard.filter(|_| o.zero > 0) {
        let whole: Vec<&Preparation> =
            params.iter().filter(|p| !p.stored.sharded().meets(shard)).collect();
        let bytes: usize = whole.iter().map(|p| p.stored.local_bytes(mesh)).sum();
        if let Some(p) = whole.first() {
            let n = mesh.ways(shard);
            let what = format!(
                "{} parameters of {bytes} B on a rank are not split over dp_shard={n}, {} first",
                whole.len(),
                p.param.name
            );
            warn(what, "use a dp_shard that divides one of their dims".into());
        }
        for p in params {
            let cut = (0..p.stored.rank()).find(|&d| p.stored.dims[d].atoms.set().meets(shard));
            let Some(d) = cut else { continue };
            let (n, all) = (p.stored.dims[d].size, p.stored.pieces(mesh, d));
            let stored = n.div_ceil(all) * all;
            if (stored - n) * 8 > n {
                let what = format!(
                    "dim {d} of `{}` is {n}, in {all} pieces: {} of {stored} stored are padding",
                    p.param.name,
                    stored - n
                );
                warn(what, "use a dp_shard that divides it".into());
            }
        }
    }
    out
}

/// A warning for each parameter of which more than 1/8 of the stored elements is padding.
fn padding(mesh: &Mesh, f: &Func, weights: &[Weight]) -> Vec<Diag> {
    let mut out = vec![];
    for (a, w) in f.args.iter().zip(weights) {
        let t = f.ty(a.value);
        for (d, dim) in t.dims.iter().enumerate() {
            let (n, k) = (dim.size, t.pieces(mesh, d));
            let waste = n.div_ceil(k) * k - n;
            if waste * 8 > n {
                let bytes = t.elements() / n * waste * t.dtype.bytes();
                out.push(Diag::new("padding", format!("dim {d} of `{}` is {n}, in {k} pieces: {waste} of {} stored are padding", w.param, n + waste))
                    .why(format!("{bytes} B over all ranks hold nothing"))
                    .help(format!("split it {} ways, or keep it whole with --shard '{}=-…'", (1..=k).rev().find(|x| n % x == 0).unwrap_or(1), w.param)));
            }
        }
    }
    out
}
