//! `shardc measure`: this machine as a device file.

use super::run::{On, Products};
use super::show;
use clap::Args;
use serde::Serialize;
use shardc_compiler::measure::measure as of_processor;
use shardc_compiler::measure::of_device;
use shardc_cost::device::{Device, Fit, Provenance};
use shardc_cost::fit::{NAMES, constant};
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::files::{self, FileFormat, io_error};
use shardc_plans::machine;
use shardc_process::signals;
use shardc_process::terminal::{json_line, note, notes, talks};
use std::path::{Path, PathBuf};

/// What is measured.
#[derive(Args, Debug)]
pub struct Measure {
    /// Ranks that run concurrently, as threads of this process
    #[arg(long, default_value_t = 1)]
    pub ranks: usize,
    /// What is measured: the processor, or the first GPU, on one rank
    #[arg(long, value_enum, default_value_t)]
    pub device: On,
    /// Matrix products on a GPU: own kernels, NVIDIA's cuBLASLt, or auto: cuBLASLt where it is installed [default:
    /// auto]
    #[arg(long, value_enum)]
    pub products: Option<Products>,
    /// Machine that a GPU is like in what is not measured: links and peaks [default: by the GPU's name and memory]
    #[arg(long, value_name = "NAME|FILE.toml")]
    pub like: Option<String>,
    /// The machine file to write, for --machine of price and plan
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
    goes_together(what)?;
    DEVICE.check(&what.output)?;
    signals::end_clean()?;
    let (device, on) = match what.device {
        On::Cpu => {
            let device = of_processor(what.ranks, &mut |text| note(text))?;
            let ranks = count(what.ranks, "rank", "ranks");
            let threads = count(device.sms as usize, "thread", "threads");
            (device, format!("{ranks} at once, {threads} each"))
        }
        On::Cuda => {
            let like = what.like.as_deref().map(machine::device).transpose()?;
            let library = Products::library(what.products);
            let device = of_device(like, library, &mut |text| note(text))?;
            let by = if library { "cuBLASLt" } else { "own kernels" };
            (device, format!("a GPU, products by {by}"))
        }
    };
    let text = format!(
        "# Measured by shardc: {on}. Whatever else ran, it slowed.\n{}",
        toml::to_string(&device).expect("plain data")
    );
    let to = &what.output;
    let failed = |e| io_error("cannot write the file", to, &e);
    files::replace(to, &DEVICE, |f| f.write_all(text.as_bytes()).map_err(failed))?;
    tell(&device, to, None);
    note(format!("wrote {}", to.display()));
    Ok(0)
}

/// Refuses what does not go together.
fn goes_together(what: &Measure) -> Result<()> {
    if what.device == On::Cuda {
        return match what.ranks {
            1 => Ok(()),
            n => Err(Diag::new("flag", "a GPU is measured on one rank")
                .at(format!("--ranks {n}"))
                .rule("ranks that share a device show nothing of the links between devices")
                .help("leave --ranks out")),
        };
    }
    let other = what.products.filter(|p| *p != Products::Own);
    let own = format!("--products {}", other.map_or("", Products::word));
    let on_gpu = [(own.as_str(), other.is_some()), ("--like", what.like.is_some())];
    match on_gpu.into_iter().find(|f| f.1) {
        None => Ok(()),
        Some((flag, _)) => {
            Err(Diag::new("flag", "this is about measuring a GPU").at(flag).help(format!(
                "add --device cuda, or leave {} out",
                &flag[..flag.find(' ').unwrap_or(flag.len())]
            )))
        }
    }
}

/// What a machine's file has that was not known before, as programs read it.
#[derive(Serialize)]
struct Machine<'a> {
    written: String,
    constants: &'a Fit,
    /// Of the runs that it was fitted to: before, and with these constants.
    mean_error: Option<[f64; 2]>,
}

/// Says what the constants of a machine are that was written to a file.
pub(super) fn tell(d: &Device, to: &Path, mean_error: Option<[f64; 2]>) {
    match talks().json {
        true => {
            let written = to.display().to_string();
            show(json_line("machine", Machine { written, constants: &d.fit, mean_error }));
        }
        false => notes(said(d)),
    }
}

/// The constants, each with where it is from.
fn said(d: &Device) -> Vec<String> {
    let line = |name: &&str| {
        let c = *constant(&mut d.fit.clone(), name);
        let from = match c.from {
            Provenance::Measured => "measured",
            Provenance::Tables => "of published runs",
            Provenance::Prior => "prior",
        };
        format!("{name:<7} {:>9.3e}  {from}, {:.3e} to {:.3e}", c.value, c.range[0], c.range[1])
    };
    NAMES.iter().map(line).collect()
}
