//! Seconds of a step by `price`, against the same plan run here, for layouts of two models that `measure` did not run.
//!
//! ```text
//! cargo bench --bench predicted                       # measures too, with as many ranks as layouts have
//! cargo bench --bench predicted -- one.toml two.toml  # files of shardc measure --ranks 1 and 2
//! ```
//!
//! Wants a machine on which nothing else runs: the table shows what else did by the spread of the steps (from their
//! first to their last quartile). Layouts and the models that are measured take turns, so that what changes with time,
//! such as which caches a host lets its guests share, changes all of them. Tau is
//! Kendall's: of all pairs, and of those that runs order, which is where quartiles do not overlap. The control is
//! tau of layouts of two ranks that runs order, where exchanges take no time: these differ in their meshes.

use serde_json::{Value, json};
use shardc::machine::device;
use shardc::measure::{Kernels, Measuring, Ready};
use shardc_cost::device::Device;
use shardc_cost::plan::price;
use shardc_ir::diag::Result;
use shardc_ir::plan::Plan;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{CpMode, Options, Order};

/// Rounds over all layouts of a model, so that what else the machine does slows all of them, and steps of each
/// that are timed in a round.
const ROUNDS: usize = 7;
const STEPS: usize = 3;

fn models() -> [(&'static str, Value); 2] {
    let tiny = include_str!("../examples/tiny-llama/config.json");
    let other = json!({
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu",
        "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "attention_bias": false, "tie_word_embeddings": true, "initializer_range": 0.02,
        "torch_dtype": "float32",
    });
    [("tiny-llama", serde_json::from_str(tiny).expect("JSON")), ("qwen3-6l", other)]
}

/// Layouts by their words: those of one rank, and those of two.
fn layouts() -> Vec<(&'static str, Options)> {
    let on = |axis: &str| vec![(axis.to_string(), 2)];
    let one = Options { global_batch: 8, microbatch: 8, seq: 128, ..Options::default() };
    let half = Options { microbatch: 4, ..one.clone() };
    let named = |n: &str| Order::Named(n.into());
    let pipe = Options { mesh: on("pp"), microbatch: 2, ..one.clone() };
    vec![
        ("1", one.clone()),
        ("1 mb2", Options { microbatch: 2, ..one.clone() }),
        ("1 full", Options { recompute: Recompute::Full, ..one.clone() }),
        ("dp2", Options { mesh: on("dp_replicate"), ..half.clone() }),
        ("dp2 mb1", Options { mesh: on("dp_replicate"), microbatch: 1, ..half.clone() }),
        ("dp2 zero1", Options { mesh: on("dp_shard"), zero: 1, ..half.clone() }),
        ("dp2 zero3", Options { mesh: on("dp_shard"), zero: 3, ..half }),
        ("tp2", Options { mesh: on("tp"), ..one.clone() }),
        ("tp2 sp", Options { mesh: on("tp"), sp: true, ..one.clone() }),
        ("cp2 ring", Options { mesh: on("cp"), cp_mode: CpMode::Ring, ..one }),
        ("pp2 1f1b", pipe.clone()),
        ("pp2 zb-h1", Options { schedule: named("zb-h1"), ..pipe }),
    ]
}

fn quantile(all: &[f64], part: f64) -> f64 {
    let mut all = all.to_vec();
    all.sort_by(f64::total_cmp);
    all[(part * (all.len() - 1) as f64).round() as usize]
}

/// A layout: ranks, seconds by price, with exchanges and without, and of its steps the quartiles.
struct Timed {
    ranks: usize,
    said: f64,
    silent: f64,
    took: [f64; 3],
}

impl Timed {
    /// True if half of the steps of each are on one side of half of the other's: runs say which is faster.
    fn differs(&self, other: &Timed) -> bool {
        self.took[0] > other.took[2] || other.took[0] > self.took[2]
    }
}

/// Kendall's tau of prices: pairs in one order less those in the other, of all pairs that count.
fn tau(
    all: &[&Timed],
    said: fn(&Timed) -> f64,
    counts: impl Fn(&Timed, &Timed) -> bool,
) -> (f64, usize) {
    let pairs = (0..all.len()).flat_map(|i| (0..i).map(move |j| (all[i], all[j])));
    let sign = |(a, b): (&Timed, &Timed)| ((said(a) - said(b)) * (a.took[1] - b.took[1])).signum();
    let signs: Vec<f64> = pairs.filter(|(a, b)| counts(a, b)).map(sign).collect();
    (signs.iter().sum::<f64>() / signs.len().max(1) as f64, signs.len())
}

/// A layout of a model, whose ranks wait for steps, and seconds of those that ran.
struct Running {
    model: usize,
    words: &'static str,
    plan: Plan,
    ready: Ready,
    steps: Vec<f64>,
}

/// Compiles all layouts of all models, and starts their ranks.
fn start() -> Result<Vec<Running>> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut out = vec![];
    for (model, (_, config)) in models().iter().enumerate() {
        for (words, o) in layouts() {
            let plan = shardc::compile_config(config, &o)?.stored.plan;
            let threads = (cores / plan.module.mesh.ranks()).max(1);
            let ready = Kernels::of(plan.clone())?.start(threads, false)?;
            out.push(Running { model, words, plan, ready, steps: vec![] });
        }
    }
    Ok(out)
}

