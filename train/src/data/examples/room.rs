//! Room and time for templates of strangers: what they nest is as deep as they take steps, and is walked and dropped by
//! recursion; some steps are long.

use shardc_ir::diag::Diag;
use shardc_ir::files;
use shardc_process::terminal::fail;
use shardc_runtime::spawn;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{Builder, scope};
use std::time::{Duration, Instant};

/// Stack in bytes: more than 200 for each step of [`super::template::FUEL`]; the system gives pages of it when they are
/// touched.
const STACK: usize = 512 << 20;
/// Longest time for one text.
const LONGEST: Duration = Duration::from_secs(30);

/// How many texts were begun, and ended: odd while one is made.
static TEXTS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// What is done is a stranger's, and a panic no bug of ours.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic of this thread is caught and said as an error.
pub fn guarded() -> bool {
    GUARDED.get()
}

/// Makes a text, whatever its template does.
///
/// # Errors
/// What was wrong, also where the engine panics.
pub fn timed<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    TEXTS.fetch_add(1, Ordering::Relaxed);
    GUARDED.set(true);
    let done = catch_unwind(AssertUnwindSafe(work));
    GUARDED.set(false);
    TEXTS.fetch_add(1, Ordering::Relaxed);
    done.unwrap_or_else(|_| Err("the engine of templates fails at it".into()))
}

/// Does some work on a large stack. If one text takes too long the process ends: nothing stops a thread.
///
/// # Errors
/// `threads` if there is none to be had, and those of the work.
pub fn roomy<T: Send>(work: impl FnOnce() -> Result<T, Diag> + Send) -> Result<T, Diag> {
    scope(|s| {
        let thread = Builder::new().name("templates".into()).stack_size(STACK);
        let (ends, end) = channel::<()>();
        let work = || {
            let _ends = ends;
            work()
        };
        let thread = thread.spawn_scoped(s, work);
        let thread = thread.map_err(|e| spawn::refused("the thread of chat templates", 1, &e))?;
        let mut since = (TEXTS.load(Ordering::Relaxed), Instant::now());
        while end.recv_timeout(Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
            let now = TEXTS.load(Ordering::Relaxed);
            if now != since.0 || now % 2 == 0 {
                since = (now, Instant::now());
            }
            if since.1.elapsed() > LONGEST {
                let what = "the chat template takes more than 30 s for one chat";
                let d = Diag::new("data", what).help("give another one: --chat-template FILE");
                let status = fail(&d);
                files::abandon();
                std::process::exit(status);
            }
        }
        thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}
