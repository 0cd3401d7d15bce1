//! Which layouts are compiled, in which order, and what is learned from each.

mod fewer;

use super::guess::{ClosedForm, Guess, Guesses};
use super::space::{Candidate, FAMILIES};
use super::steady::{self, Steady};
use super::{Asked, Compiled, CutShort, Progress, target};
use crate::search::all;
use shardc_cost::beside;
use shardc_cost::layer::Question;
use shardc_cost::layout::{Context, Layout, Recompute, Schedule};
use shardc_cost::parts::Parts;
use shardc_cost::step::Closed;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::plan::Plan;
use shardc_passes::options::{Options, Transport};
use shardc_plans::input::Input;
use shardc_plans::machine::precision;
use shardc_process::signals;
use std::collections::BTreeMap;
use std::time::Instant;

/// Candidates that are compiled at once.
const AT_ONCE: usize = 2;
/// Plans for which numbers of compilations are at least.
const FEW: usize = 10;
/// The same of layouts that need too much by formulas that plans like them have corrected.
const LATE: usize = 1;
/// Layouts of which none has fitted, before formulas are no more believed to be too high.
const HOPES: usize = 10;
/// Most layouts of the budget that are for fewer layers of plans that compute some again.
const FOR_LAYERS: usize = 3;
/// Layouts that are looked at to find faster ones than those that fit.
pub(super) const MOST_LOOKED_AT: usize = 4096;

/// Parts of the formulas of memory and time that are taken for what a plan needs and takes until one like it was
/// compiled; and what of a known part may still be too much: formulas err by microbatch, too.
const FIRST_RATIO: f64 = 0.8;
const FIRST_TIME: f64 = 0.85;
const MARGIN: f64 = 0.9;
const TIME_MARGIN: f64 = 0.95;
/// The same of memory between plans whose ranks hold as much by any formula: what differs is how cp exchanges.
const SAME: f64 = 0.99;
/// The same between plans of equal tp and pp.
const NEAR: f64 = 0.95;

/// Recomputation, stage of ZeRO, schedule, and what a rank has: tp, pp, chunks, and tokens of a microbatch.
type Likeness = (Recompute, u8, Option<Schedule>, Option<[usize; 4]>);

/// What was compiled so far.
pub(super) struct Search<'a> {
    pub asked: &'a Asked,
    /// What is asked for, but for the layout.
    pub base: &'a Options,
    pub input: &'a Input,
    form: &'a ClosedForm,
    /// The first of each family, which is compiled before all others.
    firsts: Vec<Candidate>,
    /// Layouts that did not fit, and what they need.
    failed: Vec<(Candidate, usize)>,
    /// The least that a plan needed of what the formula says, by what plans have in common.
    ratios: BTreeMap<Likeness, f64>,
    /// The same of the time that a plan takes, with tensor parallelism or without, by what cp exchanges.
    times: BTreeMap<(Recompute, u8, bool, Context), f64>,
    pub refused: Vec<(Candidate, Diag)>,
    pub fits: Vec<Compiled>,
    pub least: Option<(Candidate, usize, usize)>,
    pub compiled: usize,
    /// How much of the budget was used when the fastest plan was found.
    best_at: usize,
    /// Of those compiled, the ones that were late.
    late: usize,
    pub passed_over: usize,
    pub cut: Option<CutShort>,
}

