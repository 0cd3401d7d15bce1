//! What passes act on, and each pass as a step of it.

use crate::autodiff::chunks::chunk_loss;
use crate::autodiff::differentiate::differentiate;
use crate::autodiff::split::{split, split_forward};
use crate::checks::{differentiable, trains};
use crate::classes::{classes, lists, peak_bytes};
use crate::depends::active;
use crate::experts::lay_out;
use crate::globs;
use crate::group::group;
use crate::memory;
use crate::optim::{Groups, groups};
use crate::options::{CpMode, Options, TpMode, TpSteps};
use crate::overlap::overlap;
use crate::precision::precision;
use crate::rewrite::orders::orders;
use crate::rewrite::shifts::shifts;
use crate::rewrite::{RuleSet, rewrite};
use crate::schedule;
use crate::shard::annotate::annotate;
use crate::shard::asked::overridden;
use crate::shard::auto::{Asked, Choices, Price};
use crate::shard::grid::Grid;
use crate::shard::partition::{How, partition};
use crate::shard::propagate::{Cause, propagate};
use crate::stages::{not_too_many, stages};
use crate::step;
use crate::step::assemble::assemble;
use crate::step::bucket_grads::bucket_grads;
use crate::step::early_sums::{TRIES, early_sums};
use crate::step::instructions::{Index, Lists};
use crate::warnings::warnings;
use crate::window::ragged::ragged;
use crate::window::ring::ring;
use crate::window::summa::summa;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Func, FuncKind, Module, ParamLayout, Port, RoleKind};
use shardc_ir::hardware::Hardware;
use shardc_ir::loss_scale::LOSS_SCALE;
use shardc_ir::phase::Phase;
use shardc_ir::plan::{Mode, Plan, RankClass, Settings};
use shardc_ir::schedule::Schedule;
use shardc_ir::source::Source;
use shardc_ir::types::Type;
use shardc_ir::verify::verify;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Whether a pass may have changed the module.
pub(crate) type Changed = Result<bool>;

/// What passes act on: the module, and what is not in it.
pub(crate) struct State<'a> {
    pub m: Module,
    o: &'a Options,
    /// The plan is not checked a second time.
    pub trial: bool,
    /// The module is one that somebody gave, and perhaps changed, and not what the passes made of a model.
    pub given: bool,
    /// What the module was at first, and what is known of its parameters.
    pub source: Source,
    frozen: BTreeSet<String>,
    /// By what each parameter is updated.
    groups: Groups,
    schedule: Option<Arc<Schedule>>,
    /// Propagation was among the passes.
    is_propagated: bool,
    /// The module with propagated shardings, and why each stands; what partition has taken.
    pub sharded: Option<Module>,
    pub causes: Vec<Cause>,
    /// What layouts cost that were chosen, and from what.
    pub price: Option<Price>,
    pub choices: Option<Choices>,
    pub warnings: Vec<Diag>,
    lists: Option<(Index, Vec<Lists>)>,
    classes: Vec<RankClass>,
    /// What the passes from `bucket-grads` to `overlap` will leave, where a trial has run them already.
    ahead: Option<Module>,
    pub plan: Option<Plan>,
}

/// A function that takes parameters that are laid out, whole.
fn listed(params: &[ParamLayout]) -> Func {
    let mut f = Func::new("model");
    for p in params {
        f.arg(Type::f32(&p.stored.sizes()), p.name.clone(), Some(p.param.clone()));
    }
    f
}

