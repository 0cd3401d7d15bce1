//! The step as a textbook has it, and what the plan must equal.
//!
//! With m microbatches, `labels` the number of targets that are not negative in the whole batch, and
//! n = 1 / max(1, labels):
//!
//! - L = n · Σ loss + 1/m · Σ of every other loss (those that balance experts, and `loss` where there are no
//!   labels), sums over microbatches;
//! - the gradient of a parameter is ∂L/∂p by reverse mode on the model, summed over microbatches;
//! - of a loss that is scaled, ∂(s L)/∂p for a number s of the step is kept instead, and g is 1/s times it; nothing
//!   of what follows changes a parameter or a moment unless grad_norm is less than the largest f32;
//! - grad_norm = √(Σ over all trained parameters and elements of g²);
//! - clipped, g is multiplied by min(1, max / (grad_norm + 1e-6));
//! - the text of its update rule, on the whole parameter, makes the new parameter and states;
//! - a bias that corrects the choice of experts moves by `rate` towards experts below the mean load.

use crate::fun::Real;
use crate::ledger::Gap;
use crate::meaning;
use crate::number::Coef;
use crate::ops::{AtLeast, Both, Clamp, Each, Select};
use crate::reverse;
use crate::term::{Mentions, Origin, Store, Term};
use crate::whole::{Results, Whole};
use crate::{FORWARD, Recipe};
use shardc_ir::func::{Fill, Func, Role, RoleKind, StateInit, StateName, Value};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::Op;
use shardc_ir::text::update::Update;
use shardc_ir::types::Type;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What the textbook says of a model and a recipe.
pub struct Textbook {
    /// Terms of the model's results for a microbatch, by role.
    pub results: Vec<(Role, Term)>,
    /// 1 / max(1, labels); `None` without a loss or without labels.
    pub per_label: Option<Term>,
    /// 1 / microbatches.
    pub per_microbatch: Term,
    /// Gradients of trained parameters for a microbatch.
    pub gradients: BTreeMap<Arc<str>, Term>,
    /// Results of the step.
    pub step: BTreeMap<Role, Term>,
    /// What states are before the first step.
    begins: BTreeMap<StateName, f64>,
}

/// What updates are given of a step.
struct Step {
    norm: Term,
    /// What gradients are multiplied by.
    by: Term,
    /// 0 if nothing is to change.
    applies: Option<Term>,
}

/// Results by role, or what is not understood.
type Made = Result<Vec<(Role, Term)>, String>;

/// The name of the scale of a loss among the scalars of a step.
const LOSS_SCALE: &str = "loss_scale";

/// Added to the norm before dividing, as torch's `clip_grad_norm_` does.
const CLIP_EPS: f64 = 1e-6;

fn number(x: f64) -> Coef {
    Coef::of(x).unwrap_or(Coef::ZERO)
}

impl Textbook {
    /// Reads the model in the plan's store, and derives the step.
    pub fn of(
        w: &mut Whole,
        model: &Func,
        recipe: &Recipe,
        microbatches: usize,
    ) -> Result<Textbook, Gap> {
        let values = forward(w, model)?;
        w.ledger.first = w.of_model_alone(model, &values);
        let role = |r: &shardc_ir::func::Port| Some((r.role.clone()?, r.value));
        let named: Vec<(Role, Value)> = model.results.iter().filter_map(role).collect();
        let term = |v: Value| values[v.0 as usize].ok_or_else(|| missing(model));
        let results = named.iter().map(|(r, v)| Ok((r.clone(), term(*v)?)));
        let results = results.collect::<Result<Vec<_>, Gap>>()?;
        let share = 1.0 / microbatches.max(1) as f64;
        let per_microbatch = w.s.fill(number(share), &[]);
        let mut book = Textbook {
            results,
            per_label: None,
            per_microbatch,
            gradients: BTreeMap::new(),
            step: BTreeMap::new(),
            begins: BTreeMap::new(),
        };
        let sums: Vec<&(Role, Value)> =
            named.iter().filter(|x| x.0.kind == RoleKind::Sum).collect();
        if sums.is_empty() {
            return Ok(book);
        }
        book.per_label = labels(w, model, recipe);
        let per_label = book.per_label.unwrap_or(per_microbatch);
        let seed = |r: &Role| if &*r.name == "loss" { per_label } else { per_microbatch };
        let times = recipe.scaled.then(|| scalar(&mut w.s, LOSS_SCALE));
        let mut scaled = |seed| times.map_or(seed, |by| times_number(&mut w.s, seed, by));
        let seeds: Vec<(Value, Term)> = sums.iter().map(|(r, v)| (*v, scaled(seed(r)))).collect();
        let all = reverse::gradients(&mut w.s, model, &values, &seeds).map_err(|stop| {
            let n = &model.nodes[stop.node];
            let text = shardc_ir::text::node_text(&w.texts.model.mesh, model, n).text;
            let place = format!("@{}, {}: {text}", model.name, model.scope_info(n.scope).path);
            Gap { op: n.op.mnemonic().into(), place, lemma: stop.why }
        })?;
        let trained = |p: &Arc<str>| !recipe.frozen.contains(&**p);
        book.gradients = all.into_iter().filter(|x| trained(&x.0)).collect();
        book.step(&mut w.s, recipe, microbatches)?;
        Ok(book)
    }

