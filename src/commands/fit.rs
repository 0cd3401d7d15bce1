//! `shardc fit`: a machine's constants from step times of a user's own runs.

use super::measure::tell;
use super::price::{in_file, machines, read_rows};
use clap::Args;
use shardc_cost::device::Device;
use shardc_cost::fit::{self, RUNS};
use shardc_cost::table::Run;
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::files::{self, FileFormat, io_error};
use shardc_process::terminal::note;
use std::path::PathBuf;

/// What is fitted.
#[derive(Args, Debug)]
pub struct Fit {
    /// Runs on one machine, one a row, with the measured seconds of a step in the column step_s (columns as of
    /// `price --rows`)
    #[arg(value_name = "RUNS.csv")]
    pub runs: PathBuf,
    /// Machine that the rows may name beside the known ones: a TOML file like those in cost/hardware
    #[arg(long, alias = "device", value_name = "NAME|FILE.toml")]
    pub machine: Option<String>,
    /// The machine file to write, for --machine of price and plan
    #[arg(short, long)]
    pub output: PathBuf,
}

/// What is written.
const DEVICE: FileFormat =
    FileFormat { name: "a device file", is: |begin| begin.starts_with(b"# Fitted by shardc") };

/// Fits, writes the file and says which constants the runs determine.
///
/// # Errors
/// `rows`, `device`, `output`.
pub fn fit(what: &Fit) -> Result<i32> {
    DEVICE.check(&what.output)?;
    let machines = machines(what.machine.as_deref())?;
    let read = |row: &shardc_cost::table::Row| Ok((row.run(&machines)?, row.measured()?));
    let runs: Result<Vec<(Run, f64)>> =
        read_rows(&what.runs).and_then(|rows| rows.iter().map(read).collect());
    let runs = runs.map_err(|d| in_file(d, &what.runs))?;
    let device = one_machine(&runs).map_err(|d| in_file(d, &what.runs))?;
    let fitted = fit::machine(&device, &runs);
    let errors = [&device, &fitted].map(|d| fit::error(&runs, d));
    let [before, after] = errors;
    let (before, after) = (before?, after?);
    let rows = count(runs.len(), "run", "runs");
    let text = format!(
        "# Fitted by shardc to {rows}: mean error {:.1} %, {:.1} % before.\n{}",
        100.0 * after,
        100.0 * before,
        toml::to_string(&fitted).expect("plain data")
    );
    let to = &what.output;
    let failed = |e| io_error("cannot write the file", to, &e);
    files::replace(to, &DEVICE, |f| f.write_all(text.as_bytes()).map_err(failed))?;
    tell(&fitted, to, Some([before, after]));
    note(format!(
        "mean error of the {rows}: {:.1} %, {:.1} % before; wrote {}",
        100.0 * after,
        100.0 * before,
        to.display()
    ));
    Ok(0)
}

/// The machine of all runs.
fn one_machine(runs: &[(Run, f64)]) -> Result<Device> {
    let Some((first, _)) = runs.first().filter(|_| runs.len() >= RUNS) else {
        return Err(Diag::new("rows", format!("{} to fit to", count(runs.len(), "run", "runs")))
            .rule("a constant is fitted to four runs or more")
            .help("add rows of other layouts, models or sizes"));
    };
    match runs.iter().find(|(r, _)| r.device != first.device) {
        None => Ok(first.device.clone()),
        Some((other, _)) => {
            let names = [&first.device.name, &other.device.name].map(|n| format!("`{n}`"));
            Err(Diag::new("rows", format!("runs on {}", names.join(" and ")))
                .rule("a file has the constants of one machine")
                .help("give a table for each machine"))
        }
    }
}
