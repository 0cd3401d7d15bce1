//! The tensors of a safetensors file, as columns of data are in it.

use crate::checkpoint::{Header, Info};
use shardc_ir::diag::Result;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// The label that is not scored.
pub const IGNORED: i32 = -100;

/// A tensor of a safetensors file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BatchTensor {
    /// As the format calls it: `F32`.
    pub dtype: String,
    pub shape: Vec<usize>,
    /// Bytes of the file, inside it, as many as the shape has.
    pub bytes: Range<u64>,
}

/// The tensors of a safetensors file, by name.
///
/// # Errors
/// Those of reading a header: `file`, `truncated`, `safetensors`, `tensor-dtype`.
pub fn tensors(path: &Path) -> Result<BTreeMap<String, BatchTensor>> {
    let one = |(name, t): (String, Info)| {
        (name, BatchTensor { dtype: format!("{:?}", t.dtype), shape: t.shape, bytes: t.bytes })
    };
    Ok(Header::read(path)?.tensors.into_iter().map(one).collect())
}
