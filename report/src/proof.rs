//! Proofs of plans: what a plan directory holds, as the prover takes it.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::Module;
use shardc_ir::names::{in_module, parameters};
use shardc_ir::phase::Phase;
use shardc_ir::plan::Mode;
use shardc_ir::schedule::{Schedule, parse_csv};
use shardc_ir::source::Source;
use shardc_ir::text;
use shardc_ir::types::DType;
use shardc_ir::verify::verify;
use shardc_ir::weights::Weight;
use shardc_passes::experts::laid_out;
use shardc_passes::optim::{self, groups};
use shardc_passes::options::Options;
use shardc_passes::pipeline::computed;
use shardc_plans::plan_dir;
use shardc_plans::stored::Stored;
use shardc_prove::field::{Data, Progress};
use shardc_prove::ledger::{Gap, Refuted};
use shardc_prove::{Recipe, Report, Subject, Verdict};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What a proof needs of a plan.
pub struct Texts {
    pub source: Module,
    /// The source with its experts laid out for the mesh.
    pub model: Module,
    pub programs: Module,
    pub schedule: Schedule,
    pub recipe: Recipe,
    /// For a proof by evaluation.
    pub data: Data,
}

impl Texts {
    pub fn subject(&self) -> Subject<'_> {
        Subject {
            source: &self.source,
            model: &self.model,
            programs: &self.programs,
            schedule: &self.schedule,
            recipe: &self.recipe,
        }
    }

    /// By terms; where these are too large to compute whether they differ, the plan made smaller is evaluated,
    /// which may refute it.
    pub fn prove(&self) -> Report {
        let mut report = shardc_prove::prove(&self.subject());
        if report.refuted.is_empty() && !report.unsure.is_empty() {
            let small = shardc_prove::field::prove_smaller(&self.subject(), self.data);
            if small.verdict() == Verdict::Refuted {
                let differs = |x: &Refuted| small.refuted.iter().any(|y| y.what == x.what);
                let all = std::mem::take(&mut report.unsure);
                let known = all.iter().any(&differs);
                (report.refuted, report.unsure) =
                    all.into_iter().partition(|x| !known || differs(x));
            }
        }
        report
    }

    /// By evaluation of all ranks; `watch` hears how far it is.
    pub fn evaluate(&self, watch: &mut dyn FnMut(Progress)) -> Report {
        shardc_prove::field::prove_watched(&self.subject(), self.data, watch)
    }
}

/// Whether a plan is proved when it is compiled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Prove {
    /// If the proof takes a second or less; a plan that the prover does not understand is written anyway.
    Auto,
    Yes,
    No,
}

/// Nodes of programs and model that are read in a second at least.
const NODES: usize = 60_000;
/// The same of calls of functions in the lists of all stages.
const CALLS: usize = 1_000_000;

/// What came of a proof when a plan was compiled.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "kebab-case")]
pub enum Outcome {
    /// By terms: so many obligations.
    Proved {
        obligations: usize,
    },
    /// The first op for which a lemma is missing.
    NotUnderstood {
        op: String,
        place: String,
        lemma: String,
    },
    NotTried {
        why: String,
    },
}

impl Outcome {
    /// That of a plan's report.
    pub fn of(s: &Stored) -> Option<Outcome> {
        serde_json::from_value(s.report.get("proof")?.clone()).ok()
    }
}

