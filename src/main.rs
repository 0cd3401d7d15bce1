//! The `shardc` command.

use clap::Parser;
use shardc::commands::{Cli, run};
use shardc::signals;
use shardc::terminal::{fail, note, written};
use shardc_ir::diag::Result;
use std::io::Write as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    // A panic is a bug of ours, whichever thread it is in.
    std::panic::set_hook(Box::new(|info| {
        note(format!(
            "bug: {info}\nplease report it with the command that led here (exit status 101)"
        ));
    }));
    signals::large_files_are_errors();
    let status = match std::panic::catch_unwind(|| Cli::try_parse().map_or_else(usage, run)) {
        Ok(Ok(status)) => status,
        Ok(Err(d)) => fail(&d),
        Err(_) => 101,
    };
    ExitCode::from(status as u8)
}

/// Prints help, which is a result, or what is wrong with the arguments.
fn usage(e: clap::Error) -> Result<i32> {
    let printed = e.print().and_then(|()| std::io::stdout().flush());
    if !e.use_stderr() {
        written(printed)?;
    }
    Ok(e.exit_code())
}
