//! `plan --for`: only layouts that other software takes, by what `export` refuses.

use super::Asked;
use super::guess::ClosedForm;
use super::space::Candidate;
use super::trials::kind;
use super::what_if::Ifs;
use shardc_cost::device::Device;
use shardc_cost::held::Software;
use shardc_cost::layout::Layout;
use shardc_cost::step::{Closed, Pieces, StageLoads};
use shardc_export::takes;
use shardc_frontends::Facts;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::Module;
use shardc_ir::maps::HashMap;
use shardc_ir::plan::{Plan, Settings, TokenOrder};
use shardc_ir::schedule::Schedule;
use shardc_passes::options::Options;
use shardc_passes::schedule::Named;
use shardc_plans::flags::Target;
use shardc_plans::input::Input;
use shardc_plans::stored::Stored;
use std::collections::BTreeMap;

/// Most reasons that are said where nothing is taken.
const REASONS: usize = 5;

/// Layouts that the target does not take.
#[derive(Clone, Debug, Default)]
pub struct LeftOut {
    pub count: usize,
    /// How many each reason leaves out.
    pub reasons: BTreeMap<String, usize>,
    /// What else to ask for.
    pub helps: Vec<String>,
}

impl LeftOut {
    pub(super) fn add(&mut self, d: Diag) {
        self.count += 1;
        d.why.into_iter().for_each(|why| *self.reasons.entry(why).or_default() += 1);
        for h in d.help {
            if !self.helps.contains(&h) {
                self.helps.push(h);
            }
        }
    }

    /// The reason that leaves out most.
    pub fn most(&self) -> Option<(&str, usize)> {
        let most = self.reasons.iter().max_by_key(|r| (*r.1, std::cmp::Reverse(r.0)));
        most.map(|(why, n)| (&**why, *n))
    }
}

/// The bytes that a rank needs in the target, where a model of its memory is known.
///
/// # Errors
/// `device` if the machine lacks an element type.
pub(super) fn held(form: &ClosedForm, asked: &Asked, c: &Candidate) -> Result<Option<usize>> {
    let software = match asked.target {
        Some(Target::Megatron) => Software::Megatron,
        Some(Target::Torchtitan) => Software::Torchtitan,
        _another => return Ok(None),
    };
    let question = form.question(&asked.device, c);
    let closed = Closed { question, balanced: false };
    let loads = closed.loads(&Pieces::of(&question)?);
    Ok(Some(question.held(software, &loads) as usize))
}

/// Seconds of a step by formulas, and bytes that a rank needs in the software, of a layout that somebody gives.
///
/// # Errors
/// `device` if the machine lacks an element type, and those of the globs of options.
pub fn estimated(
    software: Software,
    of: (&Facts, &Input),
    o: &Options,
    device: &Device,
    layout: Layout,
) -> Result<(f64, usize)> {
    let form = ClosedForm::of(of.0, of.1, o, Ifs::default(), device)?;
    let named = if layout.chunks > 1 { Named::Interleaved } else { Named::OneFOneB };
    let c = Candidate { layout, named };
    let question = form.question(device, &c);
    let closed = Closed { question, balanced: false };
    let pieces = Pieces::of(&question)?;
    let loads = closed.loads(&pieces);
    let ranks = closed.ranks(&pieces, &StageLoads::of(&loads));
    Ok((closed.parts(&ranks).total(), question.held(software, &loads) as usize))
}

/// A plan of a candidate, as exports read it.
fn stored(input: &Input, plan: Plan, options: &Options) -> Stored {
    Stored {
        name: None,
        plan,
        options: options.clone(),
        source: String::new(),
        family: input.family.clone(),
        facts: input.facts,
        config: input.config.clone(),
        origin: input.origin.clone(),
        from: None,
        report: serde_json::Value::Null,
    }
}

/// What a layout has before it is compiled.
fn no_plan(o: &Options) -> Plan {
    Plan {
        module: Module::default(),
        classes: vec![],
        schedule: Schedule::default(),
        weights: vec![],
        settings: Settings {
            mode: o.mode,
            global_batch: o.global_batch,
            microbatches: 1,
            seq: o.seq,
            tokens: TokenOrder::default(),
            vocab: 0,
            lr: o.lr,
            seed: o.seed,
            documents: None,
            loss_scaling: None,
            early_receives: false,
        },
    }
}

/// Leaves those layouts that the target takes, as far as that is known before they are compiled.
///
/// # Errors
/// `no-layout` if it takes none.
pub(super) fn retain(
    to: Target,
    input: &Input,
    base: &Options,
    legal: &mut Vec<Candidate>,
    left: &mut LeftOut,
) -> Result<()> {
    let probe = stored(input, no_plan(base), base);
    // Targets ask whether there are stages and replicas, and not how many; nor for sequences and layers.
    let mut known: HashMap<_, Option<Diag>> = HashMap::default();
    legal.retain(|c| {
        let l = &c.layout;
        let key = (
            (l.tp, l.cp, l.context, l.even, l.shards, l.dp > l.shards, l.ep, l.etp),
            (l.zero, l.sp, l.pp > 1, l.chunks > 1, c.named, kind(l.recompute)),
        );
        let refused = known.entry(key).or_insert_with(|| takes(&probe, &c.options(base), to).err());
        refused.iter().for_each(|d| left.add(d.clone()));
        refused.is_none()
    });
    match legal.is_empty() {
        true => Err(nothing_taken(to, left)),
        false => Ok(()),
    }
}

/// A compiled plan, if the target takes it.
///
/// # Errors
/// `export`, as exporting it has.
pub(super) fn taken(to: Target, input: &Input, plan: Plan, o: &Options) -> Result<Plan> {
    let s = stored(input, plan, o);
    takes(&s, o, to).map(|()| s.plan)
}

fn nothing_taken(to: Target, left: &LeftOut) -> Diag {
    let what = format!("{} takes none of {} legal layouts", to.name(), left.count);
    let mut reasons: Vec<_> = left.reasons.iter().collect();
    reasons.sort_by_key(|r| (std::cmp::Reverse(*r.1), r.0));
    let d = Diag::new("no-layout", what)
        .at(format!("--for {}", to.name()))
        .rule("what is exported is the plan, and nothing that is merely near");
    let d = reasons.into_iter().take(REASONS).fold(d, |d, (why, n)| d.why(format!("{n}: {why}")));
    left.helps.iter().fold(d, |d, h| d.help(h.clone()))
}
