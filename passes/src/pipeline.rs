//! The one list of the passes, in their order.

use crate::autodiff::differentiate::differentiate;
use crate::autodiff::split::split;
use crate::memory::memory;
use crate::options::{Options, glob};
use crate::rewrite::{RuleSet, rewrite};
use crate::shard::annotate::annotate;
use crate::shard::partition::partition;
use crate::shard::propagate::{Cause, propagate};
use crate::step::combine::combine;
use crate::step::enter::enter;
use crate::step::finish::finish;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Func, Module, Value};
use shardc_ir::plan::{Action, Mode, Plan, Settings};
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
    let mut phases = vec![];
    let frozen = |name: &str| o.freeze.iter().any(|g| glob(g, name));
    let mut run = Manager { watch, phases: &mut phases, since: Instant::now() };

    // A source with a mesh was rewritten and annotated when it was written.
    if m.mesh.axes.is_empty() && m.funcs[0].annotations.is_empty() {
        rewrite(&mut m, RuleSet::Algebra)?;
        run.done("rewrite", &m);

        m.mesh = annotate(&mut m.funcs[0], &weights, &sequence, o)?;
    }
    run.done("annotate", &m);

    let causes = propagate(&m.mesh, &mut m.funcs[0]);
    run.done("propagate", &m);

    let sharded = m.clone();
    let parts = partition(&m.mesh, &m.funcs[0], &frozen)?;
    m.funcs[0] = parts.forward;
    if o.mode == Mode::Train && !o.observe {
        drop_outputs(&mut m.funcs[0]);
    }
    run.done("partition", &m);

    if o.mode == Mode::Train {
        let mut joint = differentiate(&m.mesh, m.funcs.remove(0), &frozen);
        m.funcs.push(std::mem::take(&mut joint.func));
        run.done("differentiate", &m);

        joint.func = m.funcs.remove(0);
        let (forward, backward) = split(joint);
        m.funcs = vec![forward, backward];
        run.done("split", &m);
    }

    rewrite(&mut m, RuleSet::Collectives)?;
    run.done("rewrite-collectives", &m);

    let backward = m.funcs.get(1);
    let first = enter(&m.mesh, &parts.params, &m.funcs[0], backward, o);
    let last = backward.map(|b| finish(&m.mesh, &parts.params, &weights, &m.funcs[0], b, o));
    m.funcs.insert(0, first);
    m.funcs.extend(last);
    run.done("step", &m);

    if let Some(f) = m.funcs.get_mut(3) {
        combine(&m.mesh, f);
    }
    run.done("combine", &m);

    let actions = schedule(&m, o.microbatches());
    run.done("schedule", &m);

    let places = memory(&m, o.microbatches());
    run.done("memory", &m);

    if let Err(all) = verify(&m, Phase::Ranked) {
        let all: Vec<String> = all.iter().map(Diag::render).collect();
        panic!("the passes made a program that does not verify:\n{}", all.join("\n"));
    }
    run.done("verify", &m);

    let warnings = padding(&m.mesh, &sharded.funcs[0], &weights);
    let settings = Settings {
        mode: o.mode,
        global_batch: o.global_batch,
        microbatches: o.microbatches(),
        seq: o.seq,
        vocab,
        lr: o.lr,
        seed: o.seed,
    };
    let plan = Plan { module: m, actions, memory: places, weights, settings };
    Ok(Compiled { plan, sharded, causes, phases, warnings })
}

/// Results that only a person would look at are not computed in training.
fn drop_outputs(f: &mut Func) {
    use shardc_ir::func::RoleKind;
    f.results.retain(|r| r.role.as_ref().is_none_or(|r| r.kind != RoleKind::Output));
    f.drop_dead();
}

/// One stage: enter, each microbatch forward and backward, finish.
pub fn schedule(m: &Module, microbatches: usize) -> Vec<Action> {
    let at = |name: &str| m.funcs.iter().position(|f| f.name == name);
    let once = |name| at(name).map(|func| Action { func, microbatch: None });
    let mut out: Vec<Action> = once("enter").into_iter().collect();
    for j in 0..microbatches {
        let each = ["forward", "backward"].into_iter().filter_map(at);
        out.extend(each.map(|func| Action { func, microbatch: Some(j) }));
    }
    out.extend(once("finish"));
    out
}

/// A warning for each parameter of which more than 1/8 of the stored elements is padding.
fn padding(mesh: &shardc_ir::mesh::Mesh, f: &Func, weights: &[Weight]) -> Vec<Diag> {
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
