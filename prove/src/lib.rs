//! Shows that a plan computes what its model and a textbook's training step mean, over the reals.
//!
//! The theorem, what is believed and what is not claimed: `docs/proof.md`. In short: types say that
//! ranks together compute the program that is left when collectives are taken out, and each step of it is
//! checked by rules of its own ([`local`]); that program is read as terms in normal form ([`term`]), beside the model, a textbook's reverse mode on it
//! ([`reverse`]), and a textbook's step ([`textbook`]), and every result of the plan must be the same
//! term.
//!
//! Of the compiler this uses the text, the list of ops with their letters, and the mesh: never how types
//! are inferred, gradients built, programs changed, or ops evaluated. A test reads the sources for it.

pub mod chunk;
pub mod expand;
pub mod experts;
pub mod field;
pub mod fun;
pub mod ledger;
pub mod lemmas;
pub mod local;
pub mod meaning;
pub mod number;
pub mod ops;
pub mod order;
pub mod part;
pub mod piece;
pub mod product;
pub mod reverse;
pub mod ring;
pub mod shift;
mod show;
mod stack;
mod sums;
pub mod term;
pub mod textbook;
pub mod whole;

use expand::Expansion;
use field::witness::Witness;
use ledger::{Gap, Ledger, Refuted, Texts, Unequal};
use lemmas::Lemmas;
use shardc_ir::func::{FuncKind, Module};
use shardc_ir::schedule::Schedule;
use shardc_ir::text::update::Update;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use term::{Store, Term};
use textbook::Textbook;
use whole::Whole;

/// What was asked of a step.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// By what text each parameter is updated.
    pub updates: BTreeMap<String, Arc<Update>>,
    /// The most that the norm of the gradients may be.
    pub clip: Option<f64>,
    /// The loss is scaled, and a step that overflows changes nothing.
    pub scaled: bool,
    /// Parameters that are not trained.
    pub frozen: BTreeSet<String>,
    /// By how much a step moves the biases that correct the choice of experts.
    pub rate: f64,
    /// Rows of a batch.
    pub global_batch: usize,
}

/// A plan with what it was made of.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// The model on one device.
    pub source: &'a Module,
    /// The same with its experts laid out for the mesh, of which it is shown that it is the same.
    pub model: &'a Module,
    /// The functions of all ranks.
    pub programs: &'a Module,
    pub schedule: &'a Schedule,
    pub recipe: &'a Recipe,
}

/// The outcome of a proof.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// All obligations were shown.
    Proved,
    /// Something else is computed.
    Refuted,
    /// Something is not understood; nothing is said of the plan.
    NotUnderstood,
}

/// What was shown, and how.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Obligations that were shown, by kind.
    pub shown: BTreeMap<&'static str, usize>,
    /// The smallest difference first.
    pub refuted: Vec<Refuted>,
    /// Equations whose sides have other forms, and are too large to compute whether they differ.
    pub unsure: Vec<Refuted>,
    /// Where a loss or output differs: where the model makes the first value that the plan makes nowhere in this form.
    pub first: Option<String>,
    pub gaps: Vec<Gap>,
    /// How often which lemma was used.
    pub lemmas: BTreeMap<&'static str, usize>,
    /// Nodes of programs and model that were read, and terms that were made of them.
    pub nodes: usize,
    pub terms: usize,
}

impl Report {
    pub fn verdict(&self) -> Verdict {
        match (self.refuted.is_empty(), self.gaps.is_empty() && self.unsure.is_empty()) {
            (true, true) => Verdict::Proved,
            (false, _) => Verdict::Refuted,
            (true, false) => Verdict::NotUnderstood,
        }
    }
}

/// Proves a plan by terms, after its types: they say that taking collectives out changes nothing.
pub fn prove(subject: &Subject) -> Report {
    decide(subject, Lemmas::default(), true)
}

/// The same by the forms of terms alone, whose numbers are not computed where they differ: what has another
/// form is refuted. Of the lemmas one may be wrong on purpose.
pub fn by_form(subject: &Subject, lemmas: Lemmas) -> Report {
    decide(subject, lemmas, false)
}

fn decide(subject: &Subject, lemmas: Lemmas, compute: bool) -> Report {
    let mut report = Report::default();
    experts::prove(subject.source, subject.model, &mut report);
    local::prove(subject.programs, false, &mut report);
    if report.verdict() != Verdict::Proved {
        return report;
    }
    let texts = Texts { programs: subject.programs, model: subject.model };
    let mut w = Whole::new(texts, subject.schedule);
    w.s.lemmas = lemmas;
    if let Err(gap) = run(&mut w, subject) {
        w.ledger.gaps.push(gap);
    }
    let Ledger { mut shown, mut refuted, mut unequal, mut gaps, first } =
        std::mem::take(&mut w.ledger);
    shown.append(&mut report.shown);
    let mut unsure = vec![];
    unequal.sort_by_cached_key(|x| extent(&w.s, x.2));
    let of_forward = unequal.iter().any(|x| x.0 == FORWARD);
    if compute && refuted.is_empty() {
        unequal = judged(&mut w, subject, unequal, &mut shown, &mut gaps, &mut unsure);
    }
    // Where all that forward shows is as it should be, its values in other forms say nothing.
    let first = first.filter(|_| of_forward && !(unequal.is_empty() && unsure.is_empty()));
    refuted.extend(unequal.into_iter().map(|x| x.1));
    let (lemmas, nodes, terms) = (w.s.used.clone(), w.nodes, w.s.len());
    Report { shown, refuted, unsure, first, gaps, lemmas, nodes, terms }
}

