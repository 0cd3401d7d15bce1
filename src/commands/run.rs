//! `shardc run`: executes a plan on this machine, ranks as threads.

mod trace;

use super::show;
use crate::data::Data;
use crate::plan_dir::{self, Stored};
use crate::recompile;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;
use shardc_frontends::{
    Batch, Checkpoint, NamedTensor, check_target, read_batch, save, whole_tensors, write_tensors,
};
use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::func::{Role, RoleKind};
use shardc_ir::kernel::Program;
use shardc_ir::plan::{Mode, Plan};
use shardc_ir::weights::Weight;
use shardc_runtime::native::Native;
use shardc_runtime::{Options, Session, StepBatch, StepResult};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Flags of `run`.
#[derive(clap::Args, Clone, Debug, Default)]
#[group(skip)]
pub struct Run {
    /// HF folder with the weights to start from [default: random weights]
    #[arg(long, value_name = "DIR")]
    pub weights: Option<PathBuf>,
    /// Training data: bytes:GLOB, one token per byte [default: random tokens]
    #[arg(long)]
    pub data: Option<String>,
    /// Data whose loss is shown every --eval-every steps, without training on it
    #[arg(long, value_name = "DATA")]
    pub eval_data: Option<String>,
    /// Steps between evaluations
    #[arg(long, default_value_t = 10)]
    pub eval_every: usize,
    /// Steps to run [default: 10]
    #[arg(long)]
    pub steps: Option<usize>,
    /// One batch for all steps: safetensors with input_ids and labels, i64 [global_batch, seq]
    #[arg(long, value_name = "FILE", conflicts_with = "data")]
    pub batch: Option<PathBuf>,
    /// Write logits, loss, gradients and parameters there (recompiles the plan to observe them)
    #[arg(long, value_name = "FILE", requires = "batch")]
    pub dump: Option<PathBuf>,
    /// Write the parameters as an HF folder at the end, in f32: of bf16 weights the master copies
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// Write what every rank did, and when, as a trace for Perfetto or chrome://tracing
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Seconds a rank may wait for another
    #[arg(long, default_value_t = 600)]
    pub timeout: u64,
    /// Threads of one rank's products, at most the cores [default: cores / ranks]
    #[arg(long)]
    pub threads: Option<usize>,
    /// Kernels over rows: compiled by the machine's C compiler, or interpreted, several times slower
    #[arg(long, value_enum, default_value_t)]
    pub kernels: Kernels,
}

/// How kernels over rows run.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Kernels {
    #[default]
    Compiled,
    Interpreted,
}

/// Every evaluation sees the batch of this step number, which no training step has.
const EVALUATION: u32 = u32::MAX;
/// Most ranks run as threads of one process.
const MAX_LOCAL_RANKS: usize = 256;

/// Where the first values of parameters come from.
pub enum Start {
    Random { seed: u64 },
    Checkpoint(Checkpoint),
}

impl Start {
    /// The weights of a folder, or random ones.
    pub fn open(dir: Option<&Path>, plan: &Plan) -> Result<Start> {
        let Some(dir) = dir else { return Ok(Start::Random { seed: plan.settings.seed }) };
        let none = || {
            let what = match (dir.exists(), dir.is_dir()) {
                (false, _) => "there is no such folder",
                (_, false) => "this is a file: give its folder",
                _ => "the folder has no model.safetensors and no index",
            };
            Diag::new("missing-weights", what)
                .at(dir.display().to_string())
                .help("leave --weights out to start from random weights")
        };
        if !dir.is_dir() {
            return Err(none());
        }
        let c = Checkpoint::open(dir)?.ok_or_else(none)?;
        c.check(&plan.weights)?;
        Ok(Start::Checkpoint(c))
    }
}

