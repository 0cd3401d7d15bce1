//! What `run --save` does: every so many steps, at the end, and when the run is interrupted.

use super::{Run, parameter};
use crate::checkpoint::{self, Saves};
use crate::commands::saving::prepare;
use crate::lock::{self, Lock};
use crate::plan_dir::Stored;
use shardc_frontends::{Saving, check_target, save};
use shardc_ir::diag::Result;
use shardc_runtime::Session;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Where and how a run saves.
pub struct Keeper {
    dir: PathBuf,
    what: What,
    /// The step after which the run begins.
    begun: usize,
    /// The last step that was saved.
    last: Option<usize>,
    _lock: Lock,
}

enum What {
    /// The model, at the end.
    Model(Saving),
    /// Checkpoints, every so many steps.
    Steps(Saves, u64),
}

impl Keeper {
    /// Finds out whether a run from step `done` on may save where it is to; `None` if it does not save.
    ///
    /// # Errors
    /// `save-target`, `save-locked`, and those of reading the base model.
    pub fn open(plan: &Path, how: &Run, stored: &Stored, done: usize) -> Result<Option<Keeper>> {
        let Some(dir) = how.save.clone() else { return Ok(None) };
        let weights = how.weights.as_deref();
        let (what, lock) = match how.save_every {
            None => {
                check_target(&dir)?;
                let lock = lock::of_model(&dir, plan)?;
                (What::Model(prepare(&how.saving, weights, stored)?), lock)
            }
            Some(n) => {
                let lock = lock::of_checkpoints(&dir, plan)?;
                checkpoint::check_steps(&dir, done)?;
                (What::Steps(Saves::new(&dir, how.keep)?, n), lock)
            }
        };
        Ok(Some(Keeper { dir, what, begun: done, last: None, _lock: lock }))
    }

    /// After a step: a checkpoint if it is time, and what to tell of it.
    ///
    /// # Errors
    /// `save`, and those of the session.
    pub fn after(
        &mut self,
        session: &mut Session,
        stored: &Stored,
        step: usize,
        is_last: bool,
    ) -> Result<Option<String>> {
        let What::Steps(saves, n) = &mut self.what else { return Ok(None) };
        if self.last == Some(step) || !(is_last || step as u64 % *n == 0) {
            return Ok(None);
        }
        let since = Instant::now();
        let saved = saves.save(session, step, stored)?;
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
        stored: &Stored,
        step: usize,
    ) -> Result<Option<String>> {
        let What::Model(saving) = &self.what else {
            return if self.begun == step {
                Ok(None)
            } else {
                self.after(session, stored, step, true)
            };
        };
        let (config, weights) = (&stored.config, &stored.plan.weights);
        save(&self.dir, config, weights, saving, |w| parameter(session, &w.param))?;
        Ok(Some(format!("saved {}", self.dir.display())))
    }

    /// How to go on after an interrupt.
    pub fn way_on(&self) -> String {
        let dir = self.dir.display();
        match self.what {
            What::Model(_) => {
                format!("the model is in {dir}; --save-every N makes checkpoints to go on from")
            }
            What::Steps(..) => format!("go on with --resume {dir}"),
        }
    }
}
