//! Writing beside a place, and then renaming: whoever looks sees the old or the whole new one, also
//! after a full disk or a kill.

use super::place::{Place, changed};
use super::{io_error, open};
use crate::diag::{Diag, Result};
use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Name of this host, as names of files may have it.
fn host() -> String {
    let name = rustix::system::uname();
    let name = name.nodename().to_string_lossy();
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
}

/// Tells this process from earlier ones of the same number: containers count from 1.
fn own() -> &'static str {
    static OWN: OnceLock<String> = OnceLock::new();
    OWN.get_or_init(|| {
        // Keys of a table of the standard library are random.
        format!("{:08x}", std::hash::RandomState::new().build_hasher().finish() as u32)
    })
}

/// What names of unfinished files for `path` begin with.
fn mark(path: &Path) -> Option<String> {
    Some(format!(".{}.unfinished-", path.file_name()?.to_string_lossy()))
}

/// Where `path` is written: `.NAME.unfinished-HOST-PID-NUMBER` beside it.
fn beside(path: &Path) -> Result<PathBuf> {
    let mark = mark(path).ok_or_else(|| {
        Diag::new("file", "this path does not end in a name")
            .at(path.display().to_string())
            .help("name a file or folder, such as out")
    })?;
    let name = format!("{mark}{}-{}-{}", host(), std::process::id(), own());
    Ok(path.with_file_name(name))
}

/// Whether the process that the rest of a name of [`beside`] speaks of is gone from this host.
fn is_dead(owner: &str) -> bool {
    let mut words = owner.rsplitn(3, '-');
    let (Some(number), Some(pid), Some(host_)) = (words.next(), words.next(), words.next()) else {
        return false;
    };
    let Ok(pid) = pid.parse::<i32>() else { return false };
    if host_ != host() || number == own() {
        return false;
    }
    // Our number with another's mark: it was ours before us.
    pid == std::process::id().cast_signed() || !lives(pid)
}

/// Whether a process of this host lives.
pub(super) fn lives(pid: i32) -> bool {
    let Some(pid) = rustix::process::Pid::from_raw(pid) else { return false };
    rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH)
}

/// Removes what processes of this host that have died left of writing `path`.
pub fn sweep(path: &Path) {
    let Some(mark) = mark(path) else { return };
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    for e in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = e.file_name();
        if name.to_string_lossy().strip_prefix(&mark).is_some_and(is_dead) {
            remove(&e.path());
        }
    }
}

/// Removes a file or a folder; no error here is worth more than the one on its way.
fn remove(path: &Path) {
    let is_dir = fs::symlink_metadata(path).is_ok_and(|m| m.is_dir());
    let _ = if is_dir { fs::remove_dir_all(path) } else { fs::remove_file(path) };
}

/// A file or folder that is written beside its place. It is removed unless it was published.
pub struct Staged {
    place: Place,
    path: PathBuf,
}

impl Staged {
    /// For a place; nothing is made yet, but what dead processes left there is removed.
    ///
    /// # Errors
    /// `file` if the path ends in no name.
    pub fn new(place: &Place) -> Result<Staged> {
        sweep(place.path());
        Ok(Staged { place: place.clone(), path: beside(place.path())? })
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        &self.path
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
        if place.is_new() {
            return rename_new(&self.path, place.path()).map_err(fail);
        }
        // `self.path` is the old one then, which is dropped, if it is that.
        exchange(&self.path, place.path()).map_err(fail)?;
        if !place.was(&self.path) {
            exchange(&self.path, place.path()).map_err(fail)?;
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
    let old = a.with_extension("old");
    fs::rename(b, &old)?;
    if let Err(e) = fs::rename(a, b) {
        fs::rename(&old, b)?;
        return Err(e);
    }
    fs::rename(&old, a)
}

impl Drop for Staged {
    fn drop(&mut self) {
        remove(&self.path);
    }
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
        let staged = Staged::new(&place)?;
        let out = created(staged.path()).map_err(|d| named(path, d))?;
        Ok(Growing { path: path.into(), form, staged, out })
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
        let Growing { path, form, staged, out } = self;
        let put = || {
            flushed(staged.path(), out)?;
            let place = Place::of(&path)?;
            form.check(place.path())?;
            staged.publish_at(&place)
        };
        put().map_err(|d| named(&path, d))
    }
}

/// Creates a file and flushes it to disk.
///
/// # Errors
/// `file`, and those of `write`.
pub fn create(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let mut out = created(path)?;
    write(&mut out)?;
    flushed(path, out)
}

#[expect(clippy::disallowed_methods, reason = "this is where files are made")]
fn created(path: &Path) -> Result<io::BufWriter<File>> {
    let file = File::create(path).map_err(|e| io_error("cannot write the file", path, &e))?;
    Ok(io::BufWriter::with_capacity(1 << 20, file))
}

fn flushed(path: &Path, out: io::BufWriter<File>) -> Result<()> {
    let fail = |e: &io::Error| io_error("cannot write the file", path, e);
    let file = out.into_inner().map_err(|e| fail(e.error()))?;
    file.sync_all().map_err(|e| fail(&e))
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
            let s = Staged::new(&Place::of(&target).expect("a place")).expect("a stage");
            fs::create_dir(s.path()).expect("a folder");
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
            let s = Staged::new(&place).expect("a stage");
            fs::create_dir(s.path()).expect("a folder");
            s
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

    #[test]
    fn what_the_dead_left_is_removed_and_nothing_else() {
        let dir = folder("sweep");
        let path = dir.join("out");
        let mut child = std::process::Command::new("true").spawn().expect("a process");
        child.wait().expect("it ends");
        let (dead, here, me) = (child.id(), host(), std::process::id());
        let gone = [
            format!(".out.unfinished-{here}-{dead}-00000001"),
            // Of an earlier process with our number.
            format!(".out.unfinished-{here}-{me}-xxxxxxxx"),
        ];
        let stays = [
            format!(".out.unfinished-{here}-{me}-{}", own()),
            format!(".out.unfinished-{here}-1-00000001"),
            format!(".out.unfinished-elsewhere-{dead}-00000001"),
            format!(".other.unfinished-{here}-{dead}-00000001"),
            "out.unfinished".into(),
            ".out.unfinished-notes".into(),
        ];
        for name in gone.iter().chain(&stays) {
            fs::create_dir(dir.join(name)).expect("a folder");
        }
        sweep(&path);
        gone.iter().for_each(|n| assert!(!dir.join(n).exists(), "{n} is left"));
        stays.iter().for_each(|n| assert!(dir.join(n).exists(), "{n} is gone"));
        fs::remove_dir_all(&dir).expect("removed");
    }
}
