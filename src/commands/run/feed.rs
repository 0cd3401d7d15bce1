//! Where the data of a run come from.

use super::Run;
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::func::{Fill, InputRow};
use shardc_ir::plan::Settings;
use shardc_runtime::Columns;
use shardc_train::data::Source as From;
use shardc_train::data::{Data, Order, Picks, Recipe};
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Where the data of a step come from, and which of them it takes. Those of the next step are read while a step is
/// taken, but for examples: their templates are strangers', and may end the process.
pub struct Feed {
    from: Arc<Source>,
    picks: Picks,
    /// Of a step, what is read for it.
    ahead: Mutex<Option<(usize, JoinHandle<Result<Columns>>)>>,
}

enum Source {
    Data(Data),
    /// One batch for all steps.
    Batch(Data),
}

impl Source {
    fn batch(&self, table: &[InputRow], p: &Picks, step: usize, rows: usize) -> Result<Columns> {
        match self {
            Source::Data(d) => d.batch(table, p, step as u32, rows),
            Source::Batch(d) => d.whole(table, (p.seed, step as u32), rows),
        }
    }
}

impl Feed {
    pub fn open(how: &Run, source: &From, table: &[InputRow], picks: Picks) -> Result<Feed> {
        let s = source.settings;
        let fits = |d: Data, spec: &str| {
            d.fit(table, s).map_err(|e| if e.place.is_some() { e } else { e.at(spec) })?;
            Ok(d)
        };
        let from = match (&how.batch, &how.data) {
            (Some(file), _) => {
                let spec = file.display().to_string();
                let d = fits(Data::of_batch(&spec)?, &spec)?;
                d.whole(table, (s.seed, 1), s.global_batch)?;
                Source::Batch(d)
            }
            (None, Some(spec)) => {
                let d = source.open(spec)?;
                if matches!(d, Data::Examples(_)) && picks.order == Order::Random {
                    return Err(Diag::new("flag", "examples are taken once in an epoch")
                        .at("--data-order random")
                        .help("use shuffled or sequential, or leave it out"));
                }
                Source::Data(fits(d, spec)?)
            }
            (None, None) => Source::Data(Data::Random { vocab: s.vocab }),
        };
        Ok(Feed { from: Arc::new(from), picks, ahead: Mutex::default() })
    }

    /// What tells these data from others, as far as it is known without reading all.
    pub fn mark(&self) -> String {
        let (Source::Data(d) | Source::Batch(d)) = &*self.from;
        d.mark()
    }

    /// What is called otherwise in the data than in the model, as sentences.
    pub fn renamed(&self, table: &[InputRow]) -> Vec<String> {
        let (Source::Data(d) | Source::Batch(d)) = &*self.from;
        d.renamed(table)
    }

    /// The input whose labels are made of the tokens, although its model does not move labels.
    pub fn made_labels<'t>(&self, table: &'t [InputRow]) -> Option<&'t InputRow> {
        let (Source::Data(d) | Source::Batch(d)) = &*self.from;
        d.made_labels(table)
    }

    /// What fills the inputs of a step, from 1.
    ///
    /// # Errors
    /// `data` if a file cannot be read.
    pub fn batch(&self, table: &[InputRow], s: &Settings, step: usize) -> Result<Columns> {
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        let columns = match ahead.take().filter(|a| a.0 == step) {
            Some((_, read)) => read.join().unwrap_or_else(|panic| resume_unwind(panic)),
            None => self.from.batch(table, &self.picks, step, s.global_batch),
        }?;
        if !matches!(*self.from, Source::Data(Data::Examples(_))) {
            let (from, picks, rows) = (self.from.clone(), self.picks, s.global_batch);
            let table = table.to_vec();
            let next = move || from.batch(&table, &picks, step + 1, rows);
            // Without a thread they are read when they are needed.
            *ahead = std::thread::Builder::new().spawn(next).ok().map(|read| (step + 1, read));
        }
        Ok(columns)
    }

    /// Rows of so many epochs.
    ///
    /// # Errors
    /// `flag` for data that are drawn, and have none.
    pub fn rows(&self, table: &[InputRow], epochs: f64) -> Result<u64> {
        match (&*self.from, self.picks.order) {
            (Source::Data(Data::Examples(e)), _) => Ok(e.rows_of(&self.picks, epochs)),
            (Source::Data(d), Order::Shuffled | Order::Sequential) => {
                let rows = d.epoch(table, &self.picks)?.unwrap_or(0);
                Ok((rows as f64 * epochs).ceil() as u64)
            }
            _drawn => Err(Diag::new("flag", "data that are drawn at random have no epochs")
                .help("add --data-order shuffled, or count steps: --steps, --eval-every N")),
        }
    }

    /// How examples became rows.
    pub fn recipe(&self) -> Option<Recipe> {
        match &*self.from {
            Source::Data(Data::Examples(e)) => Some(e.recipe()),
            _other => None,
        }
    }

    /// What is told of the data before the first step: of examples all that was counted, and of an epoch, where data are
    /// taken in turn.
    ///
    /// # Errors
    /// `data` if columns do not fill what the model takes.
    pub fn told(&self, s: &Settings, table: &[InputRow]) -> Result<Vec<String>> {
        let d = match (&*self.from, self.picks.order) {
            (Source::Data(Data::Examples(e)), _) => {
                let rows = e.told_rows(&self.picks, Some(s.global_batch));
                return Ok([e.told(), rows].concat());
            }
            (Source::Data(d), Order::Shuffled | Order::Sequential) => d,
            _drawn => return Ok(vec![]),
        };
        let said = |rows| {
            let all = count(rows as usize, "row", "rows");
            let steps = rows as f64 / s.global_batch as f64;
            format!("an epoch has {all}, which is {steps:.1} steps")
        };
        Ok(d.epoch(table, &self.picks)?.map(said).into_iter().collect())
    }

    /// Whether nothing is given.
    pub fn is_random(&self) -> bool {
        matches!(*self.from, Source::Data(Data::Random { .. }))
    }

    /// Inputs that are filled with random numbers because nothing is given for them, beside tokens.
    pub fn unfed<'t>(&self, table: &'t [InputRow]) -> Vec<&'t str> {
        if !self.is_random() {
            return vec![];
        }
        let unfed =
            |r: &&InputRow| r.input.fill.is_data() && r.input.fill != Fill::Mask && !r.of_tokens();
        let read = table.iter().filter(unfed);
        read.map(|r| &*r.name).collect()
    }
}
