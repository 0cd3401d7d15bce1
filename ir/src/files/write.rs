//! Writing beside a place, and then renaming: whoever looks sees the old or the whole new one, also
//! after a full disk or a kill.

use super::place::{Place, changed};
use super::unfinished::{Undo, Unfinished, beside, sweep};
use super::{io_error, make, open};
use crate::diag::{Diag, Result};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// A file or folder that is written beside its place. It is removed unless it was published.
pub struct Staged {
    place: Place,
    new: Unfinished,
}

impl Staged {
    /// An empty folder for a place, in a folder that is there. What dead processes left there is removed.
    ///
    /// # Errors
    /// `file` if the path ends in no name, or the folder cannot be made.
    pub fn folder(place: &Place) -> Result<Staged> {
        let fail = |e| io_error("cannot make the folder", place.path(), &e);
        let new = Unfinished::folder(Staged::beside(place)?).map_err(fail)?;
        Ok(Staged { place: place.clone(), new })
    }

    /// The same of an empty file, for writing.
    ///
    /// # Errors
    /// As for [`Staged::folder`].
    pub fn file(place: &Place) -> Result<(Staged, File)> {
        let fail = |e| io_error("cannot write the file", place.path(), &e);
        let (new, file) = Unfinished::file(Staged::beside(place)?).map_err(fail)?;
        Ok((Staged { place: place.clone(), new }, file))
    }

    fn beside(place: &Place) -> Result<PathBuf> {
        sweep(place.path());
        beside(place.path()).ok_or_else(|| {
            Diag::new("file", "this path does not end in a name")
                .at(place.path().display().to_string())
                .help("name a file or folder, such as out")
        })
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        self.new.path()
    }

    /// Puts it into its place, in one step. What the place had when it was checked is replaced, and
    /// removed afterwards; anything else is not.
    ///
    /// # Errors
    /// `file`: then what was there is still there.
    pub fn publish(self) -> Result<()> {
        self.publish_at(&self.place)
    }

    /// The same at another place of the same folder; it can be tried again.
    ///
    /// # Errors
    /// As for [`Staged::publish`].
    pub fn publish_at(&self, place: &Place) -> Result<()> {
        let fail = |e: io::Error| io_error("cannot rename to this", place.path(), &e);
        if !place.is_as_before()? {
            return Err(changed(place.path()));
        }
        let new = self.path();
        if place.is_new() {
            return rename_new(new, place.path()).map_err(fail);
        }
        // `new` is the old one then, which is dropped, if it is that.
        exchange(new, place.path()).map_err(fail)?;
        if !place.was(new) {
            exchange(new, place.path()).map_err(fail)?;
            return Err(changed(place.path()));
        }
        Ok(())
    }
}

/// How two names are changed in one step, where the file system has it.
#[cfg(target_os = "linux")]
fn at_once(a: &Path, b: &Path, how: rustix::fs::RenameFlags) -> io::Result<bool> {
    use rustix::fs::{CWD, renameat_with};
    use rustix::io::Errno;
    match renameat_with(CWD, a, CWD, b, how) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => Ok(false),
        done => Ok(done.map(|()| true)?),
    }
}

/// Renames to what does not exist.
fn rename_new(a: &Path, b: &Path) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    if at_once(a, b, rustix::fs::RenameFlags::NOREPLACE)? {
        return Ok(());
    }
    match fs::symlink_metadata(b) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => fs::rename(a, b),
        Err(e) => Err(e),
        Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
    }
}

/// Lets two files or folders change places.
fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    if at_once(a, b, rustix::fs::RenameFlags::EXCHANGE)? {
        return Ok(());
    }
    in_steps(a, b, || {})
}

/// The same where the file system cannot do it in one step; `between` is called where nothing is at `b`.
fn in_steps(a: &Path, b: &Path, between: impl FnOnce()) -> io::Result<()> {
    let name = b.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let old = b.with_file_name(make::beside(&name.to_string_lossy()));
    let (from, to) = (old.clone(), b.to_path_buf());
    // The old one is in its place again if the new one does not come there, or this process ends before.
    let _back = Undo::new(move || drop(rename_new(&from, &to)));
    rename_new(b, &old)?;
    between();
    rename_new(a, b)?;
    rename_new(&old, a)
}

