//! Data of evaluations: one batch of them, or all rows once.

use serde_json::{Value as Json, json};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Fill, InputRow, RoleKind, trains_alone};
use shardc_ir::plan::{Plan, Settings};
use shardc_runtime::session::StepResult;
use shardc_runtime::{Columns, Numbers, complete};
use shardc_train::data::{Data, Order, Picks, number};
use std::cell::Cell;
use std::collections::BTreeMap;

/// The batch of this step number, which no training step has, is what other data than examples are evaluated on.
const STEP: u32 = u32::MAX;
/// A label that is not scored.
const IGNORED: i32 = -100;

/// The name of the loss that is a mean over labels, where there are labels.
const MAIN: &str = "loss";

/// Data to evaluate on, and which of their batches comes next: leader and followers take the same ones in turn.
pub struct Evaluation {
    data: Data,
    /// All rows, in order; else nothing, and a batch that is drawn stands for all.
    rows: Option<u64>,
    /// Batches of an evaluation.
    pub batches: u64,
    next: Cell<u64>,
    /// Of several batches how many labels of all rows are each class, by the inputs that have such counts.
    by_class: BTreeMap<String, Vec<f64>>,
    counted: Counted,
    /// Labels weigh by their classes.
    weighs: bool,
}

/// Of what a loss is the mean.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Counted {
    /// Tokens with labels, which are tokens.
    Tokens,
    /// Labels that are something else, or that weigh by their classes: how many are scored the loss alone knows.
    Labels {
        tokens: bool,
    },
    Rows,
}

impl Counted {
    fn of(table: &[InputRow], s: &Settings) -> Counted {
        let weighs = table.iter().any(|r| r.input.fill == Fill::Histogram);
        match table.iter().find(|r| r.input.fill == Fill::Labels) {
            None => Counted::Rows,
            Some(r) => match r.of_tokens() && r.bound(s.vocab) >= s.vocab {
                true if !weighs => Counted::Tokens,
                tokens => Counted::Labels { tokens },
            },
        }
    }
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
    /// The mean over all labels; 0 if there are none.
    pub fn mean(&self) -> Option<f64> {
        let mean = if self.weight == 0.0 { 0.0 } else { self.loss / self.weight };
        self.any.then_some(mean)
    }
}

/// The losses that a step shows by name, which are added to the main one.
pub fn added(r: &StepResult) -> BTreeMap<String, f32> {
    let means = r.outputs.iter().filter(|x| x.0.kind == RoleKind::Mean);
    means.filter_map(|(role, a)| Some((role.name.to_string(), *a.data.first()?))).collect()
}

impl Evaluation {
    /// All rows of examples, and if all are wanted also of other data.
    ///
    /// # Errors
    /// `data` for data that have no rows, whose last batch could not be filled up, or of several batches whose losses are
    /// not that of all rows.
    pub fn open(data: Data, table: &[InputRow], plan: &Plan, all: bool) -> Result<Evaluation> {
        let s = &plan.settings;
        let whole = all || matches!(data, Data::Examples(_));
        let rows = match whole {
            true => data.epoch(table, &Evaluation::picks(s))?,
            false => None,
        };
        let batch = s.global_batch.max(1) as u64;
        let counted = Counted::of(table, s);
        if let Some(n) = rows.filter(|n| n % batch != 0 && counted == Counted::Rows) {
            let left = n % batch;
            return Err(Diag::new("data", format!("{n} rows are no whole number of batches of {batch}"))
                .rule("rows that fill up the last batch are not scored, which labels say; this model has none")
                .help(format!("leave {left} rows out, or compile with a --global-batch that divides {n}")));
        }
        let ports = || plan.module.funcs.iter().flat_map(|f| &f.results);
        let sums = || ports().filter_map(|p| p.role.as_ref()).filter(|r| r.kind == RoleKind::Sum);
        let main = sums().any(|r| &*r.name == MAIN);
        let batches = rows.map_or(1, |n| n.div_ceil(batch));
        if let Some(other) =
            sums().next().filter(|_| batches > 1 && !main && counted != Counted::Rows)
        {
            let n = rows.unwrap_or(0);
            return Err(Diag::new("data", format!("`{}` of {n} rows is not that of {batches} batches of {batch}", other.name))
                .rule("a mean over labels is that of all rows; this loss is made otherwise, within a batch")
                .help(format!("compile with --global-batch {n}, or give {batch} rows")));
        }
        let classes: Vec<&InputRow> =
            table.iter().filter(|r| r.input.fill == Fill::Histogram).collect();
        let (next, weighs) = (Cell::new(0), !classes.is_empty());
        let mut e =
            Evaluation { data, rows, batches, next, by_class: BTreeMap::new(), counted, weighs };
        if batches > 1 && !classes.is_empty() {
            let mut by_class: BTreeMap<String, Vec<f64>> = BTreeMap::new();
            for at in 0..batches {
                let own = by_classes(&classes, table, s, &e.rows_of(at, table, s)?);
                for (name, own) in own {
                    let all = by_class.entry(name).or_insert_with(|| vec![0.0; own.len()]);
                    all.iter_mut().zip(own).for_each(|(all, x)| *all += x);
                }
            }
            e.by_class = by_class;
        }
        Ok(e)
    }

