//! Which settings of training are written: those that somebody chose. A compiler's default is not a choice, and where
//! it was written it would replace that of the target.

use super::Export;
use shardc_ir::plan::Fall;
use shardc_passes::options::{Decay, Optimizer, Options};
use shardc_plans::flags::spec::all;
use std::fmt::Display;

impl Export<'_> {
    /// Whether what a flag sets is to be written: it was given, or is not what it is where it is not given (so also in
    /// plans that do not say what was given), or all is to be written.
    pub(super) fn asks<T: PartialEq>(&self, flag: &str, of: impl Fn(&Options) -> T) -> bool {
        self.exact || self.is_given(flag) || of(self.o) != of(&Options::default())
    }

    fn is_given(&self, flag: &str) -> bool {
        self.o.given.iter().any(|g| g == flag)
    }

    /// Notes a setting that is not written: what the plan has, and what the target then does.
    pub(super) fn leaves(&mut self, plan: impl Display, theirs: impl Display) {
        let name = self.to.software();
        self.notes.push(format!("plan: {plan}; {name}'s default: {theirs}"));
    }

    /// The flags, with the plan's values, that a target's own config has to say: those that were given (or all, if all
    /// are asked for), and the others.
    pub(super) fn elsewhere(&self) -> [Vec<String>; 2] {
        let values = values(self.o);
        let flags = all().filter(|s| s.elsewhere.contains(&self.to)).map(|s| s.flag);
        let (given, others): (Vec<_>, Vec<_>) = flags
            .filter_map(|flag| Some((flag, &values.iter().find(|v| v.0 == flag)?.1)))
            .partition(|(flag, _)| self.exact || self.is_given(flag));
        [given, others].map(|all| all.iter().map(|(f, value)| format!("--{f} {value}")).collect())
    }
}

/// Flags of optimizer, data and losses, and their values; none of one that has no meaning.
fn values(o: &Options) -> Vec<(&'static str, String)> {
    let mut all = vec![];
    match o.optimizer {
        Optimizer::AdamW { beta1, beta2, eps } => all.extend([
            ("optimizer", "adamw".into()),
            ("betas", format!("{beta1},{beta2}")),
            ("eps", format!("{eps:e}")),
        ]),
        Optimizer::Sgd => all.push(("optimizer", "sgd".into())),
    }
    all.push(("lr", o.lr.peak().to_string()));
    all.push(("lr-schedule", o.lr.word().into()));
    if let Some(Fall { warmup, total, floor, decay, .. }) = o.lr.fall() {
        all.extend([
            ("warmup", warmup.to_string()),
            ("total-steps", total.to_string()),
            ("min-lr", floor.to_string()),
        ]);
        all.extend(decay.map(|steps| ("decay-steps", steps.to_string())));
    }
    let decay = if o.decay == Decay::All { "all" } else { "matrices" };
    all.extend([("weight-decay", o.weight_decay.to_string()), ("decay", decay.into())]);
    all.push(("seed", o.seed.to_string()));
    all.extend(o.balance.aux.map(|aux| ("moe-aux", aux.to_string())));
    all.extend((o.balance.z != 0.0).then(|| ("moe-z-loss", o.balance.z.to_string())));
    all
}

/// Betas and epsilon of AdamW.
pub(super) fn adam(o: &Options) -> Option<(f64, f64, f64)> {
    match o.optimizer {
        Optimizer::AdamW { beta1, beta2, eps } => Some((beta1, beta2, eps)),
        Optimizer::Sgd => None,
    }
}
