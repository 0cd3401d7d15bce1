//! One job saves to a folder at a time: a file that names the job, locked as long as it lives.
//!
//! The operating system ends the lock with the process, so of a job of this host that has died the file
//! alone is left, and is taken over. Hosts that share a folder may not share locks: the file of another
//! host is believed.

use crate::terminal::note;
use rustix::fs::{Access, access};
use serde::{Deserialize, Serialize};
use shardc_ir::diag::{Diag, Exit, Result};
use shardc_ir::files::{self, Place};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Name of the lock in a folder; behind the name of the folder, beside it.
const LOCK: &str = ".shardc.lock";
/// Longest text of a lock that is read.
const MOST: u64 = 1 << 14;

/// Who has a lock.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Owner {
    pid: u32,
    host: String,
    /// UTC, as in 2026-01-31T12:00:00Z.
    since: String,
    plan: String,
}

/// A folder to which this process alone saves.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
    _held: File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // While it is held, so that it is the file of this process and no other's.
        let _ = fs::remove_file(&self.path);
    }
}

/// Of a folder of checkpoints, which is made. The lock is beside it, as that of a model, so that either
/// sees the other; but in it where it is the root of a file system, which other hosts may mount too, or
/// where nothing may be written beside it: no model can be saved there.
///
/// # Errors
/// `save-locked` if another job saves to it, `file`.
pub fn of_checkpoints(place: &Place, plan: &Path) -> Result<Lock> {
    let dir = place.path();
    let lock = match alone(place) {
        true => take(&dir.join(LOCK), dir, plan)?,
        false => of_model(place, plan)?,
    };
    let fail = |e| files::io_error("cannot make the folder", dir, &e);
    fs::create_dir_all(dir).map_err(fail)?;
    place.again().map(|_| lock)
}

/// Of a model's folder, which is replaced as a whole: the lock is beside it.
///
/// # Errors
/// As for [`of_checkpoints`].
pub fn of_model(place: &Place, plan: &Path) -> Result<Lock> {
    place.make_parent()?;
    let dir = place.path();
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    take(&dir.with_file_name(format!(".{name}{LOCK}")), dir, plan)
}

/// Whether a folder is the root of a file system, or in one that may not be written to.
fn alone(place: &Place) -> bool {
    let (Ok(own), Ok(parent)) = (fs::metadata(place.path()), fs::metadata(place.parent())) else {
        return false;
    };
    own.dev() != parent.dev() || access(place.parent(), Access::WRITE_OK).is_err()
}

fn take(path: &Path, dir: &Path, plan: &Path) -> Result<Lock> {
    let fail = |e| files::io_error("cannot lock the folder", path, &e);
    loop {
        if path.exists() {
            // What is not a plain file is not a lock, and is not opened for writing.
            files::open(path)?;
        }
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path);
        let mut file = file.map_err(fail)?;
        let locked = match file.try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => {
                // Its owner may be about to write.
                let mut text = read(&mut file);
                if text.is_empty() {
                    std::thread::sleep(Duration::from_millis(100));
                    text = read(&mut file);
                }
                return Err(refused(dir, path, &text));
            }
            // A file system without locks: what the file says must do.
            Err(TryLockError::Error(_)) => false,
        };
        // Its owner may have removed it between our opening and locking.
        let (here, held) = (fs::metadata(path), file.metadata().map_err(fail)?);
        if !here.is_ok_and(|m| (m.dev(), m.ino()) == (held.dev(), held.ino())) {
            continue;
        }
        let text = read(&mut file);
        if !text.is_empty() {
            let owner: Option<Owner> = serde_json::from_str(&text).ok();
            let dead = |o: &Owner| o.host == crate::cluster::host() && (locked || !lives(o.pid));
            let Some(owner) = owner.filter(dead) else { return Err(refused(dir, path, &text)) };
            note(format!(
                "took over the lock of {} from process {} of this host, which has died (it had it since {}, for {})",
                dir.display(),
                owner.pid,
                owner.since,
                owner.plan
            ));
        }
        let (pid, host) = (std::process::id(), crate::cluster::host());
        let plan = fs::canonicalize(plan).unwrap_or_else(|_| plan.into()).display().to_string();
        let owner = Owner { pid, host, since: utc(SystemTime::now()), plan };
        let text = serde_json::to_string(&owner).expect("plain data") + "\n";
        let put = file.set_len(0).and_then(|()| file.rewind());
        let put = put.and_then(|()| file.write_all(text.as_bytes()));
        // Dropped, it is removed: without a name it locks nobody out.
        let lock = Lock { path: path.into(), _held: file };
        return put.map(|()| lock).map_err(fail);
    }
}

fn read(file: &mut File) -> String {
    let mut bytes = vec![];
    // What cannot be read says nothing of its owner.
    let _ = file.take(MOST).read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Without locks of the operating system: whether a process of this host may live.
fn lives(pid: u32) -> bool {
    !Path::new("/proc/self").exists() || Path::new(&format!("/proc/{pid}")).exists()
}

fn refused(dir: &Path, path: &Path, text: &str) -> Diag {
    let d = Diag::new("save-locked", "another job saves to this folder")
        .at(dir.display().to_string())
        .rule("one job saves to a folder at a time")
        .exit(Exit::Environment);
    let remove = format!("if that job has ended, remove its lock: rm {}", path.display());
    let Ok(o) = serde_json::from_str::<Owner>(text) else {
        return d.why("its lock does not say who it is").help(remove);
    };
    let who = format!("process {} of host {}, since {}, runs {}", o.pid, o.host, o.since, o.plan);
    let d = d.why(who).help("save to another folder, or wait until that job has ended");
    // One of this host that is refused lives: its lock ends with it.
    if o.host == crate::cluster::host() { d } else { d.help(remove) }
}

/// A time in UTC, to the second.
fn utc(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days of years that begin in March, in eras of 400 years (Hinnant, "chrono-Compatible Low-Level Date
    // Algorithms").
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (h, m, s) = (rest / 3_600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{h:02}:{m:02}:{s:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        let at = |s: u64| utc(UNIX_EPOCH + Duration::from_secs(s));
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(at(1_735_689_599), "2024-12-31T23:59:59Z");
    }
}
