//! Which settings of training are written: those that somebody chose. A compiler's default is not a choice, and where
//! it was written it would replace that of the target.

use super::{Export, Target};
use shardc_ir::plan::LrSchedule;
use shardc_passes::options::{Optimizer, Options};
use std::fmt::Display;

/// Flags of training that torchtitan's config says in places of its own.
const OWN: [&str; 13] = [
    "optimizer",
    "lr",
    "lr-schedule",
    "warmup",
    "total-steps",
    "min-lr",
    "betas",
    "eps",
    "weight-decay",
    "decay",
    "seed",
    "moe-aux",
    "moe-z-loss",
];

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

    /// The flags of training that were given and that the target's own config has to say, in words.
    pub(super) fn given_elsewhere(&self) -> Option<String> {
        let given = OWN.iter().filter(|flag| self.is_given(flag));
        let given: Vec<String> = given.map(|flag| format!("--{flag}")).collect();
        (!given.is_empty()).then(|| given.join(", "))
    }
}

impl Target {
    /// What the software is called.
    pub(super) fn software(self) -> &'static str {
        match self {
            Target::Megatron => "Megatron-LM",
            Target::Torchtitan => "torchtitan",
            Target::Deepspeed => "DeepSpeed",
            Target::Nanotron => "nanotron",
            Target::HfTpPlan => "transformers",
            Target::Dtensor => "PyTorch",
            Target::Chakra => "Chakra",
        }
    }
}

/// Betas and epsilon of AdamW.
pub(super) fn adam(o: &Options) -> Option<(f64, f64, f64)> {
    match o.optimizer {
        Optimizer::AdamW { beta1, beta2, eps } => Some((beta1, beta2, eps)),
        Optimizer::Sgd => None,
    }
}

/// The largest learning rate.
pub(super) fn rate(o: &Options) -> f64 {
    match o.lr {
        LrSchedule::Constant { lr } | LrSchedule::WarmupCosine { lr, .. } => lr,
    }
}

/// Warmup, end and last learning rate of a cosine.
pub(super) fn cosine(o: &Options) -> Option<(usize, usize, f64)> {
    match o.lr {
        LrSchedule::Constant { .. } => None,
        LrSchedule::WarmupCosine { warmup, total, floor, .. } => Some((warmup, total, floor)),
    }
}
