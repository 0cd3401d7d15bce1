//! What a saved model keeps of the one that it was trained from: tokenizer, templates, element types.

use super::peft::{CONFIG, TENSORS};
use super::{Checkpoint, Entry};
use crate::stored;
use crate::{MAX_CONFIG, family};
use serde_json::Value;
use shardc_ir::diag::Result;
use shardc_ir::files;
use shardc_ir::types::DType;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// Beginnings of the names of files that belong to a model folder beside config.json and weights.
const BELONG: [&str; 17] = [
    "generation_config",
    "tokenizer",
    "tokenization_",
    "special_tokens_map",
    "added_tokens",
    "vocab",
    "merges",
    "spiece",
    "sentencepiece",
    "tekken",
    "chat_template",
    "processor_config",
    "preprocessor_config",
    "LICENSE",
    "LICENCE",
    "NOTICE",
    "USE_POLICY",
];
/// The folder of more templates that transformers writes.
const TEMPLATES: &str = "additional_chat_templates";
/// Largest such file, in bytes: the largest known tokenizers have 35 MB.
pub(super) const MOST: u64 = 256 << 20;

/// Whether a file, by its path in a model folder, belongs to it and is kept as it is.
pub(super) fn belongs(name: &str) -> bool {
    if let Some(template) = name.strip_prefix(TEMPLATES).and_then(|n| n.strip_prefix('/')) {
        return template.ends_with(".jinja");
    }
    let code = |n: &str| n.starts_with("configuration_") || n.starts_with("modeling_");
    BELONG.iter().any(|b| name.starts_with(b))
        || [".tiktoken", ".jinja"].iter().any(|e| name.ends_with(e))
        || (name.ends_with(".py") && code(name))
}

/// Whether a file is one that [`save`] writes.
pub(super) fn is_written(name: &str) -> bool {
    let piece = name.strip_prefix("model-").and_then(|n| n.strip_suffix(".safetensors"));
    let numbers = piece.and_then(|n| n.split_once("-of-"));
    let digits = |n: &str| n.len() >= 5 && n.bytes().all(|b| b.is_ascii_digit());
    ["config.json", "model.safetensors", "model.safetensors.index.json", CONFIG, TENSORS]
        .contains(&name)
        || numbers.is_some_and(|(i, n)| digits(i) && digits(n))
}

/// Files and folders of a folder by their path in it, sorted; those of [`TEMPLATES`] one by one.
pub(super) fn list(dir: &Path) -> Result<Vec<String>> {
    let unreadable = |e| files::io_error("cannot list the folder", dir, &e);
    let names = |dir: &Path| -> io::Result<Vec<String>> {
        fs::read_dir(dir)?.map(|e| Ok(e?.file_name().to_string_lossy().into_owned())).collect()
    };
    let mut out = names(dir).map_err(unreadable)?;
    if let Some(i) = out.iter().position(|n| n == TEMPLATES && dir.join(n).is_dir()) {
        out.swap_remove(i);
        let more = names(&dir.join(TEMPLATES)).map_err(unreadable)?;
        out.extend(more.into_iter().map(|n| format!("{TEMPLATES}/{n}")));
    }
    out.sort();
    Ok(out)
}

/// Where a file of a model folder lies, links followed. A link of a stranger's folder may lead to any file of the
/// user's, which a saved model would give on: so it is kept only if it lies in the folder, or in the folder of files
/// of the hub's cache whose snapshot this is (`snapshots/REVISION` beside `blobs`).
///
/// Errors: why the file is not kept.
fn own(dir: &Path, name: &str) -> std::result::Result<PathBuf, &'static str> {
    let whole = |path: &Path| fs::canonicalize(path).map_err(|_| "is a link to nothing");
    let (root, file) = (whole(dir)?, whole(&dir.join(name))?);
    let snapshots = root.parent().filter(|s| s.file_name().is_some_and(|n| n == "snapshots"));
    let blobs = snapshots.and_then(Path::parent).map(|cache| cache.join("blobs"));
    if !file.starts_with(&root) && (blobs.is_none() || file.parent() != blobs.as_deref()) {
        return Err("is a link out of the folder");
    }
    if file.is_file() { Ok(file) } else { Err("is not a regular file") }
}

fn is_tokenizer(name: &str) -> bool {
    name.starts_with("tokenizer") || name.starts_with("vocab")
}

