//! `shardc verify`: checks a plan by its types, by replay, and by its numbers against one rank.

use super::run::{Run, Start, session};
use super::show;
use crate::Output;
use crate::plan_dir::{self, Stored};
use serde::Serialize;
use serde_json::json;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::plan::{Mode, Plan};
use shardc_ir::types::DType;
use shardc_ir::weights::Weight;
use shardc_passes::memory::replay;
use shardc_passes::options::{Options, Order, ShardRule, TpMode};
use shardc_passes::pipeline::rank_classes;
use shardc_passes::step;
use shardc_runtime::StepBatch;
use std::path::Path;

/// The outcome of one check.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub ok: bool,
    pub max_error: f64,
    pub tolerance: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

/// Largest relative differences between two computations that only reassociate sums.
struct Tolerance {
    loss: f64,
    gradients: f64,
    logits: f64,
}

impl Tolerance {
    /// In f32, a few hundred roundings of 6e-8 each. In bf16 a rounding is up to 2^-8: whatever is
    /// behind a sum that was taken in another order is rounded anew, at random. PyTorch's gradients in
    /// bf16 are 3 to 8 times 2^-8 from its own in f32, tensor by tensor; a loss is a mean over tokens.
    fn of(dtype: DType) -> Tolerance {
        match dtype {
            DType::BF16 => {
                Tolerance { loss: 1.0 / 256.0, gradients: 1.0 / 16.0, logits: 1.0 / 32.0 }
            }
            _exact => Tolerance { loss: 1e-4, gradients: 1e-4, logits: 1e-4 },
        }
    }
}

/// Steps compared.
const STEPS: usize = 3;

/// Runs all checks; exit status 1 if one fails.
pub fn verify(dir: &Path, tiny: bool, as_json: bool) -> Result<i32> {
    // Reading verifies types, hashes and the peak; what it finds is a failed check, not an error.
    let (stored, types) = match plan_dir::read(dir) {
        Ok(s) => (Some(s), exact("types", None)),
        Err(d) if dir.join("plan.json").exists() => (None, exact("types", Some(d.to_string()))),
        Err(d) => return Err(d),
    };
    let mut checks = vec![types];
    if let Some(s) = stored {
        checks.push(exact("collective-order", order(&s.plan)));
        checks.push(exact("memory", replay::replay(&s.plan).err()));
        checks.extend(numbers(&s, tiny)?);
    }
    let ok = checks.iter().all(|c| c.ok);
    if as_json {
        show(format!("{}\n", json!({ "ok": ok, "checks": checks })));
    } else {
        for c in &checks {
            let word = if c.ok { "ok" } else { "FAILED" };
            let error = if c.tolerance > 0.0 {
                format!("  max error {:.1e}, tolerance {:.0e}", c.max_error, c.tolerance)
            } else {
                String::new()
            };
            show(format!("{:<18} {word}{error}\n", c.name));
            if let Some(d) = &c.detail {
                show(format!("{d}\n"));
            }
        }
    }
    Ok(i32::from(!ok))
}

fn exact(name: &'static str, problem: Option<String>) -> Check {
    let ok = problem.is_none();
    Check {
        name,
        ok,
        max_error: if ok { 0.0 } else { f64::INFINITY },
        tolerance: 0.0,
        detail: problem,
    }
}

/// All ranks of a class run one list, so every group within a stage meets the same collectives in the
/// same order. The lists of the classes come from one order of all actions, in which everything is
/// made before it is used: the replay finds it again, or says which actions wait for each other. Then
/// the lists are replayed against each other.
fn order(plan: &Plan) -> Option<String> {
    match rank_classes(&plan.module, &plan.schedule, plan.settings.mode) {
        Err(d) => Some(d.message),
        Ok(again) if again != plan.classes => {
            Some("the schedule gives other lists than the plan has".into())
        }
        Ok(_) => step::replay::replay(plan).err().map(|d| d.message),
    }
}

