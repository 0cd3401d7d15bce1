//! Models by their names on Hugging Face: `ORG/NAME` is looked up in the local cache, which their tools fill.
//! Nothing is downloaded.

use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use std::path::{Component, Path, PathBuf};

/// Longest file that names a snapshot: a hash of 40 digits.
const MAX_REF: u64 = 1 << 10;

/// A model by its name.
struct Name<'a> {
    org: &'a str,
    name: &'a str,
    /// A branch, a tag or a commit.
    revision: &'a str,
}

impl<'a> Name<'a> {
    /// `ORG/NAME` or `ORG/NAME@REVISION`; nothing for anything else.
    fn read(text: &'a str) -> Option<Name<'a>> {
        let (text, revision) = text.split_once('@').unwrap_or((text, "main"));
        let (org, name) = text.split_once('/')?;
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let word = |w: &str| !w.is_empty() && !w.starts_with('.') && w.chars().all(plain);
        (word(org) && word(name) && word(revision)).then_some(Name { org, name, revision })
    }
}

/// Whether a path that is not there may be the name of a model on Hugging Face.
pub fn is_name(model: &Path) -> bool {
    !model.exists() && model.to_str().is_some_and(|text| Name::read(text).is_some())
}

/// The folder that Hugging Face's tools keep models in, by the variables that they read.
pub fn cache() -> Option<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let home = || var("HF_HOME").or_else(|| Some(var("XDG_CACHE_HOME")?.join("huggingface")));
    let home = || home().or_else(|| Some(var("HOME")?.join(".cache/huggingface")));
    var("HF_HUB_CACHE")
        .or_else(|| var("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| Some(home()?.join("hub")))
}

/// The path of a model: as it is if there is one or if it is not a name on Hugging Face, else that of the
/// snapshot in the cache.
///
/// # Errors
/// `not-cached` if there is neither.
pub fn resolved(model: &Path) -> Result<PathBuf> {
    resolved_in(Path::new(""), model)
}

/// The same of a path relative to a folder.
///
/// # Errors
/// Those of [`resolved`].
pub fn resolved_in(dir: &Path, model: &Path) -> Result<PathBuf> {
    let path = dir.join(model);
    let text = model.to_str().filter(|_| !path.exists());
    // A path to a file that is missing stays one.
    let file = ["toml", "ir", "pt2", "json", "safetensors"];
    let ends = model.extension().and_then(|e| e.to_str()).is_some_and(|e| file.contains(&e));
    let Some(name) = text.filter(|_| !ends).and_then(Name::read) else { return Ok(path) };
    let Some(cache) = cache() else { return Err(absent(&name, None)) };
    let dir = cache.join(format!("models--{}--{}", name.org, name.name));
    let commit = match files::read_text(&dir.join("refs").join(name.revision), MAX_REF) {
        Ok(text) => text.trim().to_string(),
        Err(_) => name.revision.into(),
    };
    let snapshot = dir.join("snapshots").join(&commit);
    let inside =
        matches!(Path::new(&commit).components().collect::<Vec<_>>()[..], [Component::Normal(_)]);
    if inside && snapshot.is_dir() { Ok(snapshot) } else { Err(absent(&name, Some(&cache))) }
}

fn absent(name: &Name, cache: Option<&Path>) -> Diag {
    let Name { org, name, revision } = name;
    let of = if *revision == "main" { String::new() } else { format!(" --revision {revision}") };
    let d = Diag::new(
        "not-cached",
        format!("`{org}/{name}` is not a folder, and the model is not in the cache"),
    )
    .rule("a model is a path, or ORG/NAME in Hugging Face's cache (HF_HUB_CACHE, HF_HOME)")
    .help(format!("download it: hf download {org}/{name}{of}"));
    match cache {
        Some(cache) => d.at(cache.display().to_string()),
        None => d,
    }
}
