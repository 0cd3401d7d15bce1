//! `shardc plan`: all legal layouts in closed form, then the fastest of them compiled, until enough fit.
//!
//! Whether a layout fits is what its compiled plan says, and nothing else; which are compiled is a guess
//! that the closed form makes, and says so.

pub mod space;

use crate::machine::{precision, sizes};
use crate::search::{all, trial};
use crate::{Input, read_model};
use shardc_cost::device::Device;
use shardc_cost::layer::Question;
use shardc_cost::layout::{Job, Kernels, Overlap, Recompute, Stack};
use shardc_cost::model::Sizes;
use shardc_cost::parts::Parts;
use shardc_cost::plan as of_plan;
use shardc_cost::step::Closed;
use shardc_frontends::Facts;
use shardc_ir::diag::{Diag, Exit, Result};
use shardc_passes::options::Options;
use shardc_passes::threads;
use space::Candidate;
use std::path::Path;
use std::time::Instant;

/// Candidates that are compiled at once.
const AT_ONCE: usize = 2;
/// Compilations for one plan that is asked for, fitting or not.
const TRIES: usize = 6;

/// What is asked.
pub struct Asked {
    pub gpus: usize,
    pub device: Device,
    /// Batch, sequence and element type; the layout is not looked at.
    pub options: Options,
    /// Bytes that a rank may need.
    pub memory: usize,
    /// Plans that are wanted.
    pub top: usize,
    /// Numbers of the layout that are given.
    pub fixed: Vec<(String, usize)>,
}

/// A layout with its price in closed form.
#[derive(Clone, Copy)]
pub struct Guess {
    pub candidate: Candidate,
    pub seconds: f64,
    /// Bytes that no plan of it can do without.
    pub least: f64,
}

/// A layout that was compiled.
pub struct Compiled {
    pub guess: Guess,
    pub options: Options,
    pub seconds: f64,
    pub parts: Parts,
    pub mfu: f64,
    pub tokens_per_s: f64,
    pub peak: usize,
}

/// What was found.
pub struct Found {
    pub legal: usize,
    /// Of them, those that may fit.
    pub may_fit: usize,
    pub closed_ms: f64,
    /// Compiled, fitting or not; and those whose compilation was refused.
    pub compiled: usize,
    pub refused: Vec<(Candidate, Diag)>,
    /// Passed over, as layouts like them were compiled and did not fit.
    pub passed_over: usize,
    /// Those that fit, the fastest first.
    pub fits: Vec<Compiled>,
    /// The least that a compiled plan needs, if none fits.
    pub least: Option<(Candidate, usize)>,
    pub input: Input,
}

/// A model's closed form on a machine.
struct Form {
    sizes: Sizes,
    job: Job,
    stack: &'static Stack,
}

impl Form {
    fn of(family: &str, f: &Facts, config: &serde_json::Value, o: &Options) -> Form {
        let overlap = Overlap { tp_backward: true, dp: true, whole_sends: true, ..Overlap::default() };
        let job = Job {
            seq: o.seq,
            precision: precision(o),
            attention: Kernels::Flash(2),
            overlap,
            compiled: true,
        };
        Form { sizes: sizes(family, f, config), job, stack: Stack::named("shardc") }
    }

    /// Seconds, and the least bytes: weights, gradients and the optimizer's state, and what enters the
    /// layers of one microbatch.
    fn guess(&self, device: &Device, candidate: Candidate) -> Result<Guess> {
        let layout = &candidate.layout;
        let question =
            Question { sizes: &self.sizes, layout, job: &self.job, stack: self.stack, device };
        let seconds = Closed { question, balanced: true }.price()?.total;
        Ok(Guess { candidate, seconds, least: self.least(&candidate) })
    }

    fn least(&self, c: &Candidate) -> f64 {
        let (l, s) = (&c.layout, &self.sizes);
        let wide = self.job.precision.bytes();
        let dense = (s.layers - s.expert_layers()) as f64 * s.layer_params(true);
        let others = s.expert_layers() as f64 * s.layer_params(false);
        let own = (dense + others) / (l.tp * l.pp) as f64;
        let experts = s.expert_layers() as f64 * s.expert_params() / (l.ep * l.etp * l.pp) as f64;
        let by = |zero: u8| if l.zero >= zero { l.shards as f64 } else { 1.0 };
        // f32 gradients, two moments, and a master copy of what is not f32.
        let state = if wide < 4.0 { 12.0 } else { 8.0 };
        let each = wide / by(3) + 4.0 / by(2) + state / by(1);
        // What ZeRO does to experts depends on how many ranks have the same.
        let of_expert = if l.zero == 0 { wide + 4.0 + state } else { 0.0 };
        let rows = if l.sp { l.tp as f64 } else { 1.0 };
        let tokens = (l.microbatch * self.job.seq / l.cp) as f64 / rows;
        let entering = tokens * s.hidden as f64 * wide * (s.layers / l.pp) as f64;
        own * each + experts * of_expert + entering
    }
}