    /// Counts a batch without the losses that are added for training alone. The loss is a mean over its labels; over its rows
    /// where the model has none.
    pub fn add(&self, all: &mut Sums, r: &StepResult) {
        let others = added(r).into_iter().filter(|x| trains_alone(&x.0));
        let others: f64 = others.map(|x| f64::from(x.1)).sum();
        let weight = if self.counted == Counted::Rows { 1.0 } else { r.tokens as f64 };
        all.any |= r.loss.is_some();
        all.loss += (f64::from(r.loss.unwrap_or(0.0)) - others) * weight;
        all.weight += weight;
        all.tokens += r.tokens;
    }

    /// What is said of an evaluation that is all of a run: the loss, and over how much it is; of tokens also the perplexity.
    pub fn told(&self, step: usize, all: &Sums, as_json: bool) -> String {
        let loss = all.mean().unwrap_or(f64::NAN);
        let (of, n, one) = match self.counted {
            Counted::Tokens => ("tokens", all.tokens as u64, "scored tokens"),
            Counted::Labels { .. } => ("labels", all.tokens as u64, "labels"),
            Counted::Rows => ("rows", self.rows.unwrap_or(0), "rows"),
        };
        let perplexity = matches!(self.counted, Counted::Tokens | Counted::Labels { tokens: true });
        let perplexity = perplexity.then(|| loss.exp());
        if as_json {
            let mut line = json!({ "step": step, "eval_loss": loss });
            line[of] = n.into();
            if let Some(x) = perplexity {
                line["perplexity"] = Json::from(x);
            }
            return line.to_string();
        }
        let weighed = if self.weighs { ", weighed by class" } else { "" };
        let perplexity = perplexity.map_or(String::new(), |x| format!("  perplexity {x:.3}"));
        format!("loss {loss:.4}{perplexity}  {} {one}{weighed}", number(n))
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

    /// Whether losses are means over labels.
    pub fn scores(&self) -> bool {
        self.counted != Counted::Rows
    }

    /// The next batch; behind the last comes the first again.
    ///
    /// # Errors
    /// `data` if a file cannot be read.
    pub fn batch(&self, table: &[InputRow], s: &Settings) -> Result<Columns> {
        if self.rows.is_none() {
            return self.data.batch(table, &Picks::random(s.seed), STEP, s.global_batch);
        }
        let at = self.next.get();
        self.next.set((at + 1) % self.batches);
        let mut columns = self.rows_of(at, table, s)?;
        let classes: Vec<&InputRow> =
            table.iter().filter(|r| self.by_class.contains_key(&*r.name)).collect();
        // As if the labels of this batch were of the classes of all: what they weigh together is that of all.
        for (name, own) in by_classes(&classes, table, s, &columns) {
            let all = &self.by_class[&name];
            let [own, sum] = [own.iter(), all.iter()].map(Iterator::sum::<f64>);
            let share = if own > 0.0 { own / sum } else { 1.0 };
            let all = all.iter().map(|x| (x * share) as f32).collect();
            columns.insert(name, Numbers::F32(all));
        }
        Ok(columns)
    }

    /// Batch `at` of all rows, of which what fills up the last one is not scored.
    fn rows_of(&self, at: u64, table: &[InputRow], s: &Settings) -> Result<Columns> {
        let (batch, picks) = (s.global_batch, Evaluation::picks(s));
        let mut columns = self.data.batch(table, &picks, at as u32 + 1, batch)?;
        let left = self.rows.unwrap_or(0).saturating_sub(at * batch as u64);
        let there = left.min(batch as u64) as usize;
        for row in table.iter().filter(|r| r.input.fill == Fill::Labels) {
            if let Some(Numbers::I32(x)) = columns.get_mut(&*row.name) {
                x.iter_mut().skip(there * row.elements()).for_each(|l| *l = IGNORED);
            }
        }
        Ok(columns)
    }
}

/// How many labels of a batch are each class, as a step counts them, by the names of the inputs `classes`.
fn by_classes(
    classes: &[&InputRow],
    table: &[InputRow],
    s: &Settings,
    columns: &Columns,
) -> BTreeMap<String, Vec<f64>> {
    if classes.is_empty() {
        return BTreeMap::new();
    }
    let mut columns = columns.clone();
    complete(s, table, &mut columns);
    let of = |r: &&InputRow| match columns.get(&*r.name) {
        Some(Numbers::F32(x)) => {
            Some((r.name.to_string(), x.iter().map(|x| f64::from(*x)).collect()))
        }
        _none => None,
    };
    classes.iter().filter_map(of).collect()
}
