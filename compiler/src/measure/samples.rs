//! Runs a plan, and says how long each of its launches took.

use shardc_codegen::c;
use shardc_cost::device::Device;
use shardc_cost::plan::launch::{Pricer, Work};
use shardc_ir::diag::Result;
use shardc_ir::func::FuncKind;
use shardc_ir::group::launches;
use shardc_ir::kernel::Program;
use shardc_ir::plan::{Instr, Plan};
use shardc_ir::weights::Weight;
use shardc_runtime::native::Native;
use shardc_runtime::{Done, Options, Session, StepBatch, Timing, fresh};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest that the C compiler, and a rank for another, may take.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A launch, or a transfer between stages, and seconds of it: the median of all that ran.
#[derive(Clone, Debug)]
pub struct Sample {
    /// `None`: a transfer.
    pub work: Option<Work>,
    /// Of a transfer.
    pub bytes: f64,
    pub seconds: f64,
    /// How often a step has it.
    pub calls: usize,
    /// A product by NVIDIA's library.
    pub library: bool,
}

impl Sample {
    /// A launch, by the compiler's own kernel.
    pub fn of(work: Work, seconds: f64, calls: usize) -> Sample {
        Sample { work: Some(work), bytes: 0.0, seconds, calls, library: false }
    }
}

/// Seconds of a step, and what every rank did in it.
pub type Step = (f64, Vec<Vec<Timing>>);

/// A plan with the kernels of its ranks.
pub struct Kernels {
    pub(super) plan: Plan,
    programs: Vec<Program>,
    native: Arc<Native>,
}

/// A plan whose ranks wait for steps.
pub struct Ready {
    session: Session,
    batch: StepBatch,
    steps: usize,
}

impl Kernels {
    /// Makes them.
    ///
    /// # Errors
    /// Those of making kernels, such as `c-compiler`.
    pub fn of(plan: Plan) -> Result<Kernels> {
        let ranks = plan.module.mesh.ranks();
        let programs: Vec<Program> =
            (0..ranks).map(|r| shardc_codegen::program(&plan, r)).collect::<Result<_>>()?;
        let functions = c::Functions::of(programs.iter().flatten().flatten());
        let native = Arc::new(Native::load(&c::compile(&functions, TIMEOUT)?, programs.iter())?);
        Ok(Kernels { plan, programs, native })
    }

    /// Starts the ranks with fresh weights and so many threads each; with `trace` steps say what ranks did.
    ///
    /// # Errors
    /// Those of starting ranks.
    pub fn start(&self, threads: usize, trace: bool) -> Result<Ready> {
        let native = Some(self.native.clone());
        let options = Options { native, threads, trace, timeout: TIMEOUT, ..Options::default() };
        let s = &self.plan.settings;
        let load = fresh(|w: &Weight, at: &[Range<usize>], out: &mut [f32]| {
            shardc_frontends::init(w, at, s.seed, out)
        });
        let lower = |_: &Plan, rank: usize| Ok(self.programs[rank].clone());
        let session = Session::new(&self.plan, options, &lower, &load)?;
        let ids: Vec<i32> =
            (0..s.global_batch * s.seq).map(|i| (i * 31 % s.vocab.max(1)) as i32).collect();
        Ok(Ready { session, batch: StepBatch::tokens(&ids, &ids, false), steps: 0 })
    }
}

impl Ready {
    /// Some steps, after one that wakes threads and fills caches and is not among them.
    ///
    /// # Errors
    /// Those of running.
    pub fn steps(&mut self, count: usize) -> Result<Vec<Step>> {
        let mut out = vec![];
        for _ in 0..=count {
            self.steps += 1;
            let since = Instant::now();
            let result = self.session.step(&self.batch, 1e-4, self.steps)?;
            out.push((since.elapsed().as_secs_f64(), result.timings));
        }
        out.remove(0);
        Ok(out)
    }
}

/// The launches of all ranks of a plan, timed in some steps. Of a collective that rank counts which waited least
/// for the others.
pub fn samples(plan: &Plan, device: &Device, steps: &[Step]) -> Vec<Sample> {
    // By what was done, of each rank all times of it; those of different ranks are about the same work.
    let mut times: BTreeMap<(usize, usize, usize), BTreeMap<usize, Vec<f64>>> = BTreeMap::new();
    const RECEIVED: usize = usize::MAX;
    for (_, ranks) in steps {
        for (rank, list) in ranks.iter().enumerate() {
            let class = &plan.classes[plan.class_of(rank)];
            for t in list {
                let seconds = t.end.saturating_sub(t.start).as_secs_f64();
                let key = match t.what {
                    Done::Launch(f, n) => (f, n, 0),
                    Done::Instr(i) => match class.step.get(i) {
                        Some(Instr::Recv(_)) => (RECEIVED, plan.class_of(rank), i),
                        _other => continue,
                    },
                };
                times.entry(key).or_default().entry(rank).or_default().push(seconds);
            }
        }
    }
    let mut pricer = Pricer::new(&plan.module.mesh, device, plan.settings.tokens);
    let mut out = vec![];
    for (&(f, node, i), by_rank) in &times {
        if f == RECEIVED {
            let Some(Instr::Recv(t)) = plan.classes[node].step.get(i) else { continue };
            let least = by_rank.values().flatten().copied().fold(f64::INFINITY, f64::min);
            let bytes = t.bytes as f64;
            out.push(Sample { work: None, bytes, seconds: least, calls: 1, library: false });
            continue;
        }
        let func = &plan.module.funcs[f];
        if func.kind == FuncKind::Evaluate {
            continue;
        }
        let Some(x) = launches(func).into_iter().find(|x| x.nodes.start == node) else { continue };
        let work = pricer.work(func, &x);
        let seconds = match work {
            Work::View => continue,
            Work::Exchange { .. } => least_waiting(by_rank),
            Work::Product { .. }
            | Work::Grouped { .. }
            | Work::Attention { .. }
            | Work::Rows { .. } => median(by_rank.values().flatten().copied().collect()),
        };
        out.push(Sample::of(work, seconds, plan.times(f)));
    }
    out
}

/// The median over calls of the least time of any rank: of a collective that of who waited least for the others.
pub fn least_waiting(by_rank: &BTreeMap<usize, Vec<f64>>) -> f64 {
    let calls = by_rank.values().map(Vec::len).min().unwrap_or(0);
    let least = |i: usize| by_rank.values().map(|v| v[i]).fold(f64::INFINITY, f64::min);
    median((0..calls).map(least).collect())
}

/// The middle of some numbers; 0 of none.
pub fn median(all: Vec<f64>) -> f64 {
    quantile(all, 0.5)
}

/// A part of the way from the least of some numbers to the largest; 0 of none.
pub fn quantile(mut all: Vec<f64>, part: f64) -> f64 {
    all.sort_by(f64::total_cmp);
    let at = (part * all.len().saturating_sub(1) as f64).round() as usize;
    all.get(at).copied().unwrap_or(0.0)
}