/// Proves a plan again whose report says that it was proved, or that was made of a program of somebody's: what the
/// proof does not find. Nothing if there is nothing to find.
pub fn found_again(s: &Stored) -> Option<Result<Option<String>>> {
    let stored = Outcome::of(s).filter(|o| matches!(o, Outcome::Proved { .. }));
    if stored.is_none() && s.from.is_none() {
        return None;
    }
    Some(of_stored(s).map(|texts| {
        let report = texts.prove();
        let now = match report.verdict() {
            Verdict::Proved => {
                Outcome::Proved { obligations: report.shown.values().sum() }.to_string()
            }
            Verdict::Refuted => "refuted".into(),
            Verdict::NotUnderstood => "not proved".into(),
        };
        match stored {
            Some(stored) if stored.to_string() != now => {
                Some(format!("recorded: {stored}; now: {now}"))
            }
            None if report.verdict() != Verdict::Proved => Some(match report.refuted.first() {
                Some(r) => {
                    let [has, should] = sides(r);
                    let what = format!("from.ir does not compute model.ir: {} differs", r.what);
                    let first = first(&report).map_or(String::new(), |f| format!("\n   {f}"));
                    format!("{what}\n   in the plan  {has}\n   should be    {should}{first}")
                }
                None => {
                    format!("from.ir is not known to compute model.ir: {now}; see shardc prove")
                }
            }),
            _same => None,
        }
    }))
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            Outcome::Proved { obligations } => {
                write!(f, "proved by terms: {obligations} obligations")
            }
            Outcome::NotUnderstood { op, place, lemma } => {
                write!(f, "not proved: `{op}` is not understood: {lemma}, at {place}")
            }
            Outcome::NotTried { why } => write!(f, "not proved: {why}"),
        }
    }
}

/// What of the model a plan that is refuted does not make, where terms tell, and its first difference is another.
pub fn first(r: &Report) -> Option<String> {
    let known = r.refuted.first().is_some_and(|x| x.textbook_place == r.first);
    let (place, line) = r.first.as_deref().filter(|_| !known)?.split_once(": ")?;
    Some(format!(
        "the first value of the model that the plan makes nowhere in this form: `{line}`, in {place}"
    ))
}

/// What a plan computes somewhere, and what it should: lines of the programs and of the model, or where something has
/// none its term.
pub fn sides(x: &Refuted) -> [String; 2] {
    [(&x.plan_place, &x.plan), (&x.textbook_place, &x.textbook)].map(|(place, term)| {
        match place.as_deref().and_then(|p| p.split_once(": ")) {
            Some((place, line)) => format!("`{line}`, in {place}"),
            None => term.clone(),
        }
    })
}

/// Proves a plan that was compiled.
///
/// # Errors
/// `refuted`, and `not-understood` with `Prove::Yes`.
pub fn of_compiled(s: &Stored, how: Prove) -> Result<Outcome> {
    let why = |why: &str| Ok(Outcome::NotTried { why: why.into() });
    if how == Prove::No {
        return why("--prove no");
    }
    let texts = of_stored(s)?;
    let funcs = texts.programs.funcs.iter().chain(&texts.model.funcs);
    let nodes: usize = funcs.map(|f| f.nodes.len()).sum();
    let calls: usize = s.plan.schedule.ranks.iter().map(|r| r.len()).sum();
    if how == Prove::Auto && (nodes > NODES || calls > CALLS) {
        return why(
            "it may take longer than a second; --prove yes, or shardc prove, takes the time",
        );
    }
    let report = texts.prove();
    let help =
        "this is a bug of shardc: report it with the command; --prove no compiles without a proof";
    if let Some(r) = report.refuted.first() {
        let [has, should] = sides(r);
        let what = format!("the plan does not compute its model: {} differs", r.what);
        let d = Diag::new("refuted", what).why(format!("in the plan: {has}"));
        let d = d.why(format!("should be: {should}"));
        return Err(first(&report).into_iter().fold(d, Diag::why).help(help));
    }
    let unsure = report.unsure.into_iter().map(|r| Gap {
        op: "sum of products".into(),
        place: format!("{}: {}", r.what, r.plan_place.unwrap_or_default()),
        lemma: "the plan and the textbook have two forms, too large to compute whether they differ"
            .into(),
    });
    match report.gaps.into_iter().chain(unsure).next() {
        None => Ok(Outcome::Proved { obligations: report.shown.values().sum() }),
        Some(g) if how == Prove::Auto => {
            Ok(Outcome::NotUnderstood { op: g.op, place: g.place, lemma: g.lemma })
        }
        Some(g) => Err(Diag::new("not-understood", format!("`{}`: {}", g.op, g.lemma))
            .at(g.place)
            .rule("--prove yes writes only plans that are proved")
            .help("use --prove auto, which writes the plan and says so; or --prove no")),
    }
}

