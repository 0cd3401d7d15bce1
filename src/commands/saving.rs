//! How models are saved, whichever command does it: flags, and what must not be replaced.

use serde_json::Value as Json;
use shardc_frontends::{Base, MAX_CONFIG, OF_WEIGHTS, Saving};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files::{self, Place};
use shardc_ir::types::DType;
use shardc_ir::weights::Weight;
use shardc_plans::flags::bytes_of;
use shardc_plans::input::PROGRAMS;
use shardc_plans::stored::Stored;
use shardc_process::terminal::{note, warn};
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What checkpoints are, where a flag is refused for them.
pub const CHECKPOINTS: &str = "checkpoints, which are f32 and have a file of each rank";

/// Flags of the commands that save models.
#[derive(clap::Args, Clone, Debug, Default)]
#[group(skip)]
pub struct HowToSave {
    /// Element type of a saved model: f32, bf16 or f16 [default: for each tensor that of the base model, or else
    /// that of config.json]
    #[arg(long, value_name = "TYPE", value_parser = ["f32", "bf16", "f16"])]
    pub save_dtype: Option<String>,
    /// Maximum size of a file of a saved model; larger models are split into several files with an index
    /// [default: 5GB]
    #[arg(long, value_name = "BYTES")]
    pub max_shard_size: Option<String>,
    /// Save even if that replaces the base model, or a model that shardc did not write
    #[arg(long)]
    pub force: bool,
}

impl HowToSave {
    /// Refuses flags that say nothing of what is written, `what`, which is not a model; `--force` too, unless
    /// it may be written into the folder of a model.
    ///
    /// # Errors
    /// `flag`.
    pub fn refuse_for(&self, what: &str, may_force: bool) -> Result<()> {
        let given = [
            ("--save-dtype", self.save_dtype.is_some()),
            ("--max-shard-size", self.max_shard_size.is_some()),
            ("--force", self.force && !may_force),
        ];
        let Some((flag, _)) = given.into_iter().find(|g| g.1) else { return Ok(()) };
        Err(Diag::new("flag", format!("{flag} is for a run that saves a model, not for {what}"))
            .at(flag)
            .help(format!("leave {flag} out")))
    }
}

/// Where a command is to save.
///
/// # Errors
/// `save-target` if the path is none to save to.
pub fn place_of(dir: &Path) -> Result<Place> {
    Place::of(dir).map_err(|d| if d.code == "file" { d.coded("save-target") } else { d })
}

/// Saves a model, with a warning if that was elsewhere than asked; where it was.
///
/// # Errors
/// Those of [`shardc_frontends::save`].
pub fn write(
    place: &Place,
    config: &Json,
    weights: &[Weight],
    how: &Saving,
    get: impl FnMut(&Weight) -> Result<Vec<f32>>,
) -> Result<PathBuf> {
    let written = shardc_frontends::save(place, config, weights, how, get)?;
    if let Some(d) = written.instead {
        warn(&[d.why(format!("the model is in {} instead", written.dir.display()))]);
    }
    Ok(written.dir)
}

/// The folder that a model to be saved comes from: that of the weights, or that of the plan's model.
fn base(weights: Option<&Path>, stored: &Stored) -> Option<PathBuf> {
    let folder = weights.filter(|w| w.is_dir());
    folder.map(Path::to_path_buf).or_else(|| stored.origin.as_ref().map(PathBuf::from))
}

/// Device and inode of what a path leads to.
fn inode(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().map(|m| (m.dev(), m.ino()))
}

/// `path` and the folders it is in, as they are behind links, as far as they exist.
fn upwards(path: &Path) -> Vec<PathBuf> {
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.into());
    let there = whole.ancestors().find_map(|a| std::fs::canonicalize(a).ok());
    let exists = there.is_some() && whole.exists();
    let up: Vec<PathBuf> =
        there.iter().flat_map(|t| t.ancestors()).map(Path::to_path_buf).collect();
    // Of a new folder the first is not itself, but what it will be in.
    if exists { up } else { [vec![whole], up].concat() }
}

/// Whether files of weights of two folders are the same ones, as behind the links of a cache.
fn share(a: &Path, b: &Path) -> bool {
    let weights = |dir: &Path| -> BTreeSet<(u64, u64)> {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let files = entries.map(|e| e.path());
        files
            .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
            .filter_map(|p| inode(&p))
            .collect()
    };
    !weights(a).is_disjoint(&weights(b))
}

