//! A running plan: one thread per rank of this process, alive from step to step.

mod array;
mod remote;
mod status;
mod worker;

pub use crate::batch::StepData;
pub use array::Array;
pub use remote::{Given, Remote, RemoteFailed, Shown};

use crate::alarm::Alarm;
use crate::batch::{self, Columns, Numbers};
use crate::control::{Control, StatusSource};
use crate::flight_recorder::{FlightRecorder, Timing};
use crate::holdings::Task;
use crate::options::{LoadFn, Options};
use crate::rank::{Command, Failed, Order, Rank, Reply};
use crate::transport::Transport;
use crate::wiring::{Port, Wiring, whole};
use array::batch_of;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Fill, InputRow, Role, RoleKind};
use shardc_ir::kernel::Program;
use shardc_ir::loss_scale::ScaleState;
use shardc_ir::plan::{Plan, TokenOrder};
use status::RankStatus;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use worker::{Worker, rank_thread, start, unstarted};

/// Makes the kernels of a rank.
pub type LowerFn<'a> = dyn Fn(&Plan, usize) -> Result<Program> + Sync + 'a;

/// One step's data.
#[derive(Clone, Debug)]
pub struct StepBatch {
    /// By name, for each input that data fill; others are not looked at.
    pub columns: Columns,
    /// Return all outputs, not only scalars.
    pub observe: bool,
}

impl StepBatch {
    /// That of a language model, `[global_batch, seq]` each. Position i is scored against `targets[i]`;
    /// negative targets are ignored.
    pub fn tokens(input_ids: &[i32], targets: &[i32], observe: bool) -> StepBatch {
        let of = |name: &str, x: &[i32]| (name.to_string(), Numbers::I32(x.to_vec()));
        let columns = [of("input_ids", input_ids), of("targets", targets)].into();
        StepBatch { columns, observe }
    }
}

/// What a step gives.
#[derive(Clone, Debug, Default)]
pub struct StepResult {
    pub loss: Option<f32>,
    /// Of gradients without the scale of the loss.
    pub grad_norm: Option<f32>,
    /// What the loss was multiplied by, where it is.
    pub loss_scale: Option<f32>,
    /// Gradients have overflowed: neither parameters nor the optimizer's state have changed.
    pub skipped: bool,
    /// Labels that count; 0 of a plan without labels.
    pub tokens: usize,
    /// What is shown, by role: scalars, and all others if the batch is observed. Those of all
    /// microbatches stand in one tensor if their first dim is the batch, else the last's remain.
    /// Those of tokens, `[batch, seq, …]`, stand in the order of the batch.
    pub outputs: BTreeMap<Role, Array>,
    /// By rank, if the session notes times.
    pub timings: Vec<Vec<Timing>>,
}

impl StepResult {
    /// What was shown under a role of this kind and name.
    pub fn output(&self, kind: RoleKind, name: &str) -> Option<&Array> {
        self.outputs.get(&Role::new(kind, name))
    }
}

/// The ranks of this process, and their connection to those of others.
pub struct Process {
    /// The ends of this process's ranks.
    pub ends: Vec<Box<dyn Transport>>,
    /// Whom the ranks of this process wait for.
    pub alarm: Arc<Alarm>,
    /// `None` if all ranks are here.
    pub control: Option<Control>,
    /// Where the last instructions are written to if a rank of the job fails.
    pub records: PathBuf,
}

/// Ranks with their weights and state.
pub struct Session {
    wiring: Arc<Wiring>,
    workers: Vec<Worker>,
    status: Arc<RankStatus>,
    control: Option<Control>,
    timeout: Duration,
    table: Vec<InputRow>,
    /// Of process 0.
    scale: ScaleState,
    /// Ranks queue what they do on devices.
    queues: bool,
    failed: Option<Diag>,
    /// By class.
    touched: Vec<usize>,
}

impl Session {
    /// Starts all ranks of a plan as threads: each lowers its program, makes its arena and loads its
    /// slices.
    ///
    /// # Errors
    /// `plan` if the plan contradicts itself, `weight-missing`, and those of `lower` and `load`.
    pub fn new(plan: &Plan, options: Options, lower: &LowerFn, load: &LoadFn) -> Result<Session> {
        let ends = options.connect(&plan.module.mesh)?;
        let (alarm, records) = (Arc::default(), PathBuf::new());
        let process = Process { ends, alarm, control: None, records };
        Session::join(plan, options, process, lower, load)
    }

