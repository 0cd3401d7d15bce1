//! `shardc plan`: all legal layouts in closed form, then the fastest of them compiled, until enough fit.
//!
//! Whether a layout fits is what its compiled plan says, and nothing else; which are compiled is a guess
//! that the closed form makes, and says so.

pub mod beyond;
pub mod guess;
pub mod largest;
pub mod memory;
pub mod space;
mod steady;
pub mod target;
mod trials;
pub mod what_if;

use crate::search::{trial, trials};
use beyond::Beyond;
use guess::{ClosedForm, Guess, Guesses};
use shardc_cost::band::Band;
use shardc_cost::beside;
use shardc_cost::device::Device;
use shardc_cost::parts::Parts;
use shardc_cost::plan::{self as of_plan, PlanPrice};
use shardc_frontends::Facts;
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::plan::{Mode, Plan};
use shardc_ir::types::DType;
use shardc_passes::checks::gains_by_zigzag;
use shardc_passes::options::{CpSplit, Options};
use shardc_plans::flags::Target;
use shardc_plans::input::{Input, read_model};
use shardc_plans::machine::{precision, sizes};
use shardc_plans::rules;
use shardc_process::signals;
use space::Candidate;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Instant;
use target::LeftOut;
use trials::{MOST_LOOKED_AT, Search};
use what_if::Ifs;

/// Layouts that are compiled, fitting or not, unless another number is asked for; and as many for each plan that is.
pub const BUDGET: usize = 40;
pub const EACH: usize = 4;
/// Tokens of a sequence, and of a step, that are planned unless others are asked for; and ranks that share a sequence.
pub const SEQ: usize = 8192;
const TOKENS: usize = 1 << 20;
const MOST_OF_A_ROW: usize = 64;

/// What is asked.
#[derive(Clone)]
pub struct Asked {
    pub gpus: usize,
    pub device: Device,
    /// That machine without changed numbers: what plans are compiled for, as the printed command says it.
    pub machine: Device,
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

    /// True if the target seems to have no room for a line.
    pub fn is_over(&self, c: &Compiled) -> bool {
        c.in_target.is_some_and(|bytes| bytes > self.memory)
    }

    /// Bytes that are left for a layout's plan, as far as that is known before it is compiled.
    fn room_of(&self, c: &Candidate) -> usize {
        self.room(beside::guess(c.communicators()))
    }

    /// A layout's plan, compiled as a trial.
    fn trial(&self, input: &Input, options: &Options) -> Result<Plan> {
        let base = Options { memory: None, ..self.options.clone() };
        self.taken(input, trial(input, &base, options)?, options)
    }

    /// Its plans with two numbers of microbatches.
    fn trials(&self, input: &Input, all: [&Options; 2]) -> Result<[Plan; 2]> {
        let base = Options { memory: None, ..self.options.clone() };
        let [first, second] = trials(input, &base, all)?;
        Ok([first, self.taken(input, second, all[1])?])
    }

    /// A plan, if the target takes it.
    fn taken(&self, input: &Input, plan: Plan, options: &Options) -> Result<Plan> {
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
    /// Bytes that the software needs that is to take the plan, by a model of its memory.
    pub in_target: Option<usize>,
}

/// What ends a search early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CutShort {
    /// The time that it was given.
    Time,
    /// A signal.
    Signal(i32),
}

/// How far a search is.
pub enum Progress<'a> {
    /// All layouts are priced: what to say of it.
    Priced(String),
    /// Those with gradients of this type are looked at.
    Narrower(DType),
    /// So many were compiled, and so many fit.
    Compiled(usize, usize, Option<&'a Compiled>),
}

/// What was found.
pub struct PlannedLayouts {
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
    pub cut: Option<CutShort>,
    /// Layouts that were compiled, or refused, since the fastest was found. With half of the budget the search is over.
    pub since_best: usize,
    /// Those that fit, the fastest first.
    pub fits: Vec<Compiled>,
    /// What is faster by formula in fp8 or with activations on the host.
    pub beyond: Vec<Beyond>,
    /// What is much faster with gradients in the type of the weights, where another was asked for.
    pub narrower: Option<Compiled>,
    /// The layout of the compiled plan that needs least, with what lies beside it, and the bytes of both.
    pub least: Option<(Candidate, usize, usize)>,
    /// How far prices of runs like this have been off; none where no such runs are known.
    pub band: Option<Band>,
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
            let there: BTreeSet<usize> = all.iter().filter_map(|c| c.number(name)).collect();
            let there: Vec<String> = there.iter().map(usize::to_string).collect();
            d.why(format!("none has {name}={v}"))
                .help(format!("fix {name} at one of {}, or leave it open", there.join(", ")))
        }
        (None, None) if !all.is_empty() => not_together(d, asked, all),
        _ => d
            .rule("ranks of dp divide the sequences of a batch")
            .help(format!("give a --global-batch that {} divides", asked.gpus)),
    }
}