/// What kind of file a command writes.
pub struct FileFormat {
    /// As in: this is not *a trace*.
    pub name: &'static str,
    /// Whether a file that begins so is one of them.
    pub is: fn(&[u8]) -> bool,
}

impl FileFormat {
    /// Checks that a path can be given to [`replace`], so that a long job learns it at its start:
    /// nothing is there, or an empty file, or one of this kind.
    ///
    /// # Errors
    /// `file`, and `output` for another file.
    pub fn check(&self, path: &Path) -> Result<()> {
        if let Err(e) = fs::metadata(path) {
            let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
            return match parent.filter(|p| !p.is_dir()) {
                None => Ok(()),
                Some(p) => Err(io_error("cannot write to this folder", p, &e)),
            };
        }
        let (file, _) = open(path)?;
        let mut begin = vec![];
        let unreadable = |e| io_error("cannot read the file", path, &e);
        file.take(256).read_to_end(&mut begin).map_err(unreadable)?;
        if begin.is_empty() || (self.is)(&begin) {
            return Ok(());
        }
        let name = self.name;
        Err(Diag::new(
            "output",
            format!("this file is not {name} that shardc wrote, and would be replaced"),
        )
        .at(path.display().to_string())
        .rule(format!("{name} replaces only what shardc wrote"))
        .help("name a new file, or remove this one"))
    }
}

/// Writes a file of a kind beside its place, flushes it to disk, then renames it.
///
/// # Errors
/// Those of [`FileFormat::check`] and of `write`; what was there is then unchanged.
pub fn replace(
    path: &Path,
    form: &'static FileFormat,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    let mut file = Growing::new(path, form)?;
    write(&mut file.out).map_err(|d| named(path, d))?;
    file.publish()
}

fn named(path: &Path, d: Diag) -> Diag {
    Diag { place: Some(path.display().to_string()), ..d }
}

/// A file of a kind that is written bit by bit beside its place, and is in it when it is published. If it never is,
/// what was there is unchanged.
pub struct Growing {
    path: PathBuf,
    form: &'static FileFormat,
    staged: Staged,
    out: io::BufWriter<File>,
}

impl Growing {
    /// Nothing yet.
    ///
    /// # Errors
    /// Those of [`FileFormat::check`], and `file`.
    pub fn new(path: &Path, form: &'static FileFormat) -> Result<Growing> {
        let place = Place::of(path).map_err(|d| named(path, d))?;
        form.check(place.path()).map_err(|d| named(path, d))?;
        let (staged, out) = Staged::file(&place).map_err(|d| named(path, d))?;
        Ok(Growing { path: path.into(), form, staged, out: buffered(out) })
    }

    /// Adds bytes.
    ///
    /// # Errors
    /// `file`.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(|e| io_error("cannot write the file", &self.path, &e))
    }

    /// Flushes it to disk, and puts it into its place, which is looked at again: much time may have passed.
    ///
    /// # Errors
    /// `file`, and those of [`FileFormat::check`].
    pub fn publish(self) -> Result<()> {
        self.open().map(drop)
    }

    /// The same; the file, to whose end may be written.
    ///
    /// # Errors
    /// As for [`Growing::publish`].
    pub fn open(self) -> Result<File> {
        let Growing { path, form, staged, out } = self;
        let put = || {
            let file = flushed(staged.path(), out)?;
            let place = Place::of(&path)?;
            form.check(place.path())?;
            staged.publish_at(&place)?;
            make::appends(&file).map_err(|e| io_error("cannot write the file", &path, &e))?;
            Ok(file)
        };
        put().map_err(|d| named(&path, d))
    }
}

/// Makes a file, in a folder that is there and where nothing of this name is, and flushes it to disk.
///
/// # Errors
/// `file`, and those of `write`.
pub fn create(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let file = make::file(path).map_err(|e| io_error("cannot write the file", path, &e))?;
    let mut out = buffered(file);
    write(&mut out)?;
    flushed(path, out).map(drop)
}

fn buffered(file: File) -> io::BufWriter<File> {
    io::BufWriter::with_capacity(1 << 20, file)
}