/// Refuses to save over the base model, whatever its path looks like, or into the folder of the weights.
///
/// # Errors
/// `save-base`.
pub fn apart(to: &Path, weights: Option<&Path>, stored: &Stored, how: &HowToSave) -> Result<()> {
    let up = upwards(to);
    let is = |a: &Path, b: &Path| inode(a).is_some_and(|x| inode(b) == Some(x));
    let model = stored.origin.as_ref().map(PathBuf::from);
    let mut all = weights.into_iter().chain(model.as_deref());
    let itself = all.find(|b| is(to, b) || share(to, b));
    let around = weights.filter(|w| up.iter().any(|u| is(u, w)));
    let Some(base) = itself.or(around).filter(|_| !how.force) else { return Ok(()) };
    let what = match itself {
        Some(_) => "saving would replace the base model",
        None => "saving would write into the folder of the base model",
    };
    Err(Diag::new("save-base", what)
        .at(to.display().to_string())
        .why(format!("the base model is in {}", base.display()))
        .rule("a run does not replace the model that it starts from")
        .help("save to a new folder, or add --force to replace the base model"))
}

/// What a model is saved with, read before anything takes long.
///
/// # Errors
/// `flag`, and those of [`Base::open`].
pub fn prepare(how: &HowToSave, weights: Option<&Path>, stored: &Stored) -> Result<Saving> {
    let dtype = how.save_dtype.as_deref().and_then(DType::named);
    let max_shard = how.max_shard_size.as_deref().unwrap_or("5GB");
    let max_shard = bytes_of("--max-shard-size", max_shard)? as u64;
    let from = base(weights, stored);
    let of_plan = |dir: &Path| stored.config.is_null() || same_model(dir, &stored.config);
    let base = match &from {
        Some(dir) if dir.is_dir() && of_plan(dir) => Base::open(dir)?,
        _ => Base::default(),
    };
    let skipped = |(name, why): &(String, &str)| {
        format!("{} {why}", from.as_deref().unwrap_or(Path::new("")).join(name).display())
    };
    for file in &base.skipped {
        note(format!("{}: the saved model will not have it", skipped(file)));
    }
    if shardc_frontends::is_wrapper(&stored.config) && !base.has_others() {
        note(
            "the saved model will have no tensors but those of its text model: \
             the folder that it comes from is not there, or has no others",
        );
    }
    let of_archive = stored.family == PROGRAMS[1];
    if of_archive && stored.config.as_object().is_none_or(|c| c.is_empty()) {
        let beside = "no config.json was beside the archive when it was compiled";
        note(format!(
            "the saved model will have neither a configuration nor a tokenizer: {beside}"
        ));
    } else if !base.has_tokenizer() && (stored.facts.is_some() || of_archive) {
        let place = match &from {
            Some(dir) if dir.is_dir() && !of_plan(dir) => {
                format!("the config.json in {} is not that of the plan", dir.display())
            }
            Some(dir) if dir.is_dir() => match base.skipped_tokenizer() {
                Some(file) => skipped(file),
                None => format!("none is in {}", dir.display()),
            },
            Some(dir) => format!("{} is not there any more", dir.display()),
            None => "the plan does not know its model's folder".into(),
        };
        note(format!("the saved model will have no tokenizer: {place}"));
    }
    Ok(Saving { base, dtype, max_shard, force: how.force, adapter: None })
}

/// Whether a folder's config.json is that of a plan, but for what it says of the files alone and of the weights.
pub fn same_model(dir: &Path, config: &Json) -> bool {
    let strip = |c: &Json| {
        let mut c = c.clone();
        let keys = ["dtype", "torch_dtype", "_name_or_path", "transformers_version"];
        if let Some(map) = c.as_object_mut() {
            keys.iter().chain(&OF_WEIGHTS).for_each(|k| drop(map.remove(*k)));
        }
        c
    };
    let text = files::read(&dir.join("config.json"), MAX_CONFIG);
    let read = text.ok().and_then(|t| serde_json::from_slice::<Json>(&t).ok());
    read.is_some_and(|c| strip(&c) == strip(config))
}