impl<'a> State<'a> {
    pub fn new(m: Module, source: Source, o: &'a Options) -> Result<State<'a>> {
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
        let (causes, classes) = (vec![], vec![]);
        let warnings = groups.warnings.clone();
        let (schedule, sharded, lists, price, choices, plan) = (None, None, None, None, None, None);
        Ok(State {
            m,
            o,
            trial: false,
            given: false,
            source,
            frozen,
            groups,
            schedule,
            is_propagated: false,
            sharded,
            causes,
            price,
            choices,
            warnings,
            lists,
            classes,
            ahead: None,
            plan,
        })
    }

    /// The module as it now is, be it in a plan.
    pub fn module(&self) -> &Module {
        self.plan.as_ref().map_or(&self.m, |p| &p.module)
    }

    pub fn into_module(self) -> Module {
        self.plan.map_or(self.m, |p| p.module)
    }

    pub fn module_mut(&mut self) -> &mut Module {
        self.plan.as_mut().map_or(&mut self.m, |p| &mut p.module)
    }

    /// Checks what a pass has left.
    ///
    /// # Errors
    /// `pass` if it does not verify, of a module that somebody gave.
    ///
    /// # Panics
    /// If it does not verify, of any other: the pass is wrong then.
    pub fn verified(&self, by: &str) -> Result<()> {
        let Err(all) = verify(self.module(), self.module().phase) else { return Ok(()) };
        let all: Vec<String> = all.iter().map(Diag::render).collect();
        self.broken(&format!("{by} made a program that does not verify:\n{}", all.join("\n")))
    }

    /// What does not hold behind the passes: of a module that somebody gave it is that module's, else theirs.
    fn broken(&self, what: &str) -> Result<()> {
        assert!(self.given, "the passes are wrong: {what}");
        Err(Diag::new("pass", "the program that was given does not become a plan")
            .rule("a pass takes what the passes before it leave")
            .why(what.replace('\n', " "))
            .help("start from a text that --dump-all wrote with the same flags, with few changes"))
    }

    fn schedule(&mut self) -> Result<Arc<Schedule>> {
        let known = match &self.schedule {
            Some(known) => known.clone(),
            None => Arc::new(schedule::chosen(self.o)?),
        };
        self.schedule = Some(known.clone());
        Ok(known)
    }

    /// Exchanges go on while ranks work.
    fn overlaps(&self) -> bool {
        self.o.transport.overlaps()
    }

    fn trains(&self) -> bool {
        self.o.mode == Mode::Train
    }

    /// Of a source that has been through it, it changes nothing.
    pub fn experts(&mut self) -> Changed {
        let (f, sequence) = (&mut self.m.funcs[0], &mut self.source.sequence);
        let (changed, warning) = lay_out(&self.m.mesh, f, sequence, self.o)?;
        self.warnings.extend(warning);
        Ok(changed)
    }

    pub fn rewrite(&mut self) -> Changed {
        orders(&mut self.m.funcs[0]);
        shifts(&mut self.m.funcs[0]);
        // Annotations are about the values that there are.
        if self.m.mesh.axes.is_empty() && self.m.funcs[0].annotations.is_empty() {
            rewrite(&mut self.m, RuleSet::Algebra)?;
        }
        Ok(true)
    }

    /// Of a source that has been through it, it changes nothing.
    pub fn precision(&mut self) -> Changed {
        let half = self.o.dtype.is_half();
        if half {
            precision(&mut self.m.funcs[0], self.o.dtype);
        }
        Ok(half)
    }

    pub fn states(&mut self) -> Changed {
        crate::states::cut(&self.m.mesh, &mut self.m.funcs[0], self.o.axis("cp"))
    }

    pub fn stages(&mut self) -> Changed {
        not_too_many(&self.m.funcs[0], self.o)?;
        let schedule = self.schedule()?;
        stages(&mut self.m.funcs[0], self.o, &schedule)?;
        Ok(true)
    }

    pub fn annotate(&mut self) -> Changed {
        let Source { weights, sequence, .. } = &self.source;
        self.warnings.extend(overridden(&self.m.mesh, &self.m.funcs[0], weights, self.o)?);
        self.m.mesh = annotate(&self.m.mesh, &mut self.m.funcs[0], weights, sequence, self.o)?;
        self.m.funcs[0].forget_types();
        Ok(true)
    }

    pub fn propagate(&mut self) -> Changed {
        self.causes = propagate(&self.m.mesh, &mut self.m.funcs[0]);
        self.is_propagated = true;
        Ok(true)
    }

    pub fn partition(&mut self) -> Changed {
        let (o, mesh) = (self.o, &self.m.mesh);
        let grid = Grid::of(mesh, o.tp_mode)?.stored;
        let frozen = |name: &str| self.frozen.contains(name);
        let trained = |name: &str| self.trains() && !frozen(name);
        // What was asked for does not depend on a machine.
        let generic = Hardware::default();
        let prices = Asked {
            mesh,
            hardware: if o.auto { &o.hardware } else { &generic },
            trains: self.trains(),
            states: self.groups.most_states(),
            microbatches: o.microbatches(),
            budget: o.budget.map(|b| b as u64),
        };
        let how = match o.auto {
            false => How::Asked { zero: o.zero(), grid, prices },
            true => How::Auto(prices),
        };
        let parts = partition(mesh, &self.m.funcs[0], &frozen, &trained, how);
        let sharded = std::mem::replace(&mut self.m.funcs[0], parts.forward);
        if self.is_propagated {
            let (mesh, funcs) = (self.m.mesh.clone(), vec![sharded]);
            let phase = Phase::Sharded;
            self.sharded = Some(Module { mesh, phase, funcs, ..Module::default() });
        }
        self.m.params = parts.params;
        (self.price, self.choices) = (parts.price, parts.choices);
        if self.trains() && !o.observe {
            drop_outputs(&mut self.m.funcs[0]);
        }
        Ok(true)
    }

    pub fn differentiate(&mut self) -> Changed {
        if !self.trains() {
            return Ok(false);
        }
        let forward = self.m.funcs.remove(0);
        let frozen = |name: &str| self.frozen.contains(name);
        let (mesh, params) = (&self.m.mesh, &self.m.params);
        differentiable(&forward, &active(&forward, &frozen))?;
        let joint = differentiate(mesh, forward, &frozen, params, self.o.grad_dtype);
        trains(&joint, self.o)?;
        self.m.funcs.push(joint);
        Ok(true)
    }

    pub fn chunk_loss(&mut self) -> Changed {
        let count = self.o.loss_chunks.number()?;
        let asked = self.trains() && count > 1;
        if asked {
            let (mesh, joint) = (&self.m.mesh, &mut self.m.funcs[0]);
            chunk_loss(mesh, joint, count).map_err(|refusal| {
                let what = format!("the loss of this model is not made in chunks: {}", refusal.why);
                Diag::new("not-built", what)
                    .at(format!("--loss-chunks {count}"))
                    .rule(refusal.rule)
                    .help(refusal.help)
            })?;
        }
        Ok(asked)
    }

    pub fn summa(&mut self) -> Changed {
        let flat = matches!(self.o.tp_mode, TpMode::TwoD | TpMode::TwoAndHalfD { .. });
        let asked = flat && self.o.tp_steps == TpSteps::Summa;
        if asked {
            summa(&self.m.mesh, &mut self.m.funcs[0]);
        }
        Ok(asked)
    }

    pub fn ragged(&mut self) -> Changed {
        ragged(&self.m.mesh, &mut self.m.funcs[0]);
        Ok(true)
    }

    pub fn split(&mut self) -> Changed {
        let schedule = self.schedule()?;
        let (o, joint) = (self.o, &self.m.funcs[0]);
        self.m.funcs = match o.mode {
            Mode::Train => {
                split(&self.m.mesh, joint, &o.recompute, !o.reshard_after_forward, &schedule)
            }
            Mode::Infer => split_forward(joint, schedule.owner.len()),
        };
        Ok(true)
    }

    pub fn rewrite_collectives(&mut self) -> Changed {
        rewrite(&mut self.m, RuleSet::Collectives)?;
        Ok(true)
    }

    pub fn ring(&mut self) -> Changed {
        let (CpMode::Ring, Some(cp)) = (self.o.cp_mode, self.m.mesh.axis("cp")) else {
            return Ok(false);
        };
        self.m.funcs.iter_mut().try_for_each(|f| ring(&self.m.mesh, cp, f))?;
        Ok(true)
    }

    pub fn step(&mut self) -> Changed {
        let schedule = self.schedule()?;
        let params = std::mem::take(&mut self.m.params);
        assemble(&mut self.m, &schedule, &params, &self.groups, self.o);
        // Of a module that begins behind propagation nothing is known of why it is so.
        if let Some(sharded) = &self.sharded {
            let weights = &self.source.weights;
            let more = warnings(&self.m, &sharded.funcs[0], &params, weights, self.o);
            self.warnings.extend(more);
        }
        Ok(true)
    }

    /// As many sums begin early as need no more memory, which is known once the passes behind have placed them.
    pub fn early_sums(&mut self) -> Changed {
        if !self.overlaps() || !self.trains() {
            return Ok(false);
        }
        let schedule = self.schedule()?;
        let mut before: Option<(Module, usize)> = None;
        for left in TRIES {
            let mut some = self.m.clone();
            if !early_sums(&mut some, &schedule, left) {
                break;
            }
            let most = match &before {
                Some(known) => known.1,
                // What has not the functions of its schedule is refused where its lists are made.
                None if lists(&self.m, &schedule, self.o.mode).is_err() => break,
                None => before.insert(self.ahead(self.m.clone())?).1,
            };
            let (ahead, peak) = self.ahead(some.clone())?;
            if peak <= most {
                self.m = some;
                self.ahead = Some(ahead).filter(|_| self.trial);
                return Ok(true);
            }
        }
        self.ahead = before.filter(|_| self.trial).map(|(ahead, _)| ahead);
        Ok(false)
    }

    /// A module as the passes from `bucket-grads` to `overlap` leave it, and the bytes of its fullest arena.
    fn ahead(&mut self, m: Module) -> Result<(Module, usize)> {
        let own = std::mem::replace(&mut self.m, m);
        self.bucket_grads()?;
        self.group()?;
        self.overlap()?;
        let m = std::mem::replace(&mut self.m, own);
        let schedule = self.schedule()?;
        let peak = peak_bytes(&m, &schedule, self.o.mode, self.overlaps())?;
        Ok((m, peak))
    }

    /// True if what this pass leaves is there already.
    pub fn is_done(&self, pass: &str) -> bool {
        self.ahead.is_some() && ["bucket-grads", "group", "overlap", "schedule"].contains(&pass)
    }

    pub fn bucket_grads(&mut self) -> Changed {
        let finish = self.m.funcs.iter_mut().filter(|f| f.kind == FuncKind::OptimizerStep);
        finish.for_each(|f| bucket_grads(&self.m.mesh, f));
        Ok(true)
    }

    pub fn group(&mut self) -> Changed {
        self.m.funcs.iter_mut().for_each(|f| group(&self.m.mesh, f, self.o));
        Ok(true)
    }

    pub fn overlap(&mut self) -> Changed {
        if self.overlaps() {
            self.m.funcs.iter_mut().for_each(overlap);
        }
        Ok(self.overlaps())
    }

    pub fn lists(&mut self) -> Changed {
        let schedule = self.schedule()?;
        self.lists = Some(lists(&self.m, &schedule, self.o.mode)?);
        Ok(false)
    }

    pub fn memory(&mut self) -> Changed {
        let ahead = self.ahead.take();
        let changed = ahead.is_some();
        if let Some(m) = ahead {
            self.m = m;
        }
        let schedule = self.schedule()?;
        let lists = match self.lists.take() {
            Some(lists) => lists,
            None => lists(&self.m, &schedule, self.o.mode)?,
        };
        self.classes = classes(&self.m, &schedule, lists, self.overlaps());
        Ok(changed)
    }

    pub fn verify(&mut self) -> Changed {
        if !self.trial {
            self.verified("one of the passes")?;
        }
        Ok(false)
    }

    /// The plan, checked by what knows nothing of how it was made.
    pub fn replay(&mut self) -> Changed {
        if self.classes.is_empty() {
            self.memory()?;
        }
        let (o, schedule) = (self.o, self.schedule()?);
        let mut args = self.m.funcs.iter().flat_map(|f| &f.args);
        let scaled = args.any(|a| a.is(RoleKind::Scalar, LOSS_SCALE));
        let settings = Settings {
            mode: o.mode,
            global_batch: o.global_batch,
            microbatches: o.microbatches(),
            seq: o.seq,
            tokens: o.tokens(),
            vocab: self.source.vocab,
            lr: o.lr,
            seed: o.seed,
            documents: o.documents,
            loss_scaling: scaled.then_some(o.loss_scaling),
            early_receives: self.overlaps(),
        };
        self.schedule = None;
        let plan = Plan {
            module: std::mem::take(&mut self.m),
            classes: std::mem::take(&mut self.classes),
            schedule: Arc::unwrap_or_clone(schedule),
            weights: std::mem::take(&mut self.source.weights),
            settings,
        };
        let checked = if self.trial { Ok(()) } else { step::replay::replay(&plan) };
        if let Err(d) = checked {
            self.broken(&format!("the lists of its ranks do not fit together:\n{}", d.render()))?;
        }
        let holds = if self.trial { Ok(()) } else { memory::replay::replay(&plan) };
        if let Err(what) = holds {
            self.broken(&format!("the memory that is planned for it does not hold: {what}"))?;
        }
        self.plan = Some(plan);
        Ok(false)
    }
}

/// Results that only a person would look at are not computed in training.
fn drop_outputs(f: &mut Func) {
    f.results.retain(|r| r.role.as_ref().is_none_or(|r| r.kind != RoleKind::Output));
    f.drop_dead();
}
