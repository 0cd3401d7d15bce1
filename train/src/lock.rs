//! One job saves to a folder at a time: a file that names the job, locked as long as it lives.
//!
//! The operating system ends the lock with the process, so of a job of this host that has died the file
//! alone is left, and is taken over. Hosts that share a folder may not share locks: the file of another
//! host is believed as long as its process touches it, unless that was this job itself before its scheduler
//! put it back into the queue.

use rustix::fs::{Access, Timespec, Timestamps, UTIME_NOW, access, futimens};
use serde::{Deserialize, Serialize};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files::make::{self, Folder};
use shardc_ir::files::{self, Place};
use shardc_process::terminal::note;
use shardc_runtime::spawn;
use std::fs::{self, File, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{FileExt as _, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Name of the lock in a folder; behind the name of the folder, beside it.
const LOCK: &str = ".shardc.lock";
/// Longest text of a lock that is read.
const MOST: u64 = 1 << 14;

/// A process says so often that it lives.
const BEAT: Duration = Duration::from_secs(30);
/// After so long a silence a process of another host has died.
const SILENCE: Duration = Duration::from_secs(600);

/// Who has a lock.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Owner {
    pid: u32,
    host: String,
    /// UTC, as in 2026-01-31T12:00:00Z.
    since: String,
    plan: String,
    /// The job of the scheduler that it is of, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    job: Option<SchedulerJob>,
    /// It touches its lock as long as it lives.
    #[serde(default)]
    beats: bool,
}

/// A job of a scheduler.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct SchedulerJob {
    id: String,
    /// How often it was put back into the queue.
    restarts: u64,
}

impl SchedulerJob {
    /// That of this process, from Slurm's variables.
    fn own(var: impl Fn(&str) -> Option<String>) -> Option<SchedulerJob> {
        let id = var("SLURM_JOB_ID")?;
        let id = var("SLURM_CLUSTER_NAME").map_or(id.clone(), |cluster| format!("{cluster} {id}"));
        // Slurm sets it from the first restart on.
        let restarts = var("SLURM_RESTART_COUNT").and_then(|n| n.parse().ok()).unwrap_or(0);
        Some(SchedulerJob { id, restarts })
    }
}

/// A folder to which this process alone saves.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
    /// The folder, as the user named it.
    dir: PathBuf,
    /// What its file says.
    text: String,
    /// It was made for what is saved to it.
    is_new: bool,
    _held: File,
    /// Dropped, it ends the thread that touches the file.
    _beat: Sender<()>,
}

impl Lock {
    /// Checks that no job has taken the lock over, as one may from a process that was stopped for long.
    ///
    /// # Errors
    /// `save-locked`.
    pub fn check(&self) -> Result<()> {
        match self.said() {
            // Somebody may have removed it, and nobody has taken it since.
            text if text.is_empty() || text == self.text => Ok(()),
            text => Err(refused(&self.dir, &self.path, &text, None).help(
                "this process was silent for long: go on from the last checkpoint, in another folder",
            )),
        }
    }

    /// What the file of the folder says now.
    fn said(&self) -> String {
        files::open(&self.path).map_or(String::new(), |(mut file, _)| read(&mut file))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // While it is held, so that nobody of this host has it; of another host somebody may.
        if self.said() == self.text {
            let _ = fs::remove_file(&self.path);
        }
        if self.is_new {
            // It stays if anything was saved.
            let _ = fs::remove_dir(&self.dir);
        }
    }
}

/// Sets the time of a file by the clock of its file system, if that can be.
fn touch(file: &File) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    futimens(file, &Timestamps { last_access: now, last_modification: now }).is_ok()
}

/// Touches a file every so often, as long as it has this text, in a thread of its own, until what is returned is dropped.
fn beat(file: &File, text: String, every: Duration) -> Result<Sender<()>> {
    let no_thread = |e| spawn::refused("the thread that keeps the lock of a folder", 1, &e);
    let file = file.try_clone().map_err(no_thread)?;
    let (alive, ended) = mpsc::channel::<()>();
    let work = move || {
        while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(every) {
            let mut own = vec![0; text.len()];
            // The file may have been taken over, and say another owner.
            if file.read_exact_at(&mut own, 0).is_ok() && own != text.as_bytes() {
                return;
            }
            // Where that cannot be, the next time.
            let _ = touch(&file);
        }
    };
    std::thread::Builder::new().spawn(work).map_err(no_thread)?;
    Ok(alive)
}

