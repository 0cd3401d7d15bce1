//! The `shardc` command.

use clap::Parser;
use shardc::commands::{Cli, run};
use std::process::ExitCode;

fn main() -> ExitCode {
    // A panic is a bug of ours, whichever thread it is in.
    std::panic::set_hook(Box::new(|info| {
        eprintln!("bug: {info}\nplease report it with the command that led here (exit status 101)");
    }));
    match std::panic::catch_unwind(|| run(Cli::parse())) {
        Ok(Ok(status)) => ExitCode::from(status as u8),
        Ok(Err(d)) => {
            eprintln!("{d}");
            ExitCode::from(d.exit as u8)
        }
        Err(_) => ExitCode::from(101),
    }
}
