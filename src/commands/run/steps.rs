//! The steps of a run, as the process that leads it takes them: train, show, save, evaluate.

use super::dump::dump;
use super::evaluation::{Evaluation, Sums, added};
use super::feed::Feed;
use super::keep::Keep;
use super::keep::Keeper;
use super::metrics::{Metrics, Step};
use super::{Every, Run, trace};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::func::{Fill, InputRow};
use shardc_ir::plan::Mode;
use shardc_plans::stored::Stored;
use shardc_process::signals;
use shardc_process::terminal::{Progress, Volume, note, talks, warn};
use shardc_runtime::session::{Session, StepBatch, StepResult};
use shardc_train::checkpoint::{Evaluated, RunState};
use shardc_train::cluster::Job;
use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

/// A run, and all that the process that leads it has open.
pub(super) struct Leader<'a> {
    pub how: &'a Run,
    pub stored: &'a Stored,
    pub job: Option<&'a Job>,
    pub run: RunState,
    pub table: Vec<InputRow>,
    pub feed: Feed,
    pub eval: Option<Evaluation>,
    pub trace: Option<trace::Trace>,
    pub metrics: Vec<Metrics>,
    /// Ends before what it saves to is let go.
    pub session: Session,
    pub keeper: Option<Keeper>,
    pub as_json: bool,
    /// It was said that data of an evaluation have no labels.
    pub warned: bool,
    /// The number of an epoch, and rows of data since training began up to its end.
    pub epoch: Option<(u64, u64)>,
}

