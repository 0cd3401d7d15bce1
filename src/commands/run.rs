//! `shardc run`: executes a plan, ranks as threads of this process or as processes of a job.

mod dump;
mod engine;
mod evaluation;
mod events;
mod feed;
mod input;
mod keep;
mod metrics;
mod settings;
mod start;
mod steps;
mod trace;
mod words;

use super::saving::{CHECKPOINTS, HowToSave, apart, place_of};
use crate::torch;
use clap::builder::{PossibleValuesParser, RangedU64ValueParser, TypedValueParser};
pub use dump::{observed, parameter};
use engine::for_torch;
pub use engine::{Engine, Kernels, On, Products};
use keep::{Keep, Keeper};
use metrics::Metrics;
pub use settings::Given;
use shardc_frontends::DUMP;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use shardc_ir::func::inputs;
use shardc_plans::adapters::same_factors;
use shardc_plans::{hub, plan_dir};
use shardc_process::signals;
use shardc_process::terminal::note;
use shardc_report::proof::Outcome;
use shardc_train::checkpoint::{self, LeftOut, OptimResume};
use shardc_train::cluster::{self, Connections, Job, Transport};
use shardc_train::data::{Reading, are_examples, is_text};
pub use start::{Start, loads, session};
use start::{launch, resume};
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::time::Duration;
use steps::Leader;

