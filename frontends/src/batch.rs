//! Batches of tokens from safetensors files, as Hugging Face models take them.

use crate::checkpoint::{Header, Info};
use safetensors::Dtype;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

/// The label that is not scored.
pub const IGNORED: i32 = -100;

/// Rows of tokens and their labels, both row-major [rows, seq].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Batch {
    pub input_ids: Vec<i32>,
    /// The token itself, or a negative number such as [`IGNORED`]: position i is scored against `labels[i + 1]`.
    pub labels: Vec<i32>,
    pub rows: usize,
    pub seq: usize,
    /// The file they are from, for messages.
    pub file: String,
}

/// A tensor of a safetensors file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tensor {
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
pub fn tensors(path: &Path) -> Result<BTreeMap<String, Tensor>> {
    let one = |(name, t): (String, Info)| {
        (name, Tensor { dtype: format!("{:?}", t.dtype), shape: t.shape, bytes: t.bytes })
    };
    Ok(Header::read(path)?.tensors.into_iter().map(one).collect())
}

/// Reads `input_ids` and `labels`, i64 [rows, seq] of equal shape; where nothing is `scored`, the labels may be missing.
///
/// Errors: `batch` for another shape or type and for numbers that are not i32, `missing-tensor`, and
/// those of reading a header.
pub fn read_batch(path: &Path, scored: bool) -> Result<Batch> {
    let header = Header::read(path)?;
    let (mut file, _) = files::open(path)?;
    let place = |name: &str| format!("{}: {name}", path.display());
    let mut read = |name: &str| -> Result<(Vec<usize>, Vec<i32>)> {
        let t = header.tensors.get(name).ok_or_else(|| {
            let known: Vec<_> = header.tensors.keys().take(5).map(String::as_str).collect();
            Diag::new("missing-tensor", format!("tensor `{name}` is missing"))
                .at(path.display().to_string())
                .help(format!(
                    "the file has {} tensors: {}",
                    header.tensors.len(),
                    known.join(", ")
                ))
        })?;
        if t.dtype != Dtype::I64 || t.shape.len() != 2 || t.shape.contains(&0) {
            let what =
                format!("`{name}` must be I64 [rows, tokens], not {:?} {:?}", t.dtype, t.shape);
            return Err(Diag::new("batch", what)
                .at(place(name))
                .help("write I64, such as [8, 512]"));
        }
        // The header was checked against the file's length: this is no more than the file holds.
        let mut bytes = vec![0; (t.bytes.end - t.bytes.start) as usize];
        let fail = |e: std::io::Error| files::io_error("cannot read the tensor", path, &e);
        file.seek(SeekFrom::Start(t.bytes.start)).map_err(fail)?;
        file.read_exact(&mut bytes).map_err(fail)?;
        let numbers = bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b));
        let small = |(i, x): (usize, i64)| {
            i32::try_from(x).map_err(|_| {
                let what = format!("`{name}` element {i} is {x}, which is not i32");
                Diag::new("batch", what).at(place(name)).help("use numbers below 2147483648")
            })
        };
        Ok((t.shape.clone(), numbers.enumerate().map(small).collect::<Result<_>>()?))
    };
    let (shape, input_ids) = read("input_ids")?;
    let (other, labels) = match scored || header.tensors.contains_key("labels") {
        true => read("labels")?,
        false => (shape.clone(), vec![IGNORED; input_ids.len()]),
    };
    if shape != other {
        let what = format!("`labels` is {other:?}, `input_ids` is {shape:?}");
        return Err(Diag::new("batch", what)
            .at(place("labels"))
            .help(format!("write both {shape:?}")));
    }
    let file = path.display().to_string();
    Ok(Batch { input_ids, labels, rows: shape[0], seq: shape[1], file })
}

impl Batch {
    /// Checks tokens and labels against a vocabulary. Error: `batch`, with row and position.
    pub fn check(&self, vocab: usize) -> Result<()> {
        let known = |x: i32| usize::try_from(x).is_ok_and(|x| x < vocab);
        let ids = self.input_ids.iter().position(|&x| !known(x));
        let labels = self.labels.iter().position(|&x| x >= 0 && !known(x));
        let found = ids.map(|i| ("input_ids", i, self.input_ids[i]));
        match found.or(labels.map(|i| ("labels", i, self.labels[i]))) {
            None => Ok(()),
            Some((name, i, x)) => {
                let (row, at) = (i / self.seq, i % self.seq);
                let what =
                    format!("`{name}` row {row}, position {at} is {x}, which is not a token");
                let also = if name == "labels" { ", or -100 to ignore it" } else { "" };
                Err(Diag::new("batch", what)
                    .at(format!("{}: {name}", self.file))
                    .help(format!("use 0 to {}{also}", vocab - 1)))
            }
        }
    }

    /// What the program scores: `targets[i]` is `labels[i + 1]`, the last of a row is ignored.
    pub fn targets(&self) -> Vec<i32> {
        let shifted = |row: &[i32]| [&row[1..], &[IGNORED]].concat();
        self.labels.chunks(self.seq).flat_map(shifted).collect()
    }
}
