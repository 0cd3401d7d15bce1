//! The numbers of a stored plan: the interpreter runs all ranks of its programs in f64, and a
//! [`Reference`] runs its `model.ir` on one rank. Both begin with the same random values of the
//! checkpoint's tensors, each by what it knows of them.

mod reference;
mod updates;

pub use reference::{Reference, StepNumbers};

use crate::search::price::flops;
use shardc_ir::diag::{Diag, Result, bytes};
use shardc_ir::documents::{Documents, PADDING, Places, ahead, histogram};
use shardc_ir::func::{Fill, InputRow, Port, Role, RoleKind, StateInit, StateName, inputs};
use shardc_ir::interp::{Precision, StepState, gather, run_step};
use shardc_ir::loss_scale::LOSS_SCALE;
use shardc_ir::plan::{Instr, Mode, TokenOrder};
use shardc_ir::rng::Stream;
use shardc_ir::source::Source;
use shardc_ir::tensor::{Tensor, each_index};
use shardc_ir::types::Type;
use shardc_ir::weights::{Init, Weight};
use shardc_passes::experts::laid_out;
use shardc_passes::options::{Buffers, Optimizer, Options};
use shardc_passes::pipeline::computed;
use shardc_plans::stored::Stored;
use shardc_runtime::{Columns, Numbers};
use shardc_train::data::{Data, Picks};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Steps of training that are compared: the second begins with what the first has made.
const STEPS: usize = 2;
/// Largest relative difference of numbers that only reassociate sums in f64, where AdamW divides by
/// the square root of a square of them.
pub const TOLERANCE: f64 = 1e-6;
/// What a size is at least taken to be: differences below `TOLERANCE * FLOOR` (1e-15) are those of
/// rounding in f64 of values around 1. A gradient that is 0 in exact arithmetic is nothing else.
const FLOOR: f64 = 1e-9;
/// Most bytes that are held, and most operations that are done: some minutes of the interpreter.
const MOST_BYTES: f64 = (8u64 << 30) as f64;
const MOST_OPERATIONS: f64 = 3e10;
/// Seed of the tensors and tokens that both are given.
const SEED: u64 = 17;

/// How far two computations of one thing are apart, relative to its size.
#[derive(Clone, Debug)]
pub struct Difference {
    pub name: &'static str,
    pub error: f64,
    /// Where it is largest.
    pub worst: Option<String>,
}

/// Inputs of a step by name, whole, their tokens in the order in which ranks hold them.
pub struct Batch {
    pub inputs: BTreeMap<Arc<str>, Tensor>,
    /// How many labels count; of a model without labels none.
    pub labels: usize,
}

/// Compares a stored plan with its model.
///
/// # Errors
/// `numbers-too-large` if the interpreter would take too long or too much memory; those of reading
/// the model and of running the programs.
pub fn compare(s: &Stored) -> Result<Vec<Difference>> {
    let o = &s.options;
    let source = computed(shardc_plans::again::model_of(s)?, o)?;
    // A capacity drops by shards: those of the mesh.
    let source = match o.moe {
        Buffers::Capacity(_) => laid_out(source, o)?,
        Buffers::Worst | Buffers::Bound(_) => source,
    };
    let one = |w: &Weight| Ok((w.param.clone(), given(w)?));
    let shapes = source.weights.iter().map(|w| (w.param.clone(), Tensor::full(&[0], 0.0)));
    affordable(s, &source, &Reference::new(&source, o, shapes.collect()))?;
    let params: BTreeMap<String, Tensor> = source.weights.iter().map(one).collect::<Result<_>>()?;
    let before = params.clone();
    let mut alone = Reference::new(&source, o, params);
    let mut ranks = Ranks::new(s)?;
    let mut all = Differences::default();
    let steps = if o.mode == Mode::Train { STEPS } else { 1 };
    for step in 1..=steps {
        let batch = batch(s, &source, step)?;
        let want = alone.step(&batch, step)?;
        let got = ranks.step(&batch, step)?;
        if matches!(o.moe, Buffers::Bound(_)) && !got.is_finite() && want.is_finite() {
            return Err(too_few_rows());
        }
        if o.mode == Mode::Infer {
            for (name, want) in &want.outputs {
                let size = norm(want) + FLOOR * (want.data.len() as f64).sqrt();
                all.add("outputs", name, got.outputs.get(name), want, size);
            }
            continue;
        }
        let scalar = Tensor::scalar;
        let size = want.loss.abs() + FLOOR;
        all.add("loss", "", Some(&scalar(got.loss)), &scalar(want.loss), size);
        let (a, b) = (scalar(got.grad_norm), scalar(want.grad_norm));
        all.add("gradient-norm", "", Some(&a), &b, want.grad_norm.abs() + FLOOR);
        states(&mut all, &alone, &ranks)?;
        updates(&mut all, &alone, &before, &ranks, least_update(o, step))?;
    }
    Ok(all.0)
}

