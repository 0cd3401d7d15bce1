//! Where a parameter's numbers come from: a slice of a checkpoint tensor, or a distribution.

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// How a parameter starts when there is no checkpoint.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// Normal with mean 0 and this standard deviation.
    Normal(f64),
    /// Uniform from minus this bound to it.
    Uniform(f64),
    /// The logarithm of a number that is uniform from [`LEAST`] to this bound.
    LogOfUniform(f64),
    Ones,
    Zeros,
}

/// Least number whose logarithm a parameter may start as.
pub const LEAST: f64 = 0.01;

/// One parameter of the model and the part of a checkpoint tensor it is. A fused tensor (GPT-2's
/// `c_attn`) is several parameters, each with its own slice, so that each can be sharded alone.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Weight {
    /// Name of the parameter: the role name of the argument in every program.
    pub param: String,
    /// Name of the tensor in the checkpoint; with `{}` for the number, if there is one per expert.
    pub tensor: String,
    /// Shape of the tensor in the checkpoint.
    pub tensor_shape: Vec<usize>,
    /// The parameter has so many experts: its dim 0. It is a stack of tensors of this shape, one
    /// per expert, if the tensor's name has a place for the number, and else one tensor, or part of
    /// one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<usize>,
    /// The parameter is some elements of a dim; all of them if `None`.
    pub part: Option<TensorSlice>,
    /// Shape of the parameter.
    pub shape: Vec<usize>,
    pub init: Init,
    /// It is a matrix (`--decay matrices` spares the others).
    pub matrix: bool,
    /// The dim that 1-D tensor parallelism splits, by the family's recipe; in a stack of experts,
    /// which expert tensor parallelism splits.
    pub tp_dim: Option<usize>,
}

impl Weight {
    /// Names of the tensors of the checkpoint that the parameter is made of, in order.
    pub fn tensors(&self) -> impl Iterator<Item = String> + '_ {
        let name = |e: usize| match self.is_stacked() {
            false => self.tensor.clone(),
            true => self.tensor.replacen("{}", &e.to_string(), 1),
        };
        (0..self.experts.filter(|_| self.is_stacked()).unwrap_or(1)).map(name)
    }

    /// It is one of a low-rank adapter, by its name: those of PEFT, with which adapters are written.
    pub fn is_adapter(&self) -> bool {
        self.tensor.ends_with(".lora_A.weight") || self.tensor.ends_with(".lora_B.weight")
    }

    /// It is a stack of tensors, one per expert.
    pub fn is_stacked(&self) -> bool {
        self.experts.is_some() && self.tensor.contains("{}")
    }
}

/// Elements of a dim of a tensor: `len` from `start` on, `step` apart.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct TensorSlice {
    pub dim: usize,
    pub start: usize,
    pub len: usize,
    #[serde(default = "next", skip_serializing_if = "is_next")]
    pub step: usize,
}

/// Apart as neighbours are.
fn next() -> usize {
    1
}

fn is_next(step: &usize) -> bool {
    *step == 1
}

impl TensorSlice {
    /// Neighbours.
    pub fn of(dim: usize, start: usize, len: usize) -> TensorSlice {
        TensorSlice { dim, start, len, step: 1 }
    }

    /// The places in the tensor from the first to the last of a range of them; `None` if one is no
    /// number, or the step is 0.
    pub fn place(&self, range: &Range<usize>) -> Option<Range<usize>> {
        let at = |i: usize| i.checked_mul(self.step)?.checked_add(self.start);
        let from = at(range.start).filter(|_| self.step > 0)?;
        let until = match range.len() {
            0 => from,
            _some => at(range.end - 1)?.checked_add(1)?,
        };
        Some(from..until)
    }
}
