//! `shardc ranks`: saves or restores what the ranks of a program of PyTorch keep. `Step.save` and `Step.load` of the
//! Python package start it: what a checkpoint is, its order and its hashes, only this program knows.

use super::run::{Start, loads};
use crate::commands::saving::place_of;
use crate::torch::{self, Door, SECRET};
use serde_json::{Value as Json, json};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::loss_scale::ScaleState;
use shardc_plans::plan_dir;
use shardc_plans::stored::Stored;
use shardc_process::terminal::{show, warn};
use shardc_runtime::Wanted;
use shardc_train::checkpoint::{LeftOut, OptimResume, Saved, Saves, check_steps};
use shardc_train::lock;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Flags of `ranks`.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub struct Ranks {
    /// Folder that shardc compile wrote
    pub plan: PathBuf,
    /// The plan's hash, as the program has it
    #[arg(long, value_name = "HASH")]
    pub of: String,
    /// Save a checkpoint to this folder
    #[arg(long, value_name = "DIR", required_unless_present = "load")]
    pub save: Option<PathBuf>,
    /// Load a checkpoint: the latest one in a folder, or a specific one
    #[arg(long, value_name = "DIR", conflicts_with = "save")]
    pub load: Option<PathBuf>,
    /// Steps that were done
    #[arg(long, value_name = "N", requires = "save")]
    pub step: Option<usize>,
    /// The scale of the loss and the steps that it skipped, as JSON
    #[arg(long, value_name = "JSON", requires = "save")]
    pub scale: Option<String>,
    /// Number of checkpoints to keep, newest first
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..))]
    pub keep: u64,
    /// HF folder with the weights that adapters were trained beside
    #[arg(long, value_name = "PATH")]
    pub weights: Option<PathBuf>,
    /// Ranks are on other hosts, too
    #[arg(long)]
    pub everywhere: bool,
    /// Seconds until all ranks are connected
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout: u64,
}

/// Runs the command: the first line has the address that ranks connect to, the second what came of it.
///
/// # Errors
/// `plan` if it is another than the program's, `torch`, those of saving and of reading a checkpoint.
pub fn ranks(how: &Ranks) -> Result<i32> {
    let stored = plan_dir::read(&how.plan)?;
    if stored.hash() != how.of {
        return Err(Diag::new("plan", "the program was exported from another plan")
            .at(how.plan.display().to_string())
            .help("give the folder of the program's plan, or export that plan again"));
    }
    let secret = std::env::var(SECRET).unwrap_or_default();
    if secret.len() < 32 {
        return Err(Diag::new("no-secret", format!("{SECRET} has no secret of 32 characters"))
            .help("the Python package starts this command: call Step.save or Step.load"));
    }
    let door = Door::open(secret, stored.hash(), how.everywhere, 0)?;
    match (&how.save, &how.load) {
        (Some(dir), _) => save(how, &stored, &door, dir),
        (None, Some(dir)) => load(how, &stored, &door, dir),
        (None, None) => unreachable!("one of both is required"),
    }
}

/// What the Python package reads.
fn say(what: &Json) {
    show(format!("{what}\n"));
}

/// Says where ranks find this process.
fn listens(door: &Door) -> Result<()> {
    say(&json!({ "port": door.address()?.port() }));
    Ok(())
}

fn timeout(how: &Ranks) -> Duration {
    Duration::from_secs(how.timeout)
}

fn save(how: &Ranks, stored: &Stored, door: &Door, dir: &Path) -> Result<i32> {
    let scale = how.scale.as_deref().map_or(Ok(ScaleState::default()), |text| {
        serde_json::from_str(text).map_err(|e| {
            Diag::new("flag", format!("it is not the scale of a loss: {e}")).at("--scale")
        })
    })?;
    let (step, plan) = (how.step.unwrap_or(0), &stored.plan);
    let place = place_of(dir)?;
    let _lock = lock::of_checkpoints(&place, &how.plan)?;
    check_steps(place.path(), step.saturating_sub(1))?;
    let base = match stored.options.lora.is_some() {
        true => Start::open(how.weights.as_deref(), None, plan)?.base(plan)?,
        false => None,
    };
    let left = LeftOut::of(stored, base)?;
    let keep = usize::try_from(how.keep).unwrap_or(usize::MAX);
    let mut saves = Saves::new(place.path(), keep, None, &left)?;
    listens(door)?;
    let nothing = |_: Wanted, _: &[Range<usize>], _: &mut [f32]| Ok(());
    let mut session = torch::session(plan, door, timeout(how), (&nothing, &|| None))?;
    session.go_on(scale);
    let saved = saves.save(&mut session, step, (stored, None))?;
    session.finish()?;
    say(&json!({ "saved": saved }));
    Ok(0)
}

fn load(how: &Ranks, stored: &Stored, door: &Door, dir: &Path) -> Result<i32> {
    let plan = &stored.plan;
    let mut saved = Saved::open(dir)?;
    let base = how.weights.as_deref().map(|w| Start::weights(w, plan)).transpose()?;
    let base = base.filter(|_| stored.options.lora.is_some());
    saved.check_base(base.as_ref(), plan)?;
    saved.verify(0, 1)?;
    warn(&saved.fit(plan, OptimResume::Strict)?);
    let (step, scale) = (saved.step, saved.scale.resumed(plan.settings.loss_scaling));
    let start = Start::Resumed(Box::new(saved), base);
    let load = loads(plan, &start);
    listens(door)?;
    let session = torch::session(plan, door, timeout(how), (&load, &|| None))?;
    session.finish()?;
    say(&json!({ "step": step, "scale": scale }));
    Ok(0)
}
