//! What no single compilation can say: a search compiles variants of the options and compares the
//! plans. `--schedule search`, `--recompute fit` and `--loss-chunks auto` become what they stand for
//! before the passes run, and a plan that does not fit in `--memory` gets ways out that were tried.
//!
//! Every candidate is compiled by the same passes, so what is said of it is what its plan says. The
//! order of candidates is fixed, and so is the choice among them; threads only share the work. Plans are compared by
//! [`Prices`]: with a machine by the price that `shardc price` shows on it.

pub mod advice;
mod chunks;
pub mod price;
mod recompute;
mod schedule;
pub mod ways;

pub use price::{Price, Prices};

use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::Module;
use shardc_ir::plan::Plan;
use shardc_passes::autodiff::chunks::LossChunks;
use shardc_passes::autodiff::recompute::Recompute;
use shardc_passes::options::{Options, Order};
use shardc_passes::pipeline::{self, Manager, Source};
use shardc_passes::schedule::Named;
use shardc_passes::threads;
use shardc_plans::input::Input;

/// Threads that compile candidates: a plan of a large model takes some hundred megabytes.
const MOST_THREADS: usize = 4;

/// True if the options ask for a search.
pub fn searches(o: &Options) -> bool {
    searches_schedule(o) || o.recompute == Recompute::Fit || o.loss_chunks == LossChunks::Auto
}

fn searches_schedule(o: &Options) -> bool {
    o.schedule == Order::Named("search".into())
}

/// The options with what was searched for in place, and what there is to say about it.
#[derive(Clone)]
pub struct Found {
    pub options: Options,
    pub notes: Vec<String>,
    /// Of searches that change nothing.
    pub warnings: Vec<Diag>,
}

impl Found {
    /// Options in which nothing is searched for, or not yet.
    fn of(o: &Options) -> Found {
        Found { options: o.clone(), notes: vec![], warnings: vec![] }
    }
}

/// Finds all that the options ask to search for.
///
/// # Errors
/// What a compilation of the candidates says, if none of them can be compiled at all. If they can
/// and none fits in memory, the options are those of the one that needs least.
pub fn resolve(input: &Input, o: &Options) -> Result<Found> {
    // Numbers with which no candidate can be compiled are the passes' to refuse.
    if o.microbatches() * o.microbatch_rows() != o.global_batch || !searches(o) {
        return Ok(Found::of(o));
    }
    if o.loss_chunks == LossChunks::Auto {
        return chunks::resolve_with(input, o);
    }
    let Found { options: mut o, mut notes, warnings } = Found::of(o);
    if searches_schedule(&o) && o.recompute == Recompute::Fit {
        o = both(input, &o, &mut notes)?;
    }
    if searches_schedule(&o) {
        let (found, text) = schedule::resolve(input, &o)?;
        notes.push(text);
        o = found;
    }
    if o.recompute == Recompute::Fit {
        let (found, text) = recompute::resolve(input, &o)?;
        notes.push(text);
        o = found;
    }
    Ok(Found { options: o, notes, warnings })
}

/// The schedule for which a step is fastest, with the recomputation that it then needs; that is
/// still to be found.
fn both(input: &Input, o: &Options, notes: &mut Vec<String>) -> Result<Options> {
    let prices = Prices::of(o)?;
    let mut best: Option<(f64, Options, String)> = None;
    let mut least: Option<(usize, Options, String)> = None;
    let policies = [
        Recompute::None,
        Recompute::Elementwise,
        Recompute::Selective,
        Recompute::Full,
        Recompute::Sqrt,
    ];
    for recompute in policies {
        // Runs of layers take as long as layers: they are for where nothing else fits.
        if recompute == Recompute::Sqrt && best.is_some() {
            continue;
        }
        let (found, text) = schedule::resolve(input, &Options { recompute, ..o.clone() })?;
        let plan = trial(input, o, &found)?;
        let (peak, step) = (plan.peak_bytes(), prices.price(&plan, &o.speeds)?.step);
        if o.memory.is_some_and(|limit| peak > limit) {
            if least.as_ref().is_none_or(|b| peak < b.0) {
                least = Some((peak, found, text));
            }
        } else if best.as_ref().is_none_or(|b| step < b.0) {
            best = Some((step, found, text));
        }
    }
    let found = best.map(|b| (b.1, b.2)).or(least.map(|b| (b.1, b.2)));
    let (found, text) = found.expect("a policy was tried");
    notes.push(text);
    Ok(Options { recompute: Recompute::Fit, ..found })
}

