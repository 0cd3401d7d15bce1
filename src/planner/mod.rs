//! `shardc plan`: all legal layouts in closed form, then the fastest of them compiled, until enough fit.
//!
//! Whether a layout fits is what its compiled plan says, and nothing else; which are compiled is a guess
//! that the closed form makes, and says so.

pub mod guess;
pub mod largest;
pub mod memory;
pub mod space;
mod steady;
pub mod target;
pub mod what_if;

use crate::export::Target;
use crate::machine::precision;
use crate::rules;
use crate::search::{all, trial};
use crate::signals;
use crate::{Input, read_model};
use guess::{Form, Guess, Guesses};
use shardc_cost::beside;
use shardc_cost::device::Device;
use shardc_cost::layer::Question;
use shardc_cost::layout::Recompute;
use shardc_cost::parts::Parts;
use shardc_cost::plan::{self as of_plan, PlanPrice};
use shardc_cost::step::Closed;
use shardc_frontends::Facts;
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::plan::Plan;
use shardc_passes::checks::may_be_dealt;
use shardc_passes::options::{CpSplit, Options, Transport};
use space::Candidate;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;
use steady::Steady;
use target::LeftOut;
use what_if::Ifs;

/// Candidates that are compiled at once.
const AT_ONCE: usize = 2;
/// Layouts that are compiled, fitting or not, unless another number is asked for; and as many for each plan that is.
pub const BUDGET: usize = 40;
pub const EACH: usize = 4;
/// Plans for which numbers of compilations are at least.
const FEW: usize = 10;
/// The same of layouts that need too much by formulas that plans like them have corrected; and of those that may fit
/// although formulas are believed to be too high, while nothing has fitted.
const LATE: usize = 1;
const HOPES: usize = 2;
/// Layouts that are looked at to find such.
const MOST_LOOKED_AT: usize = 4096;

/// Parts of the formulas of memory and time that are taken for what a plan needs and takes until one like it was
/// compiled; and what of a known part may still be too much: formulas err by microbatch, too.
const FIRST_RATIO: f64 = 0.8;
const FIRST_TIME: f64 = 0.85;
const MARGIN: f64 = 0.9;
const TIME_MARGIN: f64 = 0.95;

/// What is asked.
#[derive(Clone)]
pub struct Asked {
    pub gpus: usize,
    pub device: Device,
    /// Batch, sequence and element type; the layout is not looked at.
    pub options: Options,
    /// Bytes that a rank may need.
    pub memory: usize,
    /// True if they are all of a GPU's: what lies beside a plan is in them, too.
    pub of_device: bool,
    /// Software that is to take the plans.
    pub target: Option<Target>,
    /// Plans that are wanted.
    pub top: usize,
    /// Layouts that are compiled at most.
    pub budget: usize,
    /// When no more are compiled, whatever is left of the budget.
    pub end: Option<Instant>,
    /// Numbers of the layout that are given.
    pub fixed: Vec<(String, usize)>,
    /// What no plan has, and is priced.
    pub ifs: Ifs,
}

impl Asked {
    /// Bytes that are left for a plan where so many lie beside it.
    pub fn room(&self, beside: usize) -> usize {
        self.memory.saturating_sub(if self.of_device { beside } else { 0 })
    }

    /// Bytes that are left for a layout's plan, as far as that is known before it is compiled.
    fn room_of(&self, c: &Candidate) -> usize {
        self.room(beside::guess(c.communicators()))
    }

    /// A layout's plan, compiled as a trial.
    fn trial(&self, input: &Input, options: &Options) -> Result<Plan> {
        let base = Options { memory: None, ..self.options.clone() };
        let plan = trial(input, &base, options)?;
        match self.target {
            None => Ok(plan),
            Some(to) => target::taken(to, input, plan, options),
        }
    }

