//! Files of users: read with bounds from plain files alone, and written beside their place and then
//! renamed ([`Staged`], [`replace`]).
//!
//! All reading of paths that a user gives goes through [`open`]: a FIFO would block for ever, a device
//! never end, and opening some devices does something. What a path is may change between a look and
//! the opening, so the descriptor is asked too.

pub mod make;
mod place;
pub mod trust;
mod unfinished;
mod write;

pub use place::Place;
pub use unfinished::{Undo, Unfinished, abandon, sweep};
pub use write::{FileFormat, Growing, Staged, create, replace};

use crate::diag::{Diag, Result};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::{File, FileType, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// What the operating system says about a path, as a diagnostic: `file` if it leads to nothing, else `io`.
pub fn io_error(what: &str, path: &Path, e: &io::Error) -> Diag {
    use io::ErrorKind::{NotADirectory, NotFound};
    let (code, help) = match e.kind() {
        NotFound | NotADirectory => ("file", "check the path"),
        _ if e.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => (
            "file",
            "let the link lead to a file: it leads back to itself, or over too many others",
        ),
        _ => ("io", "check permissions and free space"),
    };
    Diag::new(code, format!("{what}: {e}")).at(path.display().to_string()).help(help)
}

/// What kind of thing a path leads to, in a word for a message; `None` for a plain file.
fn kind(t: FileType) -> Option<&'static str> {
    let kinds = [
        (t.is_dir(), "a folder"),
        (t.is_fifo(), "a FIFO (a named pipe)"),
        (t.is_socket(), "a socket"),
        (t.is_char_device(), "a device"),
        (t.is_block_device(), "a block device"),
    ];
    kinds.into_iter().find(|k| k.0).map(|k| k.1)
}

/// Refuses what is not a plain file.
fn plain(path: &Path, meta: &Metadata) -> Result<()> {
    let Some(kind) = kind(meta.file_type()) else { return Ok(()) };
    Err(Diag::new("file", format!("this is {kind}, not a file"))
        .at(path.display().to_string())
        .rule("only plain files are read and replaced: others may have no end")
        .help("give a file; what a pipe or a device gives, write to a file first"))
}

/// Refuses a link, where shardc makes `what` of its own.
///
/// # Errors
/// `file`.
pub fn no_link(path: &Path, what: &str) -> Result<()> {
    if !path.is_symlink() {
        return Ok(());
    }
    Err(Diag::new("file", format!("this is a link, and not {what}"))
        .at(path.display().to_string())
        .rule("no link is followed to where shardc makes files of its own")
        .help("look at who made it and where it leads, and remove it; or name another folder"))
}

/// Opens a plain file for reading; gives its length in bytes too. It never blocks.
///
/// # Errors
/// `file` if the path leads to no plain file, or it cannot be opened.
pub fn open(path: &Path) -> Result<(File, u64)> {
    let unreadable = |e: io::Error| io_error("cannot read the file", path, &e);
    // Before: to open a device may do something. After: the path may lead elsewhere by now.
    plain(path, &std::fs::metadata(path).map_err(unreadable)?)?;
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(unreadable)?;
    let meta = file.metadata().map_err(unreadable)?;
    plain(path, &meta)?;
    Ok((file, meta.len()))
}

/// All bytes of a file of at most `most` bytes: those that the descriptor has, whatever becomes of the
/// path, and no more than that if it grows.
///
/// # Errors
/// `file` as for [`open`], and for a larger file.
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>> {
    let (file, len) = open(path)?;
    let large = |what: String| {
        Diag::new("file", what)
            .at(path.display().to_string())
            .rule(format!("at most {most} bytes are read of such a file"))
            .help("check that this is the file you mean")
    };
    if len > most {
        return Err(large(format!("the file has {len} bytes, more than {most}")));
    }
    let mut out = Vec::with_capacity(len as usize);
    let unreadable = |e| io_error("cannot read the file", path, &e);
    file.take(most.saturating_add(1)).read_to_end(&mut out).map_err(unreadable)?;
    if out.len() as u64 > most {
        return Err(large(format!("the file has more than {most} bytes, and grows")));
    }
    Ok(out)
}

/// All of a text file of at most `most` bytes.
///
/// # Errors
/// `file` as for [`read`], and for what is not UTF-8.
pub fn read_text(path: &Path, most: u64) -> Result<String> {
    String::from_utf8(read(path, most)?).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Diag::new("file", format!("this is not text: byte {at} is not UTF-8"))
            .at(path.display().to_string())
            .help("give a text file, in UTF-8")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::PathBuf;

    fn folder(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("shardc-files-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("a folder");
        dir
    }

    #[test]
    fn only_plain_files_are_read_and_none_without_end() {
        let dir = folder("read");
        let fifo = dir.join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .expect("a FIFO");
        let socket = dir.join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
        for (path, what) in [
            (fifo.as_path(), "a FIFO"),
            (&socket, "a socket"),
            (Path::new("/dev/zero"), "a device"),
            (&dir, "a folder"),
        ] {
            let d = read(path, 100).expect_err("refused").render();
            assert!(d.contains(what) && d.contains(path.to_str().expect("a path")), "{d}");
        }
        // A file of the kernel's that says it is empty, and is not.
        let d = read(Path::new("/proc/self/maps"), 10).expect_err("refused").render();
        assert!(d.contains("more than 10 bytes"), "{d}");
        let sparse = dir.join("sparse");
        fs::File::create(&sparse).and_then(|f| f.set_len(1 << 40)).expect("a sparse file");
        let d = read(&sparse, 1 << 20).expect_err("refused").render();
        assert!(d.contains("1099511627776") && d.contains("1048576"), "{d}");
        fs::remove_dir_all(&dir).expect("removed");
    }

    #[test]
    fn a_file_that_changes_is_read_from_its_descriptor() {
        let dir = folder("change");
        let path = dir.join("file");
        fs::write(&path, "whole").expect("a file");
        let (mut file, len) = open(&path).expect("open");
        fs::remove_file(&path).expect("removed");
        let mut out = String::new();
        file.read_to_string(&mut out).expect("read");
        assert_eq!((out.as_str(), len), ("whole", 5));
        fs::remove_dir_all(&dir).expect("removed");
    }
}
