//! Ctrl-C, SIGTERM and SIGHUP: a run that saves ends after the step it is in, and everything else, or a
//! second signal, ends at once; a training that nobody saves says what is lost.
//!
//! A signal that is ignored when shardc starts (nohup, a shell's background jobs) stays ignored.

use crate::terminal::note;
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::files;
use shardc_runtime::spawn::refused;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Signals that ask a process to end.
const ALL: [(i32, &str); 3] = [(SIGINT, "SIGINT"), (SIGTERM, "SIGTERM"), (SIGHUP, "SIGHUP")];

/// The first signal; 0: there was none.
static ASKED: AtomicI32 = AtomicI32::new(0);
/// The first signal is not the end: what there is is saved before.
static SAVES: AtomicBool = AtomicBool::new(false);
/// Steps of a training that nothing keeps.
static UNSAVED: AtomicUsize = AtomicUsize::new(0);

/// From now on a file that grows beyond a limit (`ulimit -f`) is an error of the write, as on a full
/// disk, and not the end of the process.
pub fn large_files_are_errors() {
    // A handler that does nothing; programs that are started do not inherit it.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)));
}

/// From now on the first signal lets the run save.
pub fn save_first() {
    SAVES.store(true, Ordering::Release);
}

/// From now on there is nothing more to save: a signal ends the run at once.
pub fn save_no_more() {
    SAVES.store(false, Ordering::Release);
}

/// A step of a training is done that nothing keeps.
pub fn step_unsaved() {
    UNSAVED.fetch_add(1, Ordering::Relaxed);
}

/// Says what is lost if the process ends now, if anything is.
pub fn say_lost(signal: i32) {
    let steps = UNSAVED.load(Ordering::Relaxed);
    if steps > 0 {
        let (name, lost) = (name(signal), count(steps, "step is", "steps are"));
        note(format!("{name}: nothing is saved, {lost} lost (--save DIR saves before the end)"));
    }
}

/// The signal by which the run was asked to save and end.
pub fn asked() -> Option<i32> {
    Some(ASKED.load(Ordering::Acquire)).filter(|&s| s != 0)
}

/// What a signal is called.
pub fn name(signal: i32) -> &'static str {
    ALL.iter().find(|s| s.0 == signal).map_or("a signal", |s| s.1)
}

/// Exit status of a process that a signal has ended.
pub fn status(signal: i32) -> i32 {
    128 + signal
}

/// Signals that this process was started to ignore.
fn ignored() -> u64 {
    let text = files::read_text(Path::new("/proc/self/status"), 1 << 16).unwrap_or_default();
    let mask = text.lines().find_map(|l| l.strip_prefix("SigIgn:"));
    mask.and_then(|m| u64::from_str_radix(m.trim(), 16).ok()).unwrap_or(0)
}

/// From now on a signal ends the process as it would, but takes back before what is not finished.
///
/// # Errors
/// Those of [`handle`].
pub fn end_clean() -> Result<()> {
    handle(
        Duration::ZERO,
        |_| {},
        |signal| {
            files::abandon();
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        },
    )
}

/// Handles signals, in a thread of their own: `first` is told of one that lets the run save, `end` ends
/// the process. Signals that come within `same` of the first count as it: a launcher may pass on what
/// the terminal has sent already.
///
/// # Errors
/// `cluster` if signals cannot be handled, `threads` if the thread does not start.
pub fn handle(
    same: Duration,
    first: impl Fn(i32) + Send + 'static,
    end: impl Fn(i32) + Send + 'static,
) -> Result<()> {
    let ignored = ignored();
    let wanted = ALL.iter().map(|s| s.0).filter(|s| ignored & (1 << (s - 1)) == 0);
    let mut signals = Signals::new(wanted).map_err(|e| {
        Diag::new("cluster", format!("signals cannot be handled: {e}"))
            .help("start shardc as 1 process of its own")
    })?;
    let waits = move || {
        let mut since: Option<Instant> = None;
        for signal in signals.forever() {
            match since {
                None if SAVES.load(Ordering::Acquire) => {
                    since = Some(Instant::now());
                    ASKED.store(signal, Ordering::Release);
                    first(signal);
                }
                Some(t) if t.elapsed() < same => {}
                _ => end(signal),
            }
        }
    };
    match std::thread::Builder::new().spawn(waits) {
        Ok(_) => Ok(()),
        Err(e) => Err(refused("the thread that waits for signals", 1, &e)),
    }
}