/// The kind of equations of what forward and evaluations show.
pub(crate) const FORWARD: &str = "losses and outputs";

/// Most terms that are counted of a difference.
const COUNTED: usize = 10_000;

/// Of how many terms that is made in which two sides differ: what is wrong in one place is seen best where this is least.
fn extent(s: &Store, [a, b]: [Term; 2]) -> usize {
    let (a, b) = s.differ(a, b);
    let (mut seen, mut open) = (BTreeSet::new(), vec![a, b]);
    while let Some(t) = open.pop().filter(|_| seen.len() < COUNTED) {
        if seen.insert(t) {
            open.extend(s.made_of(t));
        }
    }
    seen.len()
}

/// Equal numbers may have two normal forms, so what differs is computed, the smallest first. Where one
/// equation has other numbers the plan is wrong, and all are returned. Else products of sums are
/// multiplied out; what then still differs is a gap, or too large to say.
fn judged(
    w: &mut Whole,
    subject: &Subject,
    unequal: Vec<Unequal>,
    shown: &mut BTreeMap<&'static str, usize>,
    gaps: &mut Vec<Gap>,
    unsure: &mut Vec<Refuted>,
) -> Vec<Unequal> {
    let witness = Witness::new(subject);
    let mut computed = witness.on(&w.s);
    let mut order: Vec<usize> = (0..unequal.len()).collect();
    // Costs are not negative: their bits are in order.
    order.sort_by_cached_key(|&i| computed.cost(unequal[i].2).0.to_bits());
    let mut equal = vec![false; unequal.len()];
    for i in order {
        match computed.differ(unequal[i].2) {
            Some(true) => return unequal,
            same => equal[i] = same == Some(false),
        }
    }
    let mut expansion = Expansion::new(subject.schedule.microbatches);
    for ((kind, found, sides), equal) in unequal.into_iter().zip(equal) {
        let [a, b] = sides.map(|t| expansion.of(&mut w.s, t));
        if a.is_some() && a == b {
            *shown.entry(kind).or_default() += 1;
        } else if equal {
            gaps.push(Gap {
                op: "sum of products".into(),
                place: format!("{}: {}", found.what, found.plan_place.unwrap_or_default()),
                lemma: "two forms of what is equal wherever it was computed".into(),
            });
        } else {
            unsure.push(found);
        }
    }
    vec![]
}

fn run(w: &mut Whole, subject: &Subject) -> Result<(), Gap> {
    let Some(model) = subject.model.funcs.first() else {
        let lemma = "a model is one function".into();
        return Err(Gap { op: "model".into(), place: "model.ir".into(), lemma });
    };
    let unknown = subject.programs.funcs.iter().find(|f| f.kind == FuncKind::Model);
    if let Some(f) = unknown {
        let lemma = "no step calls a function of this name".into();
        return Err(Gap { op: "call".into(), place: format!("@{}", f.name), lemma });
    }
    if subject.schedule.microbatches > 1 {
        rows_alike(w, subject.programs);
    }
    order::check(subject.programs, subject.schedule, &mut w.ledger);
    w.enter()?;
    w.microbatch()?;
    let book = Textbook::of(w, model, subject.recipe, subject.schedule.microbatches)?;
    let results = w.finish()?;
    let evaluated = w.evaluate()?;
    book.compare(w, results, evaluated);
    Ok(())
}

/// Which rows of a batch are those of a microbatch depends on how many ranks have their own, if there are
/// several microbatches: every function must see the same ones.
fn rows_alike(w: &mut Whole, m: &Module) {
    let mesh = m.mesh.one_stage();
    let mut pieces: BTreeSet<usize> = BTreeSet::new();
    for f in m.funcs.iter().filter(|f| f.kind.is_looped()) {
        let inputs = f.args.iter().filter(|a| a.input().is_some_and(|i| i.batch));
        pieces.extend(inputs.map(|a| f.ty(a.value).pieces(&mesh, 0)));
    }
    w.ledger.must("composition", pieces.len() < 2, || {
        let what = "rows of a microbatch".into();
        [what, format!("cut {pieces:?} ways by its functions"), "cut alike".into()]
    });
}
