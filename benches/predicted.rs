//! Seconds of a step by `price`, against the same plan run here, for layouts of two models that `measure` did not run.
//!
//! ```text
//! cargo bench --bench predicted                       # measures first, with as many ranks as layouts have
//! cargo bench --bench predicted -- one.toml two.toml  # files of shardc measure --ranks 1 and 2
//! ```
//!
//! Wants a machine on which nothing else runs: the table shows what else did by the spread of the steps.

use serde_json::{Value, json};
use shardc::machine::device;
use shardc::measure::{measure, ran};
use shardc_cost::device::Device;
use shardc_cost::plan::price;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{CpMode, Options, Order};

/// Steps that are timed.
const STEPS: usize = 9;

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

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Kendall's tau: pairs in one order less those in the other, of all.
fn tau(all: &[(f64, f64)]) -> f64 {
    let pairs = (0..all.len()).flat_map(|i| (0..i).map(move |j| (i, j)));
    let sign = |(i, j): (usize, usize)| ((all[i].0 - all[j].0) * (all[i].1 - all[j].1)).signum();
    let signs: Vec<f64> = pairs.map(sign).collect();
    signs.iter().sum::<f64>() / signs.len().max(1) as f64
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
        let mut times = vec![];
        for (words, o) in layouts() {
            let done = shardc::compile_config(&config, &o).unwrap_or_else(|e| panic!("{e}"));
            let plan = done.stored.plan;
            let ranks = plan.module.mesh.ranks();
            let d = &devices[ranks - 1];
            let said = price(&plan, d).unwrap_or_else(|e| panic!("{e}")).total;
            let steps = ran(&plan, d.sms as usize, STEPS, false).unwrap_or_else(|e| panic!("{e}"));
            let mut all: Vec<f64> = steps.iter().map(|s| s.0).collect();
            all.sort_by(f64::total_cmp);
            let (took, spread) =
                (median(all.clone()), all[all.len() * 3 / 4] / all[all.len() / 4] - 1.0);
            let error = said / took - 1.0;
            println!(
                "{name:<11} {words:<10} {:>8.2} ms {:>6.2} ms {:>5.0} % {:>+5.1} %",
                1e3 * said,
                1e3 * took,
                100.0 * spread,
                100.0 * error
            );
            errors.push(error.abs());
            times.push((said, took));
        }
        taus.push(tau(&times));
    }
    println!("\nmedian error {:.1} % of {} layouts", 100.0 * median(errors.clone()), errors.len());
    for ((name, _), tau) in models().iter().zip(taus) {
        println!("tau {tau:.2} of {name}");
    }
}