/// All layouts, and the best of them compiled; `say` hears how far it is.
///
/// # Errors
/// `no-layout` if none is legal, and those of reading the model.
pub fn plan(model: &Path, asked: &Asked, say: &mut dyn FnMut(String)) -> Result<Found> {
    let base = &Options { memory: None, ..asked.options.clone() };
    let Some(facts) = crate::facts(model)? else {
        return Err(Diag::new("no-layout", "a text has no sizes that layouts could be made of")
            .help("give a folder with config.json, or compile the text with --shard auto"));
    };
    let input = read_model(model, base)?;
    let since = Instant::now();
    let all_legal = space::candidates(&facts, base, asked.gpus, asked.device.domain as usize);
    let fixed = |c: &Candidate| asked.fixed.iter().all(|(n, v)| c.number(n) == Some(*v));
    let legal: Vec<Candidate> = all_legal.into_iter().filter(fixed).collect();
    if legal.is_empty() {
        return Err(Diag::new("no-layout", format!("no layout on {} ranks is legal", asked.gpus))
            .rule("some layout violates no rule that check knows")
            .help(format!("give a --global-batch that {} divides, or fix less", asked.gpus))
            .exit(Exit::Infeasible));
    }
    let form = Form::of(&input.family, &facts, &input.config, base);
    let limit = asked.memory as f64;
    let priced = threads::all(&legal, usize::MAX, |c| form.guess(&asked.device, *c));
    let mut guesses: Vec<Guess> = priced.into_iter().collect::<Result<_>>()?;
    guesses.retain(|g| g.least <= limit);
    guesses.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let closed_ms = since.elapsed().as_secs_f64() * 1e3;
    let (legal, may_fit) = (legal.len(), guesses.len());
    say(format!("{legal} legal, {may_fit} may fit, all priced in {closed_ms:.0} ms"));
    let mut search = Search {
        asked,
        input: &input,
        form: &form,
        failed: vec![],
        refused: vec![],
        fits: vec![],
        least: None,
        compiled: 0,
        passed_over: 0,
    };
    search.run(&guesses, say);
    let Search { refused, fits, least, compiled, passed_over, .. } = search;
    let mut found =
        Found { legal, may_fit, closed_ms, compiled, refused, passed_over, fits, least, input };
    found.fits.sort_by(|a, b| a.seconds.total_cmp(&b.seconds).then(a.peak.cmp(&b.peak)));
    Ok(found)
}

/// What was compiled so far.
struct Search<'a> {
    asked: &'a Asked,
    input: &'a Input,
    form: &'a Form,
    /// Layouts that did not fit, and what they need.
    failed: Vec<(Candidate, usize)>,
    refused: Vec<(Candidate, Diag)>,
    fits: Vec<Compiled>,
    least: Option<(Candidate, usize)>,
    compiled: usize,
    passed_over: usize,
}

impl Search<'_> {
    fn run(&mut self, guesses: &[Guess], say: &mut dyn FnMut(String)) {
        let mut rest = guesses.iter();
        while self.fits.len() < self.asked.top && self.compiled < TRIES * self.asked.top {
            let mut some: Vec<Guess> = vec![];
            while let Some(g) = rest.next().filter(|_| some.len() < AT_ONCE) {
                match self.failed.iter().any(|f| needs_more(&g.candidate, &f.0)) {
                    true => self.passed_over += 1,
                    false => some.push(*g),
                }
                if some.len() == AT_ONCE {
                    break;
                }
            }
            if some.is_empty() {
                break;
            }
            let done = all(&some, |g| self.compile(g));
            for (g, done) in some.into_iter().zip(done) {
                match done {
                    Err(d) => self.refused.push((g.candidate, d)),
                    Ok(c) => self.keep(c),
                }
            }
            let (n, fits) = (self.compiled, self.fits.len());
            say(format!("{n} compiled, {fits} fit"));
        }
    }

    fn keep(&mut self, c: Compiled) {
        self.compiled += 1;
        if self.least.is_none_or(|l| c.peak < l.1) {
            self.least = Some((c.guess.candidate, c.peak));
        }
        if c.peak <= self.asked.memory {
            self.fits.push(c);
        } else {
            self.failed.push((c.guess.candidate, c.peak));
        }
    }

    fn compile(&self, g: &Guess) -> Result<Compiled> {
        let base = Options { memory: None, ..self.asked.options.clone() };
        let device = &self.asked.device;
        let mut options = g.candidate.options(&base);
        options.hardware = device.hardware(&options.mesh, precision(&options))?;
        let plan = trial(self.input, &base, &options)?;
        let price = of_plan::price(&plan, device)?;
        let tokens = (options.global_batch * options.seq) as f64;
        let needed = self.form.sizes.step_flops(tokens, options.seq as f64);
        let peak = device.peak.get(&precision(&options)).copied().unwrap_or(f64::INFINITY);
        let could = peak * self.asked.gpus as f64 * price.total;
        Ok(Compiled {
            guess: *g,
            seconds: price.total,
            parts: price.parts,
            mfu: needed / could,
            tokens_per_s: tokens / price.total,
            peak: plan.peak_bytes(),
            options,
        })
    }
}

/// True if a layout needs at least what another needs: the same, with more kept of more sequences.
fn needs_more(a: &Candidate, b: &Candidate) -> bool {
    let (x, y) = (&a.layout, &b.layout);
    let mesh = |l: &shardc_cost::layout::Layout| (l.tp, l.cp, l.pp, l.dp, l.chunks, l.ep, l.etp);
    let kept = |r: Recompute| match r {
        Recompute::None => 0,
        Recompute::Selective | Recompute::Ops => 1,
        Recompute::Full => 2,
    };
    mesh(x) == mesh(y)
        && a.named == b.named
        && (x.shards <= y.shards || x.zero == 0)
        && x.microbatch >= y.microbatch
        && x.zero <= y.zero
        && x.sp <= y.sp
        && kept(x.recompute) <= kept(y.recompute)
}
