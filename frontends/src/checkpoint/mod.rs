//! Checkpoints: which tensor lies where in which safetensors file. Only headers are read here.

pub mod base;
mod deal;
mod header;
pub mod init;
mod mxfp4;
pub mod peft;
mod read;
pub mod save;
mod tied;

use crate::stored::weights_of;
pub(crate) use header::{Header, Info};
use safetensors::Dtype;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use shardc_ir::names::nearest;
use shardc_ir::types::DType;
use shardc_ir::weights::Weight;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Largest model.safetensors.index.json that is read, in bytes.
const MAX_INDEX: u64 = 256 << 20;

/// The tensors of a model folder, by name.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    files: Vec<PathBuf>,
    tensors: BTreeMap<String, Entry>,
}

/// Where a tensor lies.
#[derive(Clone, PartialEq, Debug)]
pub struct Entry {
    /// Index of its file.
    file: usize,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// Bytes of the file.
    pub bytes: Range<u64>,
    /// Of one in blocks, whose element type and shape are those of the numbers.
    scales: Option<mxfp4::Scales>,
}

impl Entry {
    /// True if elements are f32.
    pub fn is_f32(&self) -> bool {
        self.dtype == Dtype::F32
    }

    /// The type of its elements, if it is one that is read.
    fn readable(&self) -> Option<DType> {
        weights_of(self.dtype)
    }
}

impl Checkpoint {
    /// Reads the headers of model.safetensors, or of the files that model.safetensors.index.json
    /// names; `None` if the folder has neither.
    ///
    /// Errors: `file`, `index`, `safetensors`, `truncated`, `tensor-dtype`, `missing-tensor`.
    pub fn open(dir: &Path) -> Result<Option<Checkpoint>> {
        let mut checkpoint =
            Checkpoint { dir: dir.into(), files: vec![], tensors: BTreeMap::new() };
        let one = dir.join("model.safetensors");
        let index = dir.join("model.safetensors.index.json");
        if one.exists() {
            checkpoint.tensors = checkpoint.add(one)?;
            checkpoint.with_blocks().map(Some)
        } else if index.exists() {
            checkpoint.add_index(&index)?;
            checkpoint.with_blocks().map(Some)
        } else {
            Ok(None)
        }
    }