/// A copy without room has no place, which the interpreter calls NaN.
fn too_few_rows() -> Diag {
    Diag::new("moe-bound", "random tokens need more rows of experts' buffers than --moe-bound gives")
        .rule("the copies of a shard's tokens for a group of experts fit its rows")
        .help("compile with a larger --moe-bound to compare numbers; as many as there are groups of experts hold any load")
}

/// What updates keep. A mean of gradients is called so; what is kept of their squares is as small as those.
fn states(all: &mut Differences, alone: &Reference, ranks: &Ranks) -> Result<()> {
    let means =
        |s: StateName| !["exp_avg_sq", "row_var", "col_var", "variance"].contains(&s.name());
    let names: BTreeSet<StateName> = alone.states.values().flatten().map(|s| s.0).collect();
    for state in names {
        let own = |s: &&(StateName, Tensor)| s.0 == state;
        let found = || alone.states.values().flatten().filter(own);
        let of_all = found().map(|s| norm(&s.1).powi(2)).sum::<f64>().sqrt();
        let count = found().map(|s| s.1.data.len()).sum::<usize>();
        let mean = of_all / (count.max(1) as f64).sqrt();
        let is_mean = means(state);
        for (name, kept) in &alone.states {
            let Some((_, want)) = kept.iter().find(own) else { continue };
            let got = ranks.value(&Role::new(RoleKind::State(state), name.as_str()))?;
            // What is 0 but for rounding is measured by that of the others, as a key's bias is, which
            // softmax does not see.
            let floor = FLOOR.powi(if is_mean { 1 } else { 2 });
            let size = norm(want) + (1e-3 * mean + floor) * (want.data.len() as f64).sqrt();
            all.add(if is_mean { "gradients" } else { "moments" }, name, got.as_ref(), want, size);
        }
    }
    Ok(())
}

/// What the size of an update is at least taken to be. AdamW divides a gradient by its own size or by
/// epsilon, so that what rounding leaves of a gradient of 0 may be an update of `1e-15 / eps` times
/// the learning rate, or of all of it.
fn least_update(o: &Options, step: usize) -> f64 {
    let of_rounding = match o.optimizer {
        Optimizer::AdamW { eps, .. } => (TOLERANCE * FLOOR / eps).clamp(1e-9, TOLERANCE),
        Optimizer::Sgd => 1e-9,
    };
    o.lr.at(step).abs() * of_rounding / TOLERANCE
}

/// Parameters, by how far they have moved.
fn updates(
    all: &mut Differences,
    alone: &Reference,
    before: &BTreeMap<String, Tensor>,
    ranks: &Ranks,
    least_update: f64,
) -> Result<()> {
    for (name, want) in &alone.params {
        let Some(got) = ranks.value(&Role::new(RoleKind::Param, name.as_str()))? else {
            if alone.reads(name) {
                all.add("parameters", name, None, want, norm(want));
            }
            continue; // nothing reads it, so no rank has it
        };
        let moved = norm(&want.zip(&before[name], |a, b| a - b));
        let floor = least_update + FLOOR;
        let slack = alone.slack.get(name).copied().unwrap_or(0.0) / TOLERANCE;
        let size = moved + floor * (want.data.len() as f64).sqrt() + slack;
        all.add("parameters", name, Some(&got), want, size);
    }
    Ok(())
}

