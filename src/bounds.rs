//! Bounds of the numbers in a plan's files, whose hashes anybody can make: what reads a plan multiplies
//! them.

use serde_json::Value as Json;
use shardc_frontends::Facts;
use shardc_ir::func::{Module, RoleKind};
use shardc_ir::loss_scale::{LARGEST, LOSS_SCALE, LossScaling};
use shardc_ir::mesh::Mesh;
use shardc_ir::plan::{Dropout, LrSchedule, Settings};
use shardc_ir::types::{DType, MAX_ELEMENTS};
use shardc_ir::weights::Weight;
use shardc_passes::options::{Buffers, Optimizer, Options, TpMode};

/// Largest count.
const MOST: u64 = 1 << 31;
/// Numbers of options that count nothing that is multiplied.
const FREE: [&str; 5] = ["seed", "memory", "warmup", "total", "node"];

/// Numbers of `options.toml`: finite, counts within bounds, and those that a flag could have given.
///
/// # Errors
/// The first that is not.
pub fn numbers(o: &Options) -> Result<(), String> {
    // JSON has no numbers that are not finite: they come back as nothing.
    let json = serde_json::to_value(o).expect("options are plain data");
    let again: Option<Options> = serde_json::from_value(json.clone()).ok();
    if again.as_ref() != Some(o) {
        return Err("a number is not finite".into());
    }
    counts("", &json)?;
    match ranges(o).into_iter().find(|r| !r.1) {
        Some((key, _, rule)) => Err(format!("{key} is {}, and {rule}", json[key])),
        None => Ok(()),
    }
}

/// What flags refuse: a key, whether its value is one that a flag gives, and the rule.
fn ranges(o: &Options) -> [(&'static str, bool, &'static str); 17] {
    let not_zero = |n: Option<usize>| n != Some(0);
    let beta = |x: f64| (0.0..1.0).contains(&x);
    let factor = |x: f64| x > 0.0 && x <= 1e6;
    let float = |t: DType| [DType::F32, DType::BF16, DType::F16].contains(&t);
    let lr = |lr: f64| lr > 0.0 && (lr as f32).is_normal();
    let balance = [o.balance.aux.unwrap_or(0.0), o.balance.z, o.balance.rate];
    [
        (
            "dropout",
            !matches!(o.dropout, Dropout::Rate(p) if !(p > 0.0 && p < 1.0)),
            "a rate is above 0 and below 1",
        ),
        ("zero", o.zero <= 3, "it is 0, 1, 2 or 3"),
        ("node", not_zero(o.node), "a node has a rank"),
        ("ep", o.ep > 0, "it is not 0"),
        ("etp", not_zero(o.etp), "it is not 0"),
        ("chunks", not_zero(o.chunks), "it is not 0"),
        ("dtype", float(o.dtype), "it is f32, bf16 or f16"),
        ("grad_dtype", [DType::F32, o.dtype].contains(&o.grad_dtype), "it is f32 or dtype"),
        ("clip", o.clip.is_none_or(|x| x > 0.0), "it is above 0"),
        ("weight_decay", o.weight_decay >= 0.0, "it is not below 0"),
        ("balance", balance.iter().all(|&x| x >= 0.0), "none is below 0"),
        ("speeds", o.speeds.iter().all(|&x| x > 0.0), "each is above 0"),
        ("hardware", o.hardware.clone().checked().is_ok(), "its speeds are above 0"),
        ("tp_mode", o.tp_mode != TpMode::TwoAndHalfD { depth: 0 }, "a grid is not 0 deep"),
        (
            "moe",
            match o.moe {
                Buffers::Worst => true,
                Buffers::Bound(x) | Buffers::Capacity(x) => factor(x),
            },
            "a factor is above 0, and at most 1e6",
        ),
        (
            "optimizer",
            match o.optimizer {
                Optimizer::AdamW { beta1, beta2, eps } => beta(beta1) && beta(beta2) && eps > 0.0,
                Optimizer::Sgd => true,
            },
            "betas are in 0..1, eps is above 0",
        ),
        (
            "lr",
            match o.lr {
                LrSchedule::Constant { lr: x } => lr(x),
                LrSchedule::WarmupCosine { lr: x, warmup, total, floor } => {
                    lr(x) && floor >= 0.0 && floor <= x && warmup < total
                }
            },
            "it is above 0 and falls, after a warmup that ends before it does",
        ),
    ]
}

