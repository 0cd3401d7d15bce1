//! Where a parameter's numbers come from: a slice of a checkpoint tensor, or a distribution.

use serde::{Deserialize, Serialize};

/// How a parameter starts when there is no checkpoint.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// Normal with mean 0 and this standard deviation.
    Normal(f64),
    Ones,
    Zeros,
}

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
    /// The parameter is a stack of so many tensors of this shape, one per expert: its dim 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<usize>,
    /// The parameter is `len` elements of dim `dim` from `start`; all of it if `None`.
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
        let name = |e: usize| match self.experts {
            None => self.tensor.clone(),
            Some(_) => self.tensor.replacen("{}", &e.to_string(), 1),
        };
        (0..self.experts.unwrap_or(1)).map(name)
    }
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct TensorSlice {
    pub dim: usize,
    pub start: usize,
    pub len: usize,
}