    fn step(&mut self, s: &mut Store, recipe: &Recipe, microbatches: usize) -> Result<(), Gap> {
        let totals: BTreeMap<Arc<str>, Term> =
            self.gradients.iter().map(|(p, &g)| (p.clone(), s.fold(g, microbatches))).collect();
        let squares: Vec<Term> = totals.values().map(|&g| squared(s, g)).collect();
        let sum = match squares[..] {
            [] => s.zero(&[]),
            _ => s.add(&squares),
        };
        let norm = s.apply(Each("sqrt", None), &[sum], 0, &[]);
        let unscale = recipe.scaled.then(|| {
            let scale = scalar(s, LOSS_SCALE);
            s.reciprocal(scale)
        });
        let unscaled = |s: &mut Store, g| unscale.map_or(g, |by| times_number(s, g, by));
        let norm = unscaled(s, norm);
        let applies = unscale.map(|_| {
            let largest = s.fill(number(f64::from(f32::MAX)), &[]);
            s.apply(Both("less"), &[norm, largest], 0, &[])
        });
        self.step.insert(Role::new(RoleKind::Metric, "grad_norm"), norm);
        self.losses(s, microbatches);
        for (p, &g) in &totals {
            let g = unscaled(s, g);
            self.step.insert(Role::new(RoleKind::GradShown, p.clone()), g);
        }
        let by = match recipe.clip {
            None => s.fill(Coef::ONE, &[]),
            Some(max) => {
                let eps = s.fill(number(CLIP_EPS), &[]);
                let shifted = s.add(&[norm, eps]);
                let ratio = s.reciprocal(shifted);
                let ratio = s.scale(number(max), ratio);
                s.apply(Clamp::new(0.0, 1.0), &[ratio], 0, &[])
            }
        };
        let by = unscaled(s, by);
        let step = Step { norm, by, applies };
        for (p, &g) in &totals {
            let gap = |lemma: String| Gap { op: "update".into(), place: p.to_string(), lemma };
            let u = recipe.updates.get(&**p).ok_or_else(|| gap("it has no update rule".into()))?;
            let made = self.update(s, u, &step, p, g).map_err(gap)?;
            self.step.extend(made);
        }
        for (role, t) in self.results.clone() {
            if role.kind == RoleKind::TokensPerExpert && !recipe.frozen.contains(&*role.name) {
                let load = s.fold(t, microbatches);
                self.router_bias(s, recipe, &role.name, load, applies);
            }
        }
        Ok(())
    }

    /// Outputs of the losses, and their sum.
    fn losses(&mut self, s: &mut Store, microbatches: usize) {
        let mut parts = vec![];
        for (role, t) in self.results.clone() {
            if role.kind != RoleKind::Sum {
                continue;
            }
            let by = match (&*role.name, self.per_label) {
                ("loss", Some(n)) => n,
                _other => self.per_microbatch,
            };
            let total = s.fold(t, microbatches);
            let part = s.product(&[(total, vec![]), (by, vec![])], &[], &[]);
            let part = part.expect("a product of numbers");
            if &*role.name != "loss" {
                self.step.insert(Role::new(RoleKind::Mean, role.name.clone()), part);
            }
            parts.push(part);
        }
        let loss = s.add(&parts);
        self.step.insert(Role::new(RoleKind::Metric, "loss"), loss);
    }

