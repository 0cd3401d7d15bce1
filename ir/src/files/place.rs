//! Where something is written: resolved once, when it is checked, so that what is checked is what is
//! locked, written beside and replaced.

use super::{io_error, make};
use crate::diag::{Diag, Result};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A path to write to, and what was there when it was resolved.
#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    path: PathBuf,
    /// Device and inode.
    there: Option<(u64, u64)>,
}

impl Place {
    /// Of a path as a user gives it. Links are followed. Folders on the way need not exist, but behind one
    /// that does not there is no `..`: it would be made first, and then lead elsewhere.
    ///
    /// # Errors
    /// `file` if the path ends in no name, leads through a link to nothing, has `..` behind what does not
    /// exist, or cannot be looked at.
    pub fn of(target: &Path) -> Result<Place> {
        let refuse = |what: &str| {
            Diag::new("file", what)
                .at(target.display().to_string())
                .help("name a file or folder, such as out, in a folder that exists")
        };
        let name = target.file_name().ok_or_else(|| refuse("this path does not end in a name"))?;
        let unreadable = |e| io_error("cannot look at this path", target, &e);
        let path = match fs::canonicalize(target) {
            Ok(path) if path.file_name().is_none() => {
                return Err(refuse("this path leads to no name"));
            }
            Ok(path) => path,
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(unreadable(e)),
            Err(_) if fs::symlink_metadata(target).is_ok() => {
                return Err(refuse("this is a dangling link"));
            }
            Err(_) => {
                let parent =
                    folder(target.parent().unwrap_or(Path::new(""))).map_err(unreadable)?;
                let none = "`..` follows a folder that does not exist, or a dangling link";
                parent.ok_or_else(|| refuse(none))?.join(name)
            }
        };
        let there = inode(&path).map_err(unreadable)?;
        Ok(Place { path: if target.is_relative() { relative(path) } else { path }, there })
    }

    /// The path without links; relative where the one that was given is and this is below the current
    /// folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder that it is in.
    pub fn parent(&self) -> &Path {
        make::parent(&self.path)
    }

    /// Whether nothing was there.
    pub fn is_new(&self) -> bool {
        self.there.is_none()
    }

    /// Whether there is now what was there then.
    ///
    /// # Errors
    /// `file` if it cannot be looked at.
    pub fn is_as_before(&self) -> Result<bool> {
        let now = inode(&self.path);
        Ok(now.map_err(|e| io_error("cannot look at this path", &self.path, &e))? == self.there)
    }

    /// Makes the folder that it is in.
    ///
    /// # Errors
    /// `file`, also if that is by now another one than was resolved.
    pub fn make_parent(&self) -> Result<()> {
        let fail = |e| io_error("cannot make the folder", self.parent(), &e);
        make::above(&self.path).map_err(fail)?;
        match Place::of(&self.path).is_ok_and(|now| now.path == self.path) {
            true => Ok(()),
            false => Err(changed(&self.path)),
        }
    }

    /// The same place for a folder that was made there since.
    ///
    /// # Errors
    /// Those of [`Place::of`]; `file` if the path leads elsewhere by now.
    pub fn again(&self) -> Result<Place> {
        let now = Place::of(&self.path)?;
        if now.path == self.path { Ok(now) } else { Err(changed(&self.path)) }
    }

    /// Whether these are the device and inode that were there.
    pub(super) fn was(&self, at: &Path) -> bool {
        inode(at).is_ok_and(|now| now == self.there)
    }
}

/// What stands at a place is no longer what was checked.
pub(super) fn changed(path: &Path) -> Diag {
    Diag::new("file", "this has changed since it was checked")
        .at(path.display().to_string())
        .rule("only what was checked is replaced")
        .help("look at what is there now, and give another path")
}

/// Device and inode of what stands at a path, not of what a link leads to; `None` if nothing does.
fn inode(path: &Path) -> io::Result<Option<(u64, u64)>> {
    match fs::symlink_metadata(path) {
        Ok(m) => Ok(Some((m.dev(), m.ino()))),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// A folder without links, of which the last ones need not exist; `None` for a link to nothing, and for
/// `..` behind what does not exist.
fn folder(path: &Path) -> io::Result<Option<PathBuf>> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    match fs::canonicalize(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => {}
        found => return found.map(Some),
    }
    if fs::symlink_metadata(path).is_ok() {
        return Ok(None);
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(None) };
    Ok(folder(parent)?.map(|p| p.join(name)))
}

/// A path below the current folder as seen from there.
fn relative(path: PathBuf) -> PathBuf {
    let here = std::env::current_dir().and_then(fs::canonicalize);
    let below = here.ok().and_then(|here| Some(path.strip_prefix(here).ok()?.to_path_buf()));
    below.filter(|p| !p.as_os_str().is_empty()).unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_place_is_where_the_path_leads_and_nowhere_else() {
        let dir = std::env::temp_dir().join(format!("shardc-place-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(dir.join("real/in")).expect("a folder");
        let dir = fs::canonicalize(dir).expect("a folder");
        symlink(dir.join("real"), dir.join("link")).expect("a link");
        symlink(dir.join("gone"), dir.join("nothing")).expect("a link");
        fs::write(dir.join("file"), "1").expect("a file");
        let of = |p: &str| Place::of(&dir.join(p)).map(|p| (p.path().to_path_buf(), p.is_new()));
        for (given, to, new) in [
            ("real", "real", false),
            ("link", "real", false),
            ("link/", "real", false),
            ("link/in/../in", "real/in", false),
            ("link/new", "real/new", true),
            ("link/a/b/", "real/a/b", true),
            ("link/in/../../x", "x", true),
            ("file", "file", false),
        ] {
            assert_eq!(of(given), Ok((dir.join(to), new)), "{given}");
        }
        for bad in [
            "nope/../real",
            "nope/../new",
            "link/nope/../../x",
            "nothing",
            "nothing/new",
            "nope/x/../y/z",
            "..",
            "file/x",
            "file/../x",
        ] {
            assert!(of(bad).is_err(), "{bad}: {:?}", of(bad));
        }
        fs::remove_dir_all(&dir).expect("removed");
    }
}
