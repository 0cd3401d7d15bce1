//! Writes Hugging Face folders and safetensors files; what is written appears whole or not at all.

use super::base::{DTYPE_KEYS, MOST, Saving, belongs, is_written, list};
use super::deal::{Values, copy, deal, most_have};
use super::peft::{CONFIG, TENSORS};
use crate::stored::{self, weights_of};
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files::{self, FileFormat, Place, Staged, make};
use shardc_ir::types::DType;
use shardc_ir::weights::Weight;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// Where a model was written.
#[derive(Debug)]
pub struct Written {
    pub dir: PathBuf,
    /// Why not where it was to be: what came there while the model was trained and written.
    pub instead: Option<Diag>,
}

/// Writes a folder that Hugging Face loads: config.json, with the element type that most weights have,
/// and weights with the checkpoint's names, fused tensors put together again, in one or more files.
/// `get` gives the values of a parameter, row-major; it is called once per weight, tensor by tensor.
/// What else belongs to a model is that of the base.
///
/// The folder is written beside a place that [`check_target`] has allowed, and renamed. If that may not be
/// replaced any more, it becomes the first new one of `NAME-1`, `NAME-2` …: no model is lost.
/// Errors: `weights` if the parts of a tensor do not make it up, `get` gives another number of elements,
/// or one is too large for f16; `file`; those of `get`.
pub fn save(
    place: &Place,
    config: &Value,
    weights: &[Weight],
    how: &Saving,
    get: impl FnMut(&Weight) -> Result<Vec<f32>>,
) -> Result<Written> {
    let dir = place.path();
    let tensors = group(weights).map_err(|d| d.at(dir.display().to_string()))?;
    place.make_parent()?;
    let staged = Staged::folder(place)?;
    write_folder(staged.path(), config, &tensors, how, get)?;
    let put = || {
        check_target(place, how.force)?;
        let kept = if place.is_new() { vec![] } else { list(dir)? };
        for name in kept.iter().filter(|n| belongs(n) && !staged.path().join(n).exists()) {
            keep(staged.path(), name, &files::read(&dir.join(name), MOST)?)?;
        }
        staged.publish_at(place)
    };
    let Err(why) = put() else { return Ok(Written { dir: dir.into(), instead: None }) };
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    for i in 1..=MOST_ASIDE {
        let aside = Place::of(&dir.with_file_name(format!("{name}-{i}")))?;
        if aside.is_new() && staged.publish_at(&aside).is_ok() {
            return Ok(Written { dir: aside.path().into(), instead: Some(why) });
        }
    }
    Err(why)
}

/// Most other names that are tried for a model.
const MOST_ASIDE: usize = 1 << 10;

/// Writes a small file of a folder.
fn keep(dir: &Path, name: &str, bytes: &[u8]) -> Result<()> {
    let path = dir.join(name);
    let fail = |e| files::io_error("cannot make the folder", &path, &e);
    make::between(dir, Path::new(name)).map_err(fail)?;
    files::create(&path, |out| put(out, &path, bytes))
}

/// Checks that a model may be saved to a place: a new one, an empty folder, or that of a model which may
/// be replaced: one that shardc wrote, or with `force` any.
///
/// # Errors
/// `save-target` otherwise; `file`.
pub fn check_target(place: &Place, force: bool) -> Result<()> {
    let dir = place.path();
    let refuse = |what: &str| {
        let name = dir.display();
        Diag::new("save-target", what)
            .at(name.to_string())
            .rule("only a folder with a config.json with `model_type`, and no folders, is replaced")
            .help(format!("save to a new folder, such as {name}-1"))
    };
    if place.is_new() {
        return Ok(());
    }
    if !dir.is_dir() {
        return Err(refuse("this exists and is not a folder"));
    }
    let names = list(dir)?;
    if names.is_empty() {
        return Ok(());
    }
    let whole = |n: &&String| is_written(n) || belongs(n);
    if let Some(folder) = names.iter().find(|n| dir.join(n).is_dir()) {
        return Err(refuse(&format!("this folder has folders in it: {folder}")));
    }
    if let Some(other) = names.iter().find(|n| !whole(n)) {
        return Err(refuse(&format!("this folder also holds {other}, which saving would delete")));
    }
    if let Some(other) = names.iter().find(|n| !dir.join(n).is_file()) {
        return Err(refuse(&format!("{other} in this folder is not a file")));
    }
    let says = |(file, key): (&str, &str)| {
        let config = files::read(&dir.join(file), crate::MAX_CONFIG);
        let config: Option<Value> = config.ok().and_then(|c| serde_json::from_slice(&c).ok());
        config.is_some_and(|c| c.get(key).is_some())
    };
    if ![("config.json", "model_type"), (CONFIG, "peft_type")].into_iter().any(says) {
        return Err(refuse("this folder holds something else than a model"));
    }
    let others = |n: &&String| n.ends_with(".safetensors") && !is_ours(&dir.join(n));
    let Some(other) = names.iter().find(others).filter(|_| !force) else { return Ok(()) };
    Err(refuse(&format!("{other} in this folder was not written by shardc"))
        .rule("only a model that shardc wrote is replaced")
        .help("or add --force to replace this model"))
}