    /// The plan of a layout that was found, and its price.
    ///
    /// # Errors
    /// Those of compiling it.
    pub fn priced(&self, c: &Compiled, input: &Input) -> Result<(Plan, PlanPrice)> {
        let plan = self.trial(input, &c.options)?;
        let price = of_plan::price(&plan, &self.device, &c.options.speeds)?;
        Ok((plan, price))
    }
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
    /// Bytes that lie beside the plan on a GPU, at most.
    pub beside: usize,
    /// Seconds and bytes of the plan as it is: without what no plan has.
    pub plain: (f64, usize),
}

/// What ends a search early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    /// The time that it was given.
    Time,
    /// A signal.
    Signal(i32),
}

/// How far a search is.
pub enum Progress<'a> {
    /// All layouts are priced: what to say of it.
    Priced(String),
    /// So many were compiled, and so many fit.
    Compiled(usize, usize, Option<&'a Compiled>),
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
    /// Legal and not looked at: the target has no words for them.
    pub left_out: LeftOut,
    /// Passed over: they need more than a layout that was compiled and did not fit.
    pub passed_over: usize,
    /// Not compiled although they seem faster: by formulas they need more than there is, or there are many.
    pub put_off: usize,
    /// What ended the search before its budget.
    pub cut: Option<Cut>,
    /// Those that fit, the fastest first.
    pub fits: Vec<Compiled>,
    /// The layout of the compiled plan that needs least, with what lies beside it, and the bytes of both.
    pub least: Option<(Candidate, usize, usize)>,
    pub input: Input,
}

/// Why no layout is legal as asked, of all that are without `--fix`.
fn nothing_legal(f: &Facts, base: &Options, asked: &Asked, all: &[Candidate]) -> Diag {
    let what = format!("no layout on {} is legal", count(asked.gpus, "rank", "ranks"));
    let d = Diag::new("no-layout", what);
    let none = asked.fixed.iter().find(|(n, v)| all.iter().all(|c| c.number(n) != Some(*v)));
    // One rank: what is wrong with the model's own sizes.
    let one = Options { mesh: vec![], microbatch: 1, global_batch: 1, ..base.clone() };
    let own = rules::violations(f, &one).into_iter().next().map(|v| v.diag());
    match (none, own) {
        (_, Some(own)) => {
            let d = own.rule.into_iter().fold(d.why(own.message), Diag::rule);
            own.help.into_iter().fold(d, Diag::help)
        }
        (Some((name, v)), None) if !all.is_empty() => {
            let mut there: Vec<usize> = all.iter().filter_map(|c| c.number(name)).collect();
            there.sort_unstable();
            there.dedup();
            let there: Vec<String> = there.iter().map(usize::to_string).collect();
            d.why(format!("none has {name}={v}"))
                .help(format!("fix {name} at one of {}, or leave it open", there.join(", ")))
        }
        (None, None) if !all.is_empty() => {
            d.why("none has all that --fix says together").help("fix less")
        }
        _ => d
            .rule("ranks of dp divide the sequences of a batch")
            .help(format!("give a --global-batch that {} divides", asked.gpus)),
    }
}

