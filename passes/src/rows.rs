//! What each row of the table of passes runs, where the options ask for it.

use crate::autodiff::chunks::chunk_loss as in_chunks;
use crate::autodiff::differentiate::differentiate as reverse;
use crate::autodiff::split::{split as cut, split_forward};
use crate::checks::{differentiable, trains};
use crate::depends::active;
use crate::experts::lay_out;
use crate::globs;
use crate::optim::{Groups, groups};
use crate::options::{CpMode, Options, TpMode, TpSteps};
use crate::rewrite::orders::orders;
use crate::rewrite::shifts::shifts;
use crate::rewrite::{RuleSet, rewrite as by_rules};
use crate::shard::asked::overridden;
use crate::shard::auto::Asked;
use crate::shard::auto::{Choices, Price};
use crate::shard::grid::Grid;
use crate::shard::partition::How;
use crate::shard::propagate::Cause;
use crate::stages::stages as cut_stages;
use crate::step::assemble::assemble;
use crate::step::early_sums::Replacements;
use crate::step::early_sums::early_sums as begun_early;
use crate::warnings::warnings;
use crate::{overlap as moved, precision as types, shard, step as steps, window};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Func, FuncKind, Module, ParamLayout, Port, RoleKind};
use shardc_ir::hardware::Hardware;
use shardc_ir::mesh::Mesh;
use shardc_ir::phase::Phase;
use shardc_ir::plan::Mode;
use shardc_ir::schedule::Schedule;
use shardc_ir::source::Source;
use shardc_ir::types::Type;
use std::collections::BTreeSet;

/// The model with propagated shardings, and why each stands.
#[derive(Debug, Default)]
pub struct Propagated {
    pub sharded: Module,
    pub causes: Vec<Cause>,
    /// What layouts cost that were chosen by price, and from what they were.
    pub price: Option<Price>,
    pub choices: Option<Choices>,
}

/// Whether a pass may have changed the module.
pub(crate) type Changed = Result<bool>;

/// What is known of a model beside its module, and what passes find out for those who read their plan.
pub(crate) struct ModelFacts {
    /// Its weights and residual stream.
    pub source: Source,
    frozen: BTreeSet<String>,
    /// By what each parameter is updated.
    groups: Groups,
    /// From `propagate` and `partition`.
    pub propagated: Propagated,
    pub warnings: Vec<Diag>,
}

impl ModelFacts {
    pub fn of(m: &Module, source: Source, o: &Options) -> Result<ModelFacts> {
        let frozen = globs::frozen(&source.weights, o)?;
        // A module may be given without the model that it is of.
        let is_param = |a: &Port| a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Param);
        let takes = |f: &&Func| f.args.iter().any(is_param);
        let listed = listed(&m.params);
        let given = [source.module.funcs.first(), m.funcs.first()].into_iter().flatten();
        let model = given.chain([&listed]).find(takes);
        let groups = match model.filter(|_| o.mode == Mode::Train) {
            Some(f) => groups(f, &source.weights, &frozen, o)?,
            None => Groups::default(),
        };
        let warnings = groups.warnings.clone();
        Ok(ModelFacts { source, frozen, groups, propagated: Propagated::default(), warnings })
    }
}

/// A function that takes parameters that are laid out, whole.
fn listed(params: &[ParamLayout]) -> Func {
    let mut f = Func::new("model");
    for p in params {
        f.arg(Type::f32(&p.stored.sizes()), p.name.clone(), Some(p.param.clone()));
    }
    f
}

/// Of a source that has been through it, it changes nothing.
pub(crate) fn experts(m: &mut Module, o: &Options, k: &mut ModelFacts) -> Changed {
    let (changed, warning) = lay_out(&m.mesh, &mut m.funcs[0], &mut k.source.sequence, o)?;
    k.warnings.extend(warning);
    Ok(changed)
}

pub(crate) fn rewrite(m: &mut Module, _: &Options) -> Changed {
    orders(&mut m.funcs[0]);
    shifts(&mut m.funcs[0]);
    // Annotations are about the values that there are.
    if m.mesh.axes.is_empty() && m.funcs[0].annotations.is_empty() {
        by_rules(m, RuleSet::Algebra)?;
    }
    Ok(true)
}

/// Of a source that has been through it, it changes nothing.
pub(crate) fn precision(m: &mut Module, o: &Options) -> Changed {
    let half = o.dtype.is_half();
    if half {
        types::precision(&mut m.funcs[0], o.dtype);
    }
    Ok(half)
}

pub(crate) fn states(m: &mut Module, o: &Options) -> Changed {
    crate::states::cut(&m.mesh, &mut m.funcs[0], o.axis("cp"))
}

pub(crate) fn stages(m: &mut Module, o: &Options, s: &Schedule) -> Changed {
    cut_stages(&mut m.funcs[0], o, s).map(|()| true)
}

pub(crate) fn annotate(m: &mut Module, o: &Options, k: &mut ModelFacts) -> Changed {
    let Source { weights, sequence, .. } = &k.source;
    k.warnings.extend(overridden(&m.mesh, &m.funcs[0], weights, o)?);
    m.mesh = shard::annotate::annotate(&m.mesh, &mut m.funcs[0], weights, sequence, o)?;
    m.funcs[0].forget_types();
    Ok(true)
}

pub(crate) fn propagate(m: &mut Module, _: &Options, k: &mut ModelFacts) -> Changed {
    k.propagated.causes = shard::propagate::propagate(&m.mesh, &mut m.funcs[0]);
    k.propagated.sharded.phase = Phase::Sharded;
    Ok(true)
}