/// Losses of a few steps, and the gradients of the first, on the plan's ranks against one rank.
/// Parameters are not compared: AdamW divides by the size of a gradient, so where one is nearly zero
/// its rounding is all that is left. That they were stepped alike shows in the later losses.
fn numbers(s: &Stored, tiny: bool) -> Result<Vec<Check>> {
    let shrunk = if tiny { Some(shrink(s)?.stored) } else { None };
    let s = shrunk.as_ref().unwrap_or(s);
    let mut many = s.options.clone();
    // The limit is that of the plan: what it is compared with needs more.
    (many.observe, many.memory) = (true, None);
    let mut alone = many.clone();
    alone.mesh.clear();
    (alone.schedule, alone.chunks) = (Order::default(), None);
    (alone.layers, alone.speeds) = (String::new(), vec![]);
    (alone.sp, alone.microbatch) = (false, many.microbatch_rows());
    (alone.ep, alone.etp) = (1, None);
    alone.tp_mode = TpMode::OneD;
    alone.shard.clear();
    let one = run_steps(&crate::retarget(s, &alone)?.stored.plan, many.data_parallel())?;
    let many = run_steps(&crate::recompile(s, &many)?.stored.plan, 1)?;
    let bounds = Tolerance::of(s.options.dtype);
    let check = |name, max_error: f64, tolerance, detail| Check {
        name,
        ok: max_error <= tolerance,
        max_error,
        tolerance,
        detail,
    };
    if s.plan.settings.mode == Mode::Infer {
        let most = one.2.iter().fold(0.0f64, |m, x| larger(m, f64::from(x.abs())));
        let apart = |(a, b): (&f32, &f32)| f64::from((a - b).abs());
        let off = many.2.iter().zip(&one.2).map(apart).fold(0.0, larger) / most.max(1e-12);
        let off = if many.2.len() == one.2.len() { off } else { f64::INFINITY };
        return Ok(vec![check("logits", off, bounds.logits, None)]);
    }
    let relative = |(a, b): (&f64, &f64)| (a - b).abs() / b.abs().max(1e-12);
    let loss = many.0.iter().zip(&one.0).map(relative).fold(0.0, larger);
    // What is nearly 0 is measured by the size of its rounding errors: that of a key's bias is, since
    // softmax does not see it. In bf16 they grow with what else went into it.
    let norm = |it: &mut dyn Iterator<Item = f32>| it.map(|x| f64::from(x * x)).sum::<f64>().sqrt();
    let all: Vec<f32> = one.1.iter().flat_map(|g| g.1.iter().copied()).collect();
    let mean = norm(&mut all.iter().copied()) / (all.len().max(1) as f64).sqrt();
    let floor = if s.options.dtype == DType::BF16 { mean.max(1e-4) } else { 1e-4 };
    let mut worst = (0.0, "");
    for ((name, a), (_, b)) in many.1.iter().zip(&one.1) {
        let size = norm(&mut b.iter().copied()) + floor * (b.len() as f64).sqrt();
        let error = norm(&mut a.iter().zip(b).map(|(x, y)| x - y)) / size;
        if error.is_nan() || error > worst.0 {
            worst = (error, name);
        }
    }
    let detail = (worst.0 > bounds.gradients).then(|| format!("   worst: {}", worst.1));
    Ok(vec![
        check("loss", loss, bounds.loss, None),
        check("gradients", worst.0, bounds.gradients, detail),
    ])
}

/// The larger of two, or NaN: `f64::max` would forget it.
fn larger(a: f64, b: f64) -> f64 {
    if b.is_nan() || b > a { b } else { a }
}

/// Losses, gradients by parameter, logits of the first step.
type Numbers = (Vec<f64>, Vec<(String, Vec<f32>)>, Vec<f32>);

