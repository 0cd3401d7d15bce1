//! `shardc audit`: over which axes each gradient is summed, in a configuration of other software.

use super::show;
use clap::{Args, ValueEnum};
use shardc_audit::{foreign, forks, megatron, page};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use shardc_plans::machine::device;
use shardc_process::terminal::{doing, json_line, note, show_file};
use std::path::PathBuf;

/// Software whose configurations are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Software {
    /// Arguments of Megatron-LM: a text of them, or behind `--`
    Megatron,
    /// A configuration of torchtitan in TOML or JSON, with --model
    Torchtitan,
    /// A configuration of DeepSpeed in JSON, with --model
    Deepspeed,
    /// A plan of transformers in JSON, or a config.json that has one
    Transformers,
}

/// What is audited.
#[derive(Args, Debug)]
pub struct Audit {
    /// The software
    #[arg(value_enum)]
    pub software: Software,
    /// File of the configuration: flags, TOML or JSON, which is read and never executed
    pub file: Option<PathBuf>,
    /// Number of ranks [default: as the launcher's flags in the file say]
    #[arg(long)]
    pub gpus: Option<usize>,
    /// HF folder, or its config.json, of the model, where the configuration has no sizes
    #[arg(long, value_name = "MODEL")]
    pub model: Option<PathBuf>,
    /// Version of the software whose rules hold, for example 0.18.2 [default: the newest that is known]
    #[arg(long, value_name = "VERSION")]
    pub at: Option<String>,
    /// A fact that rules ask for and no flag says, for example te>=2.13
    #[arg(long, value_name = "FACT")]
    pub with: Vec<String>,
    /// Rules of a fork: a TOML file whose rows replace those of the same name
    #[arg(long, value_name = "FILE.toml")]
    pub rules: Option<PathBuf>,
    /// Also estimate memory and the time of a step on this machine: a name, or a TOML file like those in cost/hardware
    #[arg(long, alias = "device", value_name = "NAME|FILE.toml")]
    pub machine: Option<String>,
    /// Also write a page for a browser
    #[arg(short, long, value_name = "FILE.html")]
    pub output: Option<PathBuf>,
    /// Print Python that asserts in a running program what the audit says: at most 40 lines
    #[arg(long)]
    pub check: bool,
    /// Flags of the software
    #[arg(last = true)]
    pub flags: Vec<String>,
}

/// Largest configuration that is read, in bytes.
const MAX: u64 = 4 << 20;

/// Audits a configuration; 1 if there are findings.
///
/// # Errors
/// `audit` for what cannot be audited, `file`, and those of reading the model and of the passes.
pub fn audit(what: &Audit, as_json: bool) -> Result<i32> {
    let (text, place) = match &what.file {
        Some(file) => (files::read_text(file, MAX)?, file.display().to_string()),
        None => (String::new(), "the command line".into()),
    };
    // Words of a command line are quoted already.
    let quoted = |w: &String| if w.starts_with('-') { w.clone() } else { format!("'{w}'") };
    let flags: Vec<String> = what.flags.iter().map(quoted).collect();
    let text = format!("{text}\n{}", flags.join(" "));
    if what.gpus.is_some_and(|n| n == 0 || n > 1 << 20) {
        return Err(Diag::new("flag", "--gpus is a number from 1 to 1048576").at("--gpus"));
    }
    doing("propagating the layout");
    let model = what.model.as_deref();
    let read = |format| foreign::read(format, &text, &place, what.gpus, model);
    let mut job = match what.software {
        Software::Megatron => megatron::read(&text, &place, what.gpus, what.at.as_deref())?,
        Software::Torchtitan => read(&foreign::TORCHTITAN)?,
        Software::Deepspeed => read(&foreign::DEEPSPEED)?,
        Software::Transformers => read(&foreign::TRANSFORMERS)?,
    };
    job.at = what.at.as_deref().map(|v| job.table.at(v)).transpose()?;
    job.given.facts.extend(what.with.iter().cloned());
    if let Some(file) = &what.rules {
        let text = files::read_text(file, MAX)?;
        job.table = forks::with(job.table, &text, &file.display().to_string())?;
    }
    let machine = what.machine.as_deref().map(device).transpose()?;
    let done = shardc_audit::audit(job, &place, machine.as_ref())?;
    if let Some(to) = &what.output {
        page::write(&done, to)?;
        note(format!("wrote {}: open it in a browser", to.display()));
    }
    if what.check {
        show_file(&done.check());
        return Ok(0);
    }
    show(if as_json { json_line("audit", done.json()) } else { done.text() });
    Ok(i32::from(!done.findings.is_empty()))
}
