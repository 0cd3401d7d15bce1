//! How models are saved, whichever command does it: flags, and what must not be replaced.

use crate::flags::bytes_of;
use crate::plan_dir::Stored;
use crate::terminal::note;
use shardc_frontends::{Base, Saving};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::types::DType;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Flags of the commands that save models.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub struct HowToSave {
    /// Element type of a saved model: f32, bf16 or f16 [default: for each tensor that of the base model,
    /// or else that of config.json]
    #[arg(long, value_name = "TYPE", value_parser = ["f32", "bf16", "f16"])]
    pub save_dtype: Option<String>,
    /// Most bytes of one file of a saved model, which then has several and an index
    #[arg(long, value_name = "BYTES", default_value = "5GB")]
    pub max_shard_size: String,
    /// Save even where that replaces the base model
    #[arg(long)]
    pub force: bool,
}

impl Default for HowToSave {
    fn default() -> HowToSave {
        HowToSave { save_dtype: None, max_shard_size: "5GB".into(), force: false }
    }
}

/// The folder that a model to be saved comes from: that of the weights, or that of the plan's model.
fn base(weights: Option<&Path>, stored: &Stored) -> Option<PathBuf> {
    weights.map(Path::to_path_buf).or_else(|| stored.origin.as_ref().map(PathBuf::from))
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

/// Refuses to save over the base model, whatever its path looks like, or into the folder of the weights.
///
/// # Errors
/// `save-base`.
pub fn apart(to: &Path, weights: Option<&Path>, stored: &Stored, how: &HowToSave) -> Result<()> {
    let up = upwards(to);
    let is = |a: &Path, b: &Path| inode(a).is_some_and(|x| inode(b) == Some(x));
    let model = stored.origin.as_ref().map(PathBuf::from);
    let mut all = weights.into_iter().chain(model.as_deref());
    let itself = all.find(|b| is(to, b));
    let around = weights.filter(|w| up.iter().any(|u| is(u, w)));
    let Some(base) = itself.or(around).filter(|_| !how.force) else { return Ok(()) };
    let what = match itself {
        Some(_) => "saving would replace the base model",
        None => "saving would write into the folder of the base model",
    };
    Err(Diag::new("save-base", what)
        .at(to.display().to_string())
        .why(format!("the base model is in {}", base.display()))
        .rule("what a run begins from is not replaced by what it makes")
        .help("save to a new folder, or add --force to replace the base model"))
}

/// What a model is saved with, read before anything takes long.
///
/// # Errors
/// `flag`, and those of [`Base::open`].
pub fn prepare(how: &HowToSave, weights: Option<&Path>, stored: &Stored) -> Result<Saving> {
    let dtype = how.save_dtype.as_deref();
    let dtype = dtype.and_then(|w| DType::ALL.into_iter().find(|d| d.name() == w));
    let max_shard = bytes_of("--max-shard-size", &how.max_shard_size)? as u64;
    let from = base(weights, stored);
    let base = match &from {
        Some(dir) if dir.is_dir() => Base::open(dir)?,
        _ => Base::default(),
    };
    if !base.has_tokenizer() && stored.facts.is_some() {
        let place = match &from {
            Some(dir) if dir.is_dir() => format!("none is in {}", dir.display()),
            Some(dir) => format!("{} is not there any more", dir.display()),
            None => "the plan does not know its model's folder".into(),
        };
        note(format!("the saved model will have no tokenizer: {place}"));
    }
    Ok(Saving { base, dtype, max_shard })
}
