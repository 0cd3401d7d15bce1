//! What a run trains with where that is not as its plan says: the learning rate, and the order of data. The
//! plan stays as it is; checkpoints say what it was.

use super::feed::Feed;
use super::{Run, Start};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::plan::{Fall, LrSchedule, Mode};
use shardc_passes::options::Options;
use shardc_plans::flags::spec::keys;
use shardc_plans::flags::{Rate, ends};
use shardc_plans::stored::Stored;
use shardc_process::terminal::{note, warn};
use shardc_train::checkpoint::{RATE, RunState};
use shardc_train::cluster::Job;
use shardc_train::data::{Order, Recipe, default_order};
use toml::{Table, Value};

/// Flags of `run` that go before what the plan says.
#[derive(clap::Args, Clone, Debug, Default)]
#[group(skip)]
pub struct Given {
    #[command(flatten)]
    pub rate: Rate,
    /// Seed of the data order, and of random data [default: the plan's]
    #[arg(long, value_name = "N", conflicts_with = "batch")]
    pub data_seed: Option<u64>,
    /// Order of data rows: random (random offsets), shuffled (each row once per epoch), or sequential [default:
    /// shuffled for examples and columns, random for the rest]
    #[arg(long, value_name = "ORDER", hide_possible_values = true, requires = "data")]
    pub data_order: Option<Order>,
    /// Train at the learning rate, in the order and with the seed of data of the plan, and not of the checkpoint
    #[arg(long, requires = "resume")]
    pub resume_fresh: bool,
}

impl Given {
    /// Refuses flags of training where nothing is trained, and those of a cosine where there is none.
    fn check(&self, mode: Mode, lr: LrSchedule) -> Result<()> {
        let rate = self.rate.words();
        if let (Mode::Infer, Some(first)) = (mode, rate.first()) {
            return Err(Diag::new("flag", "the plan does not train")
                .at(first.clone())
                .rule("a learning rate is that of a plan with an optimizer")
                .help("leave it out, or compile without --mode infer"));
        }
        let moves = |word: &&String| {
            let flags = ["--warmup", "--total-steps", "--decay-steps", "--min-lr"];
            flags.iter().any(|flag| word.starts_with(flag))
        };
        match (lr, rate.iter().find(moves)) {
            (LrSchedule::Constant { .. }, Some(word)) => Err(Diag::new(
                "flag",
                "the learning rate is constant",
            )
            .at(word.clone())
            .rule(
                "--warmup, --total-steps, --decay-steps and --min-lr belong to --lr-schedule \
                 warmup-cosine and warmup-linear",
            )
            .help("add --lr-schedule warmup-linear, or leave it out")),
            _ => Ok(()),
        }
    }

    /// The learning rate of so many steps, where nobody says how many there are.
    ///
    /// # Errors
    /// `flag` if they are too few.
    pub fn over(&self, lr: LrSchedule, steps: usize) -> Result<LrSchedule> {
        let given = self.rate.words().iter().any(|w| w.starts_with("--total-steps"));
        match lr.fall() {
            Some(fall) if !given => {
                let fall = Fall { total: steps, ..fall };
                ends(fall, &format!("the {steps} steps of --epochs"))?;
                Ok(lr.with(fall))
            }
            _other => Ok(lr),
        }
    }

