//! `shardc measure`: a machine as a device file, from kernels and exchanges of small models that run on it.
//!
//! What is timed is what plans run: every launch of some training steps, by the clock of the rank that runs it. From
//! these the constants of [`Device`] are fitted that the launches identify; all others stay priors, and say so.

mod device;
mod fit;
mod kernels;
mod products;
mod samples;

pub use device::of_device;
pub use kernels::{Distinct, OnDevice};
pub use samples::{Kernels, Ready, Sample, Step, least_waiting, median, samples};

use fit::FitOptions;
use serde_json::{Value, json};
use shardc_cost::device::{Device, Fit, Precision};
use shardc_ir::diag::Result;
use shardc_ir::files;
use shardc_ir::plan::Plan;
use shardc_ir::types::DType;
use shardc_passes::options::Options;
use shardc_train::data::Date;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// Rounds over all models, so that what else the machine does slows all of them; and steps of each model in a
/// round of which times are taken, after one that is not.
const ROUNDS: usize = 3;
const STEPS: usize = 3;

/// Hidden width, width of the MLP, heads, heads of keys, vocabulary and tokens of the models that run.
const MODELS: [[usize; 6]; 4] = [
    [64, 176, 4, 2, 512, 64],
    [128, 352, 8, 4, 1024, 128],
    [256, 688, 8, 8, 2048, 128],
    [512, 1376, 8, 8, 4096, 256],
];

/// A model's config.
fn config([hidden, ffn, heads, kv_heads, vocab, seq]: [usize; 6]) -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": seq, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "initializer_range": 0.02, "tie_word_embeddings": false, "torch_dtype": "float32",
    })
}

/// The plans that run on so many ranks: of each axis that has exchanges of its own.
fn plans(ranks: usize) -> Result<Vec<Plan>> {
    let mut out = vec![];
    for model in MODELS {
        let base =
            Options { seq: model[5], global_batch: 4 * ranks, microbatch: 4, ..Options::default() };
        let on = |axis: &str| vec![(axis.to_string(), ranks)];
        let mut all = vec![Options { mesh: on("dp_replicate"), ..base.clone() }];
        let fits = |n: usize| n.is_multiple_of(ranks);
        if ranks == 1 {
            all = vec![
                Options { microbatch: 2, ..base.clone() },
                Options { dtype: DType::BF16, ..base.clone() },
                Options { dtype: DType::F16, ..base.clone() },
                base.clone(),
            ];
        } else if fits(model[2]) && fits(model[3]) {
            let whole = Options { microbatch: 4 * ranks, ..base.clone() };
            all.push(Options { mesh: on("tp"), ..whole.clone() });
            all.push(Options { mesh: on("tp"), sp: true, ..whole.clone() });
            all.push(Options { mesh: on("dp_shard"), zero: 3, ..base.clone() });
            all.push(Options { mesh: on("cp"), microbatch: 4, ..whole });
        }
        let two = Options { mesh: on("pp"), microbatch: 2, ..base };
        all.extend((ranks == 2).then_some(two));
        for o in all {
            out.push(crate::compile_config(&config(model), &o)?.stored.plan);
        }
    }
    Ok(out)
}

/// A machine of this processor, whose ranks are threads of one process.
///
/// # Errors
/// Those of compiling and running, such as `c-compiler`.
pub fn measure(ranks: usize, say: &mut dyn FnMut(String)) -> Result<Device> {
    let mut measuring = Measuring::new(ranks)?;
    for round in 1..=ROUNDS {
        measuring.round()?;
        say(format!("{round} of {ROUNDS} rounds of {} models", measuring.kernels.len()));
    }
    Ok(measuring.device())
}

/// Models that run in rounds, between which something else may run that is to be compared with them.
pub struct Measuring {
    ranks: usize,
    threads: usize,
    kernels: Vec<Kernels>,
    /// By model.
    steps: Vec<Vec<Step>>,
}

