//! The only place that makes files and folders; `testing/tests/crates/makes.rs` looks for others.
//!
//! A folder may be a stranger's, or one that a group shares, so what stands there under a name of
//! ours may be a link to any file of the user's. What is made here is new: where a name is taken,
//! by a link too, it is an error. It is made in a folder that is open, and that is no link either:
//! whatever becomes of its path, nothing is written elsewhere.

use rustix::fs::{
    AtFlags, Mode, OFlags, fcntl_getfl, fcntl_setfl, mkdirat, openat, renameat, unlinkat,
};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Component, Path, PathBuf};

/// Permissions of a file and of a folder, of which the user's mask takes some away.
const FILE: u32 = 0o666;
const FOLDER: u32 = 0o777;

/// A number that nobody could know before.
pub fn fresh() -> u64 {
    // Keys of a table of the standard library are random, and the hash does not give them away.
    std::hash::RandomState::new().build_hasher().finish()
}

/// A name beside a file that nobody could know before.
pub fn beside(name: &str) -> String {
    format!(".{:016x}-{name}", fresh())
}

/// The folder that a path is in.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A folder, open.
#[derive(Debug)]
pub struct Folder {
    folder: File,
    path: PathBuf,
}

impl Folder {
    /// Opens a folder that is there; it need not be one that may be listed.
    ///
    /// # Errors
    /// Also for a link to one.
    pub fn open(path: &Path) -> io::Result<Folder> {
        #[cfg(target_os = "linux")]
        let place = OFlags::PATH;
        #[cfg(not(target_os = "linux"))]
        let place = OFlags::RDONLY;
        let flags = place | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = openat(rustix::fs::CWD, path, flags, Mode::empty())?;
        Ok(Folder { folder: folder.into(), path: path.into() })
    }

    /// Makes a folder that is not there.
    ///
    /// # Errors
    /// Also if anything is there.
    pub fn new(path: &Path) -> io::Result<Folder> {
        new_folder(path, FOLDER)?;
        Folder::open(path)
    }

    /// Opens a folder, which is made if nothing is there, with those above it.
    ///
    /// # Errors
    /// Also for a link to a folder.
    pub fn at(path: &Path) -> io::Result<Folder> {
        above(path)?;
        Folder::or_new(path)
    }

    fn or_new(path: &Path) -> io::Result<Folder> {
        match new_folder(path, FOLDER) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
            _made_or_there => Folder::open(path),
        }
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the descriptor says of it.
    ///
    /// # Errors
    /// Of the system.
    pub fn metadata(&self) -> io::Result<std::fs::Metadata> {
        self.folder.metadata()
    }

    /// Makes a file in it, for writing.
    ///
    /// # Errors
    /// Also if anything is there.
    pub fn file(&self, name: impl AsRef<OsStr>) -> io::Result<File> {
        self.made(name.as_ref(), OFlags::WRONLY, FILE)
    }

    /// The same with permissions for this user alone.
    ///
    /// # Errors
    /// As for [`Folder::file`].
    pub fn private_file(&self, name: impl AsRef<OsStr>) -> io::Result<File> {
        self.made(name.as_ref(), OFlags::WRONLY, 0o600)
    }

    fn made(&self, name: &OsStr, how: OFlags, mode: u32) -> io::Result<File> {
        let new = OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(openat(&self.folder, name, how | new, Mode::from_raw_mode(mode))?.into())
    }

    /// Opens a file for reading and writing, which is made if nothing is there. It never blocks;
    /// whether it is a plain file its descriptor says.
    ///
    /// # Errors
    /// Also for a link.
    pub fn file_or_new(&self, name: impl AsRef<OsStr>) -> io::Result<File> {
        let name = name.as_ref();
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        loop {
            match openat(&self.folder, name, flags, Mode::empty()) {
                Err(Errno::NOENT) => {}
                there => return Ok(there?.into()),
            }
            match self.made(name, OFlags::RDWR, FILE) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                made => return made,
            }
        }
    }

    /// Opens a file for reading; it never blocks.
    ///
    /// # Errors
    /// Also for a link.
    pub fn read(&self, name: impl AsRef<OsStr>) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(openat(&self.folder, name.as_ref(), flags, Mode::empty())?.into())
    }

    /// Renames a file within it; what has the other name is replaced, and a link is not followed.
    ///
    /// # Errors
    /// Of the system.
    pub fn rename(&self, from: impl AsRef<OsStr>, to: impl AsRef<OsStr>) -> io::Result<()> {
        Ok(renameat(&self.folder, from.as_ref(), &self.folder, to.as_ref())?)
    }

    /// Removes a file; no error of that is worth more than the one on its way.
    pub fn remove(&self, name: impl AsRef<OsStr>) {
        let _ = unlinkat(&self.folder, name.as_ref(), AtFlags::empty());
    }

    /// Writes a file beside its place, and puts it there.
    ///
    /// # Errors
    /// Of the system: then what was there still is.
    pub fn replace(
        &self,
        name: &str,
        make: impl FnOnce(&Folder, &str) -> io::Result<File>,
        write: impl FnOnce(File) -> io::Result<()>,
    ) -> io::Result<()> {
        let beside = beside(name);
        let file = make(self, &beside)?;
        let done = write(file).and_then(|()| self.rename(&beside, name));
        if done.is_err() {
            self.remove(&beside);
        }
        done
    }
}

