//! How the ranks of a run are started, and from which values.

use super::{Kernels, On, Run, engine};
use crate::torch;
use shardc_codegen::{c, program};
use shardc_compiler::device;
use shardc_frontends::import::Opened;
use shardc_frontends::{CONFIG as ADAPTER_CONFIG, Checkpoint};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::kernel::{Kernel, Program};
use shardc_ir::plan::Plan;
use shardc_ir::weights::Weight;
use shardc_plans::stored::Stored;
use shardc_process::terminal::{note, notes, warn};
use shardc_runtime::cuda::{Device, Devices};
use shardc_runtime::native::Native;
use shardc_runtime::{First, Options, Session, Wanted};
use shardc_train::checkpoint::{BaseModel, OptimResume, Saved};
use shardc_train::cluster::Job;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Where the last instructions of every rank are written to if one fails.
const RECORDS: &str = "shardc-failure";
/// What several devices are not used well by.
const THREADS: &str = "ranks are threads of 1 process, whose exchanges have no other work beside \
    them: for several devices compile with --transport nccl, and start 1 process for each \
    (shardc launch-script)";
/// Most ranks run as threads of one process.
const MAX_LOCAL_RANKS: usize = 256;

/// Where the first values of parameters come from.
pub enum Start {
    Random {
        seed: u64,
    },
    Checkpoint(Checkpoint),
    /// Parameters and optimizer state; of a plan with adapters the base model is that of other files.
    Resumed(Box<Saved>, Option<Checkpoint>),
}

impl Start {
    /// The weights of a folder or archive, or random ones; with the adapter of another folder, if one is given.
    pub fn open(dir: Option<&Path>, adapter: Option<&Path>, plan: &Plan) -> Result<Start> {
        let Some(dir) = dir else { return Ok(Start::Random { seed: plan.settings.seed }) };
        let c = Start::weights(dir, plan)?;
        let read = |a: &Path| {
            let wrong = |d: Diag| {
                match Saved::open(a) {
                Ok(s) if s.base.is_some() => d.help(format!(
                    "this is a checkpoint, its adapter is written by shardc reshard {} --to peft -o DIR",
                    a.display()
                )),
                _other => d,
            }
            };
            Checkpoint::of_adapter(a, &plan.weights).map_err(wrong)
        };
        let adapter = adapter.map(read).transpose()?;
        Ok(Start::Checkpoint(match adapter {
            Some(adapter) => c.with(adapter),
            None => c,
        }))
    }

    /// The weights of a folder or archive: all of a plan's but its adapters.
    ///
    /// # Errors
    /// `missing-weights`, and those of opening them.
    pub fn weights(dir: &Path, plan: &Plan) -> Result<Checkpoint> {
        let is_archive = shardc_plans::input::is_archive(dir) && dir.is_file();
        let none = || {
            let what = match (dir.exists(), dir.is_dir()) {
                (false, _) => "the folder does not exist",
                _ if is_archive => "the archive was made without weights",
                (_, false) => "this is a file: give its folder",
                _ => "the folder has no model.safetensors and no index",
            };
            let d = |what: &str| Diag::new("missing-weights", what).at(dir.display().to_string());
            if let Ok(saved) = Saved::open(dir) {
                return d("this is a checkpoint, --weights takes a model")
                    .help(format!("make a model of it: {}", saved.becomes()))
                    .help("or go on with the run that wrote it: --resume in place of --weights");
            }
            if dir.join(ADAPTER_CONFIG).is_file() {
                return d("this is an adapter, --weights takes a model").help(format!(
                    "compile with --lora-from {0}, and give --weights MODEL --adapter {0}",
                    dir.display()
                ));
            }
            let d = d(what);
            let d = if dir.exists() { d } else { d.help("check the path") };
            d.help("leave --weights out to start from random weights")
        };
        let c = match (is_archive, dir.is_dir()) {
            (true, _) => Opened::read(dir)?.checkpoint(),
            (_, true) => {
                shardc_frontends::check_readable(dir)?;
                Checkpoint::open(dir)?
            }
            _ => None,
        };
        let c = c.ok_or_else(none)?.called_as(&plan.weights);
        let base = plan.weights.iter().filter(|w| !w.is_adapter()).cloned();
        c.check(&base.collect::<Vec<Weight>>())?;
        c.check_tied(&plan.weights)?;
        Ok(c)
    }

