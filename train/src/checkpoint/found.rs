//! Which checkpoint a name means: a folder, the latest of several, or the best.

use super::Saved;
use super::index::broken;
use super::{step_folder, step_of};
use shardc_ir::diag::{Diag, Result};
use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// The checkpoints of a folder with their steps, the last one last.
pub(super) fn all(dir: &Path) -> std::io::Result<Vec<(usize, PathBuf)>> {
    let found = std::fs::read_dir(dir)?.flatten().filter_map(|e| {
        let step = step_of(&e.file_name().to_string_lossy())?;
        e.path().join("index.json").exists().then_some((step, e.path()))
    });
    let mut found: Vec<_> = found.collect();
    found.sort();
    Ok(found)
}

/// The checkpoint that a name means: `DIR@latest` and `DIR@best`, or a folder as it is.
pub(super) fn meant(name: &Path) -> Result<Cow<'_, Path>> {
    let text = name.to_str().filter(|_| !name.exists());
    let Some((dir, which)) = text.and_then(|t| t.rsplit_once('@')) else { return Ok(name.into()) };
    let dir = Path::new(dir);
    match which {
        "latest" => last(dir).map(Into::into),
        "best" => best(dir).map(Into::into),
        _other => Ok(name.into()),
    }
}

/// The checkpoint of a folder with the least loss of an evaluation, as the last one knows it.
fn best(dir: &Path) -> Result<PathBuf> {
    let at = |what: String| Diag::new("checkpoint", what).at(dir.display().to_string());
    let evaluated = Saved::open(&last(dir)?)?.run.and_then(|run| run.evaluated);
    let step = evaluated.map(|e| e.best.step).ok_or_else(|| {
        at("no evaluation is recorded".into())
            .rule("the best checkpoint is that with the least loss of an evaluation")
            .help("train with --eval-data, --eval-every and --keep best")
    })?;
    let folder = step_folder(dir, step);
    match folder.join("index.json").exists() {
        true => Ok(folder),
        false => {
            Err(at(format!("the checkpoint of step {step}, which was the best, is not there"))
                .rule("--keep best keeps it; --keep N keeps the newest alone")
                .help("give a folder step-NNNNNNNN, or train with --keep best"))
        }
    }
}

/// The last whole checkpoint of a folder.
pub(super) fn last(dir: &Path) -> Result<PathBuf> {
    let mut found = all(dir).map_err(|e| broken(dir, e.to_string()))?;
    found.pop().map(|f| f.1).ok_or_else(|| {
        let d = Diag::new("file", "no checkpoint is here").at(dir.display().to_string());
        if dir.join("adapter_config.json").exists() {
            return d.why("an adapter is here, without the model that it belongs to").help(
                "for text with it: shardc generate MODEL --adapter DIR, or the checkpoint that it was written from",
            );
        }
        d.help("write some with shardc run PLAN --save DIR --save-every 100")
    })
}
