//! A `.pt2` archive: its program, and where in the file the numbers of its tensors lie.

use super::graph::{Graph, StoredNumbers};
use super::room::{self, MAX_LISTED};
use super::schema::{self, RawSize, TensorMeta};
use super::zip::{Zip, broken};
use crate::stored::{StoredNumber, StoredType};
use serde::Deserialize;
use shardc_ir::diag::Result;
use shardc_ir::files;
use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

/// Bytes that are read at once, of numbers that take more room afterwards.
const AT_ONCE: usize = 1 << 20;

/// An archive without its numbers.
pub(super) struct Archive {
    zip: Zip,
    /// Folder that all members are in, with its `/`.
    root: String,
    /// Parameters by their names in the module.
    pub weights: BTreeMap<Arc<str>, ArchiveTensor>,
    /// Buffers and constants.
    pub constants: BTreeMap<Arc<str>, ArchiveTensor>,
}

/// A tensor of the archive, and the member that has it: tensors of one member are one.
#[derive(Clone, Debug)]
pub(super) struct ArchiveTensor {
    pub stored: StoredNumbers,
    pub member: Arc<str>,
}

#[derive(Deserialize)]
struct PayloadConfig {
    config: HashMap<String, Payload>,
}

#[derive(Deserialize)]
struct Payload {
    path_name: String,
    #[serde(default)]
    use_pickle: bool,
    tensor_meta: Option<TensorMeta>,
}

const WEIGHTS: (&str, &str) = ("data/weights/", "model_weights_config.json");
const CONSTANTS: (&str, &str) = ("data/constants/", "model_constants_config.json");
const MODEL: &str = "models/model.json";

impl Archive {
    /// Reads the directory and the lists of tensors.
    ///
    /// # Errors
    /// `file`; `archive` for what is no such archive, or for tensors that do not fit their bytes.
    pub fn open(path: &Path) -> Result<Archive> {
        let zip = Zip::open(path)?;
        let is_model =
            |n: &&String| n.strip_suffix(MODEL).is_some_and(|r| r.ends_with('/') || r.is_empty());
        let mut models = zip.members.keys().filter(is_model);
        let model = models.next().ok_or_else(|| broken(path, format!("it has no `{MODEL}`")))?;
        let root = model.strip_suffix(MODEL).unwrap_or("").to_string();
        let order = format!("{root}byteorder");
        if zip.members.contains_key(&order) && zip.read(&order, 64)?.trim_ascii() != b"little" {
            return Err(broken(path, "its numbers are big-endian"));
        }
        let mut a = Archive { zip, root, weights: BTreeMap::new(), constants: BTreeMap::new() };
        a.weights = a.tensors(WEIGHTS)?;
        a.constants = a.tensors(CONSTANTS)?;
        Ok(a)
    }

    /// The program.
    ///
    /// # Errors
    /// Those of [`schema::read`].
    pub fn graph(&self) -> Result<Graph> {
        schema::read(&self.zip, &format!("{}{MODEL}", self.root))
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.zip.path
    }

    fn tensors(&self, (folder, list): (&str, &str)) -> Result<BTreeMap<Arc<str>, ArchiveTensor>> {
        let list = format!("{}{folder}{list}", self.root);
        if !self.zip.members.contains_key(&list) {
            return Ok(BTreeMap::new());
        }
        let config: PayloadConfig = schema::json(&self.zip, &list)?;
        let mut out = BTreeMap::new();
        for (name, p) in config.config {
            // A pickled object is not a plain tensor, and is told of where it is used.
            let (Some(meta), false) = (&p.tensor_meta, p.use_pickle) else { continue };
            let member = format!("{}{folder}{}", self.root, p.path_name);
            let stored = self.stored(&name, meta, &member)?;
            out.insert(name.into(), ArchiveTensor { stored, member: member.into() });
        }
        Ok(out)
    }

    /// Where a tensor lies, if it has numbers.
    fn stored(&self, name: &str, meta: &TensorMeta, member: &str) -> Result<StoredNumbers> {
        let bad = |what: &str| broken(self.path(), format!("tensor `{name}` {what}"));
        let fixed = |s: &RawSize| match s {
            RawSize::AsInt(n) => usize::try_from(*n).map_err(|_| bad("has a negative size")),
            RawSize::AsExpr { .. } => Err(bad("has a size that is not a number")),
        };
        let dtype = StoredType::of_torch(meta.dtype);
        let dtype = dtype.ok_or_else(|| bad("has elements of a type that is not read"))?;
        let shape = meta.sizes.iter().map(fixed).collect::<Result<Vec<usize>>>()?;
        let strides = meta.strides.iter().map(fixed).collect::<Result<Vec<usize>>>()?;
        room::elements(&shape).ok_or_else(|| bad("has more than 2^48 elements"))?;
        let bytes = (room::count(&shape) * dtype.bytes) as u64;
        let range = self.zip.members.get(member);
        let range = range.ok_or_else(|| bad("has no member"))?;
        if range.is_empty() && bytes > 0 {
            return Ok(StoredNumbers { bytes: None, dtype, shape });
        }
        let offset = meta.storage_offset.as_ref().map_or(Ok(0), fixed)?;
        let start = offset.checked_mul(dtype.bytes).and_then(|o| range.start.checked_add(o as u64));
        let end = start.and_then(|s| s.checked_add(bytes)).filter(|&e| e <= range.end);
        let (Some(start), Some(end)) = (start, end) else {
            return Err(bad("ends outside its member"));
        };
        if !strides.is_empty() && !is_row_major(&shape, &strides) {
            return Err(bad("is not stored row by row"));
        }
        Ok(StoredNumbers { bytes: Some(start..end), dtype, shape })
    }

    /// The numbers of a constant; nothing if the archive was made without them.
    ///
    /// # Errors
    /// `file`; `archive` if it is too large for a constant.
    pub fn numbers(&self, name: &str) -> Result<Option<(Vec<f64>, &StoredNumbers)>> {
        let Some(t) = self.constants.get(name).or_else(|| self.weights.get(name)) else {
            return Ok(None);
        };
        let Some(bytes) = t.stored.bytes.clone() else { return Ok(None) };
        let size = t.stored.dtype.bytes;
        let count = (bytes.end - bytes.start) as usize / size;
        if count > MAX_LISTED {
            let what = format!("constant `{name}` has more than {MAX_LISTED} numbers");
            return Err(broken(self.path(), what));
        }
        let mut out = Vec::with_capacity(count);
        let unreadable = |e| files::io_error("cannot read the archive", self.path(), &e);
        let (mut file, _) = files::open(self.path())?;
        file.seek(SeekFrom::Start(bytes.start)).map_err(unreadable)?;
        let mut raw = vec![0; AT_ONCE.min(count * size)];
        while out.len() < count {
            let some = ((count - out.len()) * size).min(AT_ONCE);
            file.read_exact(&mut raw[..some]).map_err(unreadable)?;
            let number = |c| match t.stored.dtype.decode(c) {
                StoredNumber::Float(x) => x,
                // Exact but beyond 2^53.
                StoredNumber::Whole(x) => x as f64,
            };
            out.extend(raw[..some].chunks_exact(size).map(number));
        }
        Ok(Some((out, &t.stored)))
    }
}

/// True if elements follow each other as their indices do; dims of one element have any stride.
fn is_row_major(shape: &[usize], strides: &[usize]) -> bool {
    let mut next = 1usize;
    shape.len() == strides.len()
        && shape.iter().zip(strides).rev().all(|(&n, &s)| {
            let fits = n <= 1 || s == next;
            next = next.saturating_mul(n);
            fits
        })
}