/// Starts the ranks of a plan.
pub fn session(plan: &Plan, start: &Start, how: &Run) -> Result<Session> {
    let ranks = plan.module.mesh.ranks();
    if ranks > MAX_LOCAL_RANKS {
        return Err(Diag::new(
            "too-many-ranks",
            format!("{ranks} ranks do not run as threads of one process, {MAX_LOCAL_RANKS} do"),
        )
        .help(format!("compile for a mesh of at most {MAX_LOCAL_RANKS} ranks to run here"))
        .exit(Exit::Environment));
    }
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = how.threads.unwrap_or(cores / ranks).clamp(1, cores);
    let programs: Vec<Program> =
        (0..ranks).map(|r| shardc_codegen::program(plan, r)).collect::<Result<_>>()?;
    let native = match how.kernels {
        Kernels::Interpreted => None,
        Kernels::Compiled => {
            let all = programs.iter().flatten().flatten();
            let object = shardc_codegen::c::compile(&shardc_codegen::c::print(all))?;
            Some(Arc::new(Native::load(&object, programs.iter())?))
        }
    };
    let options = Options {
        native,
        threads,
        timeout: Duration::from_secs(how.timeout.max(1)),
        trace: how.trace.is_some(),
        ..Options::default()
    };
    let load = |w: &Weight, ranges: &[std::ops::Range<usize>], out: &mut [f32]| match start {
        Start::Random { seed } => shardc_frontends::init(w, ranges, *seed, out),
        Start::Checkpoint(c) => c.read(w, ranges, out),
    };
    Session::new(plan, options, &|_, rank| Ok(programs[rank].clone()), &load)
}

/// Tokens of a step.
enum Feed {
    Data(Data),
    Batch(Batch),
}

/// Runs the command.
pub fn run(dir: &Path, how: Run, as_json: bool) -> Result<i32> {
    let stored = plan_dir::read(dir)?;
    let stored = if how.dump.is_some() { observed(&stored)? } else { stored };
    let plan = &stored.plan;
    let s = &plan.settings;
    if let Some(dir) = &how.save {
        check_target(dir)?;
    }
    let start = Start::open(how.weights.as_deref(), plan)?;
    if matches!(start, Start::Random { .. }) {
        eprintln!(
            "starting from random weights, seed {} (--weights DIR starts from a checkpoint)",
            s.seed
        );
    }
    let feed = match (&how.batch, &how.data) {
        (Some(file), _) => {
            let b = read_batch(file)?;
            if (b.rows, b.seq) != (s.global_batch, s.seq) {
                return Err(Diag::new(
                    "batch",
                    format!(
                        "the batch is [{}, {}], the plan takes [{}, {}]",
                        b.rows, b.seq, s.global_batch, s.seq
                    ),
                )
                .at(file.display().to_string())
                .help(format!("compile with --global-batch {} --seq {}", b.rows, b.seq)));
            }
            b.check(s.vocab)?;
            Feed::Batch(b)
        }
        (None, Some(spec)) => Feed::Data(Data::open("--data", spec, s.vocab)?),
        (None, None) => Feed::Data(Data::Random { vocab: s.vocab }),
    };
    let mut session = session(plan, &start, &how)?;
    let steps = how.steps.unwrap_or(if s.mode == Mode::Infer { 1 } else { 10 });
    let eval =
        how.eval_data.as_deref().map(|d| Data::open("--eval-data", d, s.vocab)).transpose()?;
    let mut first: Option<StepResult> = None;
    let mut trace = how.trace.as_deref().map(trace::Trace::new);
    let bar = progress(steps, as_json);
    for step in 1..=steps {
        let (ids, targets) = match &feed {
            Feed::Data(d) => d.batch(s.seed, step as u32, s.global_batch, s.seq),
            Feed::Batch(b) => (b.input_ids.clone(), b.targets()),
        };
        let targets = if s.mode == Mode::Train { targets } else { vec![] };
        let since = Instant::now();
        let observe = step == 1 && how.dump.is_some();
        let r = session.step(
            &StepBatch { input_ids: &ids, targets: &targets, observe },
            s.lr.at(step),
            step,
        )?;
        if let Some(t) = &mut trace {
            t.add(plan, step, &r.timings);
        }
        show_step(&bar, step, &r, since.elapsed(), ids.len(), as_json);
        if step == 1 {
            first = Some(r);
        }
        if let Some(d) = eval.as_ref().filter(|_| step % how.eval_every.max(1) == 0) {
            let (ids, targets) = d.batch(s.seed, EVALUATION, s.global_batch, s.seq);
            let batch = StepBatch { input_ids: &ids, targets: &targets, observe: false };
            let loss = session.evaluate(&batch)?.loss;
            match as_json {
                true => show(format!("{}\n", json!({ "step": step, "eval_loss": loss }))),
                false => bar.suspend(|| {
                    show(format!(
                        "step {step:>5}  evaluation loss {:.4}\n",
                        loss.unwrap_or(f32::NAN)
                    ))
                }),
            }
        }
    }
    bar.finish_and_clear();
    if let Some(t) = &trace {
        t.write(plan)?;
    }
    if let (Some(file), Some(first)) = (&how.dump, &first) {
        dump(file, &stored, first, &mut session)?;
    }
    if let Some(dir) = &how.save {
        save(dir, &stored.config, &plan.weights, how.weights.as_deref(), |w| {
            parameter(&mut session, &w.param)
        })?;
        eprintln!("saved {}", dir.display());
    }
    Ok(0)
}