/// A tensor of the checkpoint, or one per expert, and the weights it is made of.
pub(super) struct Tensor<'a> {
    name: &'a str,
    pub names: Vec<String>,
    pub shape: &'a [usize],
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
        && let Some(n) = w.experts.filter(|_| w.is_stacked())
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
    let Some(first) = t.weights[0].part.filter(|p| p.dim < t.shape.len()) else { return false };
    let (dim, size) = (first.dim, t.shape[first.dim]);
    let mut at = 0;
    // One behind the other, or element by element in turn.
    let follows = t.weights.iter().enumerate().all(|(i, w)| {
        let Some(p) = w.part.filter(|_| !w.is_stacked()) else { return false };
        let mut shape = t.shape.to_vec();
        shape[dim] = p.len;
        let begins = p.start == if first.step == 1 { at } else { i };
        let inside = p.place(&(0..p.len)).is_some_and(|at| at.end <= size);
        at = at.saturating_add(p.len);
        let alike = (p.dim, p.step) == (dim, first.step) && w.tensor_shape == t.shape;
        alike && begins && inside && w.shape == shape
    });
    follows && at == size && [1, t.weights.len()].contains(&first.step)
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
    how: &Saving,
    mut get: impl FnMut(&Weight) -> Result<Vec<f32>>,
) -> Result<()> {
    let all = deal(tensors, how, config);
    let mut config = config.clone();
    let most = most_have(&all).and_then(weights_of);
    let word = most.unwrap_or(DType::F32).facts().torch;
    for key in DTYPE_KEYS {
        if let Some(v) = config.get_mut(key) {
            *v = json!(word);
        }
    }
    match &how.adapter {
        None => keep(dir, "config.json", format!("{config:#}\n").as_bytes())?,
        Some(text) => keep(dir, CONFIG, text.as_bytes())?,
    }
    how.base.files.iter().try_for_each(|(name, bytes)| keep(dir, name, bytes))?;
    let count = all.len();
    let mut map = BTreeMap::new();
    // Tensors of one group, as of experts, may be in several files.
    let mut last: Option<(usize, Vec<f32>)> = None;
    for (i, file) in all.iter().enumerate() {
        let name = match count {
            1 if how.adapter.is_some() => TENSORS.to_string(),
            1 => "model.safetensors".to_string(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        let path = dir.join(&name);
        let header = begin(about(MODEL), file.iter().map(|p| (p.name, p.shape, p.dtype)))?;
        files::create(&path, |out| {
            put(out, &path, &header)?;
            for p in file {
                let (group, one) = match &p.values {
                    Values::Kept { file, bytes } => {
                        copy(out, &path, file, bytes)?;
                        continue;
                    }
                    Values::Trained { group, one } => (*group, *one),
                };
                if last.as_ref().is_none_or(|l| l.0 != group) {
                    let t = &tensors[group];
                    let values = join(t, &mut |w| get(w).map(Some))?.unwrap_or_default();
                    last = Some((group, values));
                }
                let n: usize = p.shape.iter().product();
                let values = last.as_ref().map_or(&[][..], |l| &l.1[one * n..(one + 1) * n]);
                let dtype = weights_of(p.dtype).unwrap_or(DType::F32);
                put_values(out, &path, values, dtype).map_err(|d| named(d, p.name))?;
            }
            Ok(())
        })?;
        map.extend(file.iter().map(|p| (p.name, name.clone())));
    }
    if count == 1 {
        return Ok(());
    }
    let pieces = || all.iter().flatten();
    let parameters: usize = pieces().map(|p| p.shape.iter().product::<usize>()).sum();
    let bytes: u64 = pieces().map(|p| p.bytes).sum();
    let about = json!({"total_parameters": parameters, "total_size": bytes});
    let index = json!({"metadata": about, "weight_map": map});
    keep(dir, "model.safetensors.index.json", format!("{index:#}\n").as_bytes())
}

/// A value that a tensor's element type does not have, with the tensor's name.
fn named(d: Diag, name: &str) -> Diag {
    if d.code == "weights" { d.why(format!("it is in `{name}`")) } else { d }
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
    let mut out = vec![0.0; elements(t.shape).unwrap_or(0)];
    let all = t.shape[first.dim] * inner;
    for (p, values) in parts.iter().filter_map(|(p, values)| Some(((*p)?, values))) {
        // Neighbours are copied together.
        let (runs, run) = if p.step == 1 { (1, p.len * inner) } else { (p.len, inner) };
        for (i, values) in values.chunks(run.max(1)).enumerate() {
            let at = i / runs.max(1) * all + (p.start + i % runs.max(1) * p.step) * inner;
            out[at..at + run].copy_from_slice(values);
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

/// What headers of files of tensors begin with.
fn about(of: &str) -> Value {
    json!({"format": "pt", "of": of})
}

/// Whether a file of tensors begins as [`about`] says.
fn begins(begin: &[u8], of: &str) -> bool {
    let about = format!(r#"{{"__metadata__":{{"format":"pt","of":"{of}"}}"#);
    begin.get(8..).is_some_and(|b| b.starts_with(about.as_bytes()))
}

/// What the headers of models say that they are of; `format` alone stands in those of others too.
const MODEL: &str = "shardc model";

/// Whether [`save`] wrote a file of weights.
fn is_ours(path: &Path) -> bool {
    let mut begin = vec![];
    let read = files::open(path).map(|(file, _)| file.take(256).read_to_end(&mut begin));
    read.is_ok_and(|r| r.is_ok()) && begins(&begin, MODEL)
}

/// The 8 bytes of length and the header of a file of tensors in this order.
fn begin<'a>(
    about: Value,
    tensors: impl Iterator<Item = (&'a str, &'a [usize], Dtype)>,
) -> Result<Vec<u8>> {
    let mut map = Map::new();
    map.insert("__metadata__".into(), about);
    let mut at = 0usize;
    for (name, shape, dtype) in tensors {
        let size = dtype.bitsize() / 8;
        let end = elements(shape).and_then(|n| at.checked_add(size * n)).ok_or_else(|| {
            Diag::new("weights", format!("tensor `{name}` {shape:?} is too large to save"))
                .help("a file holds less than 2^60 bytes")
        })?;
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]});
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

pub(super) fn put(out: &mut dyn Write, path: &Path, bytes: &[u8]) -> Result<()> {
    out.write_all(bytes).map_err(|e| files::io_error("cannot write the file", path, &e))
}

fn put_values(out: &mut dyn Write, path: &Path, values: &[f32], dtype: DType) -> Result<()> {
    let mut bytes = vec![];
    for chunk in values.chunks(1 << 16) {
        bytes.clear();
        let large = |x: &&f32| x.is_finite() && stored::rounded(dtype)(**x).is_infinite();
        if let Some(x) = chunk.iter().find(large).filter(|_| dtype == DType::F16) {
            return Err(Diag::new("weights", format!("{x} is too large for f16"))
                .at(path.display().to_string())
                .help("f16 ends at 65504: use --save-dtype bf16 or f32"));
        }
        stored::encode(dtype, chunk, &mut bytes);
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
    let names = tensors.iter().map(|t| (t.0.as_str(), t.1.as_slice(), Dtype::F32));
    let header =
        begin(json!({"format": "pt"}), names).map_err(|d| d.at(path.display().to_string()))?;
    files::create(path, |out| {
        put(out, path, &header)?;
        (0..tensors.len()).try_for_each(|i| put_one(i, out))
    })?;
    Ok(header)
}

/// What [`write_tensors`] writes. A model's file does not begin so.
pub const DUMP: FileFormat = FileFormat { name: "dump", is: |begin| begins(begin, "dump") };

/// Writes a safetensors file of f32 tensors (name, shape, values row-major), in this order, beside
/// `path` and then renamed.
///
/// Errors: `weights` if values do not fill a shape or a name is there twice; `file`.
pub fn write_tensors(path: &Path, tensors: Vec<NamedTensor>) -> Result<()> {
    let place = || path.display().to_string();
    for (name, shape, values) in &tensors {
        if elements(shape) != Some(values.len()) {
            let what = format!("tensor `{name}` {shape:?} has {} values", values.len());
            return Err(Diag::new("weights", what).at(place()).help("give one value per element"));
        }
    }
    let names = tensors.iter().map(|t| (t.0.as_str(), t.1.as_slice(), Dtype::F32));
    let header = begin(about("dump"), names).map_err(|d| d.at(place()))?;
    files::replace(path, &DUMP, |out| {
        put(out, path, &header)?;
        tensors.iter().try_for_each(|t| put_values(out, path, &t.2, DType::F32))
    })
}
