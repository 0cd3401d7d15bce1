//! `shardc completions` and `shardc man`: what a shell and a reader of manuals know of the command line.

use super::Cli;
use clap::CommandFactory as _;
use clap_complete::Shell;
use shardc_ir::diag::{Diag, Result};
use shardc_process::terminal::show_file;

/// Prints the completions of a shell.
pub fn completions(shell: Shell) -> i32 {
    let mut out = vec![];
    clap_complete::generate(shell, &mut Cli::command(), "shardc", &mut out);
    show_file(&String::from_utf8_lossy(&out));
    0
}

/// Prints the manual page of `shardc`, or of one of its commands.
///
/// # Errors
/// `flag` if no command is called so.
pub fn man(of: Option<&str>) -> Result<i32> {
    let mut all = Cli::command();
    // Commands get what all of them take.
    all.build();
    let page = match of {
        None => all,
        Some(name) => {
            let known = || -> Vec<&str> { all.get_subcommands().map(|c| c.get_name()).collect() };
            let found = all.find_subcommand(name).ok_or_else(|| {
                Diag::new("flag", format!("no command is called `{name}`"))
                    .at(format!("man {name}"))
                    .help(format!("use one of {}", known().join(", ")))
            })?;
            found.clone().display_name(format!("shardc-{name}"))
        }
    };
    let mut out = vec![];
    let made = clap_mangen::Man::new(page).render(&mut out);
    made.expect("a vector takes all");
    show_file(&String::from_utf8_lossy(&out));
    Ok(0)
}