/// Options in which nothing is searched for: what the searches can always fall back on.
///
/// # Errors
/// Those of compiling them.
fn settled(input: &Input, o: &Options) -> Result<Options> {
    let mut o = o.clone();
    if searches_schedule(&o) {
        let named = match o.chunks {
            None | Some(1) => Named::OneFOneB,
            Some(2) => Named::VMin,
            Some(_) => Named::LoopedBfs,
        };
        o.schedule = Order::Named(named.name().into());
    }
    if o.recompute == Recompute::Fit {
        o.recompute = Recompute::Full;
    }
    // What needs least, if none fits.
    Ok(resolve(input, &o)?.options)
}

/// Compiles a candidate without a limit of memory; what is chosen in the end is compiled again, and checked. `read` are the options with which the model was
/// read: for another batch it is made again from its config.
pub fn trial(input: &Input, read: &Options, o: &Options) -> Result<Plan> {
    trial_without(input, read, o, None)
}

/// The same, with a pass left out.
fn trial_without(
    input: &Input,
    read: &Options,
    o: &Options,
    without: Option<&'static str>,
) -> Result<Plan> {
    let manager = Manager { without, ..Manager::default() };
    tried(input, read, o, manager)
}

/// The pass from which on what is made depends on the number of microbatches, if there are several.
const COUNTED: &str = "bucket-grads";

/// Plans of options that differ in their number of microbatches, of which each has several: what does not depend on it is
/// made once, and sums of gradients begin where they begin with the first number.
///
/// # Errors
/// Those of compiling them.
pub fn trials(input: &Input, read: &Options, all: [&Options; 2]) -> Result<[Plan; 2]> {
    let mut before: Option<Module> = None;
    let mut seen = |pass: &str, m: &Module| {
        if pass == "early-sums" {
            before = Some(m.clone());
        }
    };
    let first = tried(input, read, all[0], Manager::new(&mut seen))?;
    let pass = pipeline::find(COUNTED).expect("it is in the table of passes");
    let begin = before.map(|module| pipeline::Begin { pass, module, made: None });
    let manager = Manager { from: begin, ..Manager::default() };
    Ok([first, tried(input, read, all[1], manager)?])
}

fn tried(input: &Input, read: &Options, o: &Options, manager: Manager) -> Result<Plan> {
    let o = Options { memory: None, ..o.clone() };
    let same = match input.facts {
        Some(_) => shardc_plans::input::shape(&o) == shardc_plans::input::shape(read),
        None => o.microbatch_rows() == read.microbatch_rows(),
    };
    let source = if same { input.source.clone() } else { model(input, &o)? };
    Ok(pipeline::compile_with(source, &o, Manager { trial: true, ..manager })?.plan)
}

fn model(input: &Input, o: &Options) -> Result<Source> {
    if input.facts.is_none() {
        return Err(Diag::new("batch-shape", "a text has its own batch")
            .help("give the batch that the text has"));
    }
    let shape = shardc_plans::input::shape(o);
    let m = shardc_frontends::from_config(&input.config, "config.json", &shape)?;
    Ok(shardc_plans::input::adapted(shardc_plans::input::from_model(m), o)?.source)
}

/// Does the same to all items on several threads; results in the order of the items.
pub fn all<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    threads::all(items, MOST_THREADS, work)
}

/// `12.3 % more` or `12.3 % less`.
fn against(x: f64, of: f64) -> String {
    let percent = if of > 0.0 { (x / of - 1.0) * 100.0 } else { 0.0 };
    if percent.abs() < 0.05 {
        return "as much".into();
    }
    let word = if percent < 0.0 { "less" } else { "more" };
    format!("{:.1} % {word}", percent.abs())
}