fn counts(key: &str, value: &Json) -> Result<(), String> {
    match value {
        Json::Array(all) => all.iter().try_for_each(|v| counts(key, v)),
        Json::Object(all) => all.iter().try_for_each(|(k, v)| counts(k, v)),
        Json::Number(n) if !FREE.contains(&key) && n.as_u64().is_some_and(|n| n > MOST) => {
            Err(format!("{key} is {n}, more than {MOST}"))
        }
        _plain => Ok(()),
    }
}

/// How the loss is scaled, against the programs: those that take a scale have one.
///
/// # Errors
/// What cannot be.
pub fn scaling(s: &Settings, m: &Module) -> Result<(), String> {
    let takes = m.funcs.iter().flat_map(|f| &f.args).any(|a| a.is(RoleKind::Scalar, LOSS_SCALE));
    match s.loss_scaling {
        None if takes => Err("the programs scale a loss, the settings do not say how".into()),
        Some(_) if !takes => Err("the settings scale a loss, and no program does".into()),
        Some(how) if !is_scaling(how) => Err(format!("a loss cannot be scaled so: {how:?}")),
        _alike => Ok(()),
    }
}

/// True if the scales are positive numbers and the counts are not 0.
fn is_scaling(how: LossScaling) -> bool {
    let is_scale = |x: f32| x > 0.0 && x <= LARGEST;
    match how {
        LossScaling::Constant { scale } => is_scale(scale),
        LossScaling::Dynamic { initial, min, window, hysteresis } => {
            is_scale(initial) && is_scale(min) && min <= initial && window > 0 && hysteresis > 0
        }
    }
}

/// Options against the settings and the mesh of the plan that was made with them.
///
/// # Errors
/// What differs.
pub fn agree(o: &Options, s: &Settings, mesh: &Mesh) -> Result<(), String> {
    let axes: Vec<(&str, usize)> = o.mesh.iter().map(|(n, size)| (n.as_str(), *size)).collect();
    let own = Mesh::new(&axes).map_err(|d| d.message)?;
    let ranks = |m: &Mesh| m.axes.iter().map(|a| (a.name.clone(), a.size)).collect::<Vec<_>>();
    if ranks(&own) != ranks(mesh) {
        return Err(format!("mesh is {:?}, the programs have {:?}", ranks(&own), ranks(mesh)));
    }
    if o.microbatch == 0 {
        return Err("microbatch is 0".into());
    }
    let pairs = [
        ("global_batch", o.global_batch, s.global_batch),
        ("seq", o.seq, s.seq),
        ("microbatches", o.microbatches(), s.microbatches),
    ];
    match pairs.into_iter().find(|p| p.1 != p.2) {
        Some((name, a, b)) => Err(format!("{name} is {a}, in plan.json {b}")),
        None => Ok(()),
    }
}

/// Shapes of `weights.json`: their elements can be counted.
///
/// # Errors
/// The first that is too large.
pub fn weights(all: &[Weight]) -> Result<(), String> {
    let mut sum = 0;
    for w in all {
        let size = |shape: &[usize]| {
            let n = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
            n.filter(|&n| n <= MAX_ELEMENTS)
        };
        let n = size(&w.shape).filter(|_| size(&w.tensor_shape).is_some());
        sum += n.ok_or_else(|| format!("`{}` has too large a shape", w.param))?;
        let few = w.experts.is_none_or(|n| w.shape.first() == Some(&n));
        if sum > MAX_ELEMENTS || !few {
            return Err(format!("`{}` has too large a shape", w.param));
        }
    }
    Ok(())
}

/// Numbers of a model.
///
/// # Errors
/// The first that is too large.
pub fn facts(f: &Facts) -> Result<(), String> {
    let of_experts = f.experts.map_or([0; 4], |x| [x.experts, x.top_k, x.ffn, x.shared]);
    let own = [f.layers, f.hidden, f.heads, f.kv_heads, f.head_dim, f.ffn, f.vocab];
    let all = own.into_iter().chain(of_experts);
    match all.into_iter().find(|&n| n > 1 << 40) {
        Some(n) => Err(format!("facts: {n} is too large")),
        None => Ok(()),
    }
}