impl Leader<'_> {
    /// Takes the steps behind those that are done, up to number `steps`; the exit status.
    pub fn steps(mut self, done: usize, steps: usize) -> Result<i32> {
        let s = &self.stored.plan.settings;
        let bar = bar(steps, self.as_json);
        let labels = |r: &InputRow| r.input.fill == Fill::Labels;
        let scores = s.mode == Mode::Train && self.table.iter().any(labels);
        let only = self.how.eval_only;
        let files = [&self.how.save, &self.how.dump, &self.how.trace, &self.how.metrics];
        let keeps = files.iter().any(|to| to.is_some()) || self.how.tensorboard.is_some();
        let mut out = Progress::new(keeps);
        let mut first: Option<StepResult> = None;
        let (first_step, mut at) = (done + 1, done);
        let mut idle = Idle::default();
        let job = self.job;
        let asked = || job.map_or_else(signals::asked, |j| j.control.wished());
        // Where there is no step to take, an evaluation is what somebody wants.
        let alone = done >= steps && self.eval.is_some();
        let first_of_all = alone || done == 0;
        let begun = self.evaluation(done, first_of_all && asked().is_none())?;
        begun.map_or(Ok(()), |(_, line)| out.line(line))?;
        let mut waited = self.waited();
        for step in first_step..=steps {
            if asked().is_some() || waited.is_some() {
                break;
            }
            let columns = self.feed.batch(&self.table, s, step)?;
            let since = Instant::now();
            let observe = step == first_step && self.how.dump.is_some();
            let work = self.work();
            let batch = StepBatch { columns, observe };
            // A step that changes nothing is none of the schedule of the learning rate.
            let lr = self.run.lr.at(step - self.session.scale().skipped);
            let r = self.session.step(&batch, lr, step).map_err(|d| self.of_data(d, step))?;
            bar.suspend(|| idle.add(step, scores, &r));
            if let Some(t) = &mut self.trace {
                t.add(&self.stored.plan, step, &r.timings);
            }
            let took = since.elapsed();
            show_step(&mut out, &bar, step, &r, took, work, self.as_json)?;
            let lr = (s.mode == Mode::Train).then_some(lr);
            let told = Step { number: step, lr, took, work, losses: added(&r) };
            self.metrics.iter_mut().for_each(|m| m.step(&told, &r));
            if step == first_step {
                first = Some(r);
            }
            at = step;
            if self.keeper.is_none() && s.mode == Mode::Train {
                signals::step_unsaved();
            }
            // Threads of this process hear of a signal at once.
            if let Some(signal) =
                job.and_then(|j| j.control.wished()).filter(|_| self.keeper.is_some())
            {
                let name = signals::name(signal);
                bar.suspend(|| {
                    note(format!("{name}: saving after this step; a second one ends at once"))
                });
            }
            let due = self.due(done, step, steps)?;
            if let Some((loss, line)) = self.evaluation(step, due)? {
                bar.suspend(|| out.line(line))?;
                self.counts(step, loss);
            }
            waited = self.waited();
            let is_best = self.run.evaluated.is_some_and(|e| e.best.step == step);
            let wanted = step == steps || waited.is_some();
            if let Some(k) = &mut self.keeper {
                let best = is_best && self.how.keep == Some(Keep::Best);
                if best {
                    k.stays(step);
                }
                let saved =
                    k.after(&mut self.session, (self.stored, &self.run), step, wanted || best)?;
                saved.iter().for_each(|line| bar.suspend(|| note(line)));
            }
        }
        bar.finish_and_clear();
        waited.iter().filter(|_| !only).for_each(note);
        idle.told(at - done).iter().for_each(note);
        if done >= steps && !alone && !only {
            let are = count(done, "step is", "steps are");
            note(format!("nothing to do: {are} done, and --steps is {steps}"));
        }
        let stopped = asked().filter(|_| at < steps);
        self.finish(first.as_ref(), stopped.is_some() && at == done, at)?;
        let traced = self.trace.take().map_or(0, |t| t.write(self.stored));
        signals::save_no_more();
        self.session.finish()?;
        let unwritten = self.metrics.iter().map(Metrics::status).max().unwrap_or(0).max(traced);
        let Some(signal) = stopped else { return Ok(out.status().max(unwritten)) };
        let name = signals::name(signal);
        match &self.keeper {
            Some(k) if at > done => note(format!(
                "interrupted by {name} after step {at} of {steps}, which is saved: {}",
                k.way_on()
            )),
            _ => note(format!(
                "interrupted by {name} before step {first_step}: there is nothing new to save"
            )),
        }
        Ok(signals::status(signal))
    }

    /// The same; of a number that the model does not know, also in which data it was found.
    fn of_data(&self, d: Diag, step: usize) -> Diag {
        let batch = self.how.batch.as_ref().map(|file| format!("--batch {}", file.display()));
        let given = batch.or_else(|| self.how.data.as_ref().map(|data| format!("--data {data}")));
        match given {
            Some(given) if d.code.ends_with("-range") => {
                let d = d.why(format!("it was read in step {step} from {given}"));
                self.feed.renamed(&self.table).into_iter().fold(d, Diag::why)
            }
            _another => d,
        }
    }

    /// How much a step does: tokens, or rows of a model without.
    fn work(&self) -> (usize, &'static str) {
        let s = &self.stored.plan.settings;
        match self.table.iter().any(|r| r.input.seq.is_some()) {
            true => (s.global_batch * s.seq, "tokens/s"),
            false => (s.global_batch, "rows/s"),
        }
    }

    /// Whether there is an evaluation behind a step of a run that begins behind step `done`.
    fn due(&mut self, done: usize, step: usize, steps: usize) -> Result<bool> {
        match self.how.eval_every.unwrap_or_default() {
            _ if self.eval.is_none() => Ok(false),
            Every::Steps(n) => Ok(step as u64 % n == 0),
            Every::Epoch => {
                let batch = self.stored.plan.settings.global_batch;
                let taken = self.run.picks(done).taken(step, batch);
                let before = taken.saturating_sub(batch as u64);
                let (mut epoch, mut end) = self.epoch.unwrap_or((0, 0));
                // Those before the step are over.
                while end <= before {
                    epoch += 1;
                    end = self.feed.rows(&self.table, epoch as f64)?;
                }
                self.epoch = Some((epoch, end));
                Ok(end <= taken || step == steps)
            }
        }
    }

    /// Counts the loss of an evaluation behind a step.
    fn counts(&mut self, step: usize, loss: Option<f64>) {
        let delta = self.how.min_delta.unwrap_or(0.0);
        let and = |loss| Evaluated::and(self.run.evaluated, step, loss, delta);
        self.run.evaluated = loss.map(and).or(self.run.evaluated);
    }

    /// Why there are no more steps, if evaluations have waited for a lower loss as long as is wanted.
    fn waited(&self) -> Option<String> {
        let (e, patience) = self.run.evaluated.zip(self.how.patience)?;
        (e.waited >= patience).then(|| {
            format!(
                "no lower loss in {}: the best was {:.4}, behind step {}",
                count(e.waited as usize, "evaluation", "evaluations"),
                e.best.loss,
                e.best.step
            )
        })
    }

    /// The loss of an evaluation after a step and what is said of it, if it is due and there are data for it.
    fn evaluation(&mut self, step: usize, due: bool) -> Result<Option<(Option<f64>, String)>> {
        let s = &self.stored.plan.settings;
        let Some(e) = self.eval.as_ref().filter(|_| due) else { return Ok(None) };
        let mut all = Sums::default();
        for _ in 0..e.batches {
            let columns = e.batch(&self.table, s)?;
            e.add(&mut all, &self.session.evaluate(&StepBatch { columns, observe: false })?);
        }
        if e.scores() && all.tokens == 0 && !self.warned {
            self.warned = true;
            let what = "no token of the evaluation has a label: its loss says nothing";
            warn(&[no_labels(what.into()).help(LOOK)]);
        }
        let loss = all.mean().map(|x| x as f32);
        self.metrics.iter_mut().for_each(|m| m.evaluation(step, loss));
        if self.how.eval_only {
            return Ok(Some((all.mean(), e.told(step, &all, self.as_json))));
        }
        let line = match self.as_json {
            true => json!({ "step": step, "eval_loss": loss }).to_string(),
            false => format!("step {step:>5}  evaluation loss {:.4}", loss.unwrap_or(f32::NAN)),
        };
        Ok(Some((all.mean(), line)))
    }

    /// Saves, and writes what was asked for: first what is worth most.
    fn finish(&mut self, first: Option<&StepResult>, unchanged: bool, at: usize) -> Result<()> {
        let saved = match &mut self.keeper {
            Some(k) if !unchanged => k.last(&mut self.session, (self.stored, &self.run), at)?,
            _nothing_new => None,
        };
        saved.iter().for_each(note);
        if let (Some(file), Some(first)) = (&self.how.dump, first) {
            dump(file, self.stored, first, &mut self.session)?;
        }
        Ok(())
    }
}