    /// The base model of a plan with adapters, of which checkpoints keep what tells it from others; none of other plans.
    ///
    /// # Errors
    /// `io`.
    pub fn base(&self, plan: &Plan) -> Result<Option<BaseModel>> {
        if !plan.weights.iter().any(Weight::is_adapter) {
            return Ok(None);
        }
        Ok(Some(match self {
            Start::Random { seed } => BaseModel::Random { seed: *seed },
            Start::Checkpoint(c) => BaseModel::of(c, &plan.weights)?,
            Start::Resumed(s, _) => {
                s.base.clone().unwrap_or(BaseModel::Random { seed: plan.settings.seed })
            }
        }))
    }
}

/// Elements of a parameter before the first step: those of files, or of an adapter that they do not have, and
/// without files of all, drawn.
fn begins(
    c: Option<&Checkpoint>,
    w: &Weight,
    seed: u64,
    ranges: &[Range<usize>],
    out: &mut [f32],
) -> Result<()> {
    match c.filter(|c| !w.is_adapter() || w.tensors().all(|t| c.get(&t).is_some())) {
        Some(c) => c.read(w, ranges, out),
        None => shardc_frontends::init(w, ranges, seed, out),
    }
}

/// Gives the first values of what ranks keep.
pub fn loads<'a>(
    plan: &'a Plan,
    start: &'a Start,
) -> impl Fn(Wanted, &[Range<usize>], &mut [f32]) -> Result<()> + Sync + 'a {
    move |wanted, ranges, out| match (start, wanted.first) {
        (Start::Resumed(s, base), First::Weight(w)) if s.leaves_out(wanted.role) => {
            begins(base.as_ref(), w, s.seed().unwrap_or(plan.settings.seed), ranges, out)
        }
        (Start::Resumed(s, _), First::Number(x)) if s.begins(wanted.role) => {
            out.fill(x as f32);
            Ok(())
        }
        (Start::Resumed(s, _), _) => s.read(wanted.role, wanted.shape, ranges, out),
        (Start::Checkpoint(c), First::Weight(w)) => {
            begins(Some(c), w, plan.settings.seed, ranges, out)
        }
        (Start::Random { seed }, First::Weight(w)) => begins(None, w, *seed, ranges, out),
        (_, First::Number(x)) => {
            out.fill(x as f32);
            Ok(())
        }
    }
}

/// Threads of each of so many ranks that share the cores of this machine.
fn threads(how: &Run, ranks: usize) -> (usize, usize) {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    (how.threads.unwrap_or(cores / ranks).clamp(1, cores), cores)
}

/// Starts the ranks of a plan as processes of PyTorch.
pub(super) fn in_torch(
    stored: &Stored,
    start: &Start,
    how: &Run,
) -> Result<(Session, torch::Processes)> {
    let (hosts, threads, timeout) = of_torch(stored, how)?;
    torch::start(stored, hosts.as_ref(), threads, timeout, &loads(&stored.plan, start))
}

/// The hosts of a run on PyTorch if there are several, threads of a rank, and how long ranks wait.
pub(super) fn of_torch(
    stored: &Stored,
    how: &Run,
) -> Result<(Option<torch::Hosts>, usize, Duration)> {
    let hosts = torch::Hosts::detect()?;
    let here = stored.plan.module.mesh.ranks().div_ceil(hosts.as_ref().map_or(1, |h| h.count));
    Ok((hosts, threads(how, here).0, Duration::from_secs(how.timeout.max(1))))
}

/// Starts all ranks of a plan as threads.
pub fn session(plan: &Plan, start: &Start, how: &Run) -> Result<Session> {
    launch(plan, start, how, None, None)
}

