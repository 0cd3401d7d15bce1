//! Where the data of a run come from.

use super::Run;
use crate::data::{Data, Order, Picks, short};
use shardc_frontends::{Batch, read_batch};
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::func::{Fill, InputRow};
use shardc_ir::plan::Settings;
use shardc_runtime::{Columns, Numbers};

/// Where the data of a step come from, and which of them it takes.
pub struct Feed {
    from: Source,
    picks: Picks,
}

enum Source {
    Data(Data),
    /// One batch of tokens for all steps.
    Batch(Batch),
    /// One batch of columns for all steps.
    Columns(Data),
}

impl Feed {
    pub fn open(how: &Run, s: &Settings, table: &[InputRow], picks: Picks) -> Result<Feed> {
        let tokens = |r: &&InputRow| r.input.fill.is_data() && !r.of_tokens();
        let columns = table.iter().any(|r| tokens(&r));
        let from = match (&how.batch, &how.data) {
            (Some(file), _) if columns => {
                let spec = file.display().to_string();
                let d = Data::open("--batch", &spec, None, s.vocab)?;
                d.whole(table, (s.seed, 1), s.global_batch)?;
                Source::Columns(d)
            }
            (Some(file), _) => {
                let scored = table.iter().any(|r| r.input.fill == Fill::Labels);
                let b = read_batch(file, scored)?;
                if (b.rows, b.seq) != (s.global_batch, s.seq) {
                    return Err(Diag::new(
                        "batch",
                        format!(
                            "the batch is [{}, {}], the plan takes [{}, {}]",
                            b.rows, b.seq, s.global_batch, s.seq
                        ),
                    )
                    .at(file.display().to_string())
                    .help(format!("compile with --global-batch {} --seq {}", b.rows, b.seq)));
                }
                b.check(s.vocab)?;
                Source::Batch(b)
            }
            (None, Some(spec)) => {
                let d = Data::open("--data", spec, how.tokenizer.as_deref(), s.vocab)?;
                d.check(table).map_err(|e| if e.place.is_some() { e } else { e.at(spec) })?;
                Source::Data(d)
            }
            (None, None) => Source::Data(Data::Random { vocab: s.vocab }),
        };
        Ok(Feed { from, picks })
    }

    /// What tells these data from others, as far as it is known without reading all.
    pub fn mark(&self) -> String {
        match &self.from {
            Source::Data(d) | Source::Columns(d) => d.mark(),
            Source::Batch(b) => {
                let (ids, targets) = (&b.input_ids, b.targets());
                let both = [bytemuck::cast_slice(ids), bytemuck::cast_slice(&targets)].concat();
                let hash = short(&both);
                format!("of {}, {} tokens, hash {hash}", count(b.rows, "row", "rows"), ids.len())
            }
        }
    }

    /// What fills the inputs of a step, from 1.
    ///
    /// # Errors
    /// `data` if a file cannot be read.
    pub fn batch(&self, table: &[InputRow], s: &Settings, step: usize) -> Result<Columns> {
        match &self.from {
            Source::Data(d) => d.batch(table, &self.picks, step as u32, s.global_batch),
            Source::Columns(d) => d.whole(table, (self.picks.seed, step as u32), s.global_batch),
            Source::Batch(b) => {
                let read = table.iter().filter(|r| r.input.fill.is_data());
                let one = |r: &InputRow| match r.input.fill {
                    Fill::Labels => Numbers::I32(b.targets()),
                    _tokens => Numbers::I32(b.input_ids.clone()),
                };
                Ok(read.map(|r| (r.name.to_string(), one(r))).collect())
            }
        }
    }

    /// What is told of epochs, where data are taken in turn.
    ///
    /// # Errors
    /// `data` if columns do not fill what the model takes.
    pub fn epoch(&self, s: &Settings, table: &[InputRow]) -> Result<Option<String>> {
        let (Order::Shuffled | Order::Sequential, Source::Data(d)) = (self.picks.order, &self.from)
        else {
            return Ok(None);
        };
        let steps = |rows| rows as f64 / s.global_batch as f64;
        let said = |rows| {
            let all = count(rows as usize, "row", "rows");
            format!("an epoch has {all}, which is {:.1} steps", steps(rows))
        };
        Ok(d.epoch(table)?.map(said))
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
