//! What `run --save` does: every so many steps, at the end, and when the run is interrupted.

use super::{Run, parameter};
use crate::commands::saving::{prepare, write};
use shardc_frontends::{Saving, check_target};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files::{self, Place};
use shardc_ir::weights::Weight;
use shardc_plans::adapters;
use shardc_plans::stored::Stored;
use shardc_process::terminal::warn;
use shardc_runtime::Session;
use shardc_train::checkpoint::{self, LeftOut, RunState, Saved, Saves};
use shardc_train::lock::{self, Lock};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Checkpoints that are kept if nobody says.
const KEPT: usize = 2;

/// Which checkpoints stay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keep {
    /// So many, the newest first.
    Newest(usize),
    /// The newest, and the one with the least loss of an evaluation.
    Best,
}

impl Keep {
    /// As it is given.
    ///
    /// # Errors
    /// What it must be.
    pub fn parse(text: &str) -> std::result::Result<Keep, String> {
        let n = || text.parse().ok().filter(|&n| n > 0).map(Keep::Newest);
        let found = if text == "best" { Some(Keep::Best) } else { n() };
        found.ok_or_else(|| "it is a number from 1, or best".into())
    }
}

/// Where and how a run saves.
pub struct Keeper {
    place: Place,
    /// Where the model was saved.
    written: Option<PathBuf>,
    what: What,
    /// The step after which the run begins.
    begun: usize,
    /// The last step that was saved.
    last: Option<usize>,
    lock: Lock,
}

enum What {
    /// The model, at the end.
    Model(Saving),
    /// Checkpoints, every so many steps.
    Steps(Saves, u64),
}

/// Refuses to put a model into a folder of checkpoints: whoever resumes wants more of these.
fn no_checkpoints(dir: &Path) -> Result<()> {
    if Saved::open(dir).is_err() {
        return Ok(());
    }
    let name = dir.display();
    Err(Diag::new("save-target", "checkpoints are here, and --save alone writes a model")
        .at(name.to_string())
        .rule("checkpoints have a folder of their own")
        .help("add --save-every N: the run goes on writing checkpoints here")
        .help(format!("or save the model to a new folder, such as {name}-1")))
}

/// Refuses to put checkpoints into a folder that is a plan or a model.
fn no_other_use(dir: &Path) -> Result<()> {
    let is = [("plan.json", "a plan"), ("config.json", "a model")];
    match is.iter().find(|(file, _)| dir.join(file).exists()) {
        None => Ok(()),
        Some((_, what)) => Err(Diag::new("save-target", format!("this folder is {what}"))
            .at(dir.display().to_string())
            .rule("checkpoints have a folder of their own")
            .help("name a new folder")),
    }
}

impl Keeper {
    /// Finds out whether a run from step `done` on may save to a place. What runs that have died left of
    /// saving there is removed.
    ///
    /// # Errors
    /// `save-target`, `save-locked`, and those of reading the base model.
    pub fn open(
        plan: &Path,
        place: &Place,
        how: &Run,
        (stored, left): (&Stored, &LeftOut),
        (done, best): (usize, Option<usize>),
    ) -> Result<Keeper> {
        let weights = how.weights.as_deref();
        let (what, lock) = match how.save_every {
            None => {
                no_checkpoints(place.path())?;
                check_target(place, how.saving.force)?;
                let lock = lock::of_model(place, plan)?;
                files::sweep(place.path());
                let saving = prepare(&how.saving, weights, stored)?;
                (What::Model(adapters::saving(stored, saving)?), lock)
            }
            Some(n) => {
                no_other_use(place.path())?;
                let lock = lock::of_checkpoints(place, plan)?;
                checkpoint::check_steps(place.path(), done)?;
                // Better now than when it is trained.
                let unread = adapters::unread(stored)?;
                warn(unread.as_slice());
                let (keep, best) = match how.keep {
                    Some(Keep::Best) => (1, best),
                    Some(Keep::Newest(n)) => (n, None),
                    None => (KEPT, None),
                };
                (What::Steps(Saves::new(place.path(), keep, best, left)?, n), lock)
            }
        };
        let place = place.clone();
        Ok(Keeper { place, written: None, what, begun: done, last: None, lock })
    }

    /// The checkpoint of a step, which is written behind it, stays until another one does.
    pub fn stays(&mut self, step: usize) {
        if let What::Steps(saves, _) = &mut self.what {
            saves.best = Some(step);
        }
    }

    /// After a step: a checkpoint if it is time, or if it is wanted, and what to tell of it.
    ///
    /// # Errors
    /// `save`, `save-locked`, and those of the session.
    pub fn after(
        &mut self,
        session: &mut Session,
        (stored, run): (&Stored, &RunState),
        step: usize,
        wanted: bool,
    ) -> Result<Option<String>> {
        let What::Steps(saves, n) = &mut self.what else { return Ok(None) };
        if self.last == Some(step) || !(wanted || step as u64 % *n == 0) {
            return Ok(None);
        }
        self.lock.check()?;
        let since = Instant::now();
        let run = RunState {
            rows: run.picks(self.begun).taken(step, stored.plan.settings.global_batch),
            ..run.clone()
        };
        let saved = saves.save(session, step, (stored, Some(&run)))?;
        self.last = Some(step);
        let (took, bytes) = (since.elapsed().as_secs_f64(), checkpoint::bytes(&saved));
        let (mb, rate) = (bytes as f64 / 1e6, bytes as f64 / 1e6 / took);
        Ok(Some(format!("saved {}: {mb:.0} MB in {took:.1} s, {rate:.0} MB/s", saved.display())))
    }

    /// When no more steps follow: the model, or a checkpoint of the last step if it is not saved yet;
    /// what to tell of it.
    ///
    /// # Errors
    /// Those of saving.
    pub fn last(
        &mut self,
        session: &mut Session,
        (stored, run): (&Stored, &RunState),
        step: usize,
    ) -> Result<Option<String>> {
        let What::Model(saving) = &self.what else {
            return if self.begun == step {
                Ok(None)
            } else {
                self.after(session, (stored, run), step, true)
            };
        };
        self.lock.check()?;
        let weights = adapters::saved(stored)?;
        let get = |w: &Weight| parameter(session, &w.param);
        let dir = write(&self.place, &stored.config, &weights, saving, get)?;
        let line = format!("saved {}", dir.display());
        self.written = Some(dir);
        Ok(Some(line))
    }

    /// How to go on after an interrupt.
    pub fn way_on(&self) -> String {
        let dir = self.written.as_deref().unwrap_or(self.place.path()).display();
        match self.what {
            What::Model(_) => {
                format!("the model is in {dir}; --save-every N makes checkpoints to go on from")
            }
            What::Steps(..) => format!("go on with --resume {dir}"),
        }
    }
}