/// Numbers of `--fix` that layouts have, and none of them together.
fn not_together(d: Diag, asked: &Asked, all: &[Candidate]) -> Diag {
    let words = |some: &[&(String, usize)]| {
        some.iter().map(|(n, v)| format!("{n}={v}")).collect::<Vec<_>>().join(", ")
    };
    let mut seen = BTreeSet::new();
    if let Some((name, _)) = asked.fixed.iter().find(|f| !seen.insert(&f.0)) {
        return d.why(format!("--fix says {name} twice")).help(format!("give {name} once"));
    }
    let axes = |f: &&(String, usize)| ["tp", "cp", "pp", "dp"].contains(&f.0.as_str());
    let axes: Vec<_> = asked.fixed.iter().filter(axes).collect();
    let ranks = axes.iter().fold(1usize, |n, f| n.saturating_mul(f.1));
    let wrong = match axes.len() {
        4 => ranks != asked.gpus,
        _some => ranks == 0 || !asked.gpus.is_multiple_of(ranks),
    };
    if wrong {
        let there = count(asked.gpus, "rank", "ranks");
        return d
            .why(format!(
                "{} are {}, and there are {there}",
                words(&axes),
                count(ranks, "rank", "ranks")
            ))
            .help(match axes.len() {
                4 => format!("fix numbers whose product is {}", asked.gpus),
                _some => format!("fix numbers whose product divides {}", asked.gpus),
            });
    }
    let has = |c: &Candidate, f: &(String, usize)| c.number(&f.0) == Some(f.1);
    for (i, a) in asked.fixed.iter().enumerate() {
        for b in &asked.fixed[i + 1..] {
            let with: Vec<&Candidate> = all.iter().filter(|c| has(c, a)).collect();
            if with.iter().all(|c| !has(c, b)) {
                let there: BTreeSet<usize> = with.iter().filter_map(|c| c.number(&b.0)).collect();
                let there: Vec<String> = there.iter().map(usize::to_string).collect();
                return d.why(format!("none has {} together", words(&[a, b]))).help(format!(
                    "with {} fix {} at one of {}",
                    words(&[a]),
                    b.0,
                    there.join(", ")
                ));
            }
        }
    }
    d.why("none has all that --fix says together").help("fix less")
}

/// All layouts, and the best of them compiled; `say` hears how far it is. A signal ends the search, and not the process.
///
/// # Errors
/// `no-layout` if none is legal, and those of reading the model.
pub fn plan(model: &Path, asked: &Asked, say: &mut dyn FnMut(Progress)) -> Result<PlannedLayouts> {
    let mut base = Options { memory: None, ..asked.options.clone() };
    let Some(facts) = shardc_plans::input::facts(model)? else {
        return Err(Diag::new("no-layout", "a text has no sizes that layouts could be made of")
            .help("give a folder with config.json, or compile the text with --shard auto"));
    };
    let input = read_model(model, &base)?;
    if base.cp_split.is_none() && gains_by_zigzag(&input.source.module.funcs[0], base.seq) {
        // Where a length allows it.
        base.cp_split = Some(CpSplit::Zigzag);
    }
    let base = &base;
    let since = Instant::now();
    let domain = asked.device.ranks_of_domain(asked.gpus);
    let sizes = sizes(&facts, &input.config);
    let all = || space::candidates(&facts, &sizes, base, (asked.gpus, domain));
    let mut legal = all();
    legal.retain(|c| asked.fixed.iter().all(|(n, v)| c.number(n) == Some(*v)));
    if legal.is_empty() {
        return Err(nothing_legal(&facts, base, asked, &all()));
    }
    let mut left_out = LeftOut::default();
    if let Some(to) = asked.target {
        target::retain(to, &input, base, &mut legal, &mut left_out)?;
    }
    asked.ifs.check(precision(base))?;
    let form = ClosedForm::of(&facts, &input, base, asked.ifs, &asked.device)?;
    let experts = form.sizes.experts.is_some();
    let band = Band::of(experts, !asked.device.is_guessed(), base.seq);
    let mut guesses = Guesses::of(&form, &asked.device, &legal, &|c| asked.room_of(c))?;
    let closed_ms = since.elapsed().as_secs_f64() * 1e3;
    let may_fit = guesses.len();
    let priced =
        format!("{} legal, {may_fit} may fit, all priced in {closed_ms:.0} ms", legal.len());
    say(Progress::Priced(priced));
    let mut search = Search::new(asked, base, &input, &form);
    signals::save_first();
    let put_off = search.run(&mut guesses, say);
    let since_best = search.since_best();
    let narrower = narrower(&search, &facts, &legal, say);
    // What ended the look at narrower gradients ended the search.
    search.cut = search.cut.or(signals::asked().map(CutShort::Signal));
    signals::save_no_more();
    let narrower = narrower?;
    let Search { refused, mut fits, least, compiled, passed_over, cut, .. } = search;
    let (untaken, refused): (Vec<_>, Vec<_>) =
        refused.into_iter().partition(|(_, d)| asked.target.is_some() && d.code == "export");
    untaken.into_iter().for_each(|(_, d)| left_out.add(d));
    order(&mut fits, |c| (c.seconds, c.peak, c.options.mesh.len()));
    // What the target seems to have no room for comes last.
    fits.sort_by_key(|c| asked.is_over(c));
    fits.truncate(asked.top);
    let beyond = beyond::beyond(asked, &form, &fits)?;
    Ok(PlannedLayouts {
        legal: legal.len(),
        may_fit,
        closed_ms,
        compiled,
        refused,
        left_out,
        passed_over,
        put_off,
        cut,
        since_best,
        fits,
        beyond,
        narrower,
        least,
        band,
        input,
    })
}