fn flushed(path: &Path, out: io::BufWriter<File>) -> Result<File> {
    let fail = |e: &io::Error| io_error("cannot write the file", path, e);
    let file = out.into_inner().map_err(|e| fail(e.error()))?;
    file.sync_all().map_err(|e| fail(&e)).map(|()| file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("shardc-stage-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("a folder");
        dir
    }

    #[test]
    fn a_folder_is_replaced_whole_or_not_at_all() {
        let dir = folder("whole");
        let target = dir.join("out");
        fs::create_dir(&target).expect("a folder");
        fs::write(target.join("old"), "1").expect("a file");
        let stage = |publish: bool| {
            let s = Staged::folder(&Place::of(&target).expect("a place")).expect("a stage");
            fs::write(s.path().join("new"), "2").expect("a file");
            if publish {
                s.publish().expect("published")
            }
        };
        stage(false);
        assert!(target.join("old").exists() && !target.join("new").exists());
        stage(true);
        assert!(!target.join("old").exists() && target.join("new").exists());
        assert_eq!(fs::read_dir(&dir).expect("a folder").count(), 1, "nothing is left beside");
        fs::remove_dir_all(&dir).expect("removed");
    }

    #[test]
    fn nothing_is_replaced_but_what_was_checked() {
        let dir = folder("checked");
        let target = dir.join("out");
        let stage = || {
            let place = Place::of(&target).expect("a place");
            Staged::folder(&place).expect("a stage")
        };
        // New then, and there by now; another folder than then.
        let put = || {
            fs::create_dir(&target).expect("a folder");
            fs::write(target.join("mine"), "1").expect("a file");
        };
        let s = stage();
        put();
        assert!(s.publish().is_err() && target.join("mine").exists());
        let s = stage();
        fs::rename(&target, dir.join("aside")).expect("renamed");
        put();
        assert!(s.publish().is_err() && target.join("mine").exists());
        assert_eq!(fs::read_dir(&dir).expect("a folder").count(), 2, "nothing is left beside");
        // Without a look before: the file system refuses.
        let s = stage();
        assert!(rename_new(s.path(), &target).is_err() && target.join("mine").exists());
        drop(s);
        fs::remove_dir_all(&dir).expect("removed");
    }

    /// The folder of a process that ends in the middle of an exchange, which is this test's own, called again: nothing
    /// is made in a process any more that has taken back what it had not finished.
    const ENDS: &str = "SHARDC_TEST_ENDS_IN_STEPS";

    /// Where the file system exchanges no names: whatever happens in the middle, the old one comes back, and no
    /// file of another is replaced.
    #[test]
    fn what_is_exchanged_in_steps_is_never_lost() {
        let given = std::env::var_os(ENDS).map(PathBuf::from);
        let dir = given.clone().unwrap_or_else(|| folder("steps"));
        let (new, old, other) =
            (dir.join(".out.unfinished-1"), dir.join("out"), dir.join(".out.old"));
        if given.is_some() {
            let _ = in_steps(&new, &old, || {
                assert!(!old.exists());
                super::super::abandon();
                std::process::exit(42);
            });
        }
        for (path, text) in [(&new, "new"), (&old, "old"), (&other, "mine")] {
            fs::write(path, text).expect("a file");
        }
        let texts = || [&new, &old, &other].map(|p| fs::read_to_string(p).unwrap_or_default());
        // What a process has not finished is taken back before it ends.
        let mut test = std::process::Command::new(std::env::current_exe().expect("a test"));
        test.args(["--exact", "files::write::tests::what_is_exchanged_in_steps_is_never_lost"]);
        let ended = test.env(ENDS, &dir).output().expect("a process");
        assert_eq!(ended.status.code(), Some(42), "{ended:?}");
        assert_eq!(texts(), ["new", "old", "mine"]);
        // As it is where something fails.
        let ends = std::panic::catch_unwind(|| {
            in_steps(&new, &old, || {
                assert!(!old.exists());
                panic!("the end");
            })
        });
        assert!(ends.is_err());
        assert_eq!(texts(), ["new", "old", "mine"]);
        assert!(in_steps(&new, &old, || fs::remove_file(&new).expect("there")).is_err());
        assert_eq!(texts(), ["", "old", "mine"]);
        fs::write(&new, "new").expect("a file");
        in_steps(&new, &old, || {}).expect("exchanged");
        assert_eq!(texts(), ["old", "new", "mine"]);
        assert_eq!(fs::read_dir(&dir).expect("a folder").count(), 3, "nothing is left beside");
        fs::remove_dir_all(&dir).expect("removed");
    }
}