impl Measuring {
    /// Compiles them for so many ranks.
    ///
    /// # Errors
    /// Those of compiling, such as `c-compiler`.
    pub fn new(ranks: usize) -> Result<Measuring> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let kernels: Vec<Kernels> =
            plans(ranks)?.into_iter().map(Kernels::of).collect::<Result<_>>()?;
        let steps = vec![vec![]; kernels.len()];
        Ok(Measuring { ranks, threads: (cores / ranks).max(1), kernels, steps })
    }

    /// Some steps of each.
    ///
    /// # Errors
    /// Those of running.
    pub fn round(&mut self) -> Result<()> {
        // One after the other: of many ranks not all models have room at once.
        for (own, out) in self.kernels.iter().zip(&mut self.steps) {
            out.extend(own.start(self.threads, true)?.steps(STEPS)?);
        }
        Ok(())
    }

    /// The machine by all rounds.
    pub fn device(&self) -> Device {
        let mut device = blank(self.ranks, self.threads);
        let all = self.kernels.iter().zip(&self.steps);
        let all: Vec<Sample> =
            all.flat_map(|(own, steps)| samples(&own.plan, &device, steps)).collect();
        device.hbm = copy(self.ranks);
        device.source.insert("hbm".into(), format!("copies, {}", today()));
        fit::fit(&mut device, &all, &on_cpu(self.ranks));
        device
    }
}

/// What is fitted to launches of a processor, whose products have no tiles that count.
fn on_cpu(ranks: usize) -> FitOptions {
    let types = vec![Precision::F32, Precision::Bf16, Precision::F16];
    FitOptions { ranks, types, tiles: vec![vec![[1.0, 1.0, 1.0]]], epilogues: None }
}

/// Before anything is measured: what the system says, and priors.
fn blank(ranks: usize, threads: usize) -> Device {
    let of_system = files::read_text(Path::new("/proc/meminfo"), 1 << 16).unwrap_or_default();
    let total = of_system.lines().find_map(|l| l.strip_prefix("MemTotal:"));
    let kib = total.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    let memory = kib.map_or(1 << 30, |k| k * 1024) / ranks as u64;
    let source = |what: &str| format!("{what}, {}", today());
    let source: BTreeMap<String, String> = [
        ("sms", source("threads of a rank")),
        ("memory", source("the system's, over the ranks")),
        ("domain", source("the ranks that ran together")),
        ("queries", "those of our kernel".to_string()),
        ("tiles", "none that count: `short` says what small products lose".to_string()),
        ("nic", "a guess: ranks of one process have none".to_string()),
    ]
    .into_iter()
    .map(|(n, s)| (n.to_string(), s))
    .collect();
    Device {
        name: format!("measured-{ranks}"),
        also: vec![],
        chip: std::env::consts::ARCH.into(),
        sms: threads as u32,
        hbm: 10e9,
        memory,
        domain: ranks as u32,
        link: 10e9,
        nic: 1.25e9,
        nics_per_domain: 1,
        power: None,
        full_power: None,
        tiles: Some(vec![[1.0, 1.0, 1.0]]),
        short: Some([0.0; 3]),
        queries: Some(shardc_runtime::QUERIES as u32),
        weighing: Some(0.0),
        backward: None,
        overlaps: false,
        peak: BTreeMap::new(),
        attention: [("flash2".to_string(), 0.3)].into_iter().collect(),
        epilogue: None,
        source,
        fit: Fit::default(),
    }
}

/// Bytes per second, read and written, that so many threads copy at once, each: the median of some copies of what no
/// cache holds.
fn copy(ranks: usize) -> f64 {
    const WORDS: usize = 4 << 20;
    let one = || {
        let (from, mut to) = (vec![1.0f64; WORDS], vec![0.0f64; WORDS]);
        let round = |_| {
            let since = std::time::Instant::now();
            to.copy_from_slice(&from);
            std::hint::black_box(&mut to);
            since.elapsed()
        };
        let mut all: Vec<Duration> = (0..9).map(round).collect();
        all.sort();
        16.0 * WORDS as f64 / all[all.len() / 2].as_secs_f64()
    };
    std::thread::scope(|s| {
        let all: Vec<_> = (0..ranks).map(|_| s.spawn(one)).collect();
        let each: Vec<f64> = all.into_iter().filter_map(|t| t.join().ok()).collect();
        each.iter().sum::<f64>() / each.len().max(1) as f64
    })
}

/// The date of this machine's clock, in UTC, as `2026-01-31`.
fn today() -> String {
    Date::today().into()
}