/// Steps of a run in which nothing was learned.
#[derive(Default)]
struct Idle {
    steps: usize,
    /// Those that changed nothing, because gradients of f16 overflowed.
    skipped: usize,
    /// Those whose batch had no label.
    empty: usize,
}

impl Idle {
    /// Counts a step, of a plan that scores labels or does not, and says once what is to be known of such.
    fn add(&mut self, step: usize, scores: bool, r: &StepResult) {
        self.steps += 1;
        if let Some(scale) = r.loss_scale.filter(|_| r.skipped && self.steps == 1) {
            // So a scale is found, and nothing is wrong.
            note(format!(
                "the first steps of f16 are skipped until the scale of the loss fits: it begins at {} and is halved \
                 as gradients overflow (--initial-loss-scale begins lower)",
                f64::from(scale)
            ));
        }
        self.skipped += usize::from(r.skipped);
        if scores && r.tokens == 0 {
            if self.empty == 0 {
                warn(&[unlabelled(step, !added(r).is_empty())]);
            }
            self.empty += 1;
        }
    }

    /// What is said at the end.
    fn told(&self, steps: usize) -> Vec<String> {
        let of = count(steps, "step", "steps");
        let skipped = (self.skipped > 0).then(|| {
            let none = if self.skipped == steps { ": nothing was trained" } else { "" };
            format!("{} of {of} skipped: gradients overflow{none}", self.skipped)
        });
        let empty = (self.empty > 1).then(|| format!("{} of {of} had no label", self.empty));
        skipped.into_iter().chain(empty).collect()
    }
}

/// Data in which nothing has a label.
fn no_labels(what: String) -> Diag {
    Diag::new("no-labels", what).rule("a token is scored if it has a label, which is not negative")
}

const LOOK: &str = "look at the labels of the data: -100 stands for a token that is not scored";

