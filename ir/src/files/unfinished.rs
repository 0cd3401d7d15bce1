//! Files and folders that are not finished: what becomes of them when the process ends.
//!
//! Their names are `.NAME.unfinished-HOST-PID-PROCESS-NUMBER`: PROCESS tells this process from
//! earlier ones of the same pid, NUMBER is another one for each, so that no name says the next one.

use super::make::{self, Folder};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Name of this host, as names of files may have it.
pub(super) fn host() -> String {
    let name = rustix::system::uname();
    let name = name.nodename().to_string_lossy();
    name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
}

/// Tells this process from earlier ones of the same number: containers count from 1.
pub(super) fn own() -> &'static str {
    static OWN: OnceLock<String> = OnceLock::new();
    OWN.get_or_init(|| format!("{:08x}", make::fresh() as u32))
}

/// What names of unfinished files for `path` begin with.
fn mark(path: &Path) -> Option<String> {
    Some(format!(".{}.unfinished-", path.file_name()?.to_string_lossy()))
}

/// Where something may be written before it is put at `path`; another name each time.
pub(super) fn beside(path: &Path) -> Option<PathBuf> {
    let (mark, pid) = (mark(path)?, std::process::id());
    let name = format!("{mark}{}-{pid}-{}-{:016x}", host(), own(), make::fresh());
    Some(path.with_file_name(name))
}

/// Whether the process that the rest of a name of [`beside`] speaks of is gone from this host.
fn is_dead(owner: &str) -> bool {
    let words: Vec<&str> = owner.split('-').collect();
    // Of earlier versions all of a process had one number.
    let ([host_, pid, process, _] | [host_, pid, process]) = words[..] else { return false };
    let Ok(pid) = pid.parse::<i32>() else { return false };
    if host_ != host() || process == own() {
        return false;
    }
    // Our number with another's mark: it was ours before us.
    pid == std::process::id().cast_signed() || !lives(pid)
}

/// Whether a process of this host lives.
fn lives(pid: i32) -> bool {
    let Some(pid) = rustix::process::Pid::from_raw(pid) else { return false };
    rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH)
}

/// Removes what processes of this host that have died left of writing `path`.
pub fn sweep(path: &Path) {
    let Some(mark) = mark(path) else { return };
    for e in fs::read_dir(make::parent(path)).into_iter().flatten().flatten() {
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

/// A way to take something back.
type Back = Box<dyn Fn() + Send>;

/// How all that this process has not finished is taken back, each with its number.
static ALL: Mutex<Vec<(u64, Back)>> = Mutex::new(vec![]);

/// Something that is not finished: it is taken back when this is dropped, and if the process ends before ([`abandon`]).
#[derive(Debug)]
pub struct Undo(u64);

impl Undo {
    /// `back` finds out itself whether there is anything left of it.
    pub fn new(back: impl Fn() + Send + 'static) -> Undo {
        let none = || Ok::<_, std::convert::Infallible>(());
        let Ok((undo, ())) = Undo::of(none, back);
        undo
    }

    /// Makes something that `back` takes back: once all is taken back, nothing is made any more.
    fn of<T, E>(
        make: impl FnOnce() -> Result<T, E>,
        back: impl Fn() + Send + 'static,
    ) -> Result<(Undo, T), E> {
        let number = make::fresh();
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        let made = make()?;
        all.push((number, Box::new(back)));
        Ok((Undo(number), made))
    }

    fn take(&self) -> Option<Back> {
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        let at = all.iter().position(|u| u.0 == self.0)?;
        Some(all.remove(at).1)
    }

    /// It is finished: nothing is taken back any more.
    pub fn keep(self) {
        drop(self.take());
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if let Some(back) = self.take() {
            back();
        }
    }
}

/// Removed when this is dropped, unless it was renamed by then.
#[derive(Debug)]
pub struct Unfinished {
    path: PathBuf,
    _undo: Undo,
}

impl Unfinished {
    /// Makes a folder.
    ///
    /// # Errors
    /// Also if anything is there, which stays.
    pub fn folder(path: PathBuf) -> io::Result<Unfinished> {
        Ok(Unfinished::made(path, Folder::new)?.0)
    }

    /// Makes a folder beside a path, for work that ends with this process: what dead ones left
    /// there is removed.
    ///
    /// # Errors
    /// Those of the system.
    pub fn beside(path: &Path) -> io::Result<Unfinished> {
        sweep(path);
        Unfinished::folder(beside(path).ok_or(io::ErrorKind::InvalidInput)?)
    }

    /// Makes a file.
    ///
    /// # Errors
    /// As for [`Unfinished::folder`].
    pub fn file(path: PathBuf) -> io::Result<(Unfinished, File)> {
        Unfinished::made(path, make::file)
    }

    fn made<T>(
        path: PathBuf,
        make: impl FnOnce(&Path) -> io::Result<T>,
    ) -> io::Result<(Unfinished, T)> {
        let own = path.clone();
        let (undo, made) = Undo::of(|| make(&path), move || remove(&own))?;
        Ok((Unfinished { path, _undo: undo }, made))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// How often is tried to take all back, as another thread may just add to it, or this one; and the time between.
const TRIES: (usize, Duration) = (100, Duration::from_millis(5));

/// Takes back all that this process has not finished, the last first, before it ends at once: whoever makes more, or
/// finishes something, waits for that end. What others hold is left, and swept by the next process that writes there.
pub fn abandon() {
    for _ in 0..TRIES.0 {
        if let Ok(all) = ALL.try_lock() {
            all.iter().rev().for_each(|(_, back)| back());
            std::mem::forget(all);
            return;
        }
        std::thread::sleep(TRIES.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_dead_left_is_removed_and_nothing_else() {
        let dir = std::env::temp_dir().join(format!("shardc-sweep-{:016x}", make::fresh()));
        fs::create_dir(&dir).expect("a folder");
        let path = dir.join("out");
        let mut child = std::process::Command::new("true").spawn().expect("a process");
        child.wait().expect("it ends");
        let (dead, here, me) = (child.id(), host(), std::process::id());
        let gone = [
            format!(".out.unfinished-{here}-{dead}-00000001"),
            format!(".out.unfinished-{here}-{dead}-00000001-0000000000000002"),
            // Of an earlier process with our number.
            format!(".out.unfinished-{here}-{me}-xxxxxxxx"),
            format!(".out.unfinished-{here}-{me}-xxxxxxxx-0000000000000002"),
        ];
        let own_name = |p: PathBuf| p.file_name().expect("a name").to_string_lossy().into_owned();
        let stays = [
            own_name(beside(&path).expect("a name")),
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

    #[test]
    fn no_name_says_the_next_one() {
        let number = || {
            let path = beside(Path::new("dir/out")).expect("a name");
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            name.rsplit('-').next().expect("a number").to_string()
        };
        let all: std::collections::BTreeSet<String> = (0..100).map(|_| number()).collect();
        assert_eq!(all.len(), 100);
    }
}
