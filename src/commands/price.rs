//! `shardc price`: seconds of a step, of a compiled plan or of the runs in a table.

mod against;
mod launches;
mod why;

use super::show;
use against::Against;
use clap::Args;
use launches::each;
use serde_json::{Value, json};
use shardc_cost::beside;
use shardc_cost::device::Device;
use shardc_cost::parts::Parts;
use shardc_cost::plan::{self, PlanPrice};
use shardc_cost::table::{self, Row};
use shardc_ir::diag::{Diag, Result, time};
use shardc_ir::files::{self, FileFormat, io_error};
use shardc_passes::options::Transport;
use shardc_plans::machine::device;
use shardc_plans::plan_dir;
use shardc_plans::stored::Stored;
use shardc_process::terminal::{json_line, note, prose, show_file, show_written};
use shardc_report::prices::{trust, utilisation};
use shardc_report::report::{Chosen, beside_words};
use std::path::{Path, PathBuf};
pub use why::{constants, tables};

/// What is priced.
#[derive(Args, Debug)]
pub struct Price {
    /// A plan: a folder that shardc compile wrote
    pub plan: Option<PathBuf>,
    /// Machine that the ranks run on: a name, or a TOML file like those in cost/hardware; of --rows, one more that
    /// rows may name
    #[arg(long, alias = "device", value_name = "NAME|FILE.toml", required_unless_present = "rows")]
    pub machine: Option<String>,
    /// List every launch and exchange of the plan, with its sizes
    #[arg(long)]
    pub launches: bool,
    /// Show the time by part of the step with its formula, by scope of the model, and the constants
    #[arg(long)]
    pub explain: bool,
    /// Compare with a run of the plan, from a file of `run --trace`
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Estimate the runs of a table instead of a plan (columns as in cost/tests/data)
    #[arg(long, value_name = "FILE.csv", conflicts_with_all = ["plan", "launches", "explain", "trace"])]
    pub rows: Option<PathBuf>,
    /// File to write the runs' `id,step_s` to [default: standard output]
    #[arg(short, long, requires = "rows")]
    pub output: Option<PathBuf>,
}

/// Largest table that is read, in bytes.
const MAX_TABLE: u64 = 64 << 20;

/// What `--rows` writes.
const PRICES: FileFormat =
    FileFormat { name: "a table of prices", is: |begin| begin.starts_with(b"id,step_s\n") };

/// Prices a plan or a table.
///
/// # Errors
/// `rows`, `device`, `trace`, and those of reading the plan.
pub fn price(what: &Price, json: bool) -> Result<i32> {
    if let Some(path) = &what.rows {
        let machines = machines(what.machine.as_deref())?;
        let priced = read_rows(path).and_then(|rows| table::prices(&rows, &machines));
        let out = priced.map_err(|d| in_file(d, path))?;
        match &what.output {
            Some(to) => {
                let failed = |e| io_error("cannot write", to, &e);
                files::replace(to, &PRICES, |f| f.write_all(out.as_bytes()).map_err(failed))?;
                show_written(to);
            }
            None => show_file(&out),
        }
        return Ok(0);
    }
    let (Some(dir), Some(word)) = (&what.plan, &what.machine) else {
        return Err(Diag::new("flag", "there is nothing to price")
            .help("give a plan and --machine NAME, or --rows FILE.csv"));
    };
    let device = device(word)?;
    let stored = plan_dir::read(dir)?;
    let priced = plan::price(&stored.plan, &device, &stored.options.speeds)?;
    let against = what.trace.as_deref().map(|file| Against::of(file, &stored, &priced));
    let against = against.transpose()?;
    if json {
        let mut out = to_json(&stored, &device, &priced, what.launches);
        if let Some(a) = &against {
            out["trace"] = a.json();
        }
        show(json_line("price", out));
        return Ok(0);
    }
    show(human(&stored, &device, &priced));
    if what.explain {
        show(tables(&stored.plan, &priced) + &constants(&device));
    }
    match against {
        Some(a) => show(a.human(what.launches)),
        None if what.launches => show(launches::text(&each(&stored, &priced))),
        None => {}
    }
    note(trust(&device));
    Ok(0)
}

/// The machines that rows may name: those that are known, and one more that goes before them.
pub(super) fn machines(given: Option<&str>) -> Result<Vec<Device>> {
    let given = given.map(device).transpose()?;
    Ok(given.into_iter().chain(Device::known()).collect())
}