impl Running {
    /// By machines of one rank and of two.
    fn timed(&self, devices: &[Device]) -> Result<Timed> {
        let ranks = self.plan.module.mesh.ranks();
        let d = &devices[ranks - 1];
        let mut quiet = d.clone();
        (quiet.link, quiet.nic) = (1e30, 1e30);
        (quiet.fit.hop.value, quiet.fit.step.value) = (0.0, 0.0);
        let [said, silent] = [d, &quiet].map(|d| price(&self.plan, d, &[]).map(|p| p.total));
        let took = [0.25, 0.5, 0.75].map(|part| quantile(&self.steps, part));
        Ok(Timed { ranks, said: said?, silent: silent?, took })
    }
}

/// Runs all in turns; machines as files say, or as measured between.
fn run(files: &[String]) -> Result<Vec<(Running, Timed)>> {
    let mut measuring = match files {
        [_, _] => vec![],
        [] => vec![Measuring::new(1)?, Measuring::new(2)?],
        _others => panic!("give two files, of one rank and of two, or none"),
    };
    let mut all = start()?;
    for _ in 0..ROUNDS {
        for m in &mut measuring {
            m.round()?;
        }
        for one in &mut all {
            one.steps.extend(one.ready.steps(STEPS)?.iter().map(|s| s.0));
        }
    }
    let devices: Vec<Device> = match measuring.is_empty() {
        true => files.iter().map(|f| device(f)).collect::<Result<_>>()?,
        false => measuring.iter().map(Measuring::device).collect(),
    };
    let timed = |one: Running| one.timed(&devices).map(|t| (one, t));
    all.into_iter().map(timed).collect()
}

fn main() {
    let files: Vec<String> = std::env::args().skip(1).filter(|a| a.ends_with(".toml")).collect();
    let all = run(&files).unwrap_or_else(|e| panic!("{e}"));
    println!(
        "{:<11} {:<10} {:>11} {:>9} {:>7} {:>7}",
        "model", "layout", "predicted", "run", "spread", "error"
    );
    let (mut errors, names) = (vec![], models().map(|m| m.0));
    for (one, t) in &all {
        let [low, took, high] = t.took;
        let error = t.said / took - 1.0;
        println!(
            "{:<11} {:<10} {:>8.2} ms {:>6.2} ms {:>5.0} % {:>+5.1} %",
            names[one.model],
            one.words,
            1e3 * t.said,
            1e3 * took,
            100.0 * (high / low - 1.0),
            100.0 * error
        );
        errors.push(error.abs());
    }
    println!("\nmedian error {:.1} % of {} layouts", 100.0 * quantile(&errors, 0.5), errors.len());
    let two = |a: &Timed, b: &Timed| a.ranks == 2 && b.ranks == 2 && a.differs(b);
    for (model, name) in names.iter().enumerate() {
        let own: Vec<&Timed> = all.iter().filter(|x| x.0.model == model).map(|x| &x.1).collect();
        let (all, n) = tau(&own, |t| t.said, |_, _| true);
        let (ordered, m) = tau(&own, |t| t.said, Timed::differs);
        let ((two, k), (silent, _)) = (tau(&own, |t| t.said, two), tau(&own, |t| t.silent, two));
        println!("{name}: tau {all:.2} of all {n} pairs, {ordered:.2} of the {m} that runs order");
        println!("  of {k} of two ranks {two:.2}, and {silent:.2} without exchanges");
    }
}