/// Flags of `run`.
#[derive(clap::Args, Clone, Debug, Default)]
#[group(skip)]
pub struct Run {
    /// HF folder with the initial weights, or the .pt2 archive [default: random weights]
    #[arg(long, value_name = "PATH")]
    pub weights: Option<PathBuf>,
    /// Folder with an adapter, as PEFT writes it, for a plan with adapters [default: a new one]
    #[arg(long, value_name = "DIR", requires = "weights", conflicts_with = "resume")]
    pub adapter: Option<PathBuf>,
    /// Training data: examples (FILE.jsonl with messages, prompts with completions, or texts; FILE.json; jsonl:GLOB),
    /// a file of tokens (.bin of Megatron, llm.c or nanoGPT, .npy), text:GLOB with --tokenizer, bytes:GLOB with one
    /// token per byte, or columns: FILE.safetensors, or NAME=FILE.npy,.. [default: random data]
    #[arg(long)]
    pub data: Option<String>,
    /// Tokenizer for text and examples: a folder with tokenizer.json, or that file [default: of examples that of
    /// --weights, or of the model's folder]
    #[arg(long, value_name = "PATH")]
    pub tokenizer: Option<PathBuf>,
    #[command(flatten)]
    pub reading: Reading,
    /// Evaluation data, whose loss is shown before the first step and every --eval-every steps: of examples that of all
    /// rows, else of one batch
    #[arg(long, value_name = "DATA")]
    pub eval_data: Option<String>,
    /// Steps between evaluations; epoch: behind each epoch of --data, and behind the last step [default: 10]
    #[arg(long, value_name = "N|epoch", requires = "eval_data", value_parser = Every::parse)]
    pub eval_every: Option<Every>,
    /// Stop after K evaluations behind each other of which none has a lower loss than those before
    #[arg(long, value_name = "K", requires = "eval_data", conflicts_with = "eval_only", value_parser = clap::value_parser!(u64).range(1..))]
    pub patience: Option<u64>,
    /// By how much a loss is lower, at least, for --patience [default: 0]
    #[arg(long, value_name = "D", requires = "patience", value_parser = delta)]
    pub min_delta: Option<f64>,
    /// Evaluate once on all rows of --eval-data, and train nothing
    #[arg(long, requires = "eval_data", conflicts_with_all = ["data", "batch", "steps", "epochs", "save", "trace", "metrics"])]
    pub eval_only: bool,
    #[command(flatten)]
    pub given: Given,
    /// How often all rows of --data are taken, in place of --steps: 2, or 0.5. The total steps of a learning rate that
    /// changes follow from it
    #[arg(long, value_name = "N", conflicts_with = "steps", requires = "data", value_parser = epochs)]
    pub epochs: Option<f64>,
    /// Take the data from their beginning, although a checkpoint was written in the middle of others
    #[arg(long, requires_all = ["resume", "data"])]
    pub data_restart: bool,
    /// Number of the last step, counted from the start of training [default: 10]
    #[arg(long)]
    pub steps: Option<usize>,
    /// A fixed batch for all steps: safetensors with input_ids and labels, i64 [global_batch, seq], or with the
    /// columns that the model takes
    #[arg(long, value_name = "FILE", conflicts_with = "data")]
    pub batch: Option<PathBuf>,
    /// File for logits, loss, gradients and parameters (recompiles the plan to observe them)
    #[arg(long, value_name = "FILE", requires = "batch")]
    pub dump: Option<PathBuf>,
    /// Save the model as an HF folder at the end, or when the run is interrupted; with --save-every, save
    /// checkpoints instead
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    #[command(flatten)]
    pub saving: HowToSave,
    /// Write checkpoints to --save DIR/step-NNNNNNNN every N steps and after the last step; --resume can continue
    /// from them on any mesh
    #[arg(long, value_name = "N", requires = "save", value_parser = clap::value_parser!(u64).range(1..))]
    pub save_every: Option<u64>,
    /// Number of checkpoints to keep, newest first; best: the newest, and that of the evaluation with the least loss,
    /// behind which one is written, too [default: 2]
    #[arg(long, value_name = "N|best", requires = "save_every", value_parser = Keep::parse)]
    pub keep: Option<Keep>,
    /// Resume from a checkpoint: the latest one in a folder, the best one (DIR@best), or a specific one. That of a plan with adapters has no
    /// base model: --weights gives it
    #[arg(long, value_name = "DIR")]
    pub resume: Option<PathBuf>,
    /// If the optimizer states of the checkpoint are not those of the plan: strict refuses, init begins those that the
    /// checkpoint lacks as a new run does, and leaves those behind that the plan lacks [default: strict]
    #[arg(long, value_name = "HOW", requires = "resume", hide_possible_values = true)]
    pub optim_resume: Option<OptimResume>,
    /// Write a trace of what every rank did, for Perfetto or chrome://tracing
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Write a JSON object per step: loss, learning rate, gradient norm, time, memory; with --resume, append to
    /// the steps in the file
    #[arg(long, value_name = "FILE.jsonl")]
    pub metrics: Option<PathBuf>,
    /// Write the same numbers as events for TensorBoard, to a new file in this folder
    #[arg(long, value_name = "DIR")]
    pub tensorboard: Option<PathBuf>,
    /// Seconds that a rank may wait for another, and that the C compiler may take
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout: u64,
    /// How ranks communicate: threads of this process, or processes started by a launcher, over mpi, or over nccl
    /// with --device cuda [default: the plan's, threads]
    #[arg(long, value_parser = words())]
    pub transport: Option<Transport>,
    #[command(flatten)]
    pub connections: Connections,
    /// Threads per rank, at most the number of cores [default: the cores available to the process, divided by the
    /// ranks that share them]
    #[arg(long, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub threads: Option<usize>,
    /// Who computes: shardc, or torch, PyTorch's distributed runtime, whose ranks torchrun starts on this machine, on
    /// its GPUs if it has some
    #[arg(long, value_enum, default_value_t)]
    pub engine: Engine,
    /// Where ranks run: cpu, or cuda, with rank r on device r modulo the number of devices
    #[arg(long, value_enum, default_value_t)]
    pub device: On,
    /// Use the compiled kernels in the plan's folder: whoever made the plan has chosen what they do [default: kernels
    /// come from the plan's text, compiled here or found in the user's cache]
    #[arg(long)]
    pub trust_kernels: bool,
    /// Matrix products on a device: own kernels, NVIDIA's cuBLASLt (for two operands of the same type in plain
    /// batches), or auto: cuBLASLt where it is installed [default: auto]
    #[arg(long, value_enum)]
    pub products: Option<Products>,
    /// Say what of each device's memory the driver, code, NCCL, the plan's arena and the rest have taken, in bytes
    #[arg(long)]
    pub memory_log: bool,
    /// Kernels: on the CPU, those of rows compiled by the machine's C compiler, or interpreted, a few per cent slower
    /// in f32; on a device, own: no library's, so that all devices of an architecture give the same bits [default:
    /// compiled; interpreted, with a warning, if there is no working compiler]
    #[arg(long, value_enum)]
    pub kernels: Option<Kernels>,
}