    /// The new parameter and states, by the text of the rule; of one that an op does by that op.
    fn update(&mut self, s: &mut Store, u: &Update, step: &Step, name: &str, g: Term) -> Made {
        let shape = s.shape(g).to_vec();
        let none = Mentions::default();
        let mut roles = vec![Role::new(RoleKind::Param, name)];
        let mut olds = vec![s.leaf(&roles[0], &shape, none)];
        for k in u.kept(shape.len()).map_err(|d| d.message)? {
            let role = Role::new(RoleKind::State(k.name), name);
            let dims: Vec<usize> = k.dims.iter().map(|&d| shape[d]).collect();
            olds.push(s.leaf(&role, &dims, none));
            roles.push(role);
            self.begins.insert(k.name, k.init);
        }
        let lr = scalar(s, "lr");
        let lr = if u.lr == 1.0 { lr } else { s.scale(number(u.lr), lr) };
        let count = scalar(s, "step");
        let named = |name: &str| match name {
            "lr" => Ok(lr),
            "step" => Ok(count),
            "grad_norm" => Ok(step.norm),
            "g_scale" => Ok(step.by),
            other => Err(format!("no step has a scalar `{other}`")),
        };
        let news = match u.fused().map_err(|d| d.message)? {
            Some(op) => {
                let mut ins = vec![olds[0], g];
                ins.extend(&olds[1..]);
                for name in &op.operands()[ins.len()..] {
                    match (*name, step.applies) {
                        ("applies", applies) => ins.extend(applies),
                        (name, _) => ins.push(named(name)?),
                    }
                }
                let types: Vec<Type> = ins.iter().map(|&t| Type::f32(s.shape(t))).collect();
                let outs: Vec<Type> = olds.iter().map(|&t| Type::f32(s.shape(t))).collect();
                applied(s, &op, &ins, &types, &outs)?
            }
            None => {
                let g = times_number(s, g, step.by);
                let made = text(s, u, &shape, g, &olds, &named)?;
                kept(s, made, &olds, step.applies)?
            }
        };
        Ok(roles.into_iter().zip(news).collect())
    }

    /// The bias of experts moves by rate · sign(mean load - load). Loads are whole numbers, so the sign
    /// is what of experts · (mean - load) is between -1 and 1.
    fn router_bias(
        &mut self,
        s: &mut Store,
        recipe: &Recipe,
        param: &str,
        load: Term,
        applies: Option<Term>,
    ) {
        let shape = s.shape(load).to_vec();
        let experts: usize = shape.iter().product();
        let dims: Vec<_> = (0..shape.len()).map(|d| d as _).collect();
        let Ok(total) = s.product(&[(load, dims.clone())], &[], &[]) else { return };
        let Ok(total) = s.product(&[(total, vec![])], &dims, &shape) else { return };
        let under = s.sum(&[(Coef::ONE, total), (Coef::whole(experts).minus(), load)], &shape);
        let sign = s.apply(Clamp::new(-1.0, 1.0), &[under], 0, &shape);
        let role = Role::new(RoleKind::Param, param);
        let old = s.leaf(&role, &shape, Mentions::default());
        let sign = applies.map_or(sign, |by| times_number(s, sign, by));
        let new = s.sum(&[(Coef::ONE, old), (number(recipe.rate), sign)], &shape);
        self.step.insert(role, new);
    }

    /// Compares all that the plan makes.
    pub fn compare(&self, w: &mut Whole, results: Results, evaluated: Results) {
        let texts = w.texts;
        for (role, want) in &self.results {
            let what = format!("{role} of a microbatch");
            let made = match role.kind {
                kind if kind.is_shown() => w.outputs.remove(role).unwrap_or_default(),
                _sum => w.share(role).into_iter().collect(),
            };
            // Training shows outputs to observers only, and keeps no load that corrects nothing.
            let optional = role.kind == RoleKind::TokensPerExpert || !self.step.is_empty();
            if made.is_empty() && optional && role.kind != RoleKind::Sum {
                continue;
            }
            w.ledger.must("composition", made.len() < 2, || {
                [what.clone(), format!("{} functions make it", made.len()), "one".into()]
            });
            let got = made.first().copied();
            w.ledger.equal(&w.s, texts, FORWARD, what, got, *want);
        }
        let left: Vec<Role> = w.outputs.keys().cloned().collect();
        for role in left {
            w.ledger.must("composition", false, || {
                [role.to_string(), "a microbatch shows it".into(), "nothing of this name".into()]
            });
        }
        self.compare_gradients(w);
        self.compare_step(w, results, evaluated);
    }