impl<'a> Search<'a> {
    pub fn new(
        asked: &'a Asked,
        base: &'a Options,
        input: &'a Input,
        form: &'a ClosedForm,
    ) -> Search<'a> {
        Search {
            asked,
            base,
            input,
            form,
            firsts: vec![],
            failed: vec![],
            ratios: BTreeMap::new(),
            times: BTreeMap::new(),
            refused: vec![],
            fits: vec![],
            least: None,
            compiled: 0,
            best_at: 0,
            late: 0,
            passed_over: 0,
            cut: None,
        }
    }

    /// Compiles the fastest first, of those that seem to fit; then those that do not seem to; then those that may
    /// be faster than what was found. How many were left that seemed faster.
    pub fn run(&mut self, guesses: &mut Guesses, say: &mut dyn FnMut(Progress)) -> usize {
        self.compile_families(guesses, say);
        let mut put_off: Vec<Guess> = vec![];
        // What waits for the plan of one that is near.
        let mut waits: Option<Guess> = None;
        let mut late = vec![].into_iter();
        while self.fitting().count() < self.asked.top && self.goes_on() {
            // Of what fits there is one with fewer layers that are computed again.
            if self.spent() + self.for_layers() >= self.asked.budget && !self.fits.is_empty() {
                break;
            }
            let mut some: Vec<Guess> = vec![];
            while some.len() < self.at_once() {
                if let Some(g) = waits.take().or_else(|| guesses.next()) {
                    if self.firsts.contains(&g.candidate) {
                        continue;
                    }
                    match (self.is_hopeless(&g), self.seems_to_fit(&g)) {
                        (true, _) => self.passed_over += 1,
                        (false, false) => put_off.push(g),
                        (false, true) if some.iter().any(|s| self.tells_of(s, &g)) => {
                            waits = Some(g);
                            break;
                        }
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
        let mut left: Vec<Guess> = put_off.into_iter().chain(waits).chain(late).collect();
        if self.bound().is_none() {
            self.fewer_layers(guesses, say);
        }
        let Some(bound) = self.bound() else {
            // The first of a family is compiled where it stands, and counted until its turn.
            let passed = self.firsts.iter().filter(|c| guesses.waits(c)).count();
            return left.len() + guesses.left() - passed;
        };
        // None that is left is faster by formula alone; but plans of one kind are faster than their formula.
        let least = self.times.values().map(|r| r * TIME_MARGIN).fold(FIRST_TIME, f64::min);
        let near = std::iter::from_fn(|| guesses.next()).take(MOST_LOOKED_AT);
        let firsts = &self.firsts;
        let new = |g: &Guess| !firsts.contains(&g.candidate);
        left.extend(near.take_while(|g| g.seconds * least < bound).filter(new));
        self.faster(&mut left, self.for_layers(), say);
        self.fewer_layers(guesses, say);
        self.faster(&mut left, 0, say);
        left.len()
    }

    /// Compiles of layouts those that may be faster than what was found, but for so many of the budget. Those that still
    /// may be are left.
    fn faster(&mut self, left: &mut Vec<Guess>, spared: usize, say: &mut dyn FnMut(Progress)) {
        let mut bound = self.bound().unwrap_or(f64::INFINITY);
        loop {
            left.retain(|g| !self.is_hopeless(g) && self.time(g) < bound);
            let is_over = self.is_settled() || self.spent() + spared >= self.asked.budget;
            if is_over || !self.goes_on() {
                return;
            }
            let (mut now, rest): (Vec<_>, Vec<_>) =
                std::mem::take(left).into_iter().partition(|g| self.seems_to_fit(g));
            now.sort_by(|a, b| self.time(a).total_cmp(&self.time(b)));
            *left = now.split_off(self.at_once().min(now.len())).into_iter().chain(rest).collect();
            if now.is_empty() {
                return;
            }
            self.compile_all(now, say);
            bound = self.bound().unwrap_or(bound);
        }
    }

    /// Compiles of each family of layouts the fastest that seems to fit: plans of one are faster than their formula, and
    /// what is known of one plan of a family orders the others.
    fn compile_families(&mut self, guesses: &mut Guesses, say: &mut dyn FnMut(Progress)) {
        for of in FAMILIES {
            let first = guesses.first(of, |g| self.seems_to_fit(g));
            let new = first.filter(|g| !self.firsts.contains(&g.candidate));
            if let Some(g) = new.filter(|_| self.goes_on()) {
                self.firsts.push(g.candidate);
                self.compile_all(vec![g], say);
            }
        }
    }

    /// Layouts that are compiled at once, of what is left of the budget.
    fn at_once(&self) -> usize {
        AT_ONCE.min(self.asked.budget - self.spent())
    }

    fn compile_all(&mut self, some: Vec<Guess>, say: &mut dyn FnMut(Progress)) {
        let (before, done) = (self.best(), all(&some, |g| self.compile(g)));
        for (g, done) in some.into_iter().zip(done) {
            match done {
                Err(d) => self.refused.push((g.candidate, d)),
                Ok(c) => self.keep(c),
            }
        }
        if self.best() != before {
            self.best_at = self.spent();
        }
        let best = self.fitting().min_by(|a, b| a.seconds.total_cmp(&b.seconds));
        say(Progress::Compiled(self.compiled, self.fitting().count(), best));
    }

    /// Plans that fit, and for which the target seems to have room, too.
    fn fitting(&self) -> impl Iterator<Item = &Compiled> {
        self.fits.iter().filter(|c| !self.asked.is_over(c))
    }

    /// The fastest plan.
    pub fn fastest(mut self) -> Option<Compiled> {
        self.fits.retain(|c| !self.asked.is_over(c));
        self.fits.into_iter().min_by(|a, b| a.seconds.total_cmp(&b.seconds))
    }

    /// Its seconds.
    pub fn best(&self) -> Option<f64> {
        self.fitting().map(|c| c.seconds).min_by(f64::total_cmp)
    }

    /// Seconds of the slowest plan that would be shown; `None` if more are wanted.
    fn bound(&self) -> Option<f64> {
        let mut seconds: Vec<f64> = self.fitting().map(|c| c.seconds).collect();
        seconds.sort_by(f64::total_cmp);
        seconds.get(self.asked.top.checked_sub(1)?).copied()
    }

    /// The least that a layout may take by formula, if it is as plans like it.
    pub fn time(&self, g: &Guess) -> f64 {
        let ratio = self.times.get(&pace(g));
        g.seconds * ratio.map_or(FIRST_TIME, |r| r * TIME_MARGIN)
    }

    /// True while there is budget and time, and nobody has asked for an end.
    fn goes_on(&mut self) -> bool {
        let is_over = self.asked.end.is_some_and(|end| Instant::now() >= end);
        self.cut = signals::asked().map(CutShort::Signal).or(is_over.then_some(CutShort::Time));
        self.cut.is_none() && self.spent() < self.asked.budget
    }

    /// How much of the budget was used since the fastest plan was found.
    pub fn since_best(&self) -> usize {
        self.spent() - self.best_at
    }

    /// True if that is half of it, and as many fit as are shown.
    fn is_settled(&self) -> bool {
        self.since_best() >= self.asked.budget.div_ceil(2) && self.bound().is_some()
    }

    /// How much of the budget is for fewer layers.
    fn for_layers(&self) -> usize {
        FOR_LAYERS.min(self.asked.budget / 4)
    }

    /// How much of the budget was used.
    fn spent(&self) -> usize {
        self.compiled + self.refused.len()
    }

    /// True if a layout that needs less was compiled and did not fit.
    fn is_hopeless(&self, g: &Guess) -> bool {
        self.failed.iter().any(|f| needs_more(&g.candidate, &f.0))
    }

    /// True if the formula of memory, scaled by what plans like it needed, says so, and if one is asked for that of the
    /// target.
    pub fn seems_to_fit(&self, g: &Guess) -> bool {
        if !self.fits_in_target(g) {
            return false;
        }
        let many = self.compiled >= HOPES;
        let margin = if self.fits.is_empty() && many { 1.0 } else { MARGIN };
        let margins = [SAME, NEAR, margin, margin];
        let mut known = self.likenesses(g).into_iter().zip(margins);
        let known = known.find_map(|(of, margin)| Some(self.ratios.get(&of)? * margin));
        let ratio = known.unwrap_or(FIRST_RATIO * margin);
        g.likely * ratio <= self.asked.room_of(&g.candidate) as f64
    }

    /// True unless the model of the target's memory says otherwise.
    fn fits_in_target(&self, g: &Guess) -> bool {
        let theirs = target::held(self.form, self.asked, &g.candidate).ok().flatten();
        theirs.is_none_or(|bytes| bytes <= self.asked.memory)
    }

    /// What the error of the formula of memory depends on, from what plans that are most alike have in common to what it
    /// depends on most.
    fn likenesses(&self, g: &Guess) -> [Likeness; 4] {
        let l = &g.candidate.layout;
        let tokens = l.microbatch * self.base.seq / l.cp;
        let rank = Some([l.tp, l.pp, l.chunks, tokens]);
        let any = (kind(l.recompute), l.zero, None, None);
        let schedule = (any.0, any.1, Some(l.schedule), None);
        [(l.recompute, l.zero, schedule.2, rank), near(g), schedule, any]
    }

    /// True if one layout's plan would be the first that tells of the memory of those near another.
    fn tells_of(&self, one: &Guess, other: &Guess) -> bool {
        let of = near(other);
        near(one) == of && !self.ratios.contains_key(&of)
    }

    /// True if enough were compiled that did not seem to fit, and by plans like it this one does not either.
    fn is_too_late(&self, g: &Guess) -> bool {
        let known = self.ratios.contains_key(&self.likenesses(g)[3]);
        known && !self.seems_to_fit(g) && self.late >= LATE * self.asked.top.max(FEW)
    }

    fn keep(&mut self, c: Compiled) {
        self.compiled += 1;
        // With what was not guessed of what is beside it.
        let room = [self.asked.room_of(&c.guess.candidate), self.asked.room(c.beside)];
        let ratio = (c.peak as f64 + room[0] as f64 - room[1] as f64) / c.guess.likely;
        for of in self.likenesses(&c.guess) {
            let known = self.ratios.entry(of).or_insert(ratio);
            *known = known.min(ratio);
        }
        let ratio = c.seconds / c.guess.seconds;
        let known = self.times.entry(pace(&c.guess)).or_insert(ratio);
        *known = known.min(ratio);
        let beside = if self.asked.of_device { c.beside } else { 0 };
        if self.least.is_none_or(|l| c.peak + beside < l.1 + l.2) {
            self.least = Some((c.guess.candidate, c.peak, beside));
        }
        if c.peak <= self.asked.room(c.beside) {
            self.fits.push(c);
        } else {
            self.failed.push((c.guess.candidate, c.peak));
        }
    }

    fn compile(&self, g: &Guess) -> Result<Compiled> {
        let (base, device) = (self.base, &self.asked.device);
        // NCCL connects GPUs only; plans for MPI are the same programs.
        let transport = if device.is_gpu() { Transport::Nccl } else { Transport::Mpi };
        let mut options = Options { transport, ..g.candidate.options(base) };
        if device.epilogue.is_some() {
            // Whether products and what follows them are one kernel is chosen by the speeds of both.
            let machine = &self.asked.machine;
            options.hardware = machine.hardware(&options.mesh, precision(&options))?;
        }
        let room = self.asked.room_of(&g.candidate);
        let Steady { plan, seconds, parts } =
            steady::compiled(self.asked, self.input, &options, room)?;
        let beside = if device.is_gpu() { beside::bytes(&plan) } else { 0 };
        let plain = (seconds, plan.peak_bytes());
        let (parts, peak) = self.changed(g, &plan, parts)?;
        let seconds = parts.total();
        let tokens = (options.global_batch * options.seq) as f64;
        let needed =
            self.form.sizes.step_flops_with(tokens, options.seq as f64, self.form.gradients);
        let fastest = device.peak.get(&self.form.job.precision).copied().unwrap_or(f64::INFINITY);
        let could = fastest * self.asked.gpus as f64 * seconds;
        let (mfu, tokens_per_s) = (needed / could, tokens / seconds);
        let in_target = target::held(self.form, self.asked, &g.candidate)?;
        Ok(Compiled {
            guess: *g,
            options,
            seconds,
            parts,
            mfu,
            tokens_per_s,
            peak,
            beside,
            plain,
            in_target,
        })
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

/// What the error of the formula of memory depends on beside the microbatch and how a rank's layers are cut.
fn near(g: &Guess) -> Likeness {
    let l = &g.candidate.layout;
    (kind(l.recompute), l.zero, None, Some([l.tp, l.pp, 0, 0]))
}

/// What the error of the formula of time depends on most.
fn pace(g: &Guess) -> (Recompute, u8, bool, Context) {
    let l = &g.candidate.layout;
    (kind(l.recompute), l.zero, l.tp > 1, l.context)
}

/// One for all numbers of layers that are computed again.
pub(super) fn kind(r: Recompute) -> Recompute {
    if matches!(r, Recompute::Layers(..)) { Recompute::Layers(1, 2) } else { r }
}

/// True if a layout needs at least what another needs: the same, with more kept of more sequences.
fn needs_more(a: &Candidate, b: &Candidate) -> bool {
    let (x, y) = (&a.layout, &b.layout);
    let mesh = |l: &Layout| (l.tp, l.cp, l.pp, l.dp, l.chunks, l.ep, l.etp);
    mesh(x) == mesh(y)
        && (a.named, x.context) == (b.named, y.context)
        && (x.shards <= y.shards || x.zero == 0)
        && x.microbatch >= y.microbatch
        // Gradients of one microbatch need no sum beside them.
        && (x.microbatches > 1 || y.microbatches == 1)
        && x.zero <= y.zero
        && x.sp <= y.sp
        && x.recompute.keeps_all_of(y.recompute)
}
