//! Files read with a bound, and files written beside their place and then renamed.

use shardc_ir::diag::{Diag, Exit, Result};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// What the operating system says about a path, as a diagnostic with code `file`.
pub(crate) fn io_error(what: &str, path: &Path, e: &io::Error) -> Diag {
    let missing = e.kind() == io::ErrorKind::NotFound;
    let d = Diag::new("file", format!("{what}: {e}")).at(path.display().to_string());
    let help = if missing { "check the path" } else { "check permissions and free space" };
    d.help(help).exit(if missing { Exit::Usage } else { Exit::Environment })
}

/// Opens a plain file for reading; gives its length in bytes too.
pub(crate) fn open(path: &Path) -> Result<(File, u64)> {
    let meta = fs::metadata(path).map_err(|e| io_error("cannot read the file", path, &e))?;
    if !meta.is_file() {
        return Err(Diag::new("file", "this is not a file")
            .at(path.display().to_string())
            .help("give a plain file"));
    }
    let f = File::open(path).map_err(|e| io_error("cannot open the file", path, &e))?;
    Ok((f, meta.len()))
}

/// All bytes of a file of at most `most` bytes.
pub(crate) fn read_small(path: &Path, most: u64) -> Result<Vec<u8>> {
    let (f, len) = open(path)?;
    if len > most {
        return Err(Diag::new(
            "file",
            format!("{len} bytes are more than the {most} read at most"),
        )
        .at(path.display().to_string())
        .help("check that this is the file you mean"));
    }
    let mut out = Vec::with_capacity(len as usize);
    // The file may grow meanwhile: `take` keeps the bound.
    f.take(most).read_to_end(&mut out).map_err(|e| io_error("cannot read the file", path, &e))?;
    Ok(out)
}

/// `PATH.WORD-PID`, beside `path`.
pub(crate) fn beside(path: &Path, word: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or(path.as_os_str()).to_owned();
    name.push(format!(".{word}-{}", std::process::id()));
    path.with_file_name(name)
}

/// Writes a file beside its place, flushes it to disk, then renames it: a reader sees the old file
/// or the whole new one.
pub(crate) fn replace(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let temporary = beside(path, "tmp");
    let done = create(&temporary, write).and_then(|()| {
        fs::rename(&temporary, path).map_err(|e| io_error("cannot rename", path, &e))
    });
    if done.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&temporary);
    }
    done
}

/// Creates a file and flushes it to disk.
pub(crate) fn create(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let fail = |e: &io::Error| io_error("cannot write the file", path, e);
    let mut out = io::BufWriter::with_capacity(1 << 20, File::create(path).map_err(|e| fail(&e))?);
    write(&mut out)?;
    let file = out.into_inner().map_err(|e| fail(e.error()))?;
    file.sync_all().map_err(|e| fail(&e))
}
