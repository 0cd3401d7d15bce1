//! A model on one rank in f64: its graph before any pass, its gradients, and an optimizer of its own.
//!
//! The gradients are those of reverse mode over the graph by the rules of its ops, which the tests of
//! `ir` compare with finite differences. Nothing else is shared with the passes: neither what they
//! make of the graph, nor how they differentiate it, nor their optimizer.

use super::Batch;
use super::updates::Given;
use shardc_ir::builder::Builder;
use shardc_ir::diag::Result;
use shardc_ir::func::{Fill, Func, Name, Port, Role, RoleKind, StateName, Value, ValueMap};
use shardc_ir::interp::{Precision, call};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{Add, Cast};
use shardc_ir::plan::Mode;
use shardc_ir::source::Source;
use shardc_ir::tensor::Tensor;
use shardc_ir::text::update::KeptState;
use shardc_ir::types::Type;
use shardc_passes::globs;
use shardc_passes::optim::{Groups, groups};
use shardc_passes::options::Options;
use std::collections::{BTreeMap, BTreeSet};

/// What torch's `clip_grad_norm_` adds to the norm.
const CLIP_EPS: f64 = 1e-6;

/// A model that is trained, or run, on one rank.
pub struct Reference<'a> {
    source: &'a Source,
    o: &'a Options,
    /// The model, and behind its results the gradients of parameters.
    func: Func,
    /// Parameters that are not trained.
    frozen: BTreeSet<String>,
    /// Parameters whose gradients these are, in their order; `None` for those that are not trained.
    graded: Vec<Option<String>>,
    /// Values of parameters.
    pub params: BTreeMap<String, Tensor>,
    /// By what each trained parameter is updated.
    groups: Groups,
    /// What is kept of every trained parameter, in the order of its rule.
    pub states: BTreeMap<String, Vec<(StateName, Tensor)>>,
    /// How far parameters may be off in a step, where signs are those of rounding.
    pub slack: BTreeMap<String, f64>,
}

/// What a step found.
#[derive(Default)]
pub struct StepNumbers {
    pub loss: f64,
    pub grad_norm: f64,
    /// Outputs by name, without training: rows as the batch has them.
    pub outputs: BTreeMap<String, Tensor>,
}

impl StepNumbers {
    pub fn is_finite(&self) -> bool {
        let shown = self.outputs.values().flat_map(|t| &t.data);
        shown.chain([&self.loss, &self.grad_norm]).all(|x| x.is_finite())
    }
}

/// The name of a loss, if it is one.
fn loss_name(p: &Port) -> Option<&str> {
    p.role.as_ref().filter(|r| r.kind == RoleKind::Sum).map(|r| &*r.name)
}

/// Appends the gradients of the losses by every parameter, as results; whose they are. There is one
/// more argument for each loss: what its gradients are multiplied by.
fn reverse(f: &mut Func) -> Vec<Option<String>> {
    let mesh = Mesh::default();
    let mut cotangents: ValueMap<Option<Value>> = f.per_value(None);
    for r in f.results.clone() {
        let Some(name) = loss_name(&r) else { continue };
        let hint = name.to_string().into();
        let name = Name { grad: true, layer: None, hint, dup: 0 };
        cotangents[r.value] = Some(f.arg(Type::f32(&[]), name, None));
    }
    for i in (0..f.nodes.len()).rev() {
        let n = f.nodes[i].clone();
        let d: Vec<Option<Value>> = n.outs.iter().map(|o| cotangents[o]).collect();
        if d.iter().all(Option::is_none) {
            continue;
        }
        let mut b = Builder::new(&mesh, f);
        (b.scope, b.grad) = (n.scope, true);
        let grads = n.op.def().grad(&mut b, &n.ins, &n.outs, &d);
        for (&x, g) in n.ins.iter().zip(grads) {
            let Some(mut g) = g else { continue };
            let to = b.ty(x).dtype;
            if b.ty(g).dtype != to {
                g = b.push("cast", Cast { to }, &[g]);
            }
            let all = &mut cotangents[x];
            *all = Some(match *all {
                None => g,
                Some(others) => b.push("sum", Add::same(), &[others, g]),
            });
        }
    }
    let mut graded = vec![];
    for a in f.args.clone() {
        let Some(role) = a.role.filter(|r| r.kind == RoleKind::Param) else { continue };
        if let Some(value) = cotangents[a.value] {
            f.results.push(Port { value, role: None });
            graded.push(Some(role.name.to_string()));
        }
    }
    f.drop_dead();
    graded
}

