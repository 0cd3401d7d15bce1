//! Proofs of plans: what a plan directory holds, as the prover takes it.

use crate::plan_dir::{self, Stored};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Module, RoleKind};
use shardc_ir::names::parameters;
use shardc_ir::schedule::{Schedule, parse_csv};
use shardc_ir::text;
use shardc_ir::verify::{Phase, verify};
use shardc_ir::weights::Weight;
use shardc_passes::options::{self, Decay, Options};
use shardc_prove::field::Data;
use shardc_prove::{Optimizer, Recipe, Report, Subject, Verdict};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What a proof needs of a plan.
pub struct Texts {
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
            model: &self.model,
            programs: &self.programs,
            schedule: &self.schedule,
            recipe: &self.recipe,
        }
    }

    /// By terms.
    pub fn prove(&self) -> Report {
        shardc_prove::prove(&self.subject())
    }

    /// By evaluation of all ranks.
    pub fn evaluate(&self) -> Report {
        shardc_prove::field::prove(&self.subject(), self.data)
    }
}

/// The step that options ask for.
///
/// # Errors
/// `part-of-stack` if `--freeze` names some of the experts that are one parameter.
pub fn recipe(o: &Options, weights: &[Weight], model: &Module) -> Result<Recipe> {
    let params = || {
        let args = model.funcs.iter().flat_map(|f| &f.args).filter_map(|a| a.role.as_ref());
        args.filter(|r| r.kind == RoleKind::Param).map(|r| r.name.to_string())
    };
    let matrices: BTreeMap<&str, bool> = weights.iter().map(|w| (&*w.param, w.matrix)).collect();
    let decays = |p: &str| o.decay == Decay::All || matrices.get(p).is_none_or(|&m| m);
    let decay = params().map(|p| {
        let by = if decays(&p) { o.weight_decay } else { 0.0 };
        (p, by)
    });
    let optimizer = match o.optimizer {
        options::Optimizer::AdamW { beta1, beta2, eps } => Optimizer::AdamW { beta1, beta2, eps },
        options::Optimizer::Sgd => Optimizer::Sgd,
    };
    let mut frozen = BTreeSet::new();
    for g in &o.freeze {
        frozen.extend(parameters(weights, g)?.into_iter().map(|i| weights[i].param.to_string()));
    }
    Ok(Recipe {
        optimizer,
        decay: decay.collect(),
        clip: o.clip,
        frozen,
        rate: o.balance.rate,
        global_batch: o.global_batch,
    })
}

/// Of a plan that was read and checked.
pub fn of_stored(s: &Stored) -> Result<Texts> {
    let source = text::parse_source(&s.source)?;
    Ok(Texts {
        recipe: recipe(&s.options, &source.weights, &source.module)?,
        data: Data { seq: s.plan.settings.seq, vocab: s.plan.settings.vocab },
        model: source.module,
        programs: s.plan.module.clone(),
        schedule: s.plan.schedule.clone(),
    })
}

/// Of a folder whose texts may have been changed by hand: no hashes are compared. Wrong types are left to
/// the prover, which refutes them; what else is wrong with the programs is an error.
pub fn of_texts(dir: &Path) -> Result<Texts> {
    let bad = |file: &str, m: String| {
        Diag::new("plan", m)
            .at(dir.join(file).display().to_string())
            .help("make the plan again with shardc compile")
    };
    let read = |file: &str| plan_dir::read_file(dir, file);
    let options: Options = toml::from_str(&read("options.toml")?)
        .map_err(|e| bad("options.toml", e.message().to_string()))?;
    let source = text::parse_source(&read("model.ir")?)?;
    let programs = text::parse(&read("programs/all.ir")?)?;
    let mut types = Report::default();
    shardc_prove::local::prove(&programs, false, &mut types);
    if types.verdict() == Verdict::Proved {
        verify(&programs, Phase::Ranked).map_err(|mut all| all.swap_remove(0))?;
    }
    let schedule = parse_csv(&read("schedule.csv")?)?;
    let recipe = recipe(&options, &source.weights, &source.module)?;
    let data = Data { seq: options.seq, vocab: source.vocab };
    Ok(Texts { recipe, model: source.module, programs, schedule, data })
}