    fn compare_gradients(&self, w: &mut Whole) {
        let texts = w.texts;
        if let Some(per_label) = self.per_label {
            for t in w.made(&Role::new(RoleKind::Step, "inv_tokens")) {
                let what = "1 / labels of the batch".to_string();
                w.ledger.equal(&w.s, texts, FORWARD, what, Some(t), per_label);
            }
        }
        for (p, &want) in &self.gradients {
            let got = w.share(&Role::new(RoleKind::Grad, p.clone()));
            let what = format!("gradient of `{p}`");
            w.ledger.equal(&w.s, texts, "gradients", what, got, want);
        }
        for role in w.accumulators() {
            let known = match role.kind {
                RoleKind::Grad => self.gradients.contains_key(&*role.name),
                _sum => self.results.iter().any(|r| r.0 == role),
            };
            w.ledger.must("composition", known, || {
                [role.to_string(), "summed over microbatches".into(), "no such sum".into()]
            });
        }
    }

    fn compare_step(&self, w: &mut Whole, mut results: Results, evaluated: Results) {
        let texts = w.texts;
        let kinds: BTreeSet<RoleKind> = self.step.keys().map(|role| role.kind).collect();
        for kind in kinds {
            let RoleKind::State(state) = kind else { continue };
            let init = texts.programs.state(state).map(|s| s.init);
            let want = StateInit::Number(self.begins[&state]);
            w.ledger.must("updates", init == Some(want), || {
                let found = init.map_or("undeclared".into(), |x| x.to_string());
                [format!("{kind} before the first step"), found, want.to_string()]
            });
        }
        for (role, &want) in &self.step {
            let made = results.remove(role).unwrap_or_default();
            let shown = role.kind.is_shown();
            let what = if shown { role.to_string() } else { format!("new {role}") };
            if made.is_empty() && role.kind == RoleKind::GradShown {
                continue; // for observers only
            }
            // A number of the whole step is shown by every rank of the pipeline.
            let several = role.kind == RoleKind::Metric || made.len() < 2;
            w.ledger.must("composition", several, || {
                [what.clone(), format!("{} functions make it", made.len()), "made once".into()]
            });
            let kind = if shown { FORWARD } else { "updates" };
            if made.is_empty() {
                w.ledger.equal(&w.s, texts, kind, what.clone(), None, want);
            }
            for t in made {
                w.ledger.equal(&w.s, texts, kind, what.clone(), Some(t), want);
            }
        }
        for role in results.into_keys() {
            w.ledger.must("composition", false, || {
                [format!("new {role}"), "it is changed".into(), "it stays".into()]
            });
        }
        for (role, made) in evaluated {
            let want = self.step.get(&role).copied().filter(|_| role.kind.is_shown());
            for t in made {
                let what = format!("{role} of an evaluation");
                match want {
                    Some(want) => {
                        w.ledger.equal(&w.s, texts, FORWARD, what, Some(t), want);
                    }
                    None => w.ledger.must("composition", false, || {
                        [what, "an evaluation makes it".into(), "losses alone".into()]
                    }),
                }
            }
        }
    }
}

/// The results of an op that is not one of collectives.
fn applied(
    s: &mut Store,
    op: &Op,
    ins: &[Term],
    types: &[Type],
    outs: &[Type],
) -> Result<Vec<Term>, String> {
    let [types, outs] = [types, outs].map(|t| t.iter().collect::<Vec<&Type>>());
    meaning::apply(s, &Mesh::default(), op, ins, [&types, &outs])
}

/// What the text of a rule makes of a whole parameter.
fn text(
    s: &mut Store,
    u: &Update,
    shape: &[usize],
    g: Term,
    olds: &[Term],
    named: &dyn Fn(&str) -> Result<Term, String>,
) -> Result<Vec<Term>, String> {
    let f = u.func(shape).map_err(|d| d.message)?;
    let mut values: Vec<Option<Term>> = vec![None; f.values.len()];
    let mut states = olds[1..].iter().copied();
    for a in &f.args {
        let role = a.role.as_ref().ok_or("an argument is nothing")?;
        values[a.value.0 as usize] = match role.kind {
            RoleKind::Param => Some(olds[0]),
            RoleKind::Grad => Some(g),
            RoleKind::State(_) => states.next(),
            _scalar => Some(named(&role.name)?),
        };
    }
    let lost = || "a value that nothing makes".to_string();
    for n in &f.nodes {
        let ins = n.ins.iter().map(|v| values[v.0 as usize].ok_or_else(lost));
        let ins = ins.collect::<Result<Vec<Term>, String>>()?;
        let [types, outs] =
            [&n.ins[..], &n.outs[..]].map(|all| all.iter().map(|&v| f.ty(v).clone()).collect());
        let (types, outs): (Vec<Type>, Vec<Type>) = (types, outs);
        for (o, t) in n.outs.iter().zip(applied(s, &n.op, &ins, &types, &outs)?) {
            values[o.0 as usize] = Some(t);
        }
    }
    f.results.iter().map(|r| values[r.value.0 as usize].ok_or_else(lost)).collect()
}

