//! Bounds of the numbers in a plan's files, whose hashes anybody can make: what reads a plan multiplies
//! them.

use crate::flags::spec::keys;
use serde_json::Value as Json;
use shardc_frontends::Facts;
use shardc_ir::func::{Module, RoleKind};
use shardc_ir::loss_scale::{LARGEST, LOSS_SCALE, LossScaling};
use shardc_ir::mesh::Mesh;
use shardc_ir::plan::Settings;
use shardc_ir::types::MAX_ELEMENTS;
use shardc_ir::weights::Weight;
use shardc_passes::options::Options;

/// Largest count.
const MOST: u64 = 1 << 31;
/// Numbers of options that count nothing that is multiplied.
const FREE: [&str; 6] = ["seed", "memory", "warmup", "total", "decay", "node"];

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
    for key in keys() {
        if let Some((_, rule)) = key.range.filter(|(is, _)| !is(o)) {
            return Err(format!("{} is {}, and {rule}", key.name, json[key.name]));
        }
    }
    Ok(())
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
    let of_experts =
        f.experts.map_or([0; 5], |x| [x.experts, x.top_k, x.ffn, x.shared, x.narrow.unwrap_or(0)]);
    let own = [f.layers, f.hidden, f.heads, f.kv_heads, f.head_dim, f.ffn, f.vocab];
    let all = own.into_iter().chain(of_experts);
    match all.into_iter().find(|&n| n > 1 << 40) {
        Some(n) => Err(format!("facts: {n} is too large")),
        None => Ok(()),
    }
}
