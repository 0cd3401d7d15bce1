//! `shardc verify`: whether a plan is what its model compiles to, fits together, and computes the
//! model's numbers.

use super::engines;
use super::run::{Engine, observed};
use super::show;
use serde::Serialize;
use serde_json::json;
use shardc_compiler::numbers::{self, TOLERANCE};
use shardc_compiler::{Output, as_made};
use shardc_ir::diag::{Diag, Exit, Result, one_line};
use shardc_ir::plan::Plan;
use shardc_ir::schedule::write_csv;
use shardc_ir::text;
use shardc_passes::classes::rank_classes;
use shardc_passes::memory::replay;
use shardc_passes::options::{Options, Order, ShardRule};
use shardc_passes::step;
use shardc_plans::input::PROGRAMS;
use shardc_plans::plan_dir::{self, Timeless};
use shardc_plans::stored::Stored;
use shardc_process::terminal::{doing, json_line};
use shardc_report::proof;
use std::path::Path;
use std::time::Duration;

/// What is checked beside the text of a plan.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
#[group(skip)]
pub struct Verify {
    /// torch: take three steps on random weights and tokens on shardc's own ranks and on PyTorch's, and compare losses
    /// and gradients
    #[arg(long, value_enum, conflicts_with = "tiny")]
    pub engine: Option<Engine>,
    /// Execute all ranks of the plan's programs in f64, and compare with its model.ir on one rank
    #[arg(long)]
    pub numbers: bool,
    /// The same with a smaller model, compiled with the same options: it does not check this plan itself
    #[arg(long, conflicts_with = "numbers")]
    pub tiny: bool,
}

/// The outcome of one check.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    pub name: String,
    pub ok: bool,
    pub max_error: f64,
    pub tolerance: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

/// Runs the command; exit status 1 if a check fails.
///
/// # Errors
/// `plan` if there is none, `numbers-too-large`, `tiny`.
pub fn verify(dir: &Path, how: Verify, as_json: bool) -> Result<i32> {
    let checks = checks(dir, how)?;
    let ok = checks.iter().all(|c| c.ok);
    if as_json {
        show(json_line("verify", json!({ "ok": ok, "checks": checks })));
        return Ok(i32::from(!ok));
    }
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
    if how.tiny {
        show("the numbers are those of a smaller model compiled alike, not of this plan\n");
    }
    Ok(i32::from(!ok))
}

/// All checks of a plan.
///
/// # Errors
/// Those of [`verify`]. What is wrong with a plan is a check that fails.
pub fn checks(dir: &Path, how: Verify) -> Result<Vec<Check>> {
    // Reading verifies the hash, types and the peak.
    let s = match plan_dir::read(dir) {
        Ok(s) => s,
        Err(d) if dir.join("plan.json").exists() => {
            return Ok(vec![exact("plan", Some(d.to_string()))]);
        }
        Err(d) => return Err(d),
    };
    let again = as_made(&s, &s.options);
    let compiles = again.is_ok();
    let mut source = exact("source", other_than_compiled(&s, again));
    if let (true, Some(from)) = (source.ok, &s.from) {
        let pass = &from.pass;
        source.detail = Some(format!("   made with --from {pass}: from.ir has what it began with"));
    }
    let mut checks = vec![
        exact("types", None),
        source,
        exact("collective-order", order(&s.plan)),
        exact("memory", replay::replay(&s.plan).err()),
    ];
    if let Some(again) = proof::found_again(&s) {
        let problem = again.unwrap_or_else(|d| Some(d.to_string()));
        checks.push(exact("proof", problem.map(|p| format!("   {p}"))));
    }
    // Of options with which the model does not compile there are no numbers.
    if !compiles {
        return Ok(checks);
    }
    if how.engine == Some(Engine::Torch) {
        checks.extend(engines(&s)?);
    }
    if how.tiny {
        let small = shrink(&s)?.stored;
        checks.extend(computed(&small, "tiny-")?);
    } else if how.numbers {
        checks.extend(computed(&s, "")?);
    }
    Ok(checks)
}

fn exact(name: &str, problem: Option<String>) -> Check {
    let ok = problem.is_none();
    Check {
        name: name.into(),
        ok,
        max_error: if ok { 0.0 } else { f64::INFINITY },
        tolerance: 0.0,
        detail: problem,
    }
}

