//! Files and folders that are not finished: what becomes of them when the process ends.
//!
//! Their names are `.NAME.unfinished-HOST-PID-PROCESS-NUMBER`: PROCESS tells this process from
//! earlier ones of the same pid, NUMBER is another one for each, so that no name says the next one.

use super::make::{self, Folder};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

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

/// All that this process has not finished.
static ALL: Mutex<Vec<PathBuf>> = Mutex::new(vec![]);

/// A file or folder that is removed when this is dropped, unless it was renamed by then.
#[derive(Debug)]
pub struct Unfinished(PathBuf);

impl Unfinished {
    /// Makes a folder.
    ///
    /// # Errors
    /// Also if anything is there, which stays.
    pub fn folder(path: PathBuf) -> io::Result<Unfinished> {
        Folder::new(&path)?;
        Ok(Unfinished::made(path))
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
        let file = make::file(&path)?;
        Ok((Unfinished::made(path), file))
    }

    fn made(path: PathBuf) -> Unfinished {
        ALL.lock().unwrap_or_else(PoisonError::into_inner).push(path.clone());
        Unfinished(path)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        remove(&self.0);
        ALL.lock().unwrap_or_else(PoisonError::into_inner).retain(|p| *p != self.0);
    }
}

/// Removes all that this process has not finished, before it ends at once. What others hold is
/// left, and swept by the next process that writes there.
pub fn abandon() {
    if let Ok(all) = ALL.try_lock() {
        all.iter().for_each(|p| remove(p));
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
