//! The command line: one file per command.

pub mod audit;
pub mod check;
pub mod compile;
pub mod data;
pub mod diff;
pub mod doctor;
pub mod elsewhere;
mod engines;
pub mod explain;
pub mod export;
pub mod fit;
pub mod generate;
pub mod import;
pub mod inspect;
pub mod launch_script;
pub mod measure;
mod opt;
pub mod pages;
pub mod passes;
pub mod plan;
pub mod price;
pub mod prove;
pub mod ranks;
pub mod report;
pub mod reshard;
pub mod run;
pub mod saving;
pub mod shell;
pub mod verify;

use clap::{Parser, Subcommand, ValueEnum};
use shardc_ir::diag::{Diag, Result, bytes};
use shardc_plans::flags::{self, Flags};
use shardc_plans::hub;
use shardc_plans::plan_dir::bare;
use shardc_process::memory::most_memory;
use shardc_process::terminal::{
    Shown, Talk, Volume, detail, doing, note, rest, show, show_page, talk, warn,
};
use shardc_report::proof::Prove;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The version, with the commit of a release and the features.
pub const BUILD: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("SHARDC_BUILD"), ")");

/// Compiles transformers to sharded programs for every rank of a mesh, and runs them.
#[derive(Parser, Debug)]
#[command(
    version,
    long_version = BUILD,
    after_help = "Examples:
  shardc check my-model --mesh tp=8
  shardc compile my-model --mesh dp=2,tp=2 -o my.plan
  shardc inspect my.plan --summary
  shardc run my.plan --data 'bytes:src/**/*.rs' --steps 50

Exit status: 0 ok, 1 problems found, 2 usage, 3 infeasible, 4 unsupported input, 5 environment, \
6 a rank failed, or the loss is not a number, 101 internal error (a bug), 128 + N ended by signal N (130 Ctrl-C, \
143 SIGTERM; 130 for each process of a job that does not save), 141 standard output was closed."
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
    /// Output format: human-readable, or JSON
    #[arg(long, global = true, value_enum, default_value_t = Format::Human)]
    pub format: Format,
    /// Also report times and memory use
    #[arg(short, long, global = true, conflicts_with = "quiet")]
    pub verbose: bool,
    /// Print only results, warnings and errors
    #[arg(short, long, global = true)]
    pub quiet: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Format {
    Human,
    Json,
}

/// How a plan is proved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum By {
    Symbolic,
    Field,
    Both,
}

/// What to do.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Say over which axes each gradient is summed in a configuration of other software, and where that is wrong
    Audit(audit::Audit),
    /// List every violated rule of a model on a mesh, with the nearest legal values
    Check {
        /// HF folder, its config.json, a .ir text, a .pt2 archive or a shardc.toml
        model: PathBuf,
        #[command(flatten)]
        flags: Box<Flags>,
    },
    /// Compile a model to a plan, from an HF folder or its config.json, .ir, .pt2, shardc.toml
    Compile {
        /// HF folder, its config.json, a .ir text, a .pt2 archive or a shardc.toml
        model: PathBuf,
        /// Folder to write the plan to
        #[arg(short, long)]
        output: Option<PathBuf>,
        #[command(flatten)]
        passes: passes::Watched,
        /// Prove the plan [default with -o: auto]
        #[arg(long, value_enum)]
        prove: Option<Prove>,
        #[command(flatten)]
        flags: Box<Flags>,
    },
    /// Print shell completions
    Completions { shell: clap_complete::Shell },
    /// Show how examples (chats, prompts with completions, texts) become tokens, and which of them are scored
    Data(data::Show),
    /// Report which optional tools and libraries this machine has, and how to get the missing ones
    Doctor,
    /// Write text with a model, to see what it has learned
    Generate(Box<generate::Generate>),
    /// Save or load what the ranks of a program of PyTorch keep; the Python package starts it
    #[command(hide = true)]
    Ranks(ranks::Ranks),
    /// Convert a torch.export archive (.pt2) to a text model (.ir)
    #[command(after_help = import::EXPORT)]
    Import(import::Import),
    /// Run one pass on a program, as written by --dump-all
    Opt(opt::Opt),
    /// Write a plan as flags or files for other software, or report what that software cannot express
    Export(export::Export),
    /// Show a plan: its programs, a summary, its ranks
    Inspect {
        /// A plan: a folder that shardc compile wrote
        plan: PathBuf,
        #[command(flatten)]
        what: inspect::Inspect,
    },
    /// Explain why a value, a collective, a tensor or a rule is the way it is
    Explain {
        /// A plan: a folder that shardc compile wrote
        plan: PathBuf,
        /// %value, collective:N, tensor:NAME, rule:CODE (which needs no plan), schedule (bubbles), transfers (sends and
        /// receives between stages), memory, or price
        what: Option<String>,
    },
    /// Run a plan, with ranks as threads or as processes started by a launcher
    Run {
        /// A plan: a folder that shardc compile wrote
        plan: PathBuf,
        #[command(flatten)]
        how: Box<run::Run>,
    },
    /// Print a job script that starts a plan's ranks on a cluster
    LaunchScript(launch_script::LaunchScript),
    /// Compare two plans: options, memory, exchanges, programs, estimated times; and which option causes each
    /// difference
    Diff(diff::Diff),
    /// Print the manual page of shardc or of a command: shardc man run | man -l -
    Man {
        /// The command
        of: Option<String>,
    },
    /// Fit a machine's constants to step times of your own runs, and write a machine file for --machine
    Fit(fit::Fit),
    /// Measure kernels and exchanges on this machine, and write a machine file for --machine
    Measure(measure::Measure),
    /// Find layouts of a model that fit a machine, with the estimated time of a step and where it goes
    Plan(Box<plan::Plan>),
    /// Estimate the time of a step on a machine, for a compiled plan or for the runs in a table
    Price(price::Price),
    /// Write a plan as an HTML page: settings, mesh, timeline, memory, collectives, program
    Report(report::Report),
    /// Convert a checkpoint to the shards of another mesh, or to a Hugging Face folder
    Reshard(reshard::Reshard),
    /// Prove that a plan computes what its model means, for all inputs: exit status 0 proved, 1 refuted, 4 not
    /// understood
    Prove {
        /// A plan: a folder that shardc compile wrote
        plan: PathBuf,
        /// symbolic, for all inputs and plans of any size; field, by evaluating all ranks over a finite field,
        /// for small plans; or both
        #[arg(long, value_enum, default_value_t = By::Symbolic)]
        by: By,
        /// Read the texts as they are, without comparing hashes
        #[arg(long)]
        text: bool,
    },
    /// Check a plan: that it is what its model compiles to, its types, order of collectives and memory
    Verify {
        /// A plan: a folder that shardc compile wrote
        plan: PathBuf,
        #[command(flatten)]
        how: verify::Verify,
    },
}

