//! `run --metrics` and `--tensorboard`: what every step came to, in a file that grows with the run: an object a
//! line, or an event.

use super::events;
use serde_json::{Value as Json, json};
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::files::make::{self, Folder};
use shardc_ir::files::{self, FileFormat, Growing, Place};
use shardc_process::memory::most_memory;
use shardc_process::terminal::{fail, json_line, note, warn};
use shardc_runtime::session::StepResult;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What `--metrics` writes.
pub(super) const METRICS: FileFormat = FileFormat {
    name: "a file of metrics",
    is: |begin| begin.starts_with(b"{\"$schema\":\"shardc/metrics/"),
};

/// Most bytes of a file that a run goes on with.
const MOST: u64 = 1 << 30;

/// The file, open.
pub(super) struct Metrics {
    path: PathBuf,
    file: File,
    /// Events in place of lines.
    events: bool,
    /// Why nothing more is written.
    lost: Option<Diag>,
}

/// What a step came to, beside its result.
pub(super) struct Step {
    pub number: usize,
    /// Of a training.
    pub lr: Option<f64>,
    pub took: Duration,
    /// Tokens, or rows, and the word for so many in a second.
    pub work: (usize, &'static str),
    pub losses: BTreeMap<String, f32>,
}

impl Metrics {
    /// Begins the file, or goes on behind the lines of the steps that are done; says what it replaces.
    ///
    /// # Errors
    /// `file` and `output`, as [`files::replace`].
    pub fn open(path: &Path, done: usize) -> Result<Metrics> {
        METRICS.check(path)?;
        let text = match (path.exists(), done) {
            (false, _) => String::new(),
            (true, 0) => files::read_text(path, MOST).unwrap_or_default(),
            (true, _) => files::read_text(path, MOST)?,
        };
        let step = |line: &str| serde_json::from_str::<Json>(line).ok()?["step"].as_u64();
        let kept = |line: &&str| step(line).is_some_and(|s| s <= done as u64);
        let mut file = Growing::new(path, &METRICS)?;
        let mut kept_lines = text.lines().filter(kept);
        kept_lines.try_for_each(|line| file.write(format!("{line}\n").as_bytes()))?;
        let file = file.open()?;
        let lost = text.lines().filter(|line| !kept(line)).count();
        if lost > 0 {
            let (lines, at) = (count(lost, "line", "lines"), path.display());
            let behind = if done > 0 { format!(" of steps behind {done}") } else { String::new() };
            note(format!("replaced {lines}{behind} of metrics that were in {at}"));
        }
        Ok(Metrics { path: path.to_path_buf(), file, events: false, lost: None })
    }

    /// Begins a file of events in a folder, which is made. Those of earlier runs there stay.
    ///
    /// # Errors
    /// `file` if it cannot be written.
    pub fn events(dir: &Path, done: usize) -> Result<Metrics> {
        let since = now();
        let name =
            format!("events.out.tfevents.{}.{}", since as u64, shardc_train::cluster::host());
        let pid = std::process::id();
        let (path, name) = (dir.join(format!("{name}.{pid}")), format!("{name}.{pid}"));
        let fails = |e| files::io_error("cannot write the events", &path, &e);
        let folder = Folder::at(Place::of(dir)?.path()).map_err(fails)?;
        let mut file = folder.file(name).map_err(fails)?;
        make::appends(&file).map_err(fails)?;
        file.write_all(&events::begin(since, done)).map_err(fails)?;
        Ok(Metrics { path: path.clone(), file, events: true, lost: None })
    }

    /// Adds a step.
    pub fn step(&mut self, s: &Step, r: &StepResult) {
        let seconds = s.took.as_secs_f64();
        let mut line = json!({
            "step": s.number, "loss": r.loss, "lr": s.lr, "grad_norm": r.grad_norm,
            "tokens": r.tokens, "ms": seconds * 1e3, "memory_bytes": most_memory(),
        });
        line[s.work.1.replace('/', "_per_").replace("_per_s", "_per_second")] =
            json!(s.work.0 as f64 / seconds);
        if !s.losses.is_empty() {
            line["losses"] = json!(s.losses);
        }
        if let Some(scale) = r.loss_scale {
            (line["loss_scale"], line["skipped"]) = (scale.into(), r.skipped.into());
        }
        self.line(&line);
    }

    /// Adds an evaluation.
    pub fn evaluation(&mut self, step: usize, loss: Option<f32>) {
        self.line(&json!({ "step": step, "eval_loss": loss }));
    }

    /// Training goes on where the file cannot.
    fn line(&mut self, line: &Json) {
        if self.lost.is_some() {
            return;
        }
        let bytes = match self.events {
            true => events::scalars(now(), line),
            false => json_line("metrics", line.clone()).into_bytes(),
        };
        if let Err(e) = self.file.write_all(&bytes) {
            let d = files::io_error("cannot write the metrics", &self.path, &e);
            warn(&[d.clone().why("training goes on without them")]);
            self.lost = Some(d);
        }
    }

    /// The exit status of a training that has done everything else.
    pub fn status(&self) -> i32 {
        self.lost.as_ref().map_or(0, fail)
    }
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}