pub(crate) fn partition(m: &mut Module, o: &Options, k: &mut ModelFacts) -> Changed {
    let (mesh, train) = (&m.mesh, o.mode == Mode::Train);
    let grid = Grid::of(mesh, o.tp_mode)?.stored;
    let frozen = |name: &str| k.frozen.contains(name);
    let trained = |name: &str| train && !frozen(name);
    // What was asked for does not depend on a machine.
    let generic = Hardware::default();
    let prices = Asked {
        mesh,
        hardware: if o.auto { &o.hardware } else { &generic },
        trains: train,
        states: k.groups.most_states(),
        microbatches: o.microbatches(),
        budget: o.budget.map(|b| b as u64),
    };
    let how = match o.auto {
        false => How::Asked { zero: o.zero(), grid, prices },
        true => How::Auto(prices),
    };
    let parts = shard::partition::partition(mesh, &m.funcs[0], &frozen, &trained, how);
    let sharded = std::mem::replace(&mut m.funcs[0], parts.forward);
    let known = &mut k.propagated;
    // Of a module that begins behind propagation nothing is known of why it is so.
    if known.sharded.phase == Phase::Sharded {
        (known.sharded.mesh, known.sharded.funcs) = (m.mesh.clone(), vec![sharded]);
    }
    m.params = parts.params;
    (known.price, known.choices) = (parts.price, parts.choices);
    if train && !o.observe {
        drop_outputs(&mut m.funcs[0]);
    }
    Ok(true)
}

/// Results that only a person would look at are not computed in training.
fn drop_outputs(f: &mut Func) {
    f.results.retain(|r| r.role.as_ref().is_none_or(|r| r.kind != RoleKind::Output));
    f.drop_dead();
}

pub(crate) fn differentiate(m: &mut Module, o: &Options, k: &mut ModelFacts) -> Changed {
    if o.mode != Mode::Train {
        return Ok(false);
    }
    let forward = m.funcs.remove(0);
    let frozen = |name: &str| k.frozen.contains(name);
    differentiable(&forward, &active(&forward, &frozen))?;
    let joint = reverse(&m.mesh, forward, &frozen, &m.params, o.grad_dtype);
    trains(&joint, o)?;
    m.funcs.push(joint);
    Ok(true)
}

pub(crate) fn chunk_loss(m: &mut Module, o: &Options) -> Changed {
    let count = o.loss_chunks.number()?;
    let asked = o.mode == Mode::Train && count > 1;
    if asked {
        in_chunks(&m.mesh, &mut m.funcs[0], count).map_err(|refusal| {
            let what = format!("the loss of this model is not made in chunks: {}", refusal.why);
            Diag::new("not-built", what)
                .at(format!("--loss-chunks {count}"))
                .rule(refusal.rule)
                .help(refusal.help)
        })?;
    }
    Ok(asked)
}

pub(crate) fn summa(m: &mut Module, o: &Options) -> Changed {
    let flat = matches!(o.tp_mode, TpMode::TwoD | TpMode::TwoAndHalfD { .. });
    let asked = flat && o.tp_steps == TpSteps::Summa;
    if asked {
        window::summa::summa(&m.mesh, &mut m.funcs[0]);
    }
    Ok(asked)
}

pub(crate) fn ragged(m: &mut Module, _: &Options) -> Changed {
    window::ragged::ragged(&m.mesh, &mut m.funcs[0]);
    Ok(true)
}

pub(crate) fn split(m: &mut Module, o: &Options, s: &Schedule) -> Changed {
    let joint = &m.funcs[0];
    m.funcs = match o.mode {
        Mode::Train => cut(&m.mesh, joint, &o.recompute, !o.reshard_after_forward, s),
        Mode::Infer => split_forward(joint, s.owner.len()),
    };
    Ok(true)
}

pub(crate) fn rewrite_collectives(m: &mut Module, _: &Options) -> Changed {
    by_rules(m, RuleSet::Collectives)?;
    Ok(true)
}

pub(crate) fn ring(m: &mut Module, o: &Options) -> Changed {
    let (CpMode::Ring, Some(cp)) = (o.cp_mode, m.mesh.axis("cp")) else {
        return Ok(false);
    };
    m.funcs.iter_mut().try_for_each(|f| window::ring::ring(&m.mesh, cp, f))?;
    Ok(true)
}

pub(crate) fn step(m: &mut Module, o: &Options, k: &mut ModelFacts, s: &Schedule) -> Changed {
    let params = std::mem::take(&mut m.params);
    assemble(m, s, &params, &k.groups, o);
    if let Some(sharded) = k.propagated.sharded.funcs.first() {
        k.warnings.extend(warnings(m, sharded, &params, &k.source.weights, o));
    }
    Ok(true)
}

pub(crate) fn early_sums(
    m: &Module,
    o: &Options,
    s: &Schedule,
    tried: usize,
) -> Option<Replacements> {
    let asked = o.transport.overlaps() && o.mode == Mode::Train;
    asked.then(|| begun_early(m, s, tried)).filter(|others| !others.is_empty())
}

pub(crate) fn bucket_grads(mesh: &Mesh, f: &mut Func, _: &Options) {
    if f.kind == FuncKind::OptimizerStep {
        steps::bucket_grads::bucket_grads(mesh, f);
    }
}

pub(crate) fn overlap(_: &Mesh, f: &mut Func, o: &Options) {
    if o.transport.overlaps() {
        moved::overlap(f);
    }
}