/// Names of the parameters that globs name.
fn named(weights: &[Weight], globs: &[String]) -> Result<BTreeSet<String>> {
    let mut out = BTreeSet::new();
    for g in globs {
        out.extend(parameters(weights, g)?.into_iter().map(|i| weights[i].param.to_string()));
    }
    Ok(out)
}

/// The step that options ask for.
///
/// # Errors
/// `part-of-stack` if `--freeze` names some of the experts that are one parameter.
pub fn recipe(o: &Options, weights: &[Weight], model: &Module) -> Result<Recipe> {
    let mut frozen = named(weights, &o.freeze)?;
    if let Some(l) = &o.lora {
        let mut trained = named(weights, &o.train)?;
        let whole = l.whole.iter().flat_map(|end| in_module(weights, end));
        trained.extend(whole.map(|i| weights[i].param.clone()));
        let base = weights.iter().filter(|w| !w.is_adapter() && !trained.contains(&w.param));
        frozen.extend(base.map(|w| w.param.clone()));
    }
    let updates = match model.funcs.first().filter(|_| o.mode == Mode::Train) {
        Some(f) => groups(f, weights, &frozen, o)?.of,
        None => BTreeMap::new(),
    };
    let of_f16 = model.funcs.iter().flat_map(|f| &f.values).any(|v| v.ty.dtype == DType::F16);
    Ok(Recipe {
        updates,
        clip: o.clip,
        scaled: o.mode == Mode::Train && (o.dtype == DType::F16 || of_f16),
        frozen,
        rate: o.balance.rate,
        global_batch: o.global_batch,
    })
}

/// What a plan computes of its model in its mode, before and after its experts are laid out for the mesh.
///
/// # Errors
/// Those of verifying the model, of [`computed`] and of laying experts out.
pub fn both(source: Source, o: &Options) -> Result<[Module; 2]> {
    verify(&source.module, Phase::Source).map_err(|mut all| all.swap_remove(0))?;
    let source = computed(source, o)?;
    let laid = laid_out(source.clone(), o)?;
    Ok([source, laid].map(|s| s.module))
}

/// Of a plan that was read and checked.
pub fn of_stored(s: &Stored) -> Result<Texts> {
    let source = text::parse_source(&s.source)?;
    // The textbook's rules are those of model.ir.
    let options = optim::of_text(&source.updates, &s.options)?;
    optim::in_place(&source, &options)?;
    let recipe = recipe(&options, &source.weights, &source.module)?;
    let [source, model] = both(source, &options)?;
    Ok(Texts {
        recipe,
        data: Data { vocab: s.plan.settings.vocab },
        source,
        model,
        programs: s.plan.module.clone(),
        schedule: s.plan.schedule.clone(),
    })
}

/// Of a folder whose texts may have been changed by hand: no hashes are compared. Wrong types are left to
/// the prover, which refutes them; what else is wrong with the programs is an error.
pub fn of_texts(dir: &Path) -> Result<Texts> {
    let read = |file: &str| plan_dir::read_file(dir, file);
    let options = plan_dir::options(dir)?;
    let source = text::parse_source(&read("model.ir")?)?;
    let options = optim::of_text(&source.updates, &options)?;
    optim::in_place(&source, &options)?;
    let programs = text::parse(&read("programs/all.ir")?)?;
    let mut types = Report::default();
    shardc_prove::local::prove(&programs, false, &mut types);
    if types.verdict() == Verdict::Proved {
        verify(&programs, Phase::Step).map_err(|mut all| all.swap_remove(0))?;
    }
    let schedule = parse_csv(&read("schedule.csv")?)?;
    let recipe = recipe(&options, &source.weights, &source.module)?;
    let data = Data { vocab: source.vocab };
    let [source, model] = both(source, &options)?;
    Ok(Texts { recipe, source, model, programs, schedule, data })
}