/// Runs a plan on batches whose rows are dealt as `owners` ranks have them.
fn run_steps(plan: &Plan, owners: usize) -> Result<Numbers> {
    let s = &plan.settings;
    let start = Start::Random { seed: s.seed };
    let mut session = session(plan, &start, &Run { timeout: 600, ..Run::default() })?;
    let data = crate::data::Data::Random { vocab: s.vocab.min(1 << 20) };
    let (mut losses, mut grads, mut logits) = (vec![], vec![], vec![]);
    let steps = if s.mode == Mode::Train { STEPS } else { 1 };
    for step in 1..=steps {
        let (ids, targets) = data.batch(s.seed, step as u32, s.global_batch, s.seq)?;
        let dealt = |rows: &[i32]| as_dealt(rows, s.seq, owners, s.microbatches);
        let (ids, targets) = match s.mode {
            Mode::Train => (dealt(&ids), dealt(&targets)),
            Mode::Infer => (ids, vec![]),
        };
        let batch = StepBatch { input_ids: &ids, targets: &targets, observe: step == 1 };
        let r = session.step(&batch, s.lr.at(step), step)?;
        losses.push(f64::from(r.loss.unwrap_or(f32::NAN)));
        if step == 1 {
            let found = |w: &Weight| {
                Some((w.param.clone(), r.outputs.get(&format!("grad.{}", w.param))?.data.clone()))
            };
            grads = plan.weights.iter().filter_map(found).collect();
            logits = r.outputs.get("logits").map(|a| a.data.clone()).unwrap_or_default();
        }
    }
    Ok((losses, grads, logits))
}

/// The rows of a batch in the order in which one rank has those in a microbatch that `owners` ranks have
/// in it: the auxiliary loss of experts is no sum over rows, but that of a microbatch.
fn as_dealt(rows: &[i32], seq: usize, owners: usize, microbatches: usize) -> Vec<i32> {
    let n = rows.len() / (owners * microbatches).max(1) / seq.max(1);
    let first = |j: usize| (0..owners).map(move |r| (r * microbatches + j) * n);
    let all = (0..microbatches).flat_map(first);
    all.flat_map(|row| &rows[row * seq..(row + n) * seq]).copied().collect()
}

/// The same family and layout with small sizes: two layers or one per stage, narrow, short.
fn shrink(s: &Stored) -> Result<Output> {
    let Some(f) = s.facts else {
        return Err(
            Diag::new("tiny", "a model from text has no sizes to shrink").help("leave --tiny out")
        );
    };
    let mut config = s.config.clone();
    let width = |n: usize| n.min(8);
    let layers = f.layers.min(s.plan.schedule.owner.len().max(2));
    let sizes: [(&str, usize); 12] = [
        ("num_hidden_layers", layers),
        ("n_layer", layers),
        ("hidden_size", f.heads * width(f.head_dim)),
        ("n_embd", f.heads * width(f.head_dim)),
        ("head_dim", width(f.head_dim)),
        ("intermediate_size", f.ffn.min(f.heads * 16)),
        ("n_inner", f.ffn.min(f.heads * 16)),
        ("vocab_size", f.vocab.min(512)),
        ("num_attention_heads", f.heads),
        ("n_head", f.heads),
        ("num_key_value_heads", f.kv_heads),
        ("max_window_layers", layers),
    ];
    if let Some(map) = config.as_object_mut() {
        for (k, n) in sizes {
            if map.get(k).is_some_and(|v| v.is_number()) {
                map.insert(k.into(), n.into());
            }
        }
        if let Some(types) = map.get_mut("layer_types").and_then(|t| t.as_array_mut()) {
            types.truncate(layers);
        }
    }
    let mut o = s.options.clone();
    o.memory = None;
    let tp = o.axis("tp");
    o.seq = o.seq.min(16 * tp * o.axis("cp"));
    o.layers.clear();
    // A schedule is for its number of microbatches.
    let microbatches = match o.schedule {
        Order::Named(_) if o.axis("pp") == 1 => o.microbatches().min(2),
        Order::Named(_) | Order::Csv(_) => o.microbatches(),
    };
    o.microbatch = o.tp_mode.side(tp).map_or(1, |q| o.tp_mode.rows(q));
    o.global_batch = o.data_parallel() * o.microbatch * microbatches;
    // What was said of layers that are no longer there is left out.
    let alone = |shard: Vec<ShardRule>, freeze: Vec<String>| Options { shard, freeze, ..o.clone() };
    let known = |p: &Options| match crate::compile_config(&config, p) {
        Err(d) => d.code != "unknown-tensor",
        Ok(_) => true,
    };
    let shard = o.shard.iter().filter(|r| known(&alone(vec![(*r).clone()], vec![]))).cloned();
    let freeze = o.freeze.iter().filter(|g| known(&alone(vec![], vec![(*g).clone()]))).cloned();
    let o = alone(shard.collect(), freeze.collect());
    crate::compile_config(&config, &o)
}
