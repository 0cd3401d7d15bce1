//! Seconds of a step by `price`, against the same plan run here, for layouts of two models that `measure` did not run.
//!
//! ```text
//! cargo bench --bench predicted                       # measures first, with as many ranks as layouts have
//! cargo bench --bench predicted -- one.toml two.toml  # files of shardc measure --ranks 1 and 2
//! ```
//!
//! Wants a machine on which nothing else runs: the table shows what else did by the spread of the steps (from their
//! first to their last quartile). Layouts take turns, so that what changes with time changes all of them. Tau is
//! Kendall's: of all pairs, and of those that runs order, which is where quartiles do not overlap. The control is
//! tau of layouts of two ranks that runs order, where exchanges take no time: these differ in their meshes.

use serde_json::{Value, json};
use shardc::machine::device;
use shardc::measure::{Kernels, Ready, measure};
use shardc_cost::device::Device;
use shardc_cost::plan::price;
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
    all: &[Timed],
    said: fn(&Timed) -> f64,
    counts: impl Fn(&Timed, &Timed) -> bool,
) -> (f64, usize) {
    let pairs = (0..all.len()).flat_map(|i| (0..i).map(move |j| (&all[i], &all[j])));
    let sign = |(a, b): (&Timed, &Timed)| ((said(a) - said(b)) * (a.took[1] - b.took[1])).signum();
    let signs: Vec<f64> = pairs.filter(|(a, b)| counts(a, b)).map(sign).collect();
    (signs.iter().sum::<f64>() / signs.len().max(1) as f64, signs.len())
}

/// All layouts of a model, by price and by their steps, in rounds.
fn timed(config: &Value, devices: &[Device]) -> Vec<Timed> {
    let mut all = vec![];
    for (_, o) in layouts() {
        let done = shardc::compile_config(config, &o).unwrap_or_else(|e| panic!("{e}"));
        let plan = done.stored.plan;
        let d = &devices[plan.module.mesh.ranks() - 1];
        let of = |d: &Device| price(&plan, d, &[]).unwrap_or_else(|e| panic!("{e}")).total;
        let mut quiet = d.clone();
        (quiet.link, quiet.nic) = (1e30, 1e30);
        (quiet.fit.hop.value, quiet.fit.step.value) = (0.0, 0.0);
        let (said, silent, ranks) = (of(d), of(&quiet), plan.module.mesh.ranks());
        let kernels = Kernels::of(&plan).unwrap_or_else(|e| panic!("{e}"));
        let ready = kernels.start(d.sms as usize, false).unwrap_or_else(|e| panic!("{e}"));
        all.push((Timed { ranks, said, silent, took: [0.0; 3] }, ready, vec![]));
    }
    for _ in 0..ROUNDS {
        for (_, ready, steps) in &mut all {
            let some = ready.steps(STEPS).unwrap_or_else(|e| panic!("{e}"));
            steps.extend(some.iter().map(|s| s.0));
        }
    }
    let of = |(t, _, steps): (Timed, Ready, Vec<f64>)| Timed {
        took: [0.25, 0.5, 0.75].map(|part| quantile(&steps, part)),
        ..t
    };
    all.into_iter().map(of).collect()
}

fn main() {
    let files: Vec<String> = std::env::args().skip(1).filter(|a| a.ends_with(".toml")).collect();
    let devices: Vec<Device> = match &files[..] {
        [one, two] => [one, two].map(|f| device(f).unwrap_or_else(|e| panic!("{e}"))).into(),
        _none => [1, 2].map(|n| measure(n, &mut |_| {}).unwrap_or_else(|e| panic!("{e}"))).into(),
    };
    println!(
        "{:<11} {:<10} {:>11} {:>9} {:>7} {:>7}",
        "model", "layout", "predicted", "run", "spread", "error"
    );
    let (mut errors, mut taus) = (vec![], vec![]);
    for (name, config) in models() {
        let all = timed(&config, &devices);
        for (t, (words, _)) in all.iter().zip(layouts()) {
            let [low, took, high] = t.took;
            let error = t.said / took - 1.0;
            println!(
                "{name:<11} {words:<10} {:>8.2} ms {:>6.2} ms {:>5.0} % {:>+5.1} %",
                1e3 * t.said,
                1e3 * took,
                100.0 * (high / low - 1.0),
                100.0 * error
            );
            errors.push(error.abs());
        }
        let two = |a: &Timed, b: &Timed| a.ranks == 2 && b.ranks == 2 && a.differs(b);
        taus.push([
            tau(&all, |t| t.said, |_, _| true),
            tau(&all, |t| t.said, Timed::differs),
            tau(&all, |t| t.said, two),
            tau(&all, |t| t.silent, two),
        ]);
    }
    println!("\nmedian error {:.1} % of {} layouts", 100.0 * quantile(&errors, 0.5), errors.len());
    for ((name, _), [(all, n), (ordered, m), (two, k), (silent, _)]) in models().iter().zip(taus) {
        println!("{name}: tau {all:.2} of all {n} pairs, {ordered:.2} of the {m} that runs order");
        println!("  of {k} of two ranks {two:.2}, and {silent:.2} without exchanges");
    }
}