    /// Starts the ranks of this process, of a job of several.
    ///
    /// # Errors
    /// As for [`Session::new`].
    pub fn join(
        plan: &Plan,
        options: Options,
        process: Process,
        lower: &LowerFn,
        load: &LoadFn,
    ) -> Result<Session> {
        let wiring = Arc::new(Wiring::new(plan)?);
        let table = batch::check_inputs(&wiring)?;
        let Process { ends, alarm, control, records } = process;
        let recorders = ends.iter().map(|e| (e.rank(), Arc::new(FlightRecorder::new()))).collect();
        let status = Arc::new(RankStatus { wiring: wiring.clone(), recorders, alarm, records });
        if let Some(c) = &control {
            c.watch(status.clone());
            c.expect(Reply::largest(plan));
            // Times of all processes begin together.
            c.barrier();
        }
        let began = Instant::now();
        let made: Mutex<Vec<(usize, Result<Rank>)>> = Mutex::new(vec![]);
        let ranks = ends.len();
        std::thread::scope(|s| {
            for (end, (rank, recorder)) in ends.into_iter().zip(&status.recorders) {
                let (wiring, recorder, rank, made) =
                    (wiring.clone(), recorder.clone(), *rank, &made);
                let options = options.clone();
                let thread = std::thread::Builder::new().name(rank_thread(rank));
                let make = move || {
                    let r = lower(&wiring.plan, rank).and_then(|program| {
                        Rank::new(wiring, program, end, (options, began), recorder, load)
                    });
                    made.lock().unwrap_or_else(PoisonError::into_inner).push((rank, r));
                };
                thread.spawn_scoped(s, make).map_err(|e| unstarted(rank, ranks, &e))?;
            }
            Ok(())
        })?;
        let mut made = made.into_inner().unwrap_or_else(PoisonError::into_inner);
        made.sort_by_key(|m| m.0);
        let ready: Vec<(usize, Rank)> =
            made.into_iter().map(|(rank, r)| Ok((rank, r?))).collect::<Result<_>>()?;
        let workers: Result<Vec<Worker>> = ready.into_iter().map(|r| start(r, ranks)).collect();
        let (timeout, queues) = (options.timeout, options.devices.is_some());
        Ok(Session::with(status, workers?, control, table, (timeout, queues)))
    }

    fn with(
        status: Arc<RankStatus>,
        workers: Vec<Worker>,
        control: Option<Control>,
        table: Vec<InputRow>,
        (timeout, queues): (Duration, bool),
    ) -> Session {
        let wiring = status.wiring.clone();
        let scale = ScaleState::new(wiring.plan.settings.loss_scaling);
        let touched = vec![0; wiring.plan.classes.len()];
        Session {
            wiring,
            workers,
            status,
            control,
            timeout,
            table,
            scale,
            queues,
            failed: None,
            touched,
        }
    }

    /// The scale of the loss, and how many steps have changed nothing.
    pub fn scale(&self) -> ScaleState {
        self.scale
    }

    /// Goes on from what another session had come to.
    pub fn go_on(&mut self, from: ScaleState) {
        self.scale = from.resumed(self.wiring.plan.settings.loss_scaling);
    }

    /// Runs one step, the `step`-th (from 1), at a learning rate. Where the loss is scaled and gradients
    /// overflow, it changes nothing but the scale.
    ///
    /// # Errors
    /// `batch-shape`, `token-range` and `label-range` if the data do not fit (nothing has run
    /// then); `nan-loss`; `rank-failed`, after which the session fails always.
    pub fn step(&mut self, batch: &StepBatch, lr: f64, step: usize) -> Result<StepResult> {
        self.run_actions(batch, lr, step, false)
    }

    /// The loss of a batch; no parameter changes.
    ///
    /// # Errors
    /// `no-evaluation` if the plan does not train, and those of [`Session::step`].
    pub fn evaluate(&mut self, batch: &StepBatch) -> Result<StepResult> {
        if self.wiring.plan.classes.iter().all(|c| c.evaluation.is_empty()) {
            return Err(Diag::new("no-evaluation", "the plan has no loss to evaluate")
                .help("compile it with --mode train"));
        }
        self.run_actions(batch, 0.0, 0, true)
    }