/// Runs a command; the exit status.
pub fn run(cli: Cli) -> Result<i32> {
    let since = Instant::now();
    let volume = match (cli.quiet, cli.verbose) {
        (true, _) => Volume::Quiet,
        (_, true) => Volume::Verbose,
        _ => Volume::Normal,
    };
    talk(Talk { volume, json: cli.format == Format::Json });
    renamed(&cli.command);
    let status = command(cli)?;
    rest();
    let memory =
        most_memory().map_or(String::new(), |n| format!(", at most {} of memory", bytes(n)));
    detail(format!("took {:.2} s{memory}", since.elapsed().as_secs_f64()));
    Ok(status)
}

/// Says what a flag is called that was typed as it was called before.
fn renamed(command: &Command) {
    use Command::{Audit, Diff, Fit, Plan, Price, Report};
    let words = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
    let mut own = words.take_while(|word| word != "--");
    if matches!(command, Audit(_) | Diff(_) | Fit(_) | Plan(_) | Price(_) | Report(_))
        && own.any(|word| word == "--device" || word.starts_with("--device="))
    {
        note("--device of a machine is called --machine now; --device is for cpu and cuda");
    }
}

fn command(cli: Cli) -> Result<i32> {
    let json = cli.format == Format::Json;
    match cli.command {
        Command::Audit(what) => audit::audit(&what, json),
        Command::Check { model, flags } => check::check(&model, *flags, json),
        Command::Compile { model, output, passes, prove, flags } => {
            compile::compile(&model, *flags, output.as_deref(), (&passes, prove), json)
        }
        Command::Completions { shell } => Ok(shell::completions(shell)),
        Command::Man { of } => shell::man(of.as_deref()),
        Command::Data(what) => data::data(&what, json),
        Command::Doctor => doctor::doctor(json),
        Command::Generate(how) => generate::generate(&how, json),
        Command::Import(how) => import::import(&how),
        Command::Opt(how) => opt::opt(&how, json),
        Command::Inspect { plan, what } => {
            doing("reading the plan");
            show(inspect::inspect(&shardc_plans::plan_dir::read(&plan)?, &what, json)?);
            Ok(0)
        }
        Command::Explain { plan, what } => {
            let own = plan.to_string_lossy();
            match what {
                Some(what) if !what.trim().starts_with("rule:") => {
                    show(explain::explain(&shardc_plans::plan_dir::read(&plan)?, &what, json)?);
                }
                what => {
                    let text = explain::explain_rule(what.as_deref().unwrap_or(&own), json)?;
                    if json { show(text) } else { show_page(&text) }
                }
            }
            Ok(0)
        }
        Command::Run { plan, how } => run::run(&plan, *how, json),
        Command::LaunchScript(how) => {
            show(Shown::file(&launch_script::launch_script(&how, json)?));
            Ok(0)
        }
        Command::Diff(what) => diff::diff(&what, json),
        Command::Export(what) => export::export(&what),
        Command::Ranks(how) => ranks::ranks(&how),
        Command::Fit(what) => fit::fit(&what),
        Command::Measure(what) => measure::measure(&what),
        Command::Plan(what) => plan::plan(&what, cli.format),
        Command::Price(what) => price::price(&what, json),
        Command::Report(what) => report::report(&what),
        Command::Reshard(how) => reshard::reshard(&how, json),
        Command::Prove { plan, by, text } => prove::prove(&plan, by, text, json),
        Command::Verify { plan, how } => verify::verify(&plan, how, json),
    }
}

/// Refuses a compiled plan where a model is wanted.
///
/// # Errors
/// `plan`.
fn no_plan(model: &Path) -> Result<()> {
    if !model.join("plan.json").is_file() {
        return Ok(());
    }
    let dir = bare(model);
    let dir = dir.display();
    Err(Diag::new("plan", "this is a compiled plan, and not a model")
        .at(dir.to_string())
        .help(format!("give the model that it was compiled from, or its text: {dir}/model.ir"))
        .help(format!("to see what it is: shardc inspect {dir} --summary")))
}

/// The model's path and all flags: those of `shardc.toml` below those of the command line.
///
/// # Errors
/// `plan` if that is a compiled plan and no model.
fn gather(model: &Path, flags: Flags) -> Result<(PathBuf, Flags)> {
    no_plan(model)?;
    if model.extension().is_some_and(|e| e == "toml") {
        let (path, below) = flags::read_toml(model)?;
        let dir = model.parent().unwrap_or(Path::new("."));
        return Ok((hub::resolved_in(dir, Path::new(&path))?, flags.over(below)));
    }
    Ok((hub::resolved(model)?, flags))
}
