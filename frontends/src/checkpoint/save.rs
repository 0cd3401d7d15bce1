//! Writes Hugging Face folders and safetensors files; what is written appears whole or not at all.

use crate::files;
use serde_json::{Map, Value, json};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::weights::Weight;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Files of a model folder that are copied as they are.
const COPIED: [&str; 8] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
];

/// Files that are written.
const WRITTEN: [&str; 2] = ["config.json", "model.safetensors"];

/// Writes a folder that Hugging Face loads: config.json (its element type set to float32) and
/// model.safetensors with the checkpoint's names, fused tensors put together again. `get` gives the
/// values of a parameter, row-major; it is called once per weight, tensor by tensor. Tokenizer
/// files are copied `from` a folder, if one is given.
///
/// The folder is written beside `dir` and renamed. An existing `dir` is replaced only if it is
/// empty or a plain model folder. Errors: `save-target` otherwise; `weights` if the parts of a
/// tensor do not make it up or `get` gives another number of elements; `file`; those of `get`.
pub fn save(
    dir: &Path,
    config: &Value,
    weights: &[Weight],
    from: Option<&Path>,
    get: impl FnMut(&Weight) -> Result<Vec<f32>>,
) -> Result<()> {
    let replaces = check_target(dir)?;
    let tensors = group(weights)?;
    let temporary = files::beside(dir, "tmp");
    let fail = |what, path: &Path, e| files::io_error(what, path, &e);
    if temporary.exists() {
        // Of an earlier process with our number, which has died.
        fs::remove_dir_all(&temporary).map_err(|e| fail("cannot remove", &temporary, e))?;
    }
    fs::create_dir_all(&temporary).map_err(|e| fail("cannot make the folder", &temporary, e))?;
    let temporary = Temporary(temporary);
    write_folder(&temporary.0, config, &tensors, from, get)?;
    for name in COPIED.iter().filter(|_| replaces) {
        let (kept, new) = (dir.join(name), temporary.0.join(name));
        if kept.is_file() && !new.exists() {
            fs::copy(&kept, &new).map_err(|e| fail("cannot copy", &kept, e))?;
        }
    }
    let old = files::beside(dir, "old");
    if replaces {
        fs::rename(dir, &old).map_err(|e| fail("cannot rename", dir, e))?;
    }
    if let Err(e) = fs::rename(&temporary.0, dir) {
        if replaces {
            // Best effort: the folder it was is also still there under its other name.
            let _ = fs::rename(&old, dir);
        }
        return Err(fail("cannot rename", dir, e));
    }
    if replaces {
        fs::remove_dir_all(&old).map_err(|e| fail("cannot remove", &old, e))?;
    }
    Ok(())
}

/// A folder that is removed unless it was renamed.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        // It is gone after a rename, and no error here is worth more than the one on its way.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// True if `dir` exists and may be replaced. Errors: `save-target` if it exists and may not.
pub fn check_target(dir: &Path) -> Result<bool> {
    let place = dir.display().to_string();
    let refuse = |what: &str| {
        Err(Diag::new("save-target", what)
            .at(&place)
            .rule("only a folder with a config.json with `model_type`, and no folders, is replaced")
            .help(format!("save to a new folder, such as {place}-1")))
    };
    if dir.file_name().is_none() {
        return refuse("this path does not end in the name of a folder");
    }
    let Ok(meta) = fs::symlink_metadata(dir) else { return Ok(false) };
    if !meta.is_dir() {
        return refuse("this exists and is not a folder");
    }
    let entries = fs::read_dir(dir).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let entries = entries.map_err(|e| files::io_error("cannot list the folder", dir, &e))?;
    if entries.is_empty() {
        return Ok(true);
    }
    if entries.iter().any(|e| e.file_type().is_ok_and(|t| t.is_dir())) {
        return refuse("this folder has folders in it");
    }
    let config = files::read_small(&dir.join("config.json"), crate::MAX_CONFIG);
    let config: Option<Value> = config.ok().and_then(|c| serde_json::from_slice(&c).ok());
    let names = entries.iter().map(|e| e.file_name().to_string_lossy().into_owned());
    let ours = |n: &String| WRITTEN.contains(&n.as_str()) || COPIED.contains(&n.as_str());
    if let Some(other) = names.into_iter().find(|n| !ours(n)) {
        return refuse(&format!("this folder also holds {other}, which saving would delete"));
    }
    match config.is_some_and(|c| c.get("model_type").is_some()) {
        true => Ok(true),
        false => refuse("this folder holds something else than a model"),
    }
}

