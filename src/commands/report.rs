//! `shardc report`: a plan as one page for a browser.

use clap::Args;
use shardc_ir::diag::Result;
use shardc_ir::files::{self, FileFormat};
use shardc_plans::machine::device;
use shardc_plans::plan_dir;
use shardc_process::terminal::{doing, note, show_written};
use shardc_report::page::{Asked, page};
use std::path::PathBuf;

/// What the page is of.
#[derive(Args, Debug)]
pub struct Report {
    /// A plan: a folder that shardc compile wrote
    pub plan: PathBuf,
    /// Estimate where the time goes on this machine: a name, or a TOML file like those in cost/hardware
    #[arg(long, alias = "device", value_name = "NAME|FILE.toml")]
    pub machine: Option<String>,
    /// Also show the times of a run, from a file of run --trace
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Also show another plan: a folder that shardc compile wrote
    #[arg(long, value_name = "PLAN")]
    pub compare: Option<PathBuf>,
    /// The page to write
    #[arg(short, long, value_name = "FILE.html")]
    pub output: PathBuf,
}

/// What is written.
const PAGE: FileFormat = FileFormat {
    name: "a page",
    is: |begin| {
        begin.starts_with(b"<!doctype html>\n<html lang=\"en\" data-by=\"shardc report\">\n")
    },
};

/// Writes the page.
///
/// # Errors
/// Those of reading the plans and of [`page()`]; `output` and `file` if it cannot be written.
pub fn report(what: &Report) -> Result<i32> {
    PAGE.check(&what.output)?;
    doing("reading the plan");
    let stored = plan_dir::read(&what.plan)?;
    let other = what.compare.as_deref().map(plan_dir::read).transpose()?;
    let machine = what.machine.as_deref().map(device).transpose()?;
    let trace = what.trace.as_deref();
    let asked = Asked { device: machine.as_ref(), trace, other: other.as_ref() };
    doing("explaining the plan");
    let text = page(&stored, &asked)?;
    let to = &what.output;
    files::replace(to, &PAGE, |out| {
        let fail = |e| files::io_error("cannot write the page", to, &e);
        out.write_all(text.as_bytes()).map_err(fail)
    })?;
    show_written(to);
    note(format!("wrote {}, {} kB: open it in a browser", to.display(), text.len() / 1000));
    Ok(0)
}