/// New values, or old ones where the step does not apply.
fn kept(
    s: &mut Store,
    news: Vec<Term>,
    olds: &[Term],
    applies: Option<Term>,
) -> Result<Vec<Term>, String> {
    let Some(applies) = applies else { return Ok(news) };
    let one = |(new, &old)| {
        let shape = s.shape(old).to_vec();
        let own: Vec<u32> = (0..shape.len() as u32).collect();
        let applies = s.product(&[(applies, vec![])], &own, &shape)?;
        Ok(s.apply(Select, &[applies, new, old], 0, &shape))
    };
    news.into_iter().zip(olds).map(one).collect()
}

fn missing(model: &Func) -> Gap {
    let lemma = "a value that nothing makes".into();
    Gap { op: "return".into(), place: format!("@{}", model.name), lemma }
}

/// A scalar of the step.
fn scalar(s: &mut Store, name: &str) -> Term {
    s.leaf(&Role::new(RoleKind::Scalar, name), &[], Mentions::default())
}

/// A tensor times a number.
fn times_number(s: &mut Store, t: Term, by: Term) -> Term {
    let shape = s.shape(t).to_vec();
    let own: Vec<u32> = (0..shape.len() as u32).collect();
    s.product(&[(t, own.clone()), (by, vec![])], &own, &shape).expect("a product with a number")
}

fn squared(s: &mut Store, g: Term) -> Term {
    let own: Vec<u32> = (0..s.shape(g).len() as u32).collect();
    s.product(&[(g, own.clone()), (g, own)], &[], &[]).expect("a tensor with itself")
}

/// Terms of all values of the model for a microbatch.
fn forward(w: &mut Whole, model: &Func) -> Result<Vec<Option<Term>>, Gap> {
    let mut values: Vec<Option<Term>> = vec![None; model.values.len()];
    for a in &model.args {
        let Some(role) = &a.role else { return Err(missing(model)) };
        let shape = model.ty(a.value).sizes();
        values[a.value.0 as usize] = Some(w.leaf(role, &shape, true));
    }
    let mesh = &w.texts.model.mesh;
    for (i, n) in model.nodes.iter().enumerate() {
        w.nodes += 1;
        w.s.here = Some(Origin { func: None, node: i as u32 });
        let ins: Option<Vec<Term>> = n.ins.iter().map(|v| values[v.0 as usize]).collect();
        let ins = ins.ok_or_else(|| missing(model))?;
        let types = |vs: &[Value]| -> Vec<_> { vs.iter().map(|&v| model.ty(v)).collect() };
        let [of, to] = [types(&n.ins), types(&n.outs)];
        let outs = meaning::apply(&mut w.s, mesh, &n.op, &ins, [&of, &to]).map_err(|lemma| {
            let text = shardc_ir::text::node_text(mesh, model, n).text;
            Gap { op: n.op.mnemonic().into(), place: format!("@{}: {text}", model.name), lemma }
        })?;
        for (v, t) in n.outs.iter().zip(outs) {
            values[v.0 as usize] = Some(t);
        }
    }
    w.s.here = None;
    Ok(values)
}

/// 1 / max(1, number of labels of the whole batch that are not negative), if the model has labels.
fn labels(w: &mut Whole, model: &Func, recipe: &Recipe) -> Option<Term> {
    let a = model.args.iter().find(|a| a.fills(Fill::Labels))?;
    let mut shape = model.ty(a.value).sizes().to_vec();
    if let Some(rows) = shape.first_mut().filter(|_| a.input().is_some_and(|i| i.batch)) {
        *rows = recipe.global_batch;
    }
    let all = w.leaf(a.role.as_ref()?, &shape, false);
    let valid = w.s.apply(AtLeast(Real::new(0.0)), &[all], 0, &shape);
    let own: Vec<u32> = (0..shape.len() as u32).collect();
    let count = w.s.product(&[(valid, own)], &[], &[]).expect("a sum of all elements");
    let bounds = Clamp::new(1.0, f64::INFINITY);
    let count = w.s.apply(bounds, &[count], 0, &[]);
    Some(w.s.reciprocal(count))
}