    fn run_actions(
        &mut self,
        batch: &StepBatch,
        lr: f64,
        step: usize,
        evaluate: bool,
    ) -> Result<StepResult> {
        let settings = &self.wiring.plan.settings;
        let mut columns = batch.columns.clone();
        batch::complete(settings, &self.table, &mut columns);
        let scaling = settings.loss_scaling;
        let data = Arc::new(StepData {
            columns,
            lr: lr as f32,
            step,
            update: step.saturating_sub(self.scale.skipped + self.scale.before),
            loss_scale: self.scale.scale(scaling),
            observe: batch.observe,
            evaluate,
        });
        batch::check(settings, &self.table, &data)?;
        let replies = self.ask(|| Command::Step(data.clone()))?;
        let mut out =
            StepResult { tokens: self.labels(&data.columns).unwrap_or(0), ..StepResult::default() };
        let ports: Vec<Port> = self.wiring.results(RoleKind::is_shown).collect();
        out.timings = replies.iter().map(|r| r.1.timings.clone()).collect();
        for (rank, r) in &replies {
            for p in &r.pieces {
                let port = &ports[p.output];
                let to = out.outputs.entry(port.role.clone()).or_default();
                to.add(&self.wiring, port, *rank, p);
            }
        }
        let settings = &self.wiring.plan.settings;
        let dealt = settings.tokens != TokenOrder::Contiguous;
        let of_tokens = |p: &&Port| dealt && p.ty.dims.get(1).map(|d| d.size) == Some(settings.seq);
        let of_tokens = |p: &&Port| of_tokens(p) && batch_of(&self.wiring, p).is_some();
        let roles: BTreeSet<&Role> = ports.iter().filter(of_tokens).map(|p| p.role).collect();
        for role in roles {
            out.outputs.entry(role.clone()).and_modify(|a| a.restore_order(settings));
        }
        let scalar = |n| out.output(RoleKind::Metric, n).and_then(|a| a.data.first().copied());
        (out.loss, out.grad_norm) = (scalar("loss"), scalar("grad_norm"));
        // A loss that is no number is so at any scale.
        let has_loss = out.loss.is_none_or(f32::is_finite);
        if let Some(how) = scaling.filter(|_| !evaluate && has_loss) {
            out.skipped = out.grad_norm.is_none_or(|x| !x.is_finite());
            out.loss_scale = Some(data.loss_scale);
            self.scale.update(how, !out.skipped).map_err(|d| d.at(format!("step {step}")))?;
            if out.skipped {
                return Ok(out);
            }
        }
        let named = [("loss", out.loss), ("gradient norm", out.grad_norm)];
        let bad = named.into_iter().find_map(|(n, x)| Some((n, x.filter(|x| !x.is_finite())?)));
        match bad {
            None => Ok(out),
            Some((what, x)) => {
                // Values of the forward pass end at 65504 in f16.
                let other = if scaling.is_some() { "--dtype bf16" } else { "--clip 1.0" };
                Err(Diag::new("nan-loss", format!("the {what} of step {step} is {x}"))
                    .rule("loss and gradient norm are finite numbers")
                    .why(format!("the learning rate is {lr}"))
                    .help(format!(
                        "run with --lr {:e}, or compile with {other}",
                        (lr / 10.0) as f32
                    )))
            }
        }
    }

    /// How many labels count, if there are labels.
    fn labels(&self, columns: &Columns) -> Option<usize> {
        let row = self.table.iter().find(|r| r.input.fill == Fill::Labels)?;
        match columns.get(&*row.name)? {
            Numbers::I32(x) => Some(x.iter().filter(|&&t| t >= 0).count()),
            Numbers::F32(_) => None,
        }
    }

    /// Does what process 0 asks of this one's ranks, until it has [`Session::finish`]ed. `feed` gives
    /// the data of a step, or of an evaluation if it is 0; `task` what a number of
    /// [`Session::each`] stands for.
    ///
    /// # Errors
    /// Those of the steps.
    pub fn follow(
        &mut self,
        feed: &dyn Fn(usize) -> Result<Columns>,
        task: &dyn Fn(u32) -> Arc<Task>,
    ) -> Result<()> {
        while let Some(c) = &self.control {
            let Some(order) = Order::read(&c.share(vec![])) else { break };
            match order {
                Order::Fetch { func, value } => {
                    self.ask(|| Command::Fetch { func, value })?;
                }
                Order::Task(number) => {
                    let task = task(number);
                    self.ask(|| Command::Task(number, task.clone()))?;
                }
                Order::Step { lr, step, update, loss_scale, observe, evaluate } => {
                    let mut columns = feed(if evaluate { 0 } else { step })?;
                    batch::complete(&self.wiring.plan.settings, &self.table, &mut columns);
                    let data =
                        StepData { columns, lr, step, update, loss_scale, observe, evaluate };
                    batch::check(&self.wiring.plan.settings, &self.table, &data)?;
                    let data = Arc::new(data);
                    self.ask(|| Command::Step(data.clone()))?;
                }
            }
        }
        Ok(())
    }

    /// Does something with all that each rank holds; what each has given, by rank. Other processes
    /// know it by its number.
    ///
    /// # Errors
    /// Those of the task.
    pub fn each(&mut self, number: u32, task: Arc<Task>) -> Result<Vec<Vec<u8>>> {
        let replies = self.ask(|| Command::Task(number, task.clone()))?;
        Ok(replies.into_iter().map(|r| r.1.given).collect())
    }

    /// Tells other processes that there is nothing more to do, and waits for them; then the ranks of this process
    /// end.
    ///
    /// # Errors
    /// Those of [`Control::finish`].
    pub fn finish(mut self) -> Result<()> {
        if let Some(c) = self.control.take() {
            if c.leads() {
                c.share(vec![]);
            }
            c.finish()?;
        }
        Ok(())
    }