    /// The tensors of these files of a folder, whose names must differ.
    ///
    /// Errors: `index` for a name with a path or a tensor in two files, and those of
    /// [`Checkpoint::open`].
    pub fn of_files<'a>(dir: &Path, names: impl Iterator<Item = &'a str>) -> Result<Checkpoint> {
        let mut c = Checkpoint { dir: dir.into(), files: vec![], tensors: BTreeMap::new() };
        for name in names {
            let wrong = |what: String| {
                let d = Diag::new("index", what).at(dir.join("index.json").display().to_string());
                d.help("name 1 file of this folder for each tensor")
            };
            if !is_plain(name) {
                return Err(wrong(format!("`{name}` is not a file of this folder")));
            }
            for (tensor, entry) in c.add(dir.join(name))? {
                if c.tensors.insert(tensor.clone(), entry).is_some() {
                    return Err(wrong(format!("`{tensor}` is in {name} and in another file")));
                }
            }
        }
        Ok(c)
    }

    /// Tensors that lie in one file of another format: name, element type, shape and bytes of each; `None`
    /// if there are none.
    pub(crate) fn of_archive(
        file: &Path,
        tensors: impl Iterator<Item = (String, Dtype, Vec<usize>, Range<u64>)>,
    ) -> Option<Checkpoint> {
        let entry = |(name, dtype, shape, bytes)| {
            (name, Entry { file: 0, dtype, shape, bytes, scales: None })
        };
        let tensors: BTreeMap<_, _> = tensors.map(entry).collect();
        let dir = file.parent().unwrap_or(Path::new("")).into();
        let c = Checkpoint { dir, files: vec![file.into()], tensors };
        (!c.tensors.is_empty()).then_some(c)
    }

    /// The tensors of both; where both have one of a name, that of the other.
    #[must_use]
    pub fn with(mut self, other: Checkpoint) -> Checkpoint {
        let before = self.files.len();
        self.files.extend(other.files);
        let moved = |(name, e): (String, Entry)| (name, Entry { file: e.file + before, ..e });
        self.tensors.extend(other.tensors.into_iter().map(moved));
        self
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What messages about all tensors name: the one file, or the folder of several.
    fn place(&self) -> String {
        match &self.files[..] {
            [one] => one.display().to_string(),
            _ => format!("{}/*.safetensors", self.dir.display()),
        }
    }

    pub fn get(&self, tensor: &str) -> Option<&Entry> {
        self.tensors.get(tensor)
    }

    /// All tensors, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.tensors.iter().map(|(n, e)| (n.as_str(), e))
    }

    /// The file a tensor lies in.
    pub fn file(&self, entry: &Entry) -> &Path {
        &self.files[entry.file]
    }

    fn add(&mut self, path: PathBuf) -> Result<BTreeMap<String, Entry>> {
        let header = Header::read(&path)?;
        let file = self.files.len();
        self.files.push(path);
        let entry = |(name, t): (String, header::Info)| {
            (name, Entry { file, dtype: t.dtype, shape: t.shape, bytes: t.bytes, scales: None })
        };
        Ok(header.tensors.into_iter().map(entry).collect())
    }

    fn add_index(&mut self, index: &Path) -> Result<()> {
        let place = index.display().to_string();
        let wrong = |what: String, help: &str| Diag::new("index", what).at(&place).help(help);
        let bytes = files::read(index, MAX_INDEX)?;
        let json: serde_json::Value = serde_json::from_slice(&bytes)
            .map_err(|e| wrong(format!("the index is not JSON: {e}"), "download the file again"))?;
        let map = json.get("weight_map").and_then(|m| m.as_object()).ok_or_else(|| {
            let help = r#"write {"weight_map": {"lm_head.weight": "model-1.safetensors"}}"#;
            wrong("the index has no object `weight_map`".into(), help)
        })?;
        let mut wanted: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (tensor, file) in map {
            let file = file.as_str().filter(|f| is_plain(f)).ok_or_else(|| {
                let help = "write a plain name without `/` and `..`, such as model-1.safetensors";
                wrong(
                    format!("tensor `{tensor}` is listed in {file}, which is not in this folder"),
                    help,
                )
            })?;
            wanted.entry(file).or_default().insert(tensor);
        }
        for (file, names) in wanted {
            let path = self.dir.join(file);
            let mut found = self.add(path)?;
            for name in names {
                let Some(entry) = found.remove(name) else {
                    let what = format!("tensor `{name}` is not in {file}, where the index puts it");
                    let near = nearest(name, found.keys().map(String::as_str), 3);
                    return Err(Diag::new("missing-tensor", what)
                        .at(&place)
                        .help(near_text(&near, found.len())));
                };
                self.tensors.insert(name.to_string(), entry);
            }
        }
        Ok(())
    }

    /// Checks that every weight has its tensor, of its shape and of a readable element type.
    ///
    /// Errors: `missing-tensor` with the nearest names, `tensor-shape`, `tensor-dtype`.
    pub fn check(&self, weights: &[Weight]) -> Result<()> {
        let missing: Vec<String> = weights
            .iter()
            .flat_map(Weight::tensors)
            .filter(|t| !self.tensors.contains_key(t))
            .collect();
        if let Some(name) = missing.first() {
            let mut d = self.missing(name);
            if missing.len() > 1 {
                let shown = missing.iter().take(5).cloned().collect::<Vec<_>>().join(", ");
                let more = if missing.len() > 5 { ", …" } else { "" };
                d = d.why(format!("{} are missing in all: {shown}{more}", missing.len()));
            }
            return Err(d);
        }
        weights.iter().try_for_each(|w| w.tensors().try_for_each(|t| self.entry(w, &t).map(|_| ())))
    }

    fn missing(&self, name: &str) -> Diag {
        let near = nearest(name, self.tensors.keys().map(String::as_str), 3);
        Diag::new("missing-tensor", format!("tensor `{name}` is missing"))
            .at(self.place())
            .help(near_text(&near, self.tensors.len()))
    }

    /// A tensor of a weight, checked.
    fn entry(&self, w: &Weight, tensor: &str) -> Result<&Entry> {
        let e = self.get(tensor).ok_or_else(|| self.missing(tensor))?;
        let place = || format!("{}: {tensor}", self.file(e).display());
        if e.shape != w.tensor_shape {
            let what = format!("tensor `{tensor}` is {:?}, not {:?}", e.shape, w.tensor_shape);
            return Err(Diag::new("tensor-shape", what)
                .at(place())
                .rule("the shapes follow from config.json")
                .help(format!(
                    "expected {:?}, got {:?}: use the config.json of these weights",
                    w.tensor_shape, e.shape
                )));
        }
        if e.readable().is_none() {
            let what = format!("tensor `{tensor}` has elements of type {}", header::name(e.dtype));
            return Err(dtype_error(what).at(place()));
        }
        Ok(e)
    }

    /// A warning that names tensors nobody uses; `known` are ends of names of tensors that are no
    /// weights. A tied output projection, `head`, and `other` ones are no surprise either.
    pub fn unused(
        &self,
        weights: &[Weight],
        (within, known): (&str, &[&str]),
        head: &str,
        other: &dyn Fn(&str) -> bool,
    ) -> Option<Diag> {
        let used: BTreeSet<String> = weights.iter().flat_map(Weight::tensors).collect();
        let left: Vec<&str> = (self.tensors.keys().map(String::as_str))
            .filter(|t| t.starts_with(within) && !used.contains(*t) && *t != head && !other(t))
            .filter(|t| !known.iter().any(|k| t.ends_with(k)))
            .collect();
        let (n, shown) = (left.len(), left.iter().take(3).copied().collect::<Vec<_>>().join(", "));
        let more = if n > 3 { ", …" } else { "" };
        (n > 0).then(|| {
            Diag::new("unused-tensors", format!("{n} tensors belong to no weight: {shown}{more}"))
                .at(self.place())
                .help(format!(
                    "the model has {} weights; check `model_type` and the switches of biases",
                    used.len()
                ))
        })
    }
}

fn dtype_error(what: String) -> Diag {
    Diag::new("tensor-dtype", what)
        .help("the 3 readable element types are F32, BF16, F16: convert the weights")
}

fn near_text(near: &[&str], tensors: usize) -> String {
    match near {
        [] => format!("none of the {tensors} other tensors has a similar name"),
        _ => format!("the nearest of {tensors} other names: `{}`", near.join("`, `")),
    }
}

/// A name of a file in the folder itself.
fn is_plain(name: &str) -> bool {
    let bad = |c: char| matches!(c, '/' | '\\' | ':' | '\0') || c.is_control();
    !name.is_empty() && name != "." && name != ".." && !name.contains(bad)
}
