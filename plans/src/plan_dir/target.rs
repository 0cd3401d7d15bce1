//! What a plan may be written over: nothing but a plan.

use super::{MAX_FILE, OTHERS, TEXTS};
use serde::Deserialize;
use serde_json::Value as Json;
use shardc_codegen::kept;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files::{self, Place};
use std::path::{Path, PathBuf};

/// Whether a path in a plan's folder is a file that shardc writes there.
fn is_part(path: &Path) -> bool {
    let kernel = |name: &std::ffi::OsStr| kept::is_ours(&name.to_string_lossy());
    let of_kernels = path.parent() == Some(Path::new(crate::plan_dir::KERNELS));
    TEXTS.iter().chain(&OTHERS).any(|f| path == Path::new(f))
        || (of_kernels && path.file_name().is_some_and(kernel))
}

/// The first thing in a folder that is not part of a plan; folders of a plan are looked into.
fn foreign(dir: &Path, inside: &Path) -> std::io::Result<Option<PathBuf>> {
    for e in std::fs::read_dir(dir.join(inside))? {
        let e = e?;
        let path = inside.join(e.file_name());
        let folders = TEXTS.iter().filter_map(|f| Path::new(f).parent());
        let mut folders = folders.chain([Path::new(crate::plan_dir::KERNELS)]);
        let found = match e.file_type()?.is_dir() && folders.any(|f| f == path) {
            true => foreign(dir, &path)?,
            false => Some(path).filter(|p| !is_part(p)),
        };
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// Whether a folder's plan.json is that of a plan, of whatever version.
fn is_plan(dir: &Path) -> bool {
    #[derive(Deserialize)]
    struct Any {
        #[serde(rename = "schema")]
        _schema: u32,
        #[serde(rename = "version")]
        _version: String,
        #[serde(rename = "settings")]
        _settings: Json,
    }
    let text = files::read(&dir.join("plan.json"), MAX_FILE);
    text.is_ok_and(|t| serde_json::from_slice::<Any>(&t).is_ok())
}

/// A plan replaces nothing but a plan: no file, and no folder that holds anything else, however deep.
pub(super) fn check_target(place: &Place) -> Result<()> {
    let dir = place.path();
    let refuse = |what: String| {
        let name = dir.file_name().map_or("model".into(), |n| n.to_string_lossy().into_owned());
        Err(Diag::new("output", what)
            .at(dir.display().to_string())
            .help(format!("give -o a new folder, such as {name}.plan")))
    };
    if place.is_new() {
        return Ok(());
    }
    if !dir.is_dir() {
        return refuse("this exists and is not a folder".into());
    }
    let unreadable = |e| files::io_error("cannot list the folder", dir, &e);
    if let Some(other) = foreign(dir, Path::new("")).map_err(unreadable)? {
        let other = other.display();
        return refuse(format!("the folder holds {other}, which is not part of a plan"));
    }
    let empty = std::fs::read_dir(dir).map_err(unreadable)?.next().is_none();
    if !empty && !is_plan(dir) {
        return refuse("the folder holds files and is not a plan".into());
    }
    Ok(())
}