/// All layouts, and the best of them compiled; `say` hears how far it is. A signal ends the search, and not the process.
///
/// # Errors
/// `no-layout` if none is legal, and those of reading the model.
pub fn plan(model: &Path, asked: &Asked, say: &mut dyn FnMut(Progress)) -> Result<Found> {
    let mut base = Options { memory: None, ..asked.options.clone() };
    let Some(facts) = crate::facts(model)? else {
        return Err(Diag::new("no-layout", "a text has no sizes that layouts could be made of")
            .help("give a folder with config.json, or compile the text with --shard auto"));
    };
    let input = read_model(model, &base)?;
    if base.cp_split.is_none() && may_be_dealt(&input.source.module.funcs[0], base.seq) {
        // Ranks of cp have equal parts of what a causal model attends to.
        base.cp_split = Some(CpSplit::Zigzag);
    }
    let base = &base;
    let since = Instant::now();
    let domain = asked.device.domain as usize;
    let mut legal = space::candidates(&facts, base, asked.gpus, domain);
    legal.retain(|c| asked.fixed.iter().all(|(n, v)| c.number(n) == Some(*v)));
    if legal.is_empty() {
        let all = space::candidates(&facts, base, asked.gpus, domain);
        return Err(nothing_legal(&facts, base, asked, &all));
    }
    let mut left_out = LeftOut::default();
    if let Some(to) = asked.target {
        target::retain(to, &input, base, &mut legal, &mut left_out)?;
    }
    asked.ifs.check(precision(base))?;
    let form = Form::of(&facts, &input.config, base, asked.ifs);
    let mut guesses = Guesses::of(&form, &asked.device, &legal, &|c| asked.room_of(c))?;
    let closed_ms = since.elapsed().as_secs_f64() * 1e3;
    let (legal, may_fit) = (legal.len(), guesses.len());
    let priced = format!("{legal} legal, {may_fit} may fit, all priced in {closed_ms:.0} ms");
    say(Progress::Priced(priced));
    let mut search = Search {
        asked,
        base,
        input: &input,
        form: &form,
        failed: vec![],
        ratios: BTreeMap::new(),
        times: BTreeMap::new(),
        refused: vec![],
        fits: vec![],
        least: None,
        compiled: 0,
        late: 0,
        passed_over: 0,
        cut: None,
    };
    signals::save_first();
    let put_off = search.run(&mut guesses, say);
    signals::save_no_more();
    let Search { refused, mut fits, least, compiled, passed_over, cut, .. } = search;
    let (untaken, refused): (Vec<_>, Vec<_>) =
        refused.into_iter().partition(|(_, d)| asked.target.is_some() && d.code == "export");
    untaken.into_iter().for_each(|(_, d)| left_out.add(d));
    fits.sort_by(|a, b| a.seconds.total_cmp(&b.seconds).then(a.peak.cmp(&b.peak)));
    fits.truncate(asked.top);
    Ok(Found {
        legal,
        may_fit,
        closed_ms,
        compiled,
        refused,
        left_out,
        passed_over,
        put_off,
        cut,
        fits,
        least,
        input,
    })
}

/// What was compiled so far.
struct Search<'a> {
    asked: &'a Asked,
    /// What is asked for, but for the layout.
    base: &'a Options,
    input: &'a Input,
    form: &'a Form,
    /// Layouts that did not fit.
    failed: Vec<Candidate>,
    /// By recomputation and stage of ZeRO, the least that a plan needed of what the formula says.
    ratios: BTreeMap<(Recompute, u8), f64>,
    /// The same of the time that a plan takes, with tensor parallelism or without.
    times: BTreeMap<((Recompute, u8), bool), f64>,
    refused: Vec<(Candidate, Diag)>,
    fits: Vec<Compiled>,
    least: Option<(Candidate, usize, usize)>,
    compiled: usize,
    /// Of them, those that were late.
    late: usize,
    passed_over: usize,
    cut: Option<Cut>,
}

