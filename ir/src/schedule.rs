//! A pipeline schedule as data: which rank of the pipeline does what, in which order.
//!
//! A stage is a contiguous part of the model, numbered from the input on. Every stage lives on one
//! rank of the pipeline; a rank may hold several (chunks). Each microbatch goes forward through all
//! stages and back. Sends and receives are not actions: they follow from the edges between stages.

mod check;
mod csv;
mod replay;
mod timeline;

pub use check::{MAX_MICROBATCHES, MAX_PAIRS, MAX_STAGES};
pub use csv::{parse_csv, write_csv};
pub use replay::{Slot, Timeline, Times, replay};
pub use timeline::Held;

/// What is done to one microbatch in one stage.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ActionKind {
    /// F: forward.
    Forward,
    /// B: the whole backward; what [`ActionKind::Input`] and [`ActionKind::Weight`] do, one after the other.
    Backward,
    /// I: the part of backward that makes the gradient of the stage's input (B in the zero-bubble
    /// papers).
    Input,
    /// W: the part of backward that makes the gradients of the stage's parameters.
    Weight,
}

impl ActionKind {
    /// F, B, I or W, as torchtitan's CSV files have it.
    pub fn letter(self) -> char {
        match self {
            ActionKind::Forward => 'F',
            ActionKind::Backward => 'B',
            ActionKind::Input => 'I',
            ActionKind::Weight => 'W',
        }
    }
}

/// One turn of a rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Action {
    pub kind: ActionKind,
    pub stage: usize,
    pub microbatch: usize,
}

/// As in a CSV file: `3F12` is the forward of microbatch 12 in stage 3.
impl std::fmt::Display for Action {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{}{}{}", self.stage, self.kind.letter(), self.microbatch)
    }
}

/// Who does what, in which order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Schedule {
    /// Rank of the pipeline that holds each stage.
    pub owner: Vec<usize>,
    /// Microbatches per step.
    pub microbatches: usize,
    /// Actions of each rank of the pipeline, in order.
    pub ranks: Vec<Vec<Action>>,
}

impl Schedule {
    /// Stages of a rank, in the order of the model.
    pub fn stages_of(&self, rank: usize) -> Vec<usize> {
        (0..self.owner.len()).filter(|&s| self.owner[s] == rank).collect()
    }
    /// Most microbatches that a stage has between the beginning of F and the end of B, or of W if
    /// the backward is cut.
    pub fn in_flight(&self, stage: usize) -> usize {
        let (mut now, mut most) = (0usize, 0);
        for a in self.ranks[self.owner[stage]].iter().filter(|a| a.stage == stage) {
            match a.kind {
                ActionKind::Forward => now += 1,
                ActionKind::Backward | ActionKind::Weight => now = now.saturating_sub(1),
                ActionKind::Input => {}
            }
            most = most.max(now);
        }
        most
    }
    /// True if some backward is cut into I and W.
    pub fn splits_backward(&self) -> bool {
        self.ranks
            .iter()
            .flatten()
            .any(|a| matches!(a.kind, ActionKind::Input | ActionKind::Weight))
    }
}

#[cfg(test)]
mod tests;