/// What a saved model keeps of the one that it was trained from. It is read before training: what
/// cannot be kept is known then, and the folder may be gone or replaced afterwards.
#[derive(Clone, Default)]
pub struct Base {
    pub(super) files: Vec<(String, Vec<u8>)>,
    /// What has the name of such a file and is not kept, with why.
    pub skipped: Vec<(String, &'static str)>,
    dtypes: BTreeMap<String, DType>,
    /// Tensors of parts beside the text model, such as a tower of pictures, which are saved as they are.
    pub(super) others: Option<(Checkpoint, Vec<String>)>,
    pub(super) copies: Vec<Copy>,
}

/// A tensor of a layer that predicts tokens behind the next which is a table of the model again.
#[derive(Clone)]
pub(super) struct Copy {
    pub name: String,
    /// What the names of the layer's tensors begin with.
    pub layer: String,
    /// The table; where the model has two that are tied as one, it may be the other.
    of: [String; 2],
}

impl Copy {
    /// Which of these names is the table's.
    pub fn table(&self, has: impl Fn(&str) -> bool) -> Option<&str> {
        self.of.iter().map(String::as_str).find(|t| has(t))
    }
}

/// The copies of tables among the tensors of a model.
fn copies(config: &Value, c: &Checkpoint) -> Vec<Copy> {
    let Ok((_, f)) = family::of(config, "config.json") else { return vec![] };
    let prefix = f.prefix(|name| c.get(name).is_some());
    let [table, head] = f.tables(&prefix);
    let ends = f.copies();
    let layers = format!("{prefix}{}.", f.layers);
    let copy = |name: &str| {
        let i = ends.iter().position(|end| name.ends_with(end)).filter(|_| f.mtp.is_some())?;
        let layer = name.strip_suffix(&*ends[i]).filter(|l| l.starts_with(&layers))?;
        let of = if i == 0 { [table.clone(), head.clone()] } else { [head.clone(), table.clone()] };
        Some(Copy { name: name.into(), layer: layer.into(), of })
    };
    c.iter().filter_map(|(name, _)| copy(name)).collect()
}

impl Base {
    /// The files of a model folder that belong to it, but for config.json and weights; of its weights the
    /// element types.
    ///
    /// Errors: `file`, and those of [`Checkpoint::open`].
    pub fn open(dir: &Path) -> Result<Base> {
        let (mut files, mut skipped) = (vec![], vec![]);
        for name in list(dir)?.into_iter().filter(|n| belongs(n)) {
            match own(dir, &name) {
                Ok(path) => files.push((name, files::read(&path, MOST)?)),
                Err(why) => skipped.push((name, why)),
            }
        }
        let weights = Checkpoint::open(dir)?;
        let types = |c: &Checkpoint| {
            c.iter().filter_map(|(n, e)| Some((n.to_string(), e.readable()?))).collect()
        };
        let dtypes = weights.as_ref().map(types).unwrap_or_default();
        let config = files::read(&dir.join("config.json"), MAX_CONFIG).ok();
        let config: Option<Value> = config.and_then(|text| serde_json::from_slice(&text).ok());
        let both = config.as_ref().zip(weights.as_ref());
        let copies = both.map(|(config, c)| copies(config, c)).unwrap_or_default();
        let names = both.map(|(config, c)| beside(config, c));
        let others = weights.zip(names).filter(|(_, names)| !names.is_empty());
        Ok(Base { files, skipped, dtypes, others, copies })
    }

    /// Whether there are tensors of parts beside the text model.
    pub fn has_others(&self) -> bool {
        self.others.is_some()
    }

    /// Keeps no tensors of other parts: what is saved is no whole model.
    pub fn without_tensors(&mut self) {
        self.others = None;
        self.copies.clear();
    }

    /// Whether there is a tokenizer.
    pub fn has_tokenizer(&self) -> bool {
        self.files.iter().any(|f| is_tokenizer(&f.0))
    }

    /// A tokenizer that is not kept, with why.
    pub fn skipped_tokenizer(&self) -> Option<&(String, &'static str)> {
        self.skipped.iter().find(|f| is_tokenizer(&f.0))
    }
}

/// Names of tensors that are no part of the text model in a model that holds one.
fn beside(config: &Value, c: &Checkpoint) -> Vec<String> {
    if !crate::is_wrapper(config) {
        return vec![];
    }
    let Ok((_, family)) = family::of(config, "config.json") else { return vec![] };
    let prefix = family.prefix(|name| c.get(name).is_some());
    let tables = family.tables(&prefix);
    let of_text = |name: &str| name.starts_with(&prefix) || tables.iter().any(|t| t == name);
    // Elements of less than a byte are in no published tower.
    let whole = |e: &Entry| {
        let bytes = e.shape.iter().product::<usize>() as u64 * (e.dtype.bitsize() / 8) as u64;
        bytes == e.bytes.end - e.bytes.start
    };
    c.iter().filter(|(n, e)| !of_text(n) && whole(e)).map(|(n, _)| n.to_string()).collect()
}

/// How a model is saved.
#[derive(Clone)]
pub struct Saving {
    pub base: Base,
    /// Of all tensors; else each has the element type that it has in the base model, or else that of
    /// config.json, or else f32.
    pub dtype: Option<DType>,
    /// Most bytes of tensors in one file, unless one tensor has more.
    pub max_shard: u64,
    /// Whether a model that shardc did not write may be replaced.
    pub force: bool,
    /// The text of adapter_config.json: what is saved is an adapter, in one file and without config.json.
    pub adapter: Option<String>,
}

impl Default for Saving {
    fn default() -> Saving {
        let (base, max_shard) = (Base::default(), 5_000_000_000);
        Saving { base, dtype: None, max_shard, force: false, adapter: None }
    }
}

/// The keys of config.json that name the element type, by age.
pub(super) const DTYPE_KEYS: [&str; 2] = ["dtype", "torch_dtype"];

impl Saving {
    /// What a number of a tensor becomes in the element type that it is saved in.
    pub fn rounded(&self, name: &str, config: &Value) -> fn(f32) -> f32 {
        stored::rounded(self.of(name, config))
    }

    /// The element type of a tensor.
    pub(super) fn of(&self, name: &str, config: &Value) -> DType {
        let word = || DTYPE_KEYS.iter().find_map(|k| config.get(k)?.as_str());
        let named = |word: &str| stored::weights(|f| [f.name, f.torch].contains(&word));
        let base = || self.base.dtypes.get(name).copied();
        self.dtype.or_else(base).or_else(|| named(word()?)).unwrap_or(DType::F32)
    }
}