impl Run {
    /// What all processes of a job must be told alike, as flags. Paths may differ: hosts need not mount a file system
    /// in the same place.
    fn of_all(&self, steps: usize) -> String {
        let mut all = format!("--steps {steps}");
        let mut say =
            |what: Option<String>| what.iter().for_each(|w| all.push_str(&format!(" {w}")));
        say(self.save.as_ref().map(|_| "--save".into()));
        say(self.save_every.map(|n| format!("--save-every {n}")));
        say(self.adapter.as_ref().map(|_| "--adapter".into()));
        say(self.eval_data.as_ref().map(|_| "--eval-data".into()));
        say(self.eval_only.then(|| "--eval-only".into()));
        let every = self.eval_every.unwrap_or_default();
        say(self.eval_data.as_ref().map(|_| format!("--eval-every {every:?}")));
        say(self.patience.map(|n| format!("--patience {n}")));
        say(self.dump.as_ref().map(|_| "--dump".into()));
        all
    }
}

/// The words of --transport.
fn words() -> impl TypedValueParser<Value = Transport> {
    let of = |word: String| Transport::ALL.into_iter().find(|t| t.name() == word);
    PossibleValuesParser::new(Transport::ALL.map(Transport::name))
        .map(move |word| of(word).expect("one of the words"))
}

/// By how much a loss is lower.
fn delta(text: &str) -> std::result::Result<f64, String> {
    let x = text.parse::<f64>().ok().filter(|x| x.is_finite() && *x >= 0.0);
    x.ok_or_else(|| "it is 0 or more, for example 0.01".into())
}

/// A number of epochs.
fn epochs(text: &str) -> std::result::Result<f64, String> {
    let n = text.parse::<f64>().ok().filter(|n| n.is_finite() && *n > 0.0 && *n <= 1e9);
    n.ok_or_else(|| "it is a number above 0, for example 2 or 0.5".into())
}

/// When there is an evaluation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Every {
    Steps(u64),
    /// Behind each epoch.
    Epoch,
}

impl Default for Every {
    fn default() -> Every {
        Every::Steps(10)
    }
}

impl Every {
    /// As it is given.
    ///
    /// # Errors
    /// What it must be.
    fn parse(text: &str) -> std::result::Result<Every, String> {
        let n = || text.parse().ok().filter(|&n| n > 0).map(Every::Steps);
        let found = if text == "epoch" { Some(Every::Epoch) } else { n() };
        found.ok_or_else(|| "it is a number from 1, or epoch".into())
    }
}

/// Refuses what does not go together.
fn check(how: &Run, transport: Transport) -> Result<()> {
    match (&how.save, how.save_every) {
        (None, _) => how.saving.refuse_for("a run without --save", false)?,
        (Some(_), Some(_)) => how.saving.refuse_for(CHECKPOINTS, true)?,
        (Some(_), None) => {}
    }
    engine::checked(how)?;
    if how.device == On::Cpu && how.trust_kernels {
        return Err(Diag::new("flag", "the kernels in a plan's folder are for devices")
            .at("--trust-kernels")
            .help("add --device cuda, or leave --trust-kernels out"));
    }
    if how.keep == Some(Keep::Best) && how.eval_data.is_none() {
        return Err(Diag::new("flag", "the best checkpoint is that of an evaluation")
            .at("--keep best")
            .help("add --eval-data, or use --keep N"));
    }
    let files = [
        ("--trace", how.trace.as_deref()),
        ("--dump", how.dump.as_deref()),
        ("--metrics", how.metrics.as_deref()),
        ("--save", how.save.as_deref()),
    ];
    let named: Vec<(&str, &Path)> = files.iter().filter_map(|f| Some((f.0, f.1?))).collect();
    for (i, (flag, file)) in named.iter().enumerate() {
        if let Some((other, _)) = named[..i].iter().find(|o| o.1 == *file) {
            return Err(Diag::new("flag", format!("{other} and {flag} write the same file"))
                .at(format!("{flag} {}", file.display()))
                .help("give each a file of its own"));
        }
    }
    let given = || [&how.data, &how.eval_data].into_iter().flatten();
    let examples = given().any(|d| are_examples(d));
    if let Some(flag) = how.reading.given().filter(|_| !examples) {
        return Err(Diag::new("flag", "no examples are given")
            .at(flag)
            .rule("it says how lines of JSON are read: --data FILE.jsonl")
            .help("add --data FILE.jsonl, or leave it out"));
    }
    let text = examples || given().any(|d| is_text(d));
    if let Some(tokenizer) = how.tokenizer.as_ref().filter(|_| !text) {
        return Err(Diag::new("flag", "no text is given for the tokenizer")
            .at(format!("--tokenizer {}", tokenizer.display()))
            .help("add --data text:GLOB, or leave --tokenizer out"));
    }
    match (how.device, transport) {
        (On::Cpu, Transport::Nccl) => Err(Diag::new("flag", "NCCL connects devices")
            .at("--transport nccl")
            .help("add --device cuda, or use --transport mpi")),
        (On::Cuda, Transport::Mpi) => Err(Diag::new("flag", "MPI connects processors")
            .at("--transport mpi")
            .help("use --transport nccl, or leave --device cuda out")),
        _ => Ok(()),
    }
}

