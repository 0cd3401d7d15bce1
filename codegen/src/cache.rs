//! The user's folder of compiled kernels. What lies there runs as this user, so it is believed only if nobody
//! else can have put it there: owner and mode of the folder, of those above it and of each file are
//! judged as ssh judges its own ([`shardc_ir::files::trust`]), on descriptors, and links are not followed.

use shardc_ir::diag::Result;
use shardc_ir::files::{io_error, make, trust};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Largest file of compiled kernels that is read, in bytes.
pub(crate) const MOST: u64 = 1 << 30;
/// A folder in which only the owner of a file renames it, such as /tmp.
const STICKY: u32 = 0o1000;

/// The user's cache of compiled kernels: `SHARDC_CACHE`, else the user's folder for such.
pub fn place() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let own = set("SHARDC_CACHE");
    let user = || set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|h| h.join(".cache")));
    own.or_else(|| user().map(|c| c.join("shardc")))
}

/// A folder that is ours, open.
pub(crate) struct Folder {
    folder: make::Folder,
    pub path: PathBuf,
}

impl Folder {
    /// Opens a folder, and makes it if it is not there.
    ///
    /// # Errors
    /// `file` if it cannot be made, or others can write it, or put another in its place.
    pub fn open(path: &Path) -> Result<Folder> {
        let fail = |e: io::Error| io_error("cannot open the folder of compiled kernels", path, &e);
        make::private(path).map_err(fail)?;
        let path = std::fs::canonicalize(path).map_err(fail)?;
        for above in path.ancestors().skip(1) {
            let meta = std::fs::symlink_metadata(above).map_err(fail)?;
            let not = if meta.mode() & STICKY == 0 { trust::WRITABLE } else { 0 };
            trust::check("a folder above compiled kernels", above, &meta, not)?;
        }
        let folder = make::Folder::open(&path).map_err(fail)?;
        let meta = folder.metadata().map_err(fail)?;
        trust::check("the folder of compiled kernels", &path, &meta, trust::WRITABLE)?;
        Ok(Folder { folder, path })
    }

    /// Opens a file; `None` if there is none, or a link.
    pub fn file(&self, name: &str) -> Option<File> {
        self.folder.read(name).ok()
    }

    /// All of a file, if it is there and ours; any other is replaced when it is made again.
    pub fn read(&self, name: &str) -> Option<Vec<u8>> {
        let (file, path) = (self.file(name)?, self.path.join(name));
        trust::read_checked(file, "a file of compiled kernels", &path, trust::WRITABLE, MOST).ok()
    }

    /// Writes a file beside its place, and renames it.
    pub fn keep(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let new = |f: &make::Folder, beside: &str| f.private_file(beside);
        self.folder.replace(name, new, |mut file| file.write_all(bytes))
    }

    /// Names of its files, in order.
    pub fn names(&self) -> Vec<String> {
        let all = std::fs::read_dir(&self.path).into_iter().flatten().flatten();
        let mut all: Vec<String> =
            all.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        all.sort();
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).expect("a mode");
    }

    #[test]
    fn only_what_nobody_else_can_have_written_is_believed() {
        let base = std::env::temp_dir().join(make::beside("cache"));
        let (above, dir) = (base.join("above"), base.join("above/cache"));
        let folder = Folder::open(&dir).expect("a folder");
        assert_eq!(fs::metadata(&dir).expect("made").permissions().mode() & 0o777, 0o700);
        folder.keep("whole", b"kernels").expect("written");
        let read = || folder.read("whole");
        assert_eq!(read().as_deref(), Some(&b"kernels"[..]));
        assert_eq!(folder.names(), ["whole"]);
        // A file that others can write, that is not a file, or that is a link to one.
        let file = dir.join("whole");
        for (m, is_read) in [(0o664, false), (0o606, false), (0o644, true), (0o600, true)] {
            mode(&file, m);
            assert_eq!(read().is_some(), is_read, "{m:o}");
        }
        fs::rename(&file, base.join("elsewhere")).expect("moved");
        symlink(base.join("elsewhere"), &file).expect("a link");
        assert_eq!(read(), None, "a link");
        // What is made again takes its place, and not that of what it leads to.
        folder.keep("whole", b"anew").expect("written");
        assert_eq!(read().as_deref(), Some(&b"anew"[..]));
        assert_eq!(fs::read(base.join("elsewhere")).expect("still there"), b"kernels");
        fs::remove_file(&file).and_then(|()| fs::create_dir(&file)).expect("a folder");
        assert_eq!(read(), None, "a folder");
        // A folder that others can write, and one above it, but for one like /tmp.
        for (of, m, opens) in [
            (&dir, 0o770, false),
            (&dir, 0o707, false),
            (&dir, 0o755, true),
            (&above, 0o777, false),
            (&above, 0o775, false),
            (&above, 0o1777, true),
        ] {
            mode(of, m);
            let opened = Folder::open(&dir);
            assert_eq!(opened.is_ok(), opens, "{m:o} of {}", of.display());
            if let Err(d) = opened {
                assert!(d.render().contains("chmod go-w"), "{d}");
            }
            mode(of, 0o700);
        }
        // A link to a folder is what it leads to.
        symlink(&dir, base.join("link")).expect("a link");
        mode(&dir, 0o777);
        assert!(Folder::open(&base.join("link")).is_err());
        fs::remove_dir_all(&base).expect("removed");
    }
}