/// Starts the ranks of a plan: all as threads, or that of this process of a job. Code for devices may be
/// in the plan's folder, `dir`.
pub(super) fn launch(
    plan: &Plan,
    start: &Start,
    how: &Run,
    job: Option<&Job>,
    dir: Option<&Path>,
) -> Result<Session> {
    let world = plan.module.mesh.ranks();
    let own = job.map_or(0..world, |j| j.launched.rank..j.launched.rank + 1);
    // Those that share the cores of this process.
    let ranks = job.map_or(world, Job::sharing);
    if own.len() > MAX_LOCAL_RANKS {
        return Err(Diag::new(
            "too-many-ranks",
            format!("{world} ranks do not run as threads of one process, {MAX_LOCAL_RANKS} do"),
        )
        .help(format!("compile for a mesh of at most {MAX_LOCAL_RANKS} ranks to run here")));
    }
    let (threads, cores) = threads(how, ranks);
    let programs: Vec<Program> = own.clone().map(|r| program(plan, r)).collect::<Result<_>>()?;
    let native = match (how.device, how.kernels) {
        (On::Cuda, _) | (_, Some(Kernels::Interpreted | Kernels::Own)) => None,
        (On::Cpu, asked) => match native(&programs, how) {
            Ok(made) => Some(Arc::new(made)),
            Err(d) if asked.is_none() => {
                warn(&[d.why("kernels are interpreted: the same numbers, in f32 a little slower")]);
                None
            }
            Err(d) => return Err(d),
        },
    };
    let devices = match how.device {
        On::Cpu => None,
        On::Cuda => {
            if let Some(job) = job {
                // Bits of the library and of ours differ.
                job.same("products by", &engine::multiplies(how))?;
            }
            let one = job.and_then(Job::device);
            let trusted = dir.filter(|_| how.trust_kernels);
            let opened =
                device::open(plan, &programs, (own.start, one), trusted, engine::library(how));
            Some(opened.map_err(|d| device::without(d, dir, trusted))?)
        }
    };
    let options = Options {
        native,
        devices,
        threads,
        crowded: threads * ranks > cores,
        timeout: Duration::from_secs(how.timeout.max(1)),
        trace: how.trace.is_some(),
        ..Options::default()
    };
    let load = loads(plan, start);
    let lower = |_: &Plan, rank: usize| Ok(programs[rank - own.start].clone());
    let devices = options.devices.clone();
    let session = match job {
        None => Session::new(plan, options, &lower, &load)?,
        Some(job) => {
            let records = PathBuf::from(RECORDS);
            let devices = options.devices.as_deref();
            let process = job.process(plan, options.timeout, records, devices)?;
            Session::join(plan, options, process, &lower, &load)?
        }
    };
    if let Some(devices) = devices {
        let leads = job.is_none_or(|j| j.control.leads());
        notes(leads.then(|| products(&devices, &programs)));
        if job.is_none() && programs.len() > 1 && Device::count()? > 1 {
            note(THREADS);
        }
        notes(if how.memory_log { devices.memory() } else { vec![] });
    }
    Ok(session)
}

/// By whom products are done, in words.
fn products(devices: &Devices, programs: &[Program]) -> String {
    let all = || programs[0].iter().flatten();
    let joined = all().filter(|k| matches!(k, Kernel::GemmThen(_))).count();
    let grouped = all().filter(|k| matches!(k, Kernel::Grouped(_))).count();
    let ours = [(joined, "products with work on their result"), (grouped, "of experts")];
    let ours: Vec<String> =
        ours.iter().filter(|o| o.0 > 0).map(|(n, what)| format!("{n} {what}")).collect();
    match ours.is_empty() {
        true => format!("products: {}", devices.products()),
        false => format!("products: {}; ours: {}", devices.products(), ours.join(", ")),
    }
}

/// The kernels over rows of these programs, compiled.
fn native(programs: &[Program], how: &Run) -> Result<Native> {
    let functions = c::Functions::of(programs.iter().flatten().flatten());
    let objects = c::compile(&functions, Duration::from_secs(how.timeout.max(1)))?;
    Native::load(&objects, programs.iter())
}

/// Opens a checkpoint and checks its data; processes share this.
pub(super) fn resume(
    dir: &Path,
    weights: Option<&Path>,
    plan: &Plan,
    states: OptimResume,
    job: Option<&Job>,
) -> Result<Start> {
    let mut saved = Saved::open(dir)?;
    let base = weights.map(|w| Start::weights(w, plan)).transpose()?;
    saved.check_base(base.as_ref(), plan)?;
    if let Some(job) = job {
        job.same("the checkpoint", &saved.mark())?;
    }
    let (first, of) = job.map_or((0, 1), |j| (j.launched.rank, j.launched.world));
    saved.verify(first, of)?;
    let other = saved.fit(plan, states)?;
    if first == 0 {
        warn(&other);
        note(format!("resuming from {}, step {}", saved.dir().display(), saved.step));
    }
    Ok(Start::Resumed(Box::new(saved), base))
}