impl<'a> Reference<'a> {
    /// A model with these parameters, whose optimizer has not done a step.
    pub fn new(source: &'a Source, o: &'a Options, params: BTreeMap<String, Tensor>) -> Self {
        let mut func = source.module.funcs[0].clone();
        let mut graded = if o.mode == Mode::Train { reverse(&mut func) } else { vec![] };
        // Globs that mean nothing were refused when the plan was compiled.
        let frozen = globs::frozen(&source.weights, o).unwrap_or_default();
        for p in &mut graded {
            *p = p.take().filter(|p| !frozen.contains(p));
        }
        let model = &source.module.funcs[0];
        let groups = match o.mode {
            Mode::Train => groups(model, &source.weights, &frozen, o).unwrap_or_default(),
            Mode::Infer => Groups::default(),
        };
        let mut states = BTreeMap::new();
        for p in graded.iter().flatten() {
            let shape = &params[p].shape;
            let kept = groups.of[p].kept(shape.len()).unwrap_or_default();
            let begin = |k: KeptState| {
                let shape: Vec<usize> =
                    k.dims.iter().filter_map(|&d| shape.get(d).copied()).collect();
                (k.name, Tensor::full(&shape, k.init))
            };
            states.insert(p.clone(), kept.into_iter().map(begin).collect());
        }
        let slack = BTreeMap::new();
        Reference { source, o, func, frozen, graded, params, groups, states, slack }
    }

    /// Whether anything in the model reads a parameter.
    pub fn reads(&self, param: &str) -> bool {
        let f = &self.source.module.funcs[0];
        let values = f.args.iter().filter(|a| a.is(RoleKind::Param, param)).map(|a| a.value);
        let read = |v: Value| {
            f.nodes.iter().any(|n| n.ins.contains(&v)) || f.results.iter().any(|r| r.value == v)
        };
        values.into_iter().any(read)
    }

    /// Elements of all values of a microbatch: no run holds more of them.
    pub fn elements(&self) -> f64 {
        self.func.values.iter().map(|v| v.ty.elements() as f64).sum()
    }

    /// Runs one step, the `step`-th from 1.
    ///
    /// # Errors
    /// Those of [`call`].
    pub fn step(&mut self, batch: &Batch, step: usize) -> Result<StepNumbers> {
        let m = self.o.microbatches();
        let (per_label, per_microbatch) = (1.0 / batch.labels.max(1) as f64, 1.0 / m as f64);
        let counts = self.func.args.iter().any(|a| a.fills(Fill::Labels));
        let share = |name: &str| if counts && name == "loss" { per_label } else { per_microbatch };
        let mut found = StepNumbers::default();
        let mut grads: BTreeMap<String, Tensor> = BTreeMap::new();
        let mut loads: BTreeMap<String, Tensor> = BTreeMap::new();
        let mut shown: BTreeMap<String, Vec<Tensor>> = BTreeMap::new();
        let add = |to: &mut BTreeMap<String, Tensor>, name: &str, t: &Tensor| match to.get_mut(name)
        {
            Some(sum) => *sum = sum.zip(t, |a, b| a + b),
            None => drop(to.insert(name.into(), t.clone())),
        };
        for j in 0..m {
            let made =
                call(&Mesh::default(), &self.func, &self.args(batch, j, share), Precision::F64)?;
            let plain = self.source.module.funcs[0].results.len();
            for (r, t) in self.func.results.iter().zip(&made[..plain]) {
                let (Some(role), t) = (&r.role, &t[0]) else { continue };
                match role.kind {
                    RoleKind::TokensPerExpert => add(&mut loads, &role.name, t),
                    RoleKind::Sum => found.loss += share(&role.name) * t.data[0],
                    _shown => shown.entry(role.name.to_string()).or_default().push(t.clone()),
                }
            }
            for (p, t) in self.graded.iter().zip(&made[plain..]) {
                if let Some(p) = p {
                    add(&mut grads, p, &t[0]);
                }
            }
        }
        if self.o.mode == Mode::Infer {
            let o = self.o;
            let whole = |(name, parts): (String, Vec<Tensor>)| {
                (name, joined(&parts, o.data_parallel(), o.microbatch_rows()))
            };
            found.outputs = shown.into_iter().map(whole).collect();
            return Ok(found);
        }
        let square = |t: &Tensor| t.data.iter().map(|x| x * x).sum::<f64>();
        found.grad_norm = grads.values().map(square).sum::<f64>().sqrt();
        self.update(&grads, found.grad_norm, step)?;
        for (name, load) in &loads {
            self.router_bias(name, load);
        }
        Ok(found)
    }

