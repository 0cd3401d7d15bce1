//! What a rank needs to run: programs, the step as a list of actions, exact memory, weights.

use crate::func::Module;
use crate::weights::Weight;
use serde::{Deserialize, Serialize};

/// One entry of the step: call a function, for one microbatch or once. The functions are those of
/// the plan's module; a single stage is a schedule too: `enter`, then `forward` and `backward` of
/// every microbatch, then `finish`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Action {
    /// Index into the module's functions.
    pub func: usize,
    /// The microbatch whose slice of the inputs it sees; `None` at step scope.
    pub microbatch: Option<usize>,
}

/// Where a value lies in a rank's arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Place {
    /// Byte offset in the arena, a multiple of [`ALIGN`].
    pub offset: usize,
    /// Bytes added per microbatch: inputs of a step lie one microbatch after the other.
    pub per_microbatch: usize,
    /// Size in bytes.
    pub bytes: usize,
}

/// Alignment of everything in the arena, in bytes.
pub const ALIGN: usize = 64;

/// What a piece of memory is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    Weights,
    Grads,
    Optimizer,
    Activation,
    CollectiveBuffer,
    Temporary,
    Input,
}

impl Class {
    /// The word people read.
    pub fn name(self) -> &'static str {
        match self {
            Class::Weights => "weights",
            Class::Grads => "gradients",
            Class::Optimizer => "optimizer",
            Class::Activation => "activations",
            Class::CollectiveBuffer => "collective buffers",
            Class::Temporary => "temporaries",
            Class::Input => "inputs",
        }
    }
}

/// A rank's arena: the same on every rank of the class.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Memory {
    /// Place of every value, by function and value number.
    pub places: Vec<Vec<Place>>,
    /// Scratch memory of every node that needs some, by function and node number.
    pub workspaces: Vec<Vec<Place>>,
    /// Size of the arena.
    pub peak_bytes: usize,
    /// Bytes by class at the peak; they sum to `peak_bytes`.
    pub at_peak: Vec<(Class, usize)>,
    /// The largest values alive at the peak: name, class, bytes.
    pub live_at_peak: Vec<(String, Class, usize)>,
}

/// How the learning rate moves with the step.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum LrSchedule {
    Constant {
        lr: f64,
    },
    /// Linear from 0 over `warmup` steps, then a half cosine down to `floor` at `total` steps.
    WarmupCosine {
        lr: f64,
        warmup: usize,
        total: usize,
        floor: f64,
    },
}

impl LrSchedule {
    /// Learning rate of step `step`, counted from 1.
    pub fn at(&self, step: usize) -> f64 {
        match *self {
            LrSchedule::Constant { lr } => lr,
            LrSchedule::WarmupCosine { lr, warmup, .. } if step <= warmup => {
                lr * step as f64 / warmup as f64
            }
            LrSchedule::WarmupCosine { lr, warmup, total, floor } => {
                let done = (step - warmup) as f64 / total.saturating_sub(warmup).max(1) as f64;
                floor + (lr - floor) * 0.5 * (1.0 + (std::f64::consts::PI * done.min(1.0)).cos())
            }
        }
    }
}

/// What the plan computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    Train,
    Infer,
}

/// Facts about a run that are not in the programs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Settings {
    pub mode: Mode,
    pub global_batch: usize,
    /// Microbatches per step.
    pub microbatches: usize,
    pub seq: usize,
    /// Indices from here on are no tokens of the model.
    pub vocab: usize,
    pub lr: LrSchedule,
    pub seed: u64,
}

/// A compiled model.
#[derive(Clone, Debug)]
pub struct Plan {
    pub module: Module,
    pub actions: Vec<Action>,
    /// What gives the loss of a batch and changes no parameter; empty if the plan does not train.
    pub evaluation: Vec<Action>,
    pub memory: Memory,
    pub weights: Vec<Weight>,
    pub settings: Settings,
}
