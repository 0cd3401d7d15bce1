//! Runs the command under limits, and says what it took.

use rustix::process::{Resource, Rlimit, setrlimit};
use shardc_ir::diag::is_hidden;
use std::ffi::{c_int, c_long, c_uint};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

/// Most bytes of memory that a run may have had at once, and seconds of processor time.
pub const RESIDENT: u64 = 1 << 30;
pub const SECONDS: f64 = 5.0;
/// What the system refuses beyond: of address space, which has what is never touched too, and of time.
const ADDRESSES: u64 = 3 << 29;
const HARD_SECONDS: u64 = 6;
/// Seconds by a clock after which a run ends by SIGALRM: it waits for something.
const PATIENCE: c_uint = 10;

/// A run that has ended.
pub struct Ran {
    /// The exit status, or the signal.
    pub outcome: String,
    pub out: String,
    pub err: String,
    /// Seconds of processor time, of the command and of compilers that it started and waited for.
    pub seconds: f64,
    /// Most bytes of memory that it had at once.
    pub resident: u64,
}

impl Ran {
    pub fn good(&self) -> bool {
        self.outcome == "0"
    }
    /// What is not allowed whatever was read: a panic, a signal, an unknown status, a refusal without a
    /// word, what a terminal obeys, or more than the limits.
    pub fn defect(&self) -> bool {
        let known = ["0", "1", "2", "3", "4", "5", "6"].contains(&self.outcome.as_str());
        let silent = !self.good() && !self.err.contains("error") && self.out.is_empty();
        let panics = self.err.contains("bug: ")
            || self.err.contains("panicked") && !self.err.contains("error[pass]");
        let obeyed =
            self.out.chars().chain(self.err.chars()).any(|c| !"\n\t".contains(c) && is_hidden(c));
        !known || silent || panics || obeyed || self.seconds > SECONDS || self.resident > RESIDENT
    }
    /// Results without times.
    pub fn results(&self) -> String {
        let line = |l: &str| l.split(",\"ms\"").next().unwrap_or("").to_string();
        self.out.lines().map(line).collect::<Vec<_>>().join("\n")
    }
}

/// `struct rusage` of Linux on processors of 64 bits: two times, then 14 numbers, the first of them the most
/// memory in KiB.
#[repr(C)]
#[derive(Default)]
struct Usage {
    times: [[c_long; 2]; 2],
    resident: c_long,
    others: [c_long; 13],
}

unsafe extern "C" {
    fn alarm(seconds: c_uint) -> c_uint;
    fn wait4(pid: c_int, status: *mut c_int, options: c_int, usage: *mut Usage) -> c_int;
}

/// The command: the one that was built for the test, or another build of it (`SHARDC_BIN`), such as one for
/// speed.
pub fn shardc() -> String {
    std::env::var("SHARDC_BIN").unwrap_or(env!("CARGO_BIN_EXE_shardc").into())
}

/// Runs a command in a folder, with its output in files of that folder (`.out`, `.err`).
#[expect(clippy::zombie_processes, reason = "`wait4` waits for it")]
pub fn run(mut c: Command, dir: &Path) -> Ran {
    let file = |name: &str| std::fs::File::create(dir.join(name)).expect("a file");
    c.current_dir(dir).stdin(Stdio::null()).stdout(file(".out")).stderr(file(".err"));
    c.env("MALLOC_ARENA_MAX", "2")
        .env("RUST_BACKTRACE", "0")
        .env("SHARDC_CACHE", dir.join("cache"));
    let limit = |what, most: u64| {
        setrlimit(what, Rlimit { current: Some(most), maximum: Some(most) })
            .map_err(std::io::Error::from)
    };
    // SAFETY: between fork and exec there are four system calls and nothing else.
    unsafe {
        c.pre_exec(move || {
            alarm(PATIENCE);
            limit(Resource::Cpu, HARD_SECONDS)?;
            limit(Resource::As, ADDRESSES)?;
            limit(Resource::Core, 0)
        });
    }
    let child = c.spawn().expect("the command starts");
    let (mut status, mut usage) = (0, Usage::default());
    // SAFETY: a child of ours that nobody else waits for, and places for what is said of it.
    let pid = unsafe { wait4(child.id() as c_int, &mut status, 0, &mut usage) };
    assert_eq!(pid, child.id() as c_int, "{}", std::io::Error::last_os_error());
    let status = ExitStatus::from_raw(status);
    let text = |name: &str| {
        String::from_utf8_lossy(&std::fs::read(dir.join(name)).expect("a file")).into_owned()
    };
    let [own, systems] = usage.times.map(|[s, us]| s as f64 + us as f64 * 1e-6);
    Ran {
        outcome: match (status.code(), status.signal()) {
            (Some(code), _) => code.to_string(),
            (None, signal) => format!("signal {}", signal.unwrap_or(0)),
        },
        out: text(".out"),
        err: text(".err"),
        seconds: own + systems,
        resident: usage.resident as u64 * 1024,
    }
}