/// For how long a file was not touched, by the clock of its own file system: that of a file which is made
/// beside it.
fn silence(path: &Path) -> Option<Duration> {
    let folder = Folder::open(make::parent(path)).ok()?;
    let beside = format!("{}.{:016x}", path.file_name()?.to_string_lossy(), make::fresh());
    let now = folder.file(&beside).and_then(|f| {
        folder.remove(&beside);
        f.metadata()?.modified()
    });
    let then = fs::metadata(path).and_then(|m| m.modified()).ok()?;
    now.ok()?.duration_since(then).ok()
}

/// Whether the text of a lock is cut short: its writer has died within the one write that it takes.
fn is_cut(text: &str) -> bool {
    let begin = r#"{"pid":"#;
    let cut = serde_json::from_str::<Owner>(text).is_err_and(|e| e.is_eof());
    let ours = text.starts_with(begin) || begin.starts_with(text);
    (cut && ours) || text.bytes().all(|b| b == 0)
}

/// Why the lock of such a process may be taken over, if it may.
fn free(
    owner: &Owner,
    locked: bool,
    job: Option<&SchedulerJob>,
    silent: Option<Duration>,
) -> Option<String> {
    let (pid, host) = (owner.pid, &owner.host);
    if *host == crate::cluster::host() {
        let dead = locked || !lives(pid);
        return dead.then(|| format!("process {pid} of this host, which has died"));
    }
    let before = owner.job.as_ref().zip(job);
    if before.is_some_and(|(was, now)| was.id == now.id && was.restarts < now.restarts) {
        return Some(format!("process {pid} of host {host}, of this job before it was requeued"));
    }
    let silent = silent.filter(|s| *s >= SILENCE)?.as_secs() / 60;
    Some(format!("process {pid} of host {host}, which has said nothing for {silent} minutes"))
}

/// Of a folder of checkpoints, which is made. The lock is beside it, as that of a model, so that either
/// sees the other; but in it where it is the root of a file system, which other hosts may mount too, or
/// where nothing may be written beside it: no model can be saved there.
///
/// # Errors
/// `save-locked` if another job saves to it, `file`.
pub fn of_checkpoints(place: &Place, plan: &Path) -> Result<Lock> {
    let dir = place.path();
    let mut lock = match alone(place) {
        true => take(&dir.join(LOCK), dir, plan)?,
        false => of_model(place, plan)?,
    };
    let fail = |e| files::io_error("cannot make the folder", dir, &e);
    Folder::at(dir).map_err(fail)?;
    lock.is_new = place.is_new();
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
        files::no_link(path, "a lock")?;
        if path.exists() {
            // What is not a plain file is not a lock, and is not opened for writing.
            files::open(path)?;
        }
        let mut file = make::file_or_new(path).map_err(fail)?;
        if !file.metadata().map_err(fail)?.is_file() {
            continue;
        }
        let locked = match file.try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => {
                // Its owner may be about to write.
                let mut text = read(&mut file);
                if text.is_empty() {
                    std::thread::sleep(Duration::from_millis(100));
                    text = read(&mut file);
                }
                // Who holds it is not dead to the system, whatever is not said.
                return Err(refused(dir, path, &text, None));
            }
            // A file system without locks: what the file says must do.
            Err(TryLockError::Error(_)) => false,
        };
        // Its owner may have removed it between our opening and locking.
        let (here, held) = (fs::symlink_metadata(path), file.metadata().map_err(fail)?);
        if !here.is_ok_and(|m| (m.dev(), m.ino()) == (held.dev(), held.ino())) {
            continue;
        }
        let (text, job) = (read(&mut file), SchedulerJob::own(|name| std::env::var(name).ok()));
        let long = || silence(path).is_some_and(|s| s >= SILENCE);
        if !text.is_empty() && is_cut(&text) && (locked || long()) {
            note(format!(
                "took over the lock of {}, whose text is cut short: who wrote it has died",
                dir.display()
            ));
        } else if !text.is_empty() {
            let owner: Option<Owner> = serde_json::from_str(&text).ok();
            // Silence of one that never said anything says nothing.
            let silent = silence(path).filter(|_| owner.as_ref().is_some_and(|o| o.beats));
            let why = owner.as_ref().and_then(|o| free(o, locked, job.as_ref(), silent));
            let (Some(o), Some(why)) = (owner, why) else {
                return Err(refused(dir, path, &text, silent));
            };
            note(format!(
                "took over the lock of {} from {why} (it had it since {}, for {})",
                dir.display(),
                o.since,
                o.plan
            ));
        }
        let (pid, host) = (std::process::id(), crate::cluster::host());
        let plan = fs::canonicalize(plan).unwrap_or_else(|_| plan.into()).display().to_string();
        let beats = touch(&file);
        let owner = Owner { pid, host, since: utc(SystemTime::now()), plan, job, beats };
        let text = serde_json::to_string(&owner).expect("plain data") + "\n";
        let put = file.set_len(0).and_then(|()| file.rewind());
        let put = put.and_then(|()| file.write_all(text.as_bytes()));
        let beat = put.map_err(fail).and_then(|()| beat(&file, text.clone(), BEAT));
        // Without a name it locks nobody out.
        let _beat = beat.inspect_err(|_| drop(fs::remove_file(path)))?;
        let (path, dir) = (path.into(), dir.into());
        return Ok(Lock { path, dir, text, is_new: false, _held: file, _beat });
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