fn norm(t: &Tensor) -> f64 {
    t.data.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// The largest differences found, by name.
#[derive(Default)]
struct Differences(Vec<Difference>);

impl Differences {
    fn add(
        &mut self,
        name: &'static str,
        of: &str,
        got: Option<&Tensor>,
        want: &Tensor,
        size: f64,
    ) {
        let apart = got.filter(|g| g.shape == want.shape).map(|g| g.zip(want, |a, b| a - b));
        let error = apart.map_or(f64::INFINITY, |d| norm(&d) / size.max(1e-30));
        let at = match self.0.iter().position(|d| d.name == name) {
            Some(i) => i,
            None => {
                self.0.push(Difference { name, error: 0.0, worst: None });
                self.0.len() - 1
            }
        };
        let known = &mut self.0[at];
        if error.is_nan() || error > known.error {
            known.error = error;
            known.worst = (!of.is_empty()).then(|| of.to_string());
        }
    }
}

/// What a parameter begins with: values of the checkpoint's tensors, which have their own by name.
/// Those that would be 1 or 0 are near it, so that none stands for another.
fn given(w: &Weight) -> Result<Tensor> {
    let (mean, deviation) = match w.init {
        Init::Normal(d) => (0.0, d),
        Init::Uniform(bound) => (0.0, bound),
        Init::LogOfUniform(bound) => ((bound / 2.0).ln(), 0.1),
        Init::Ones => (1.0, 0.1),
        Init::Zeros => (0.0, 0.1),
    };
    let wrong = |what: &str| {
        Diag::new("plan", format!("weights.json: `{}` {what}", w.param))
            .help("recompile the plan with shardc compile")
    };
    let own = usize::from(w.is_stacked());
    let shape = w.shape.get(own..).ok_or_else(|| wrong("is not a stack"))?;
    let inside = |(d, (&n, &all)): (usize, (&usize, &usize))| match w.part.filter(|p| p.dim == d) {
        Some(p) => p.len == n && p.place(&(0..n)).is_some_and(|at| at.end <= all),
        None => n == all,
    };
    let fits = shape.len() == w.tensor_shape.len()
        && shape.iter().zip(&w.tensor_shape).enumerate().all(inside)
        && w.experts.is_none_or(|n| n == w.shape[0]);
    if !fits {
        return Err(wrong("does not fit its tensor"));
    }
    let mut data = Vec::with_capacity(w.shape.iter().product());
    for name in w.tensors() {
        let stream = Stream::new(SEED, &name, 0);
        each_index(shape, |i| {
            let at = i.iter().zip(&w.tensor_shape).enumerate().fold(0, |at, (d, (&x, &n))| {
                at * n + w.part.filter(|p| p.dim == d).map_or(x, |p| p.start + x * p.step)
            });
            data.push(mean + deviation * stream.normal(at as u64));
        });
    }
    Ok(Tensor::new(&w.shape, data))
}

/// Random numbers as the ranks hold them.
fn batch(s: &Stored, source: &Source, step: usize) -> Result<Batch> {
    let (o, mut labels) = (&s.options, 0);
    let data = Data::Random { vocab: source.vocab.min(1 << 20) };
    let table = inputs(&source.module);
    let mut numbers = data.batch(&table, &Picks::random(SEED), step as u32, o.global_batch)?;
    let places = o.documents.map(|d| documents(d, &table, o.seq, &mut numbers));
    for (fill, of) in [(Fill::Ahead, Fill::Tokens), (Fill::LabelsAhead, Fill::Labels)] {
        let named = |fill| table.iter().find(|r: &&InputRow| r.input.fill == fill);
        let Some((row, of)) = named(fill).zip(named(of)) else { continue };
        let Some(Numbers::I32(of)) = numbers.get(&*of.name) else { continue };
        let all = ahead(of, places.as_ref(), row.sizes.last().copied().unwrap_or(0), o.seq);
        numbers.insert(row.name.to_string(), Numbers::I32(all));
    }
    let mut places = places.unwrap_or(Places { segments: vec![], offsets: vec![] });
    let count = Documents::count(&places.segments, o.microbatches());
    let scored = |depths: usize| {
        let name = table.iter().find(|r| r.input.fill == Fill::LabelsAhead).map(|r| &*r.name);
        let Some(Numbers::I32(ahead)) = name.and_then(|n| numbers.get(n)) else { return vec![] };
        Documents::scored(ahead, depths, o.microbatches())
    };
    let counts = |fill: Fill| table.iter().find(|r| r.input.fill == fill).map(|r| r.elements());
    let classes = |n: usize| {
        let name = table.iter().find(|r| r.input.fill == Fill::Labels).map(|r| &*r.name);
        match name.and_then(|name| numbers.get(name)) {
            Some(Numbers::I32(labels)) => histogram(labels, n, o.microbatches()),
            _none => vec![0.0; n],
        }
    };
    let histograms = table.iter().filter(|r| r.input.fill == Fill::Histogram);
    let histograms: BTreeMap<_, _> =
        histograms.map(|r| (r.name.to_string(), classes(r.elements()))).collect();
    let scored = scored(counts(Fill::Scored).unwrap_or(0));
    let order: TokenOrder = o.tokens();
    let mut all = BTreeMap::new();
    for row in table {
        let own = row.input;
        let rows = own.batch.then_some(o.global_batch);
        let shape: Vec<usize> = rows.into_iter().chain(row.sizes.iter().copied()).collect();
        let token = |i: &[usize]| own.tokens().map_or(0, |d| order.position(o.seq, i[d]));
        let t = match own.fill {
            Fill::Positions => Tensor::from_fn(&shape, |i| token(i) as f64),
            Fill::Places => Tensor::from_fn(&shape, |i| (i[0] * o.seq + token(i)) as f64),
            // Of any two neighbours one is a token, and the first is.
            Fill::Mask => {
                let is = |i: &[usize]| token(i) == 0 || (i[0] + token(i)) % 3 != 0;
                Tensor::from_fn(&shape, |i| f64::from(u8::from(is(i))))
            }
            Fill::Count => Tensor::new(&shape, vec![count]),
            Fill::Scored => Tensor::new(&shape, scored.clone()),
            Fill::Histogram => Tensor::new(&shape, histograms[&*row.name].clone()),
            Fill::Run => {
                let run = [o.seed as u32, (o.seed >> 32) as u32, step as u32];
                Tensor::new(&shape, run.map(f64::from).to_vec())
            }
            _given => {
                let given = match own.fill {
                    Fill::Segments => Some(Numbers::I32(std::mem::take(&mut places.segments))),
                    Fill::Offsets => Some(Numbers::I32(std::mem::take(&mut places.offsets))),
                    _data => numbers.remove(&*row.name),
                };
                let numbers: Vec<f64> = match given {
                    Some(Numbers::I32(x)) => x.into_iter().map(f64::from).collect(),
                    Some(Numbers::F32(x)) => x.into_iter().map(f64::from).collect(),
                    None => vec![],
                };
                let whole = Tensor::new(&shape, numbers);
                Tensor::from_fn(&shape, |i| {
                    let mut at = i.to_vec();
                    own.tokens().into_iter().for_each(|d| at[d] = token(i));
                    whole.at(&at)
                })
            }
        };
        if own.fill == Fill::Labels {
            labels = t.data.iter().filter(|t| **t >= 0.0).count();
        }
        all.insert(row.name.text().clone(), t);
    }
    Ok(Batch { inputs: all, labels })
}

/// Ends documents here and there, and pads; segments and offsets of tokens, and labels that are scored.
fn documents(d: Documents, table: &[InputRow], seq: usize, all: &mut Columns) -> Places {
    let name = |fill| table.iter().find(|r| r.input.fill == fill).map(|r| &*r.name);
    let mut tokens = match name(Fill::Tokens).and_then(|n| all.remove(n)) {
        Some(Numbers::I32(x)) => x,
        _none => return Places { segments: vec![], offsets: vec![] },
    };
    let mut given: Vec<i32> = (0..tokens.len()).map(|i| ((i + 3) / 7) as i32).collect();
    for i in (0..tokens.len()).filter(|i| i % 7 == 3) {
        tokens[i] = d.tokens().next().unwrap_or(tokens[i]);
    }
    for i in (8..tokens.len()).step_by(11) {
        tokens[i] = d.tokens().nth(1).unwrap_or(tokens[i]);
        given[i] = PADDING;
    }
    let labels = match name(Fill::Labels).and_then(|n| all.get_mut(n)) {
        Some(Numbers::I32(labels)) => Some(&mut labels[..]),
        _none => None,
    };
    let places = d.places(&tokens, Some(&given), labels, seq);
    if let Some(name) = name(Fill::Tokens) {
        all.insert(name.to_string(), Numbers::I32(tokens));
    }
    places
}

/// Refuses what the interpreter cannot do in minutes.
fn affordable(s: &Stored, source: &Source, alone: &Reference) -> Result<()> {
    let plan = &s.plan;
    let ranks = plan.module.mesh.ranks() as f64;
    // Numbers have 8 bytes, and arguments of a call are copies.
    let widest = |t: &Type| 8 / t.dtype.bytes().max(1);
    let args = plan.module.funcs.iter().flat_map(|f| f.args.iter().map(|a| f.ty(a.value)));
    let wider = args.map(widest).max().unwrap_or(2) as f64;
    let params: usize = source.weights.iter().map(|w| w.shape.iter().product::<usize>()).sum();
    let held = ranks * plan.peak_bytes() as f64 * wider * 2.0
        + (alone.elements() + 8.0 * params as f64) * 8.0;
    let steps = if plan.settings.mode == Mode::Train { STEPS as f64 } else { 1.0 };
    let operations = steps * 2.0 * flops(plan) * ranks / plan.classes.len().max(1) as f64;
    if held <= MOST_BYTES && operations <= MOST_OPERATIONS {
        return Ok(());
    }
    let what = format!(
        "the interpreter would hold {} and do {operations:.1e} operations",
        bytes(held as usize)
    );
    Err(Diag::new("numbers-too-large", what)
        .at("--numbers")
        .rule(format!(
            "at most {} and {MOST_OPERATIONS:.0e} operations",
            bytes(MOST_BYTES as usize)
        ))
        .help("use --tiny in place of --numbers: a smaller model on the same mesh, compiled alike"))
}

/// All ranks of a plan in the interpreter.
struct Ranks<'a> {
    s: &'a Stored,
    state: StepState,
}

