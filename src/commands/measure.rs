//! `shardc measure`: this machine as a device file.

use crate::measure::measure as of_machine;
use crate::terminal::note;
use clap::Args;
use shardc_cost::device::{Constant, Device, Provenance};
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::files::{self, FileFormat, io_error};
use std::path::PathBuf;

/// What is measured.
#[derive(Args, Debug)]
pub struct Measure {
    /// Ranks that run concurrently, as threads of this process
    #[arg(long, default_value_t = 1)]
    pub ranks: usize,
    /// The machine file to write, for --device
    #[arg(short, long)]
    pub output: PathBuf,
}

/// Most ranks that are measured at once.
const MOST: usize = 64;

/// What is written.
const DEVICE: FileFormat =
    FileFormat { name: "a device file", is: |begin| begin.starts_with(b"# Measured by shardc") };

/// Measures, writes the file and says what was found.
///
/// # Errors
/// `flag`, `output`, and those of running plans.
pub fn measure(what: &Measure) -> Result<i32> {
    if what.ranks == 0 || what.ranks > MOST {
        return Err(Diag::new("flag", format!("{} ranks are not in 1..={MOST}", what.ranks))
            .at(format!("--ranks {}", what.ranks))
            .help("for example --ranks 2"));
    }
    DEVICE.check(&what.output)?;
    let device = of_machine(what.ranks, &mut |text| note(text))?;
    let text = format!(
        "# Measured by shardc: {} at once, {} each. Whatever else ran, it slowed.\n{}",
        count(what.ranks, "rank", "ranks"),
        count(device.sms as usize, "thread", "threads"),
        toml::to_string(&device).expect("plain data")
    );
    let to = &what.output;
    let failed = |e| io_error("cannot write the file", to, &e);
    files::replace(to, &DEVICE, |f| f.write_all(text.as_bytes()).map_err(failed))?;
    note(said(&device));
    note(format!("wrote {}", to.display()));
    Ok(0)
}

/// The constants, each with where it is from.
fn said(d: &Device) -> String {
    let f = &d.fit;
    let line = |(name, c): (&str, Constant)| {
        let from = if c.from == Provenance::Measured { "measured" } else { "prior" };
        format!("{name:<7} {:>9.3e}  {from}, {:.3e} to {:.3e}\n", c.value, c.range[0], c.range[1])
    };
    let all = [
        ("gemm", f.gemm),
        ("hbm", f.hbm),
        ("link", f.link),
        ("nic", f.nic),
        ("hop", f.hop),
        ("kernel", f.kernel),
        ("step", f.step),
    ];
    all.into_iter().map(line).collect()
}
