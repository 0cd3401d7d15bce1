//! The tensors of a saved model by file, and where their values are.

use super::Entry;
use super::base::Saving;
use super::save::{Tensor, put};
use crate::stored::file_type;
use safetensors::Dtype;
use serde_json::Value;
use shardc_ir::diag::Result;
use shardc_ir::files;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;

/// A tensor as it is written: where its values are, its name, element type and bytes.
pub(super) struct StoredTensor<'a> {
    pub values: Values<'a>,
    pub name: &'a str,
    pub shape: &'a [usize],
    pub dtype: Dtype,
    pub bytes: u64,
}

/// Where the values of a tensor are.
pub(super) enum Values<'a> {
    /// In the trained model: which group, and which of its names.
    Trained { group: usize, one: usize },
    /// In a file of the base, as they are.
    Kept { file: &'a Path, bytes: Range<u64> },
}

/// All tensors in files of at most `most` bytes, as `save_pretrained` of transformers deals them: in
/// order, a file is closed by the tensor that no longer fits.
pub(super) fn deal<'a>(
    tensors: &'a [Tensor],
    how: &'a Saving,
    config: &Value,
) -> Vec<Vec<StoredTensor<'a>>> {
    let all: BTreeSet<&str> = tensors.iter().flat_map(|t| &t.names).map(String::as_str).collect();
    let of_layer = |layer: &str| {
        let first = all.range(layer..).next();
        first.is_some_and(|name| name.starts_with(layer))
    };
    // Of layers that are trained; each behind its table, whose values are at hand there.
    let copies = how.base.copies.iter().filter(|c| of_layer(&c.layer) && !all.contains(&*c.name));
    let mut again: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for c in copies {
        let table = c.table(|name| all.contains(name));
        again.entry(table.unwrap_or_default()).or_default().push(&c.name);
    }
    let again = &again;
    let names = tensors.iter().enumerate().flat_map(|(group, t)| {
        t.names.iter().enumerate().flat_map(move |(one, name)| {
            let copies = again.get(&**name).into_iter().flatten().copied();
            let names = std::iter::once(&**name).chain(copies);
            names.map(move |name| (t, name, Values::Trained { group, one }))
        })
    });
    let trained = names.map(|(t, name, values)| {
        let dtype = how.of(name, config);
        let bytes = (t.shape.iter().product::<usize>() * dtype.bytes()) as u64;
        StoredTensor { values, name, shape: t.shape, dtype: file_type(dtype), bytes }
    });
    let others = how.base.others.iter().flat_map(|(c, names)| {
        names.iter().filter_map(|name| {
            let Entry { dtype, shape, bytes, .. } = c.get(name)?;
            let values = Values::Kept { file: c.file(c.get(name)?), bytes: bytes.clone() };
            let bytes = bytes.end - bytes.start;
            Some(StoredTensor { values, name, shape, dtype: *dtype, bytes })
        })
    });
    let mut out: Vec<Vec<StoredTensor>> = vec![vec![]];
    let mut size = 0;
    for piece in trained.chain(others) {
        let full = size + piece.bytes > how.max_shard;
        if full && out.last().is_some_and(|file| !file.is_empty()) {
            out.push(vec![]);
            size = 0;
        }
        size += piece.bytes;
        out.last_mut().expect("at least one").push(piece);
    }
    out
}

/// The element type that most bytes have.
pub(super) fn most_have(all: &[Vec<StoredTensor>]) -> Option<Dtype> {
    let mut sums: BTreeMap<Dtype, u64> = BTreeMap::new();
    all.iter().flatten().for_each(|p| *sums.entry(p.dtype).or_default() += p.bytes);
    sums.into_iter().max_by_key(|s| s.1).map(|s| s.0)
}

/// Copies bytes of a file.
pub(super) fn copy(out: &mut dyn Write, to: &Path, file: &Path, bytes: &Range<u64>) -> Result<()> {
    let fail = |e| files::io_error("cannot read the file", file, &e);
    let (mut from, _) = files::open(file)?;
    from.seek(SeekFrom::Start(bytes.start)).map_err(fail)?;
    let (mut left, mut room) = (bytes.end - bytes.start, vec![0; 1 << 20]);
    while left > 0 {
        let n = left.min(room.len() as u64) as usize;
        from.read_exact(&mut room[..n]).map_err(fail)?;
        put(out, to, &room[..n])?;
        left -= n as u64;
    }
    Ok(())
}