fn new_folder(path: &Path, mode: u32) -> io::Result<()> {
    Ok(mkdirat(rustix::fs::CWD, path, Mode::from_raw_mode(mode))?)
}

/// Makes the folders above a path, links followed.
///
/// # Errors
/// Of the system.
pub fn above(path: &Path) -> io::Result<()> {
    #[expect(clippy::disallowed_methods, reason = "this is where folders are made")]
    std::fs::create_dir_all(parent(path))
}

/// Makes a folder for this user alone, and those above it, unless it is there, links followed:
/// whether it can be trusted is judged then.
///
/// # Errors
/// Of the system.
pub fn private(path: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Makes a file for writing, in a folder that is there and is no link.
///
/// # Errors
/// Also if anything is there.
pub fn file(path: &Path) -> io::Result<File> {
    let (folder, name) = split(path)?;
    folder.file(name)
}

/// As [`Folder::file_or_new`].
///
/// # Errors
/// Also for a link, and for one in place of the folder.
pub fn file_or_new(path: &Path) -> io::Result<File> {
    let (folder, name) = split(path)?;
    folder.file_or_new(name)
}

/// Makes the folders between a folder and a path in it.
///
/// # Errors
/// Also if one of them is a link, or the path leads out of the folder.
pub fn between(folder: &Path, inside: &Path) -> io::Result<()> {
    let mut at = folder.to_path_buf();
    for part in parent(inside).components() {
        match part {
            Component::CurDir => {}
            Component::Normal(name) => {
                at.push(name);
                Folder::or_new(&at)?;
            }
            _out => return Err(io::ErrorKind::InvalidInput.into()),
        }
    }
    Ok(())
}

fn split(path: &Path) -> io::Result<(Folder, &OsStr)> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    Ok((Folder::open(parent(path))?, name))
}

/// From now on all that is written to a file goes behind its end, whoever else has cut it.
///
/// # Errors
/// Of the system.
pub fn appends(file: &File) -> io::Result<()> {
    Ok(fcntl_setfl(file, fcntl_getfl(file)? | OFlags::APPEND)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_is_made_is_new_and_where_its_name_says() {
        let dir = std::env::temp_dir().join(format!("shardc-make-{:016x}", fresh()));
        fs::create_dir(&dir).expect("a folder");
        let folder = Folder::open(&dir).expect("a folder");
        fs::create_dir(dir.join("mine")).expect("a folder");
        fs::write(dir.join("mine/file"), "mine").expect("a file");
        symlink("mine/new", dir.join("dangling")).expect("a link");
        symlink("mine/file", dir.join("file")).expect("a link");
        symlink("mine", dir.join("folder")).expect("a link");
        for name in ["dangling", "file", "folder", "mine"] {
            assert!(folder.file(name).is_err() && folder.file_or_new(name).is_err(), "{name}");
            assert!(file(&dir.join(name)).is_err(), "{name}");
            assert!(Folder::new(&dir.join(name)).is_err(), "{name}");
            assert_eq!(Folder::at(&dir.join(name)).is_ok(), name == "mine", "{name}");
        }
        // Nor in what a link leads to, in place of a folder of ours.
        assert!(file(&dir.join("folder/new")).is_err());
        assert!(between(&dir, Path::new("folder/new")).is_err());
        assert!(between(&dir, Path::new("a/../../new")).is_err());
        between(&dir, Path::new("a/b/new")).expect("folders");
        file(&dir.join("a/b/new")).expect("a file");
        let names = fs::read_dir(dir.join("mine")).expect("a folder").count();
        assert_eq!((names, fs::read(dir.join("mine/file")).expect("a file")), (1, b"mine".into()));
        // What is put in place of a link is itself there.
        let write = |mut f: File| io::Write::write_all(&mut f, b"ours");
        folder.replace("file", |f, name| f.file(name), write).expect("written");
        assert!(!dir.join("file").is_symlink());
        assert_eq!(fs::read(dir.join("mine/file")).expect("a file"), b"mine");
        fs::remove_dir_all(&dir).expect("removed");
    }
}