/// The plan made again with logits and gradients as outputs.
fn observed(stored: &Stored) -> Result<Stored> {
    let mut o = stored.options.clone();
    // The limit is that of the plan that trains.
    (o.observe, o.memory) = (true, None);
    let again = recompile(stored, &o)?;
    let (old, new) = (stored.plan.peak_bytes(), again.stored.plan.peak_bytes());
    let peak = if new == old {
        format!("peak {new} B as before")
    } else {
        format!("peak {new} B instead of {old} B")
    };
    eprintln!("recompiled to observe logits and gradients: {peak}");
    Ok(again.stored)
}

fn progress(steps: usize, as_json: bool) -> ProgressBar {
    let hidden = as_json || !std::io::stderr().is_terminal();
    let bar = ProgressBar::with_draw_target(
        Some(steps as u64),
        if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() },
    );
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  {eta} left")
        .expect("a fixed template");
    bar.set_style(style);
    bar
}

fn show_step(
    bar: &ProgressBar,
    step: usize,
    r: &StepResult,
    took: Duration,
    tokens: usize,
    as_json: bool,
) {
    let ms = took.as_secs_f64() * 1e3;
    if as_json {
        show(format!(
            "{}\n",
            json!({ "step": step, "loss": r.loss, "grad_norm": r.grad_norm, "tokens": r.tokens, "ms": ms })
        ));
        return;
    }
    let rate = tokens as f64 / took.as_secs_f64();
    let number = |x: Option<f32>| x.map_or("-".into(), |x| format!("{x:.4}"));
    let found = match r.loss {
        Some(_) => format!("loss {}  grad norm {}", number(r.loss), number(r.grad_norm)),
        None => "forward".into(),
    };
    let line = format!("step {step:>5}  {found}  {rate:.0} tokens/s  {ms:.0} ms");
    bar.set_message(format!("loss {}  {rate:.0} tokens/s", number(r.loss)));
    bar.inc(1);
    bar.suspend(|| show(line + "\n"));
}

/// The current value of a parameter, whole.
pub fn parameter(session: &mut Session, param: &str) -> Result<Vec<f32>> {
    session.tensor(&Role::new(RoleKind::Param, param)).map(|a| a.data)
}

/// Writes what was observed, under the checkpoint's names and layouts.
fn dump(file: &Path, stored: &Stored, first: &StepResult, session: &mut Session) -> Result<()> {
    let mut out: Vec<NamedTensor> = vec![];
    for name in ["logits", "loss"] {
        if let Some(a) = first.outputs.get(name) {
            out.push((name.into(), a.shape.clone(), a.data.clone()));
        }
    }
    let weights = &stored.plan.weights;
    if stored.plan.settings.mode == Mode::Train {
        let grads = whole_tensors(weights, |w| {
            Ok(first.outputs.get(&format!("grad.{}", w.param)).map(|a| a.data.clone()))
        })?;
        out.extend(grads.into_iter().map(|(n, s, d)| (format!("grad.{n}"), s, d)));
        let params = whole_tensors(weights, |w| parameter(session, &w.param).map(Some))?;
        out.extend(params.into_iter().map(|(n, s, d)| (format!("param.{n}"), s, d)));
    }
    write_tensors(file, out)
}