    /// What the run begins with, but for its data: what flags say, or the checkpoint that it goes on from, or the plan,
    /// in this order. What is not as the plan or the checkpoint has it is told by the process that leads, where something is
    /// trained.
    ///
    /// # Errors
    /// `flag`, and `plans-differ` of processes with other flags.
    pub fn begin(
        &self,
        stored: &Stored,
        start: &Start,
        how: &Run,
        (job, trains): (Option<&Job>, bool),
    ) -> Result<RunState> {
        let s = &stored.plan.settings;
        let (saved, done) = match start {
            Start::Resumed(saved, _) => (saved.run.as_ref(), saved.step),
            _new => (None, 0),
        };
        let rows = (done as u64).saturating_mul(s.global_batch as u64);
        let plan = RunState {
            lr: s.lr,
            order: default_order(how.data.as_deref()),
            seed: s.seed,
            rows,
            data: None,
            recipe: None,
            evaluated: None,
        };
        let was = saved.filter(|_| !self.resume_fresh).unwrap_or(&plan);
        let lr = self.rate.over(was.lr)?;
        self.check(s.mode, lr)?;
        let run = RunState {
            lr,
            order: self.data_order.unwrap_or(was.order),
            seed: self.data_seed.unwrap_or(was.seed),
            rows: saved.map_or(rows, |s| s.rows),
            data: None,
            recipe: saved.and_then(|s| s.recipe.clone()),
            evaluated: saved.and_then(|s| s.evaluated),
        };
        let (order, seed) = (run.order, run.seed);
        if let Some(job) = job {
            job.same("the learning rate", &lr.to_string())?;
            job.same("the order of data", &format!("{}, seed {seed}", order.name()))?;
        }
        if trains && job.is_none_or(|j| j.control.leads()) {
            let when = match saved {
                None => "in the plan",
                Some(_) => "in the plan; a run goes on as its checkpoint or its flags say",
            };
            // What the rate is at the end of epochs is told when it is known how many steps they are.
            let now = |line: &&String| how.epochs.is_none() || !line.starts_with(RATE);
            run.differs(&plan, when).iter().filter(now).for_each(note);
            let mut other: Vec<String> =
                saved.iter().flat_map(|was| run.differs(was, WRITTEN)).collect();
            if let Start::Resumed(saved, _) = start {
                // What cannot be read is not needed to go on.
                let then = saved.options().ok();
                other.extend(then.iter().flat_map(|then| replaced(&stored.options, then)));
            }
            warn(&other.into_iter().map(otherwise).collect::<Vec<_>>());
        }
        Ok(run)
    }
}

/// A run goes on from a checkpoint with something that the run that saved it had not.
pub(super) fn otherwise(what: String) -> Diag {
    Diag::new("resume", format!("it goes on with {what}"))
        .help("resume with the plan, the data and the flags of the run that saved, to train as it would have")
}

/// When a checkpoint had what a run has not.
const WRITTEN: &str = "when the checkpoint was written";

/// What the plan asks for otherwise than that of a checkpoint: a line for each.
fn replaced(plan: &Options, then: &Options) -> Vec<String> {
    let table = |o: &Options| Table::try_from(o).expect("options are plain data");
    let (plan, then) = (table(plan), table(then));
    let text = |value: Option<&Value>| match value {
        None => "none".into(),
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
    };
    // The learning rate is told by itself.
    let all = keys().filter(|key| key.trained).map(|key| key.name);
    let other = all.filter(|&key| plan.get(key) != then.get(key));
    other
        .map(|key| {
            let (now, was) = (text(plan.get(key)), text(then.get(key)));
            format!("{} {now}, the plan's ({was} {WRITTEN})", key.replace('_', " "))
        })
        .collect()
}

/// These data from now on; what to tell where a checkpoint's run had others. With `restart` they are taken from
/// their beginning.
///
/// # Errors
/// `resume` for examples of which the number of a row means another one.
pub(super) fn takes(
    run: &mut RunState,
    feed: &Feed,
    start: &Start,
    restart: bool,
) -> Result<Vec<String>> {
    let (now, recipe) = (feed.mark(), feed.recipe());
    if let (Some(then), Some(own)) = (&run.recipe, &recipe) {
        let other = own.differs(then);
        let said =
            |(what, now, then): &(&str, String, String)| format!("{what} {now} ({then} {WRITTEN})");
        let all: Vec<String> = other.iter().map(said).collect();
        let rows = other.iter().any(|(what, ..)| Recipe::ROWS.contains(what));
        if rows && !restart && run.rows > 0 {
            let d =
                Diag::new("resume", "rows of these data are others than those of the checkpoint")
                    .rule("a run goes on behind the last row that was taken")
                    .help("give the data and the flags of the run that saved")
                    .help("or take the data from their beginning: --data-restart");
            return Err(all.into_iter().fold(d, Diag::why));
        }
        (run.data, run.recipe) = (Some(now), recipe);
        return Ok(all);
    }
    run.recipe = recipe;
    let said = match start {
        Start::Resumed(saved, _) => {
            let then = saved.run.as_ref().and_then(|run| run.data.as_ref());
            then.filter(|then| **then != now).map(|then| format!("data {now} ({then} {WRITTEN})"))
        }
        _new => None,
    };
    run.data = Some(now);
    Ok(said.into_iter().collect())
}