/// The rows of a table.
pub(super) fn read_rows(path: &Path) -> Result<Vec<Row>> {
    table::read(&files::read_text(path, MAX_TABLE)?)
}

/// A fault of a table that says where it is.
pub(super) fn in_file(d: Diag, path: &Path) -> Diag {
    match d.place {
        Some(_) => d,
        None => d.at(path.display().to_string()),
    }
}

/// Parts of a step with what they take of it, those that take something.
pub fn lines(parts: &Parts) -> String {
    let total = parts.total();
    let line = |(name, s): (&str, f64)| {
        format!("{name:<10} {:>12}  {:>5.1} %\n", time(s), 100.0 * s / total)
    };
    parts.list().into_iter().filter(|p| p.1 > 0.0).map(line).collect()
}

fn human(stored: &Stored, d: &Device, p: &PlanPrice) -> String {
    let s = &stored.plan.settings;
    let tokens = (s.global_batch * s.seq) as f64 / p.total;
    let mfu = utilisation(stored, d, p.total);
    let mfu = mfu.map_or(String::new(), |u| format!("   {:.1} % of the peak", 100.0 * u));
    let with = Chosen::of(&stored.options).line();
    let step = format!("step {} on {}   {tokens:.0} tokens/s{mfu}\n", time(p.total), d.name);
    let head = step + &elsewhere(stored, d) + &format!("{with}\n");
    head + &lines(&p.parts) + "\n" + &prose(&(of(p) + &computed(p) + &assumed(stored, d)))
}

/// Whose parts are shown of several ranks of the pipeline.
fn of(p: &PlanPrice) -> String {
    match p.flops.len() {
        0 | 1 => String::new(),
        _ => format!("these are the parts of ranks of pp {}, which wait least\n", p.class),
    }
}

/// FLOPs of a step by class.
fn computed(p: &PlanPrice) -> String {
    let text = |n: &f64| format!("{:.2}", n / 1e12);
    let all: Vec<String> = p.flops.iter().map(text).collect();
    let of = match all.len() {
        0 | 1 => String::new(),
        _ => format!(" (ranks of pp 0 to {}: {})", all.len() - 1, all.join(", ")),
    };
    let most = p.flops.iter().fold(0.0, |a: f64, &b| a.max(b));
    format!("computed by a rank in products and attention: {} TFLOP per step{of}\n", text(&most))
}

/// That the plan is not one for this machine.
fn elsewhere(stored: &Stored, d: &Device) -> String {
    let transport = stored.options.transport;
    if transport == Transport::Nccl || !d.is_gpu() {
        return String::new();
    }
    let beside = if transport.overlaps() { "" } else { ", and no work was put beside them" };
    format!(
        "warning: compiled for --transport {}: exchanges are priced on the links of {}{beside}; the plan that runs \
         there is compiled with --transport nccl\n",
        transport.name(),
        d.name
    )
}

/// What the plan was compiled for, and what lies beside it.
fn assumed(stored: &Stored, d: &Device) -> String {
    let on = stored.options.transport.name();
    let mut out = match (stored.options.transport, d.is_gpu()) {
        (Transport::Nccl, _) => {
            format!("compiled for --transport {on}: exchanges go on beside work\n")
        }
        (Transport::Threads | Transport::Mpi, false) => format!("compiled for --transport {on}\n"),
        (Transport::Threads | Transport::Mpi, true) => String::new(),
    };
    if d.is_gpu() {
        out += &(beside_words(beside::bytes(&stored.plan)) + "\n");
    }
    out
}

fn to_json(stored: &Stored, d: &Device, p: &PlanPrice, all: bool) -> Value {
    let s = &stored.plan.settings;
    let mut out = json!({
        "device": d.name,
        "options": Chosen::of(&stored.options),
        "transport": stored.options.transport.name(),
        "peak_bytes": stored.plan.peak_bytes(),
        "beside_bytes": if d.is_gpu() { beside::bytes(&stored.plan) } else { 0 },
        "step_s": p.total,
        "parts": p.parts,
        "class": p.class,
        "flops": p.flops,
        "tokens_per_s": (s.global_batch * s.seq) as f64 / p.total,
        "mfu": utilisation(stored, d, p.total),
        "extrapolated": true,
    });
    if all {
        out["launches"] = each(stored, p).iter().map(launches::json).collect();
    }
    out
}