    /// The arguments of microbatch `j`.
    fn args(&self, batch: &Batch, j: usize, share: impl Fn(&str) -> f64) -> Vec<Vec<Tensor>> {
        let owners = self.o.data_parallel();
        let rows = |t: &Tensor| rows_of(t, j, self.o.microbatches(), owners);
        let input = |r: &Role| match (&batch.inputs[&*r.name], r.kind.input()) {
            (t, Some(own)) if own.batch => rows(t),
            (t, _all_share) => t.clone(),
        };
        let mut seeds = self.func.results.iter().filter_map(loss_name).map(share);
        let one = |a: &Port| match &a.role {
            Some(r) if r.kind == RoleKind::Param => self.params[&*r.name].clone(),
            Some(r) => input(r),
            None => Tensor::scalar(seeds.next().unwrap_or(1.0)),
        };
        self.func.args.iter().map(one).map(|t| vec![t]).collect()
    }

    /// Updates all parameters by clipped gradients.
    fn update(&mut self, grads: &BTreeMap<String, Tensor>, norm: f64, step: usize) -> Result<()> {
        let clip = self.o.clip.map_or(1.0, |max| (max / (norm + CLIP_EPS)).min(1.0));
        for (name, g) in grads {
            let u = &*self.groups.of[name];
            let own = self.states.get_mut(name).expect("it was made with the parameter");
            let states: Vec<Tensor> = own.iter().map(|s| s.1.clone()).collect();
            let given = Given {
                u,
                param: &self.params[name],
                grad: g.map(|g| g * clip),
                states: &states,
                lr: self.o.lr.at(step) * u.lr,
                step,
                grad_norm: norm,
            };
            let made = given.update()?;
            own.iter_mut().zip(made.states).for_each(|(old, new)| old.1 = new);
            self.slack.insert(name.clone(), made.slack);
            self.params.insert(name.clone(), made.param);
        }
        Ok(())
    }

    /// Moves a bias that only chooses experts towards an even load.
    fn router_bias(&mut self, name: &str, load: &Tensor) {
        let mean = load.data.iter().sum::<f64>() / load.data.len().max(1) as f64;
        let rate = self.o.balance.rate;
        let frozen = self.frozen.contains(name);
        if let Some(bias) = self.params.get_mut(name).filter(|_| !frozen && rate != 0.0) {
            let toward = |x: f64| if x == mean { 0.0 } else { (mean - x).signum() };
            *bias = bias.zip(load, |b, x| b + rate * toward(x));
        }
    }
}

/// The rows of microbatch `j` of `m`: of each owner's consecutive rows, the `j`-th part.
fn rows_of(t: &Tensor, j: usize, m: usize, owners: usize) -> Tensor {
    let mb = t.shape[0] / (m * owners).max(1);
    let parts: Vec<Tensor> = (0..owners).map(|r| t.slice(0, (r * m + j) * mb, mb)).collect();
    Tensor::concat(0, &parts.iter().collect::<Vec<_>>())
}

/// What microbatches of so many rows made of them, in the order of the batch; what has no rows is that of the last.
fn joined(parts: &[Tensor], owners: usize, rows: usize) -> Tensor {
    let last = &parts[parts.len() - 1];
    if parts.len() == 1 || last.shape.len() < 2 || last.shape[0] != rows {
        return last.clone();
    }
    let mb = last.shape[0] / owners.max(1);
    let all = (0..owners).flat_map(|r| parts.iter().map(move |p| p.slice(0, r * mb, mb)));
    let all: Vec<Tensor> = all.collect();
    Tensor::concat(0, &all.iter().collect::<Vec<_>>())
}
