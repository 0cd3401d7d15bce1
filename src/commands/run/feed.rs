//! Where the data of a run come from.

use super::Run;
use crate::data::Data;
use shardc_frontends::{Batch, read_batch};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Fill, InputRow};
use shardc_ir::plan::Settings;
use shardc_runtime::{Columns, Numbers};

/// Where the data of a step come from.
pub enum Feed {
    Data(Data),
    /// One batch of tokens for all steps.
    Batch(Batch),
    /// One batch of columns for all steps.
    Columns(Data),
}

impl Feed {
    pub fn open(how: &Run, s: &Settings, table: &[InputRow]) -> Result<Feed> {
        let tokens = |r: &&InputRow| r.input.fill.is_data() && !r.of_tokens();
        let columns = table.iter().any(|r| tokens(&r));
        Ok(match (&how.batch, &how.data) {
            (Some(file), _) if columns => {
                let spec = file.display().to_string();
                let d = Data::open("--batch", &spec, None, s.vocab)?;
                d.whole(table, (s.seed, 1), s.global_batch)?;
                Feed::Columns(d)
            }
            (Some(file), _) => {
                let b = read_batch(file)?;
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
                Feed::Batch(b)
            }
            (None, Some(spec)) => {
                let d = Data::open("--data", spec, how.tokenizer.as_deref(), s.vocab)?;
                d.check(table).map_err(|e| if e.place.is_some() { e } else { e.at(spec) })?;
                Feed::Data(d)
            }
            (None, None) => Feed::Data(Data::Random { vocab: s.vocab }),
        })
    }

    /// What tells these data from others, as far as it is known without reading all.
    pub fn mark(&self) -> String {
        match self {
            Feed::Data(d) | Feed::Columns(d) => d.mark(),
            Feed::Batch(b) => format!("of {} rows, {} tokens", b.rows, b.input_ids.len()),
        }
    }

    /// What fills the inputs of a step, from 1.
    ///
    /// # Errors
    /// `data` if a file cannot be read.
    pub fn batch(&self, table: &[InputRow], s: &Settings, step: usize) -> Result<Columns> {
        match self {
            Feed::Data(d) => d.batch(table, s.seed, step as u32, s.global_batch),
            Feed::Columns(d) => d.whole(table, (s.seed, step as u32), s.global_batch),
            Feed::Batch(b) => {
                let read = table.iter().filter(|r| r.input.fill.is_data());
                let one = |r: &InputRow| match r.input.fill {
                    Fill::Labels => Numbers::I32(b.targets()),
                    _tokens => Numbers::I32(b.input_ids.clone()),
                };
                Ok(read.map(|r| (r.name.to_string(), one(r))).collect())
            }
        }
    }

    /// Inputs that are filled with random numbers because nothing is given for them, beside tokens.
    pub fn unfed<'t>(&self, table: &'t [InputRow]) -> Vec<&'t str> {
        let Feed::Data(Data::Random { .. }) = self else { return vec![] };
        let read = table.iter().filter(|r| r.input.fill.is_data() && !r.of_tokens());
        read.map(|r| &*r.name).collect()
    }
}