fn refused(dir: &Path, path: &Path, text: &str, silent: Option<Duration>) -> Diag {
    let d = Diag::new("save-locked", "another job saves to this folder")
        .at(dir.display().to_string())
        .rule("one job saves to a folder at a time");
    let remove = format!("if that job has ended, remove its lock: rm {}", path.display());
    let Ok(o) = serde_json::from_str::<Owner>(text) else {
        return d.why("its lock does not say who it is").help(remove);
    };
    let who = format!("process {} of host {}, since {}, runs {}", o.pid, o.host, o.since, o.plan);
    let d = d.why(who).help("save to another folder, or wait until that job has ended");
    // One of this host that is refused lives: its lock ends with it.
    if o.host == crate::cluster::host() {
        return d;
    }
    match silent.and_then(|s| SILENCE.checked_sub(s)) {
        None => d.help(remove),
        Some(left) => d.help(remove).help(format!(
            "or start again in {} s: if that process says nothing until then, its lock is taken over",
            left.as_secs() + 1
        )),
    }
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

    fn owner(host: &str, job: Option<(&str, u64)>) -> Owner {
        let job = job.map(|(id, restarts)| SchedulerJob { id: id.into(), restarts });
        Owner {
            pid: 7,
            host: host.into(),
            since: "then".into(),
            plan: "plan".into(),
            job,
            beats: true,
        }
    }

    #[test]
    fn a_requeued_job_and_one_behind_a_silent_host_take_over() {
        let job = |restarts| Some(SchedulerJob { id: "12".into(), restarts });
        let minutes = |n: u64| Some(Duration::from_secs(60 * n));
        let why = |was, now: Option<SchedulerJob>, silent| {
            free(&owner("elsewhere", was), true, now.as_ref(), silent).unwrap_or_default()
        };
        assert!(why(Some(("12", 0)), job(1), minutes(0)).contains("before it was requeued"));
        // Two steps of one job may run at the same time.
        assert_eq!(why(Some(("12", 1)), job(1), minutes(9)), "");
        assert_eq!(why(Some(("13", 0)), job(1), minutes(9)), "");
        assert_eq!(why(None, job(1), None), "");
        assert!(why(None, None, minutes(11)).contains("nothing for 11 minutes"));
        let var = |name: &str| match name {
            "SLURM_JOB_ID" => Some("12".to_string()),
            "SLURM_RESTART_COUNT" => Some("2".to_string()),
            _ => None,
        };
        assert_eq!((SchedulerJob::own(var), SchedulerJob::own(|_| None)), (job(2), None));
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a file of the test")]
    fn a_lock_is_touched_while_it_is_held_and_is_not_another_ones() {
        let dir = std::env::temp_dir().join(format!("shardc-lock-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = dir.join("lock");
        let mut lock = take(&path, &dir, Path::new("plan")).unwrap();
        let old = SystemTime::now() - Duration::from_secs(3600);
        lock._held.set_modified(old).unwrap();
        assert!(silence(&path).unwrap() > Duration::from_secs(3500));
        lock._beat = beat(&lock._held, lock.text.clone(), Duration::from_millis(1)).unwrap();
        while silence(&path).unwrap() > Duration::from_secs(3500) {
            std::thread::sleep(Duration::from_millis(1));
        }
        lock.check().unwrap();
        fs::write(&path, serde_json::to_string(&owner("elsewhere", None)).unwrap()).unwrap();
        assert_eq!(lock.check().unwrap_err().code, "save-locked");
        drop(lock);
        assert!(path.exists(), "the lock of another job is removed");
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "more is left");
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        let at = |s: u64| utc(UNIX_EPOCH + Duration::from_secs(s));
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(at(1_735_689_599), "2024-12-31T23:59:59Z");
    }
}