impl<'a> Ranks<'a> {
    /// Ranks with the parameters that weights.json describes, and an optimizer that has done no step.
    fn new(s: &'a Stored) -> Result<Ranks<'a>> {
        let m = &s.plan.module;
        let mut state = StepState::default();
        let args = m.funcs.iter().flat_map(|f| f.args.iter().map(move |a| (f.ty(a.value), a)));
        for (ty, a) in args {
            let Some(role) = &a.role else { continue };
            let weight = |name: &str| {
                let of = s.plan.weights.iter().find(|w| w.param == *name);
                let of = of.filter(|w| w.shape[..] == ty.sizes()[..]);
                given(of.ok_or_else(|| {
                    let what = format!("weights.json does not describe `{name}`");
                    Diag::new("plan", what).help("recompile the plan with shardc compile")
                })?)
            };
            let whole = match role.kind {
                RoleKind::Param => weight(&role.name)?,
                RoleKind::State(name) => match m.state(name).map(|s| s.init) {
                    Some(StateInit::Number(x)) => Tensor::full(&ty.sizes(), x),
                    _of_a_file => weight(&role.name)?,
                },
                _ => continue,
            };
            state.put(&m.mesh, role.clone(), ty, &whole);
        }
        Ok(Ranks { s, state })
    }

    fn step(&mut self, batch: &Batch, step: usize) -> Result<StepNumbers> {
        let (plan, state) = (&self.s.plan, &mut self.state);
        let m = &plan.module;
        state.inputs.clone_from(&batch.inputs);
        state.outputs.clear();
        let all = m.funcs.iter().flat_map(|f| f.args.iter().map(move |a| (f.ty(a.value), a)));
        let scale = plan.settings.loss_scaling.map_or(1.0, |how| f64::from(how.initial()));
        let lr = plan.settings.lr.at(step);
        for (name, x) in [("lr", lr), ("step", step as f64), (LOSS_SCALE, scale)] {
            let role = Role::new(RoleKind::Scalar, name);
            let is = |x: &(&Type, &Port)| x.1.role.as_ref() == Some(&role);
            if let Some((ty, _)) = all.clone().find(is) {
                state.put(&m.mesh, role, ty, &Tensor::scalar(x));
            }
        }
        let lists: Vec<&[Instr]> = plan.classes.iter().map(|c| &c.step[..]).collect();
        run_step(m, &lists, state, Precision::F64)?;
        let mut found = StepNumbers::default();
        for role in state.outputs.keys().cloned().collect::<Vec<_>>() {
            let t = state.output(&m.mesh, role.kind, &role.name)?;
            match (role.kind, &*role.name) {
                (RoleKind::Metric, "loss") => found.loss = t.data[0],
                (RoleKind::Metric, "grad_norm") => found.grad_norm = t.data[0],
                (RoleKind::Output, name) => drop(found.outputs.insert(name.into(), t)),
                _other => {}
            }
        }
        Ok(found)
    }

    /// The whole value of a parameter or of optimizer state; `None` if no rank has it.
    fn value(&self, role: &Role) -> Result<Option<Tensor>> {
        let m = &self.s.plan.module;
        let mut all = m.funcs.iter().flat_map(|f| f.args.iter().map(move |a| (f.ty(a.value), a)));
        let Some((ty, _)) = all.find(|x| x.1.role.as_ref() == Some(role)) else { return Ok(None) };
        let Some(ranks) = self.state.values.get(role) else { return Ok(None) };
        gather(&m.mesh.one_stage(), ty, ranks).map(Some)
    }
}