/// What the plan has that config.json does not make, or that model.ir and options.toml do not compile to.
fn other_than_compiled(s: &Stored, again: Result<Output>) -> Option<String> {
    match shardc_plans::again::of_config(s) {
        Ok(made) => {
            // Of a text and of an archive nothing is known but the program.
            let known = made.as_ref().map(|(i, _)| (i.facts, i.family.as_str()));
            let (facts, family) = known.unwrap_or((None, &s.family));
            if s.facts != facts {
                return Some("   plan.json has other facts than config.json gives".into());
            }
            if s.family != family || known.is_none() && !PROGRAMS.contains(&family) {
                let family = one_line(&s.family);
                return Some(format!("   plan.json is of {family}, which config.json is not"));
            }
            let place = ("model.ir", "config.json and options.toml make");
            if let Some(other) =
                made.and_then(|(_, text)| first_difference(place, &s.source, &text))
            {
                return Some(other);
            }
        }
        Err(d) => return Some(format!("   config.json makes no model: {}", d.render())),
    }
    let again = match again {
        Ok(again) => again.stored,
        Err(d) => return Some(format!("   model.ir does not compile: {}", d.render())),
    };
    let json = |s: &Stored| {
        // The proof was not compiled.
        let report = Timeless::sorted(&s.report, "proof");
        // As a reader has them: what is stored was read.
        let text = serde_json::to_string(&(&s.plan.weights, &s.plan.settings, report));
        let read = |t: String| serde_json::from_str::<serde_json::Value>(&t);
        read(text.expect("plain data")).expect("JSON of our own")
    };
    let (stored, made) = (json(s), json(&again));
    let texts = [
        ("programs/all.ir", text::print(&s.plan.module), text::print(&again.plan.module)),
        ("schedule.csv", write_csv(&s.plan.schedule), write_csv(&again.plan.schedule)),
        ("weights.json", lines(&stored[0]), lines(&made[0])),
        ("plan.json, settings", lines(&stored[1]), lines(&made[1])),
        ("plan.json, report", lines(&stored[2]), lines(&made[2])),
    ];
    let makers = match s.from {
        Some(_) => "from.ir and options.toml compile to",
        None => "model.ir and options.toml compile to",
    };
    let mut all = texts.iter().map(|(file, a, b)| first_difference((file, makers), a, b));
    all.find_map(|d| d)
}

/// Where a file is not what others make, which is the second text.
fn first_difference((file, makers): (&str, &str), has: &str, made: &str) -> Option<String> {
    if has == made {
        return None;
    }
    let none = "(nothing)";
    let (mut a, mut b) = (has.lines(), made.lines());
    (1..).find_map(|at| {
        let (x, y) = (a.next(), b.next());
        (x != y || x.is_none()).then(|| {
            let (x, y) = (x.unwrap_or(none).trim(), y.unwrap_or(none).trim());
            format!(
                "   {file} is not what {makers}, first in line {at}:\n   has   {x}\n   makes {y}"
            )
        })
    })
}

fn lines(json: &serde_json::Value) -> String {
    serde_json::to_string_pretty(json).expect("plain data")
}

/// All ranks of a class run one list, so every group within a stage meets the same collectives in the
/// same order. The lists of the classes come from one order of all actions, in which everything is
/// made before it is used: the replay finds it again, or says which actions wait for each other. Then
/// the lists are replayed against each other.
fn order(plan: &Plan) -> Option<String> {
    match rank_classes(&plan.module, &plan.schedule, &plan.settings) {
        Err(d) => Some(d.message),
        Ok(again) if again != plan.classes => {
            Some("the schedule gives other lists than the plan has".into())
        }
        Ok(_) => step::replay::replay(plan).err().map(|d| d.message),
    }
}

/// A plan's numbers against those of its model on one rank.
fn computed(s: &Stored, prefix: &str) -> Result<Vec<Check>> {
    doing("computing the numbers of both");
    let all = match numbers::compare(s) {
        Ok(all) => all,
        // These numbers cannot be compared, which says nothing against them.
        Err(d) if d.exit == Exit::Unsupported || d.code == "moe-bound" => return Err(d),
        Err(d) => return Ok(vec![exact(&format!("{prefix}numbers"), Some(d.to_string()))]),
    };
    let one = |d: numbers::Difference| {
        let ok = d.error <= TOLERANCE;
        Check {
            name: format!("{prefix}{}", d.name),
            ok,
            max_error: d.error,
            tolerance: TOLERANCE,
            detail: d.worst.filter(|_| !ok).map(|w| format!("   worst: {w}")),
        }
    };
    Ok(all.into_iter().map(one).collect())
}

/// How long ranks of PyTorch may take to start, and wait for each other.
const TORCH: Duration = Duration::from_secs(600);

/// A plan's numbers on both engines.
fn engines(s: &Stored) -> Result<Vec<Check>> {
    doing("taking steps on both engines");
    let one = |d: engines::Apart| {
        let ok = d.error <= d.tolerance;
        Check {
            name: format!("torch-{}", d.name),
            ok,
            max_error: d.error,
            tolerance: d.tolerance,
            detail: d.worst.filter(|_| !ok).map(|w| format!("   worst: {w}")),
        }
    };
    Ok(engines::compare(&observed(s, false)?, TORCH)?.into_iter().map(one).collect())
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
        ("intermediate_size", f.ffn.min(f.heads * 4)),
        ("n_inner", f.ffn.min(f.heads * 4)),
        ("vocab_size", f.vocab.min(128)),
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
    o.seq = o.seq.min(4 * tp * o.axis("cp"));
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
    let known = |p: &Options| match shardc_compiler::compile_config(&config, p) {
        Err(d) => d.code != "unknown-tensor",
        Ok(_) => true,
    };
    let shard = o.shard.iter().filter(|r| known(&alone(vec![(*r).clone()], vec![]))).cloned();
    let freeze = o.freeze.iter().filter(|g| known(&alone(vec![], vec![(*g).clone()]))).cloned();
    let o = alone(shard.collect(), freeze.collect());
    shardc_compiler::compile_config(&config, &o)
}
