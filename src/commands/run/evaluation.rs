//! Data of evaluations: one batch of them, or all rows once.

use crate::data::{Data, Order, Picks};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Fill, InputRow};
use shardc_ir::plan::Settings;
use shardc_runtime::{Columns, Numbers};
use std::cell::Cell;

/// The batch of this step number, which no training step has, is what other data than examples are evaluated on.
const STEP: u32 = u32::MAX;
/// A label that is not scored.
const IGNORED: i32 = -100;

/// Data to evaluate on, and which of their batches comes next: leader and followers take the same ones in turn.
pub struct Evaluation {
    data: Data,
    /// All rows, in order; else nothing, and a batch that is drawn stands for all.
    rows: Option<u64>,
    /// Batches of an evaluation.
    pub batches: u64,
    next: Cell<u64>,
}

/// Sums over the batches of an evaluation.
#[derive(Default)]
pub struct Sums {
    loss: f64,
    weight: f64,
    /// Labels that were scored.
    pub tokens: usize,
    /// Whether there was a loss.
    any: bool,
}

impl Sums {
    /// Counts the loss of a batch, which is a mean over its labels; over its rows where the model has none.
    pub fn add(&mut self, loss: Option<f32>, tokens: usize, labels: bool) {
        let weight = if labels { tokens as f64 } else { 1.0 };
        self.any |= loss.is_some();
        self.loss += f64::from(loss.unwrap_or(0.0)) * weight;
        self.weight += weight;
        self.tokens += tokens;
    }

    /// The mean over all labels; 0 if there are none.
    pub fn mean(&self) -> Option<f64> {
        let mean = if self.weight == 0.0 { 0.0 } else { self.loss / self.weight };
        self.any.then_some(mean)
    }
}

impl Evaluation {
    /// All rows of examples, and if all are wanted also of other data.
    ///
    /// # Errors
    /// `data` for data that have no rows, or whose last batch could not be filled up.
    pub fn open(data: Data, table: &[InputRow], s: &Settings, all: bool) -> Result<Evaluation> {
        let whole = all || matches!(data, Data::Examples(_));
        let rows = match whole {
            true => data.epoch(table, &Evaluation::picks(s))?,
            false => None,
        };
        let batch = s.global_batch.max(1) as u64;
        let labels = table.iter().any(|r| r.input.fill == Fill::Labels);
        if let Some(n) = rows.filter(|n| n % batch != 0 && !labels) {
            let left = n % batch;
            return Err(Diag::new("data", format!("{n} rows are no whole number of batches of {batch}"))
                .rule("rows that fill up the last batch are not scored, which labels say; this model has none")
                .help(format!("leave {left} rows out, or compile with a --global-batch that divides {n}")));
        }
        let batches = rows.map_or(1, |n| n.div_ceil(batch));
        Ok(Evaluation { data, rows, batches, next: Cell::new(0) })
    }

    fn picks(s: &Settings) -> Picks {
        Picks { order: Order::Sequential, seed: s.seed, done: (0, 0) }
    }

    /// What tells the data from others.
    pub fn mark(&self) -> String {
        self.data.mark()
    }

    /// The data.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// The next batch; behind the last comes the first again.
    ///
    /// # Errors
    /// `data` if a file cannot be read.
    pub fn batch(&self, table: &[InputRow], s: &Settings) -> Result<Columns> {
        let Some(rows) = self.rows else {
            return self.data.batch(table, &Picks::random(s.seed), STEP, s.global_batch);
        };
        let at = self.next.get();
        self.next.set((at + 1) % self.batches);
        let (batch, picks) = (s.global_batch, Evaluation::picks(s));
        let mut columns = self.data.batch(table, &picks, at as u32 + 1, batch)?;
        // What fills up the last batch is not scored.
        let there = rows.saturating_sub(at * batch as u64).min(batch as u64) as usize;
        for row in table.iter().filter(|r| r.input.fill == Fill::Labels) {
            if let Some(Numbers::I32(x)) = columns.get_mut(&*row.name) {
                x.iter_mut().skip(there * row.elements()).for_each(|l| *l = IGNORED);
            }
        }
        Ok(columns)
    }
}