    /// The value of a parameter, a state or an output after a step, gathered from its owners.
    ///
    /// # Errors
    /// `unknown-tensor` if no value has the role, `partial` if its ranks hold parts of a sum, and
    /// `rank-failed`.
    pub fn tensor(&mut self, role: &Role) -> Result<Array> {
        let wiring = self.wiring.clone();
        let port = wiring.find(role).filter(|p| p.ty.dtype.is_float());
        let Some(port) = port else {
            let same = |k| k == role.kind;
            let known = wiring.args(same).chain(wiring.results(same));
            let known: Vec<&str> = known.map(|p| &*p.role.name).take(8).collect();
            return Err(Diag::new(
                "unknown-tensor",
                format!("no {} is called `{}`", role.kind, role.name),
            )
            .help(format!("the first {} are {}", known.len(), known.join(", "))));
        };
        whole(port.role, port.ty)?;
        let (func, value) = (port.func, port.value);
        let replies = self.ask(|| Command::Fetch { func, value })?;
        let mut out = Array::default();
        for (rank, r) in &replies {
            for p in &r.pieces {
                out.place(&wiring, &port, *rank, &p.data, &port.ty.sizes(), None);
            }
        }
        Ok(out)
    }

    /// The most bytes of its arena that any rank of a class has used, by class.
    pub fn touched(&self) -> &[usize] {
        &self.touched
    }

    /// Gives all ranks a command and waits for all replies, by rank; those of other processes reach
    /// process 0 only.
    fn ask(&mut self, command: impl Fn() -> Command) -> Result<Vec<(usize, Reply)>> {
        if let Some(c) = self.control.as_ref().filter(|c| c.leads()) {
            c.share(command().order().to_vec());
        }
        let mut all = self.ask_here(command)?;
        if let Some(c) = &self.control {
            let own: Vec<u8> = all.iter().flat_map(|(rank, r)| r.to_bytes(*rank)).collect();
            for (_, bytes) in c.gather(own).iter().enumerate().filter(|x| x.0 != c.process()) {
                all.extend(Reply::from_bytes(bytes));
            }
            all.sort_by_key(|r| r.0);
        }
        for (rank, r) in &all {
            let most = &mut self.touched[self.wiring.plan.class_of(*rank)];
            *most = r.touched.max(*most);
        }
        Ok(all)
    }

    /// As [`Session::ask`], of the ranks of this process.
    fn ask_here(&mut self, command: impl Fn() -> Command) -> Result<Vec<(usize, Reply)>> {
        if let Some(f) = &self.failed {
            return Err(f.clone());
        }
        for w in &self.workers {
            // A rank whose thread has ended is found below, when it does not reply.
            let _ = w.commands.as_ref().map(|c| c.send(command()));
        }
        let mut replies = vec![];
        let mut failures: Vec<(usize, Failed)> = vec![];
        for w in &mut self.workers {
            let rank = w.rank;
            let reply = if failures.is_empty() {
                w.replies.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                w.replies.recv_timeout(self.timeout + Duration::from_secs(1))
            };
            match reply {
                Ok(Ok(r)) => replies.push((rank, r)),
                Ok(Err(f)) => failures.push((rank, f)),
                Err(e) => {
                    // A thread that does not answer cannot be joined either.
                    w.thread = None;
                    let what = if e == RecvTimeoutError::Timeout {
                        "does not answer"
                    } else {
                        "has ended"
                    };
                    let cause =
                        Diag::new("rank-failed", format!("{} {what}", self.wiring.rank_text(rank)))
                            .help("restart from the latest checkpoint, with 1 thread per rank");
                    failures.push((rank, Failed { own: e != RecvTimeoutError::Timeout, cause }));
                }
            }
        }
        let first = failures.iter().position(|f| f.1.own).unwrap_or(0);
        if failures.is_empty() {
            return Ok(replies);
        }
        let (rank, failed) = failures.swap_remove(first);
        let cause = match self.control {
            // The others say themselves where they are.
            Some(_) if failed.cause.place.is_some() => failed.cause,
            Some(_) => failed.cause.at(self.status.whereabouts()),
            None => self.status.explain(rank, failed.cause),
        };
        self.failed = Some(cause.clone());
        Err(cause)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        for w in &mut self.workers {
            w.commands = None;
        }
        // What a device has queued may wait for others for ever, and so would who frees its memory.
        // The job ends, and this process.
        if (self.control.is_some() || self.queues) && self.failed.is_some() {
            return;
        }
        for w in &mut self.workers {
            if let Some(t) = w.thread.take() {
                // A panic was reported as the rank's failure.
                let _ = t.join();
            }
        }
    }
}