impl Search<'_> {
    /// Compiles the fastest first, of those that seem to fit; then those that do not seem to; then those that may
    /// be faster than what was found. How many were left that seemed faster.
    fn run(&mut self, guesses: &mut Guesses, say: &mut dyn FnMut(Progress)) -> usize {
        let mut put_off: Vec<Guess> = vec![];
        let mut late = vec![].into_iter();
        while self.fits.len() < self.asked.top && self.goes_on() {
            let mut some: Vec<Guess> = vec![];
            while some.len() < AT_ONCE {
                if let Some(g) = guesses.next() {
                    match (self.is_hopeless(&g), self.seems_to_fit(&g)) {
                        (true, _) => self.passed_over += 1,
                        (false, false) => put_off.push(g),
                        (false, true) => some.push(g),
                    }
                    continue;
                }
                if late.len() == 0 && self.late == 0 {
                    put_off.sort_by(|a, b| a.likely.total_cmp(&b.likely));
                    late = std::mem::take(&mut put_off).into_iter();
                }
                match late.next() {
                    Some(g) if self.is_hopeless(&g) => self.passed_over += 1,
                    Some(g) if self.is_too_late(&g) => put_off.push(g),
                    Some(g) => {
                        self.late += usize::from(!self.seems_to_fit(&g));
                        some.push(g);
                    }
                    None => break,
                }
            }
            if some.is_empty() {
                break;
            }
            self.compile_all(some, say);
        }
        let mut left: Vec<Guess> = put_off.into_iter().chain(late).collect();
        let Some(mut bound) = self.bound() else { return left.len() + guesses.left() };
        // None that is left is faster by formula alone; but plans of one kind are faster than their formula.
        let least = self.times.values().map(|r| r * TIME_MARGIN).fold(FIRST_TIME, f64::min);
        let near = std::iter::from_fn(|| guesses.next()).take(MOST_LOOKED_AT);
        left.extend(near.take_while(|g| g.seconds * least < bound));
        while self.goes_on() {
            left.retain(|g| !self.is_hopeless(g) && self.time(g) < bound);
            let (mut now, rest): (Vec<_>, Vec<_>) =
                left.into_iter().partition(|g| self.seems_to_fit(g));
            now.sort_by(|a, b| self.time(a).total_cmp(&self.time(b)));
            left = now.split_off(AT_ONCE.min(now.len())).into_iter().chain(rest).collect();
            if now.is_empty() {
                break;
            }
            self.compile_all(now, say);
            bound = self.bound().unwrap_or(bound);
        }
        left.retain(|g| !self.is_hopeless(g) && self.time(g) < bound);
        left.len()
    }

    fn compile_all(&mut self, some: Vec<Guess>, say: &mut dyn FnMut(Progress)) {
        let done = all(&some, |g| self.compile(g));
        for (g, done) in some.into_iter().zip(done) {
            match done {
                Err(d) => self.refused.push((g.candidate, d)),
                Ok(c) => self.keep(c),
            }
        }
        let best = self.fits.iter().min_by(|a, b| a.seconds.total_cmp(&b.seconds));
        say(Progress::Compiled(self.compiled, self.fits.len(), best));
    }

    /// Seconds of the slowest plan that would be shown; `None` if more are wanted.
    fn bound(&self) -> Option<f64> {
        let mut seconds: Vec<f64> = self.fits.iter().map(|c| c.seconds).collect();
        seconds.sort_by(f64::total_cmp);
        seconds.get(self.asked.top.checked_sub(1)?).copied()
    }

    /// The least that a layout may take by formula, if it is as plans like it.
    fn time(&self, g: &Guess) -> f64 {
        let ratio = self.times.get(&(likeness(g), g.candidate.layout.tp > 1));
        g.seconds * ratio.map_or(FIRST_TIME, |r| r * TIME_MARGIN)
    }

    /// True while there is budget and time, and nobody has asked for an end.
    fn goes_on(&mut self) -> bool {
        let is_over = self.asked.end.is_some_and(|end| Instant::now() >= end);
        self.cut = signals::asked().map(Cut::Signal).or(is_over.then_some(Cut::Time));
        self.cut.is_none() && self.compiled + self.refused.len() < self.asked.budget
    }

    /// True if a layout that needs less was compiled and did not fit.
    fn is_hopeless(&self, g: &Guess) -> bool {
        self.failed.iter().any(|f| needs_more(&g.candidate, f))
    }

    /// True if the formula of memory, scaled by what plans like it needed, says so.
    fn seems_to_fit(&self, g: &Guess) -> bool {
        let ratio = self.ratios.get(&likeness(g)).copied().unwrap_or(FIRST_RATIO);
        let many = self.compiled >= HOPES * self.asked.top.max(FEW);
        let margin = if self.fits.is_empty() && many { 1.0 } else { MARGIN };
        g.likely * ratio * margin <= self.asked.room_of(&g.candidate) as f64
    }

    /// True if enough were compiled that did not seem to fit, and by plans like it this one does not either.
    fn is_too_late(&self, g: &Guess) -> bool {
        let known = self.ratios.contains_key(&likeness(g));
        known && !self.seems_to_fit(g) && self.late >= LATE * self.asked.top.max(FEW)
    }

    fn keep(&mut self, c: Compiled) {
        self.compiled += 1;
        let ratio = c.peak as f64 / c.guess.likely;
        let known = self.ratios.entry(likeness(&c.guess)).or_insert(ratio);
        *known = known.min(ratio);
        let ratio = c.seconds / c.guess.seconds;
        let known = (likeness(&c.guess), c.guess.candidate.layout.tp > 1);
        let known = self.times.entry(known).or_insert(ratio);
        *known = known.min(ratio);
        let beside = if self.asked.of_device { c.beside } else { 0 };
        if self.least.is_none_or(|l| c.peak + beside < l.1 + l.2) {
            self.least = Some((c.guess.candidate, c.peak, beside));
        }
        if c.peak <= self.asked.room(c.beside) {
            self.fits.push(c);
        } else {
            self.failed.push(c.guess.candidate);
        }
    }

    fn compile(&self, g: &Guess) -> Result<Compiled> {
        let (base, device) = (self.base, &self.asked.device);
        // NCCL connects GPUs only; plans for MPI are the same programs.
        let transport = if device.is_gpu() { Transport::Nccl } else { Transport::Mpi };
        let options = Options { transport, ..g.candidate.options(base) };
        let room = self.asked.room_of(&g.candidate);
        let Steady { plan, seconds, parts } =
            steady::compiled(self.asked, self.input, &options, room)?;
        let beside = if device.is_gpu() { beside::bytes(&plan) } else { 0 };
        let plain = (seconds, plan.peak_bytes());
        let (parts, peak) = self.changed(g, &plan, parts)?;
        let seconds = parts.total();
        let tokens = (options.global_batch * options.seq) as f64;
        let needed = self.form.sizes.step_flops(tokens, options.seq as f64);
        let fastest = device.peak.get(&self.form.job.precision).copied().unwrap_or(f64::INFINITY);
        let could = fastest * self.asked.gpus as f64 * seconds;
        let (mfu, tokens_per_s) = (needed / could, tokens / seconds);
        Ok(Compiled { guess: *g, options, seconds, parts, mfu, tokens_per_s, peak, beside, plain })
    }

    /// Parts of a plan's price and the bytes that it needs, with what no plan has.
    fn changed(&self, g: &Guess, plan: &Plan, parts: Parts) -> Result<(Parts, usize)> {
        let ifs = &self.form.ifs;
        if !ifs.is_any() {
            return Ok((parts, plan.peak_bytes()));
        }
        let device = &self.asked.device;
        let asked = self.form.question(device, &g.candidate);
        let plain = Question { job: &self.form.plain, ..asked };
        let of = |question| Ok(Closed { question, balanced: true }.price()?.parts);
        Ok((ifs.parts(plan, device, parts, [of(plain)?, of(asked)?]), ifs.peak(plan)))
    }
}

/// What the errors of the formulas of memory and time depend on most.
fn likeness(g: &Guess) -> (Recompute, u8) {
    (g.candidate.layout.recompute, g.candidate.layout.zero)
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
        // Gradients of one microbatch need no sum beside them.
        && (x.microbatches > 1 || y.microbatches == 1)
        && x.zero <= y.zero
        && x.sp <= y.sp
        && kept(x.recompute) <= kept(y.recompute)
}