/// Options with gradients in the type of the weights, where that is narrower than what they ask for.
pub fn with_narrow_gradients(o: &Options) -> Option<Options> {
    let is_narrower = o.mode == Mode::Train && o.grad_dtype.bytes() > o.dtype.bytes();
    is_narrower.then(|| Options { grad_dtype: o.dtype, ..o.clone() })
}

/// Part of the seconds of line 1 in which a step with narrow gradients has to be made to be spoken of.
const MUCH: f64 = 0.75;
/// The fastest layout with narrow gradients, if it is much faster than what was found; looked for where one may be by what
/// is known of plans, with half of the budget.
fn narrower(
    search: &Search,
    facts: &Facts,
    legal: &[Candidate],
    say: &mut dyn FnMut(Progress),
) -> Result<Option<Compiled>> {
    let (asked, input) = (search.asked, search.input);
    let base = with_narrow_gradients(search.base).filter(|_| search.cut.is_none());
    let Some((best, base)) = search.best().zip(base) else { return Ok(None) };
    let mut legal = legal.to_vec();
    if let Some(to) = asked.target {
        // It may take none of them.
        let taken = target::retain(to, input, &base, &mut legal, &mut LeftOut::default());
        if taken.is_err() {
            return Ok(None);
        }
    }
    let form = ClosedForm::of(facts, input, &base, asked.ifs, &asked.device)?;
    let guesses = || Guesses::of(&form, &asked.device, &legal, &|c| asked.room_of(c));
    let mut all = guesses()?;
    let mut near = std::iter::from_fn(|| all.next()).take(MOST_LOOKED_AT);
    if !near.any(|g| search.time(&g) < MUCH * best && search.seems_to_fit(&g)) {
        return Ok(None);
    }
    let budget = asked.budget.div_ceil(2);
    let asked = &Asked { options: base.clone(), top: 1, budget, ..asked.clone() };
    say(Progress::Narrower(base.grad_dtype));
    let mut so = Search::new(asked, &base, input, &form);
    so.run(&mut guesses()?, &mut |_| {});
    Ok(so.fastest().filter(|c| c.seconds < MUCH * best))
}

/// Lines whose seconds differ by less are one to who reads them.
const SAME: f64 = 0.01;

/// The fastest first; of those that are within 1 % of the first of them, what needs least memory, then fewest axes. `of`
/// says seconds, bytes and axes.
fn order<T>(fits: &mut [T], of: impl Fn(&T) -> (f64, usize, usize)) {
    fits.sort_by(|a, b| of(a).0.total_cmp(&of(b).0).then(of(a).1.cmp(&of(b).1)));
    let mut rest = fits;
    while let Some(first) = rest.first() {
        let bound = of(first).0 * (1.0 + SAME);
        let n = rest.iter().take_while(|c| of(c).0 <= bound).count();
        rest[..n].sort_by_key(|c| (of(c).1, of(c).2));
        rest = &mut rest[n..];
    }
}

/// Sequences of about a million tokens on so many ranks: what is odd of the ranks divides them, as ranks of dp have to,
/// and there is one for every 64 ranks at least, as layouts can share a sequence among so many.
pub fn about_a_million(seq: usize, gpus: usize) -> usize {
    let odd = gpus >> gpus.trailing_zeros();
    let wanted = (TOKENS / seq.max(1)).max(gpus / MOST_OF_A_ROW).max(1);
    let below = odd << (wanted / odd).max(1).ilog2();
    // The nearer one, by ratio.
    if wanted * wanted > 2 * below * below { 2 * below } else { below }
}

#[cfg(test)]
mod tests {
    use super::order;

    /// Of lines that are one to who reads them the smaller is first, then the one with fewer axes; the first of the next
    /// ones is the fastest of them, however small the others.
    #[test]
    fn the_smaller_of_equally_fast_lines_is_first() {
        let mut all = [
            (1.000, 60, 1, "fastest"),
            (1.009, 50, 2, "smaller"),
            (1.008, 50, 1, "with fewer axes"),
            (1.011, 10, 1, "slower"),
            (1.030, 20, 1, "slowest"),
            (1.021, 30, 1, "of the second 1 %, and larger"),
        ];
        all.reverse();
        order(&mut all, |c| (c.0, c.1, c.2));
        let words = all.map(|c| c.3);
        assert_eq!(
            words,
            [
                "with fewer axes",
                "smaller",
                "fastest",
                "slower",
                "of the second 1 %, and larger",
                "slowest",
            ]
        );
    }
}