/// A batch in which nothing has a label, of a model that has other losses or not.
fn unlabelled(step: usize, others: bool) -> Diag {
    let (only, why) = match others {
        true => ("only the other losses teach", "the cross-entropy is 0, and not in the loss"),
        false => (
            "there is nothing to learn",
            "the loss is 0; weight decay and the optimizer's moments still change parameters",
        ),
    };
    no_labels(format!("no token of step {step} has a label: {only}")).why(why).help(LOOK)
}

fn bar(steps: usize, as_json: bool) -> ProgressBar {
    let quiet = talks().volume == Volume::Quiet;
    let hidden = as_json || quiet || !std::io::stderr().is_terminal();
    let bar = ProgressBar::with_draw_target(
        Some(steps as u64),
        if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() },
    );
    bar.set_style(style());
    bar
}

/// What the line of progress shows: it is cut where a terminal ends, so that it stays one line.
fn style() -> ProgressStyle {
    let template = "{bar:12} {pos}/{len}  {eta} left  {wide_msg}";
    ProgressStyle::with_template(template).expect("a fixed template")
}

fn show_step(
    out: &mut Progress,
    bar: &ProgressBar,
    step: usize,
    r: &StepResult,
    took: Duration,
    (work, unit): (usize, &str),
    as_json: bool,
) -> Result<()> {
    let ms = took.as_secs_f64() * 1e3;
    let parts: BTreeMap<String, f32> = added(r);
    if as_json {
        let (loss, norm, tokens) = (r.loss, r.grad_norm, r.tokens);
        let mut line =
            json!({ "step": step, "loss": loss, "grad_norm": norm, "tokens": tokens, "ms": ms });
        if !parts.is_empty() {
            line["losses"] = parts.into_iter().collect();
        }
        if let Some(scale) = r.loss_scale {
            (line["loss_scale"], line["skipped"]) = (scale.into(), r.skipped.into());
        }
        return out.line(line);
    }
    let rate = work as f64 / took.as_secs_f64();
    let number = |x: Option<f32>| x.map_or("-".into(), |x| format!("{x:.4}"));
    let found = match r.loss {
        Some(_) => {
            let parts: String = parts.iter().map(|(n, x)| format!("  {n} {x:.4}")).collect();
            format!("loss {}{parts}  grad norm {}", number(r.loss), number(r.grad_norm))
        }
        None => "forward".into(),
    };
    let scaled = match (r.loss_scale, r.skipped) {
        (None, _) => String::new(),
        (Some(x), false) => format!("  loss scale {}", f64::from(x)),
        (Some(x), true) => {
            format!("  loss scale {}: skipped, gradients overflow", f64::from(x))
        }
    };
    let line = format!("step {step:>5}  {found}{scaled}  {rate:.0} {unit}  {ms:.0} ms");
    bar.set_message(format!("loss {}  {rate:.0} {unit}", number(r.loss)));
    bar.inc(1);
    bar.suspend(|| out.line(line))
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::TermLike;
    use std::io;
    use std::sync::{Arc, Mutex};

    /// A terminal of 48 columns, and what was written to it.
    #[derive(Clone, Debug, Default)]
    struct Narrow(Arc<Mutex<String>>);

    impl TermLike for Narrow {
        fn width(&self) -> u16 {
            48
        }
        fn move_cursor_up(&self, n: usize) -> io::Result<()> {
            assert_eq!(n, 0, "the line is several");
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(&format!("{text}\n"))
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            self.write_str("\n")
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn progress_is_one_line_on_a_narrow_terminal() {
        let seen = Narrow::default();
        let target = ProgressDrawTarget::term_like(Box::new(seen.clone()));
        let bar = ProgressBar::with_draw_target(Some(10_000), target);
        bar.set_style(style());
        bar.set_message("loss 11.7654  1234567 tokens/s, which is longer than there is room for");
        bar.inc(9_999);
        bar.tick();
        let text = seen.0.lock().unwrap().clone();
        let longest = text.lines().map(|l| l.trim_end().chars().count()).max();
        assert!(text.contains("/10000") && text.contains("loss 11"), "{text}");
        assert!(longest.is_some_and(|n| n <= 48), "{longest:?}: {text}");
    }
}
