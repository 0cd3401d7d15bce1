//! A plan's numbers by PyTorch and by shardc's own ranks, in the types of the plan.

use crate::commands::run::{self, Run, Start};
use crate::torch::start;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Func, RoleKind, inputs};
use shardc_ir::loss_scale::{LossScale, LossScaling, ScaleState};
use shardc_ir::plan::{Mode, Plan};
use shardc_ir::types::DType;
use shardc_plans::stored::Stored;
use shardc_runtime::{Session, StepBatch, StepResult};
use shardc_train::data::{Data, Picks};
use std::collections::BTreeMap;
use std::time::Duration;

/// Steps of training that are compared. Parameters are, by the losses and gradients of those behind: of an update alone
/// AdamW makes as much where a gradient is 0 but for rounding.
const STEPS: usize = 3;
/// Seed of weights and tokens.
const SEED: u64 = 17;

/// How far both are apart, relative to the size of what shardc's own ranks have.
pub struct Apart {
    pub name: &'static str,
    pub error: f64,
    pub tolerance: f64,
    pub worst: Option<String>,
}

/// What losses, gradient norms and, in f32, gradients may differ by: engines add in other orders. In f32 it is what the runtime
/// is held to against transformers. A number of bf16 has 8 bits and one of f16 11, and some ten roundings of activations
/// stand one behind the other; of what they make of a single gradient there is no bound where they change the choice of an
/// expert, so losses and the norm of all gradients are compared there.
fn tolerances(dtype: DType) -> (f64, f64, Option<f64>) {
    match dtype {
        DType::BF16 => (1e-2, 5e-2, None),
        DType::F16 => (2e-3, 2e-2, None),
        _f32 => (1e-5, 1e-5, Some(1e-4)),
    }
}

/// The coarsest numbers that a plan has: Muon iterates in bf16 also where the model computes in f32. Losses and gradients
/// behind an update are those of such numbers.
fn coarsest(plan: &Plan) -> DType {
    let types = |f: &Func| -> Vec<DType> { f.values.ids().map(|v| f.ty(v).dtype).collect() };
    let all: Vec<DType> = plan.module.funcs.iter().flat_map(types).collect();
    let has = |t: &DType| all.contains(t);
    [DType::BF16, DType::F16].into_iter().find(has).unwrap_or(DType::F32)
}

/// A scale of f16 at which gradients of random weights do not overflow.
const SCALE: LossScale = LossScale { scale: 1024.0, good: 0, left: 2 };
/// What a gradient's size is at least taken to be, of the norm of all: that of a key's bias is 0 but for rounding, as
/// softmax does not see it.
const LEAST: f64 = 1e-3;

/// Takes steps of a plan on both engines, with the same random weights and data.
///
/// # Errors
/// `torch`, `export` and those of the runs.
pub fn compare(stored: &Stored, timeout: Duration) -> Result<Vec<Apart>> {
    let s = &stored.plan.settings;
    if s.mode != Mode::Train {
        return Err(Diag::new("flag", "engines are compared by steps of training")
            .at("--engine torch")
            .help("give a plan that was compiled with --mode train"));
    }
    let (plan, begin) = (&stored.plan, Start::Random { seed: SEED });
    let mut own = run::session(plan, &begin, &Run::default())?;
    let (mut torch, processes) = start(stored, None, 1, timeout, &run::loads(plan, &begin))?;
    if matches!(s.loss_scaling, Some(LossScaling::Dynamic { .. })) {
        let scale = ScaleState { loss_scale: Some(SCALE), ..ScaleState::default() };
        own.go_on(scale);
        torch.go_on(scale);
    }
    let compared = both(stored, &mut own, &mut torch);
    drop(torch);
    compared.map_err(|d| processes.explained(d))
}

fn both(stored: &Stored, own: &mut Session, torch: &mut Session) -> Result<Vec<Apart>> {
    let s = &stored.plan.settings;
    let (table, data) = (inputs(&stored.plan.module), Data::Random { vocab: s.vocab.min(1 << 20) });
    let (dtype, updated) = (stored.options.dtype, coarsest(&stored.plan));
    let mut all: BTreeMap<&'static str, Apart> = BTreeMap::new();
    let mut add = |name: &'static str, of: &str, error: f64, tolerance: f64| {
        let known = all.entry(name).or_insert(Apart { name, error: 0.0, tolerance, worst: None });
        if error.is_nan() || error > known.error {
            (known.error, known.worst) = (error, (!of.is_empty()).then(|| of.to_string()));
        }
    };
    for step in 1..=STEPS {
        let columns = data.batch(&table, &Picks::random(SEED), step as u32, s.global_batch)?;
        let batch = StepBatch { columns, observe: true };
        let lr = stored.options.lr.at(step);
        let (a, b) = (own.step(&batch, lr, step)?, torch.step(&batch, lr, step)?);
        // Before the first update there are only the model's own numbers.
        let coarse = step > 1 && updated != dtype;
        let (loss, norm, tensor) = tolerances(if coarse { updated } else { dtype });
        let behind = |name, later| if coarse { later } else { name };
        // Of a step that overflows on both there are no numbers.
        if a.skipped && b.skipped {
            continue;
        }
        for (name, of, scalar) in [
            (behind("loss", "updated-loss"), (|r| r.loss) as fn(&StepResult) -> Option<f32>, loss),
            (behind("gradient-norm", "updated-gradient-norm"), |r| r.grad_norm, norm),
        ] {
            let (x, y) = (of(&a).map(f64::from), of(&b).map(f64::from));
            let error = x.zip(y).map_or(f64::INFINITY, |(x, y)| (x - y).abs() / x.abs().max(1e-30));
            add(name, "", if x.is_none() && y.is_none() { 0.0 } else { error }, scalar);
        }
        let shown = || a.outputs.iter().filter(|x| x.0.kind == RoleKind::GradShown);
        let all: f64 = shown().flat_map(|x| &x.1.data).map(|&x| f64::from(x).powi(2)).sum();
        for (role, x) in shown() {
            let y = b.outputs.get(role).map_or(&[][..], |y| &y.data);
            let error = apart(&x.data, y, LEAST * all.sqrt());
            tensor.iter().for_each(|&by| add("gradients", &role.name, error, by));
        }
    }
    Ok(all.into_values().collect())
}

/// The norm of a difference, by that of the first, which is at least so large.
fn apart(x: &[f32], y: &[f32], least: f64) -> f64 {
    if x.len() != y.len() {
        return f64::INFINITY;
    }
    let norm = |all: &mut dyn Iterator<Item = f64>| all.map(|x| x * x).sum::<f64>().sqrt();
    let of = norm(&mut x.iter().map(|&x| f64::from(x)));
    let off = norm(&mut x.iter().zip(y).map(|(&x, &y)| f64::from(x) - f64::from(y)));
    off / of.max(least).max(f64::MIN_POSITIVE)
}
