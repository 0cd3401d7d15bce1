//! Where the data of a run come from.

use super::Run;
use crate::data::{Data, Order, Picks, Recipe, Source as From};
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::func::{Fill, InputRow};
use shardc_ir::plan::Settings;
use shardc_runtime::Columns;

/// Where the data of a step come from, and which of them it takes.
pub struct Feed {
    from: Source,
    picks: Picks,
}

enum Source {
    Data(Data),
    /// One batch for all steps.
    Batch(Data),
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
        Ok(Feed { from, picks })
    }

    /// What tells these data from others, as far as it is known without reading all.
    pub fn mark(&self) -> String {
        let (Source::Data(d) | Source::Batch(d)) = &self.from;
        d.mark()
    }

    /// What is called otherwise in the data than in the model, as sentences.
    pub fn renamed(&self, table: &[InputRow]) -> Vec<String> {
        let (Source::Data(d) | Source::Batch(d)) = &self.from;
        d.renamed(table)
    }

    /// The input whose labels are made of the tokens, although its model does not move labels.
    pub fn made_labels<'t>(&self, table: &'t [InputRow]) -> Option<&'t InputRow> {
        let (Source::Data(d) | Source::Batch(d)) = &self.from;
        d.made_labels(table)
    }

    /// What fills the inputs of a step, from 1.
    ///
    /// # Errors
    /// `data` if a file cannot be read.
    pub fn batch(&self, table: &[InputRow], s: &Settings, step: usize) -> Result<Columns> {
        match &self.from {
            Source::Data(d) => d.batch(table, &self.picks, step as u32, s.global_batch),
            Source::Batch(d) => d.whole(table, (self.picks.seed, step as u32), s.global_batch),
        }
    }

    /// Rows of so many epochs.
    ///
    /// # Errors
    /// `flag` for data that are drawn, and have none.
    pub fn rows(&self, table: &[InputRow], epochs: f64) -> Result<u64> {
        match (&self.from, self.picks.order) {
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
        match &self.from {
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
        let d = match (&self.from, self.picks.order) {
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
        matches!(self.from, Source::Data(Data::Random { .. }))
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