/// A tensor of the checkpoint, or one per expert, and the weights it is made of.
struct Tensor<'a> {
    name: &'a str,
    names: Vec<String>,
    shape: &'a [usize],
    weights: Vec<&'a Weight>,
}

/// The weights by tensor, in order of first appearance; checks that parts make up their tensor.
fn group(weights: &[Weight]) -> Result<Vec<Tensor<'_>>> {
    let mut out: Vec<Tensor> = vec![];
    let mut index = std::collections::BTreeMap::new();
    for w in weights {
        let i = *index.entry(w.tensor.as_str()).or_insert_with(|| {
            let names = w.tensors().collect();
            out.push(Tensor { name: &w.tensor, names, shape: &w.tensor_shape, weights: vec![] });
            out.len() - 1
        });
        out[i].weights.push(w);
    }
    for t in &mut out {
        t.weights.sort_by_key(|w| w.part.map_or(0, |p| p.start));
        if !makes_up(t) {
            let parts: Vec<_> = t.weights.iter().map(|w| (&w.param, w.part)).collect();
            let what = format!("tensor `{}` {:?} is not made up of {parts:?}", t.name, t.shape);
            let help = format!("give weights that cover each of its {} dims once", t.shape.len());
            return Err(Diag::new("weights", what).help(help));
        }
    }
    Ok(out)
}

fn makes_up(t: &Tensor) -> bool {
    if elements(t.shape).is_none() {
        return false;
    }
    if let [w] = t.weights[..]
        && let Some(n) = w.experts
    {
        let whole = w.shape.split_first().is_some_and(|(&e, one)| e == n && one == t.shape);
        return w.part.is_none()
            && w.tensor_shape == t.shape
            && whole
            && elements(&w.shape).is_some();
    }
    if let [w] = t.weights[..]
        && w.part.is_none()
    {
        return w.shape == t.shape && w.tensor_shape == t.shape;
    }
    let Some(dim) = t.weights[0].part.map(|p| p.dim).filter(|&d| d < t.shape.len()) else {
        return false;
    };
    let mut at = 0;
    let follows = t.weights.iter().all(|w| {
        let Some(p) = w.part.filter(|_| w.experts.is_none()) else { return false };
        let mut shape = t.shape.to_vec();
        shape[dim] = p.len;
        let ok = p.dim == dim && p.start == at && w.shape == shape && w.tensor_shape == t.shape;
        at = at.saturating_add(p.len);
        ok
    });
    follows && at == t.shape[dim]
}

/// Number of elements; `None` if their bytes overflow.
fn elements(shape: &[usize]) -> Option<usize> {
    let n = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
    n.checked_mul(4).filter(|&bytes| bytes < 1 << 60).map(|_| n)
}

fn write_folder(
    dir: &Path,
    config: &Value,
    tensors: &[Tensor],
    from: Option<&Path>,
    mut get: impl FnMut(&Weight) -> Result<Vec<f32>>,
) -> Result<()> {
    let mut config = config.clone();
    for key in ["dtype", "torch_dtype"] {
        if let Some(v) = config.get_mut(key) {
            *v = json!("float32");
        }
    }
    let text = format!("{config:#}\n");
    let path = dir.join("config.json");
    files::create(&path, |out| put(out, &path, text.as_bytes()))?;
    for name in COPIED {
        let Some(source) = from.map(|f| f.join(name)).filter(|s| s.is_file()) else { continue };
        let fail = |e| files::io_error("cannot copy the file", &source, &e);
        fs::copy(&source, dir.join(name)).map_err(fail)?;
    }
    let path = dir.join("model.safetensors");
    let all = tensors.iter().flat_map(|t| t.names.iter().map(|n| (n.as_str(), t.shape)));
    let header = header(all)?;
    files::create(&path, |out| {
        put(out, &path, &header)?;
        tensors.iter().try_for_each(|t| {
            let values = join(t, &mut |w| get(w).map(Some))?.unwrap_or_default();
            put_values(out, &path, &values)
        })
    })
}

/// The values of a tensor from those of its weights, if there are any; of all experts in order.
fn join(
    t: &Tensor,
    get: &mut impl FnMut(&Weight) -> Result<Option<Vec<f32>>>,
) -> Result<Option<Vec<f32>>> {
    let mut parts = vec![];
    for &w in &t.weights {
        let Some(values) = get(w)? else { return Ok(None) };
        let (n, want) = (values.len(), w.shape.iter().product::<usize>());
        if n != want {
            let what = format!("parameter `{}` has {n} values instead of {want}", w.param);
            return Err(Diag::new("weights", what).help(format!("its shape is {:?}", w.shape)));
        }
        parts.push((w.part, values));
    }
    let (Some(first), true) = (t.weights[0].part, parts.len() > 1) else {
        return Ok(Some(parts.swap_remove(0).1));
    };
    let inner: usize = t.shape[first.dim + 1..].iter().product();
    let rows: usize = t.shape[..first.dim].iter().product();
    let mut out = Vec::with_capacity(elements(t.shape).unwrap_or(0));
    for row in 0..rows {
        for (part, values) in &parts {
            let len = part.map_or(0, |p| p.len) * inner;
            out.extend_from_slice(&values[row * len..(row + 1) * len]);
        }
    }
    Ok(Some(out))
}