/// Refuses flags that are for plans with adapters alone.
fn with_adapters(how: &Run, has: bool) -> Result<()> {
    let refuse =
        |flag: &str, what: &str, help: &str| Err(Diag::new("flag", what).at(flag).help(help));
    match (&how.adapter, &how.resume, &how.weights) {
        _ if has => Ok(()),
        (Some(_), _, _) => refuse(
            "--adapter",
            "the plan has no adapters",
            "compile with --lora-from DIR and the folder of the adapter",
        ),
        (None, Some(_), Some(_)) => refuse(
            "--weights",
            "--resume and --weights both say what the run begins with",
            "leave one of them out",
        ),
        _fine => Ok(()),
    }
}

/// Runs the command: alone, or as a process of a job, which ends as one.
pub fn run(dir: &Path, mut how: Run, as_json: bool) -> Result<i32> {
    how.weights = how.weights.as_deref().map(hub::resolved).transpose()?;
    if how.engine == Engine::Torch {
        for_torch(&how)?;
        check(&how, Transport::Threads)?;
        let stored = plan_dir::read(dir)?;
        let (hosts, threads, timeout) = start::of_torch(&stored, &how)?;
        if let Some(h) = hosts.filter(|h| h.own > 0) {
            let stored = if how.dump.is_some() { observed(&stored, false)? } else { stored };
            // The first host saves, and then there are no ranks to wait for.
            heed_signals(how.save.is_some(), None)?;
            return torch::follow(&stored, &h, threads, timeout).map(|()| 0);
        }
        return run_in(dir, &how, None, as_json);
    }
    let transport = match how.transport {
        Some(t) => t,
        None => plan_dir::read(dir)?.options.transport,
    };
    check(&how, transport)?;
    let ranks = || plan_dir::read(dir).map(|s| s.plan.module.mesh.ranks());
    let Some(job) = cluster::join(transport, &how.connections, how.timeout, &ranks)? else {
        return run_in(dir, &how, None, as_json);
    };
    let done =
        std::panic::catch_unwind(AssertUnwindSafe(|| run_in(dir, &how, Some(&job), as_json)));
    match done {
        Ok(Ok(status)) => {
            job.end();
            Ok(status)
        }
        Ok(Err(d)) => job.control.fail(&d),
        // What it was is said where it was.
        Err(_) => job.control.fail(
            &Diag::new("rank-failed", format!("process {} panicked", job.launched.rank))
                .help("this is a bug of shardc: report it with the plan and these 2 lines"),
        ),
    }
}

/// A signal ends a run that saves after the step that is under way, and any other at once.
fn heed_signals(saves: bool, job: Option<&Job>) -> Result<()> {
    if saves {
        signals::save_first();
    }
    // A job listens since it began.
    if job.is_some() {
        return Ok(());
    }
    let told = |signal| {
        let name = signals::name(signal);
        note(format!("{name}: saving after this step; a second one ends at once"));
    };
    signals::handle(Duration::ZERO, told, |signal| {
        signals::say_lost(signal);
        files::abandon();
        std::process::exit(signals::status(signal))
    })
}

