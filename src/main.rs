//! The `shardc` command.

use clap::Parser;
use clap::error::{ContextKind, ContextValue};
use rustix::process::{Resource, getrlimit};
use shardc::commands::elsewhere;
use shardc::commands::{Cli, run};
use shardc::signals;
use shardc::terminal::{self, Talk, fail, say_error, talk};
use shardc_ir::diag::{Diag, Result};
use shardc_runtime::memory::Memory;
use std::process::ExitCode;
use std::sync::PoisonError;

#[global_allocator]
static MEMORY: Memory = Memory;

fn main() -> ExitCode {
    Memory::reserve();
    // A panic is a bug of ours, whichever thread it is in.
    std::panic::set_hook(Box::new(|info| {
        // But of what a template does.
        if shardc::data::guarded() {
            return;
        }
        say_error(format!(
            "bug: {info}\nplease report it with the command that led here (exit status 101)"
        ));
    }));
    signals::large_files_are_errors();
    let work = || std::panic::catch_unwind(|| Cli::try_parse().map_or_else(usage, run));
    let status = match roomy(work) {
        Ok(Ok(status)) => status,
        Ok(Err(d)) => fail(&d),
        Err(_) => 101,
    };
    ExitCode::from(status as u8)
}

/// Stack that the command works on, in bytes: what systems give a process that asks for nothing else.
const STACK: u64 = 8 << 20;

/// Does the work on a stack of [`STACK`]: where `ulimit -s` leaves less, that of a thread of its own.
fn roomy<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    if getrlimit(Resource::Stack).current.is_none_or(|n| n >= STACK) {
        return work();
    }
    // Where there is no thread to be had, the work is done here all the same.
    let once = std::sync::Mutex::new(Some(work));
    let take = || once.lock().unwrap_or_else(PoisonError::into_inner).take();
    let thread = std::thread::Builder::new().name("main".into()).stack_size(STACK as usize);
    std::thread::scope(|s| {
        let own = thread.spawn_scoped(s, || take().map(|work| work()));
        own.ok().and_then(|own| own.join().ok().flatten())
    })
    .unwrap_or_else(|| take().expect("no thread took it")())
}

/// Whether the arguments ask for JSON, although they could not be read.
fn asks_for_json() -> bool {
    let args: Vec<String> = std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect();
    let apart = args.windows(2).any(|w| w[0] == "--format" && w[1] == "json");
    apart || args.iter().any(|a| a == "--format=json")
}

/// Prints help, which is a result, or what is wrong with the arguments.
fn usage(mut e: clap::Error) -> Result<i32> {
    let words: Vec<String> =
        std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect();
    if let Some(d) = elsewhere::answer(&e, &words) {
        talk(Talk { json: asks_for_json(), ..Talk::default() });
        return Err(d);
    }
    // "To pass '--x' as a value, use '-- --x'": but for flags that are audited, no command has a value that begins so.
    let is_escape = |s: &ContextValue| s.to_string().contains("as a value, use");
    if words.get(1).is_none_or(|w| w != "audit")
        && e.get(ContextKind::Suggested).is_some_and(is_escape)
    {
        e.remove(ContextKind::Suggested);
    }
    if e.use_stderr() && asks_for_json() {
        talk(Talk { json: true, ..Talk::default() });
        let text = e.to_string();
        // Its first paragraph says what is wrong, the others what to do.
        let (first, rest) = text.split_once("\n\n").unwrap_or((&text, ""));
        let what: Vec<&str> = first.trim_start_matches("error: ").split_whitespace().collect();
        let lines = rest.lines().map(str::trim).filter(|l| !l.is_empty());
        return Err(lines.fold(Diag::new("usage", what.join(" ")), |d, line| d.help(line)));
    }
    terminal::usage(&e)
}
