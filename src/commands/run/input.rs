//! What a run opens of its data before the first step, what it tells of them, and how many steps follow from them.

use super::evaluation::Evaluation;
use super::feed::Feed;
use super::{Run, Start, settings, words};
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::func::InputRow;
use shardc_ir::plan::Mode;
use shardc_plans::stored::Stored;
use shardc_process::terminal::{note, warn};
use shardc_train::checkpoint::{RATE, RunState};
use shardc_train::cluster::Job;
use shardc_train::data::{Source, is_text};
use std::path::PathBuf;

/// Opens the data of a run that begins behind step `done`, and those of its evaluations; with the number of its last step.
/// Processes of a job compare what they opened.
///
/// # Errors
/// Those of data; `flag`, `no-evaluation`, `resume`, `plans-differ`.
pub(super) fn opened(
    how: &Run,
    stored: &Stored,
    (run, start, done): (&mut RunState, &Start, usize),
    table: &[InputRow],
    job: Option<&Job>,
) -> Result<(Feed, Option<Evaluation>, usize)> {
    let s = &stored.plan.settings;
    let leads = job.is_none_or(|j| j.control.leads());
    let reading = how.reading.dated(run.recipe.as_ref().map(|r| r.date));
    let model = stored.origin.iter().map(PathBuf::from);
    let source = |flag| Source {
        flag,
        tokenizer: how.tokenizer.as_deref(),
        folders: how.weights.iter().cloned().chain(model.clone()).collect(),
        settings: s,
        reading: &reading,
    };
    if how.eval_only && s.mode == Mode::Infer {
        return Err(Diag::new("no-evaluation", "the plan was compiled without a loss")
            .at("--eval-only")
            .help("compile it with --mode train"));
    }
    let feed = Feed::open(how, &source("--data"), table, run.picks(done))?;
    let batch = s.global_batch.max(1) as u64;
    let mut filled = 0;
    let steps = match (how.epochs, how.eval_only) {
        (_, true) => done,
        (None, _) => how.steps.unwrap_or(if s.mode == Mode::Infer { 1 } else { 10 }),
        (Some(n), _) => {
            let left = feed.rows(table, n)?.saturating_sub(run.rows);
            filled = left.next_multiple_of(batch) - left;
            done + usize::try_from(left.div_ceil(batch)).unwrap_or(usize::MAX)
        }
    };
    if let Some(n) = how.epochs {
        run.lr = how.given.over(run.lr, steps)?;
        if leads {
            let all = count(steps - done, "step", "steps");
            note(format!("--epochs {n}: {all}, {} {}", RATE, run.lr));
        }
    }
    if leads {
        words::random(stored, start, (&feed, steps > done), table).iter().for_each(note);
        let saves = how.save.is_some() || steps <= done;
        words::unsaved(start, saves).iter().for_each(note);
    }
    if let Some(job) = job {
        job.same("flags", &how.of_all(steps))?;
        job.same("the data", &feed.mark())?;
    }
    let other = settings::takes(run, &feed, start, how.data_restart)?;
    if leads && !how.eval_only {
        warn(&other.into_iter().map(settings::otherwise).collect::<Vec<_>>());
        if how.data.as_deref().is_some_and(is_text) {
            note(format!("text {}", feed.mark()));
        }
        feed.told(s, table)?.iter().for_each(note);
        if filled > 0 {
            let rows = count(filled as usize, "row that follows fills", "rows that follow fill");
            note(format!("{rows} the last batch of --epochs"));
        }
    }
    let open = |d| {
        let data = source("--eval-data").open(d)?;
        data.fit(table, s)?;
        Evaluation::open(data, table, &stored.plan, how.eval_only)
    };
    let eval = how.eval_data.as_deref().map(open).transpose()?;
    let of_steps = || feed.made_labels(table).filter(|_| steps > done);
    let made = of_steps().or_else(|| eval.as_ref()?.data().made_labels(table)).filter(|_| leads);
    made.map(words::made_labels).iter().for_each(note);
    if let (Some(job), Some(d)) = (job, &eval) {
        job.same("the evaluation data", &d.mark())?;
    }
    Ok((feed, eval, steps))
}