/// Name, shape and values, row-major.
pub type NamedTensor = (String, Vec<usize>, Vec<f32>);

/// The checkpoint's tensors from parameters, in order: fused ones are put together again, stacks of
/// experts taken apart. A tensor for which `get` has no values is left out.
///
/// Errors: `weights` as in [`save`]; those of `get`.
pub fn whole_tensors(
    weights: &[Weight],
    mut get: impl FnMut(&Weight) -> Result<Option<Vec<f32>>>,
) -> Result<Vec<NamedTensor>> {
    let mut out = vec![];
    for t in group(weights)? {
        let Some(values) = join(&t, &mut get)? else { continue };
        let one = values.len() / t.names.len().max(1);
        let pieces = values.chunks(one.max(1));
        out.extend(
            t.names.iter().zip(pieces).map(|(n, v)| (n.clone(), t.shape.to_vec(), v.to_vec())),
        );
    }
    Ok(out)
}

/// The 8 bytes of length and the header of a file of f32 tensors in this order.
fn header<'a>(tensors: impl Iterator<Item = (&'a str, &'a [usize])>) -> Result<Vec<u8>> {
    let mut map = Map::new();
    map.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut at = 0usize;
    for (name, shape) in tensors {
        let end = elements(shape).and_then(|n| at.checked_add(4 * n)).ok_or_else(|| {
            Diag::new("weights", format!("tensor `{name}` {shape:?} is too large to save"))
                .help("a file holds less than 2^60 bytes")
        })?;
        let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [at, end]});
        if map.insert(name.into(), entry).is_some() {
            return Err(Diag::new("weights", format!("tensor `{name}` is there twice"))
                .help("give each tensor 1 name"));
        }
        at = end;
    }
    let mut text = Value::Object(map).to_string().into_bytes();
    // The data begins at a multiple of 8, as the format asks.
    text.resize(text.len().next_multiple_of(8), b' ');
    Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
}

fn put(out: &mut dyn Write, path: &Path, bytes: &[u8]) -> Result<()> {
    out.write_all(bytes).map_err(|e| files::io_error("cannot write the file", path, &e))
}

fn put_values(out: &mut dyn Write, path: &Path, values: &[f32]) -> Result<()> {
    let mut bytes = vec![];
    for chunk in values.chunks(1 << 16) {
        bytes.clear();
        bytes.extend(chunk.iter().flat_map(|x| x.to_le_bytes()));
        put(out, path, &bytes)?;
    }
    Ok(())
}

/// Writes a safetensors file of f32 tensors (name and shape) in this order, and flushes it; `put_one`
/// writes the values of one, 4 bytes per element, little-endian. What stands before the values is
/// returned.
///
/// Errors: `weights` if a name is there twice; `file`; those of `put_one`.
pub fn write_each(
    path: &Path,
    tensors: &[(String, Vec<usize>)],
    mut put_one: impl FnMut(usize, &mut dyn Write) -> Result<()>,
) -> Result<Vec<u8>> {
    let header = header(tensors.iter().map(|t| (t.0.as_str(), t.1.as_slice())))?;
    files::create(path, |out| {
        put(out, path, &header)?;
        (0..tensors.len()).try_for_each(|i| put_one(i, out))
    })?;
    Ok(header)
}

/// Writes a safetensors file of f32 tensors (name, shape, values row-major), in this order, beside
/// `path` and then renamed.
///
/// Errors: `weights` if values do not fill a shape or a name is there twice; `file`.
pub fn write_tensors(path: &Path, tensors: Vec<NamedTensor>) -> Result<()> {
    for (name, shape, values) in &tensors {
        if elements(shape) != Some(values.len()) {
            let what = format!("tensor `{name}` {shape:?} has {} values", values.len());
            return Err(Diag::new("weights", what).help("give one value per element"));
        }
    }
    let header = header(tensors.iter().map(|t| (t.0.as_str(), t.1.as_slice())))?;
    files::replace(path, |out| {
        put(out, path, &header)?;
        tensors.iter().try_for_each(|t| put_values(out, path, &t.2))
    })
}