fn run_in(dir: &Path, how: &Run, job: Option<&Job>, as_json: bool) -> Result<i32> {
    let leads = job.is_none_or(|j| j.control.leads());
    let mut stored = plan_dir::read(dir)?;
    if let Some(job) = job {
        job.check(&stored.plan, &stored.hash())?;
    }
    with_adapters(how, stored.options.lora.is_some())?;
    let place = how.save.as_deref().map(place_of).transpose()?;
    if let Some(to) = &place {
        apart(to.path(), how.weights.as_deref(), &stored, &how.saving)?;
    }
    let folder = how.weights.as_ref().filter(|w| w.is_dir());
    if let Some(weights) = folder.and_then(|w| std::fs::canonicalize(w).ok()) {
        // What checkpoints of this run come from.
        stored.origin = Some(weights.display().to_string());
    }
    let heeds = heed_signals(how.save.is_some(), job);
    // Where nothing is saved, a signal that is not heeded ends the run as well.
    if how.save.is_some() {
        heeds?;
    }
    if let Some(proof) = Outcome::of(&stored).filter(|_| leads) {
        note(format!("plan {proof} when it was compiled (verify makes the proof again)"));
    }
    let stored = &if how.dump.is_some() { observed(&stored, leads)? } else { stored };
    let plan = &stored.plan;
    let s = &plan.settings;
    let trace =
        how.trace.as_deref().filter(|_| leads).map(|f| trace::Trace::new(f, stored)).transpose()?;
    how.dump.iter().filter(|_| leads).try_for_each(|file| DUMP.check(file))?;
    how.metrics.iter().filter(|_| leads).try_for_each(|file| metrics::METRICS.check(file))?;
    let start = match &how.resume {
        None => {
            let start = Start::open(how.weights.as_deref(), how.adapter.as_deref(), plan)?;
            how.adapter.iter().try_for_each(|dir| same_factors(stored, dir))?;
            start
        }
        Some(dir) => {
            let states = how.optim_resume.unwrap_or_default();
            resume(dir, how.weights.as_deref(), plan, states, job)?
        }
    };
    let left = LeftOut::of(stored, start.base(plan)?)?;
    let done = if let Start::Resumed(s, _) = &start { s.step } else { 0 };
    let keeps = place.as_ref().filter(|_| leads);
    let mut run = how.given.begin(stored, &start, how, (job, !how.eval_only))?;
    if how.data_restart {
        run.rows = 0;
    }
    let best = run.evaluated.map(|e| e.best.step);
    let keeper = keeps.map(|to| Keeper::open(dir, to, how, (stored, &left), (done, best)));
    let keeper = keeper.transpose()?;
    let table = inputs(&plan.module);
    let (feed, eval, steps) = input::opened(how, stored, (&mut run, &start, done), &table, job)?;
    let (mut session, processes) = match how.engine {
        Engine::Shardc => (launch(plan, &start, how, job, Some(dir))?, None),
        Engine::Torch => {
            let (session, processes) = start::in_torch(stored, &start, how)?;
            (session, Some(processes))
        }
    };
    if let Start::Resumed(s, _) = &start {
        session.go_on(s.scale);
    }
    if !leads {
        let batch = |step| match (step, &eval) {
            (0, Some(e)) => e.batch(&table, s),
            _ => feed.batch(&table, s, step),
        };
        let dir = place.as_ref().map_or(Path::new(""), |p| p.path());
        session.follow(&batch, &|step| checkpoint::task(dir, step as usize, &left))?;
        signals::save_no_more();
        session.finish()?;
        return Ok(0);
    }
    let lines = how.metrics.as_deref().map(|file| Metrics::open(file, done));
    let events = how.tensorboard.as_deref().map(|dir| Metrics::events(dir, done));
    let metrics = lines.into_iter().chain(events).collect::<Result<_>>()?;
    let leader = Leader {
        how,
        stored,
        job,
        run,
        table,
        feed,
        eval,
        trace,
        metrics,
        session,
        keeper,
        as_json,
        warned: false,
        epoch: None,
    };
    let done = leader.steps(done, steps);
    match &processes {
        Some(p) => done.map_err(|d| if d.code == "rank-failed" { p.explained(d) } else { d }),
        None => done,
    }
}
