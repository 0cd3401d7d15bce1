//! What the functions of a plan are for.

use shardc_ir::func::{Func, FuncKind};
use std::fmt;

/// What a function of a plan is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Part {
    pub kind: FuncKind,
    /// Number of the stage; of what runs once per step, that of the rank of the pipeline.
    pub at: usize,
}

impl Part {
    /// `None` for a function that is none of a plan's.
    pub fn of(f: &Func) -> Option<Part> {
        (f.kind != FuncKind::Model).then_some(Part { kind: f.kind, at: f.stage })
    }
    /// Runs for each microbatch.
    pub fn of_microbatch(self) -> bool {
        self.kind.is_looped()
    }
    /// Runs for the last microbatch of its stage, in place of another.
    pub fn is_of_last(self) -> bool {
        self.plain() != self
    }
    /// What runs for the other microbatches, or itself.
    pub fn plain(self) -> Part {
        Part { kind: self.kind.plain(), ..self }
    }
    /// The rank of the pipeline that runs it.
    pub fn rank(self, owner: &[usize]) -> usize {
        if self.of_microbatch() { owner.get(self.at).copied().unwrap_or(0) } else { self.at }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let of = if self.of_microbatch() { "stage" } else { "pipeline rank" };
        write!(f, "{} of {of} {}", self.kind.name(), self.at)
    }
}
