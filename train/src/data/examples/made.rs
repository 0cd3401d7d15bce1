//! What examples are made of, and into, with and without a tokenizer.

use crate::data::Reading;
use std::path::Path;

/// A row of a batch, `seq` numbers each.
pub struct Row {
    pub ids: Vec<i32>,
    /// What each position is scored against; -100 of none.
    pub targets: Vec<i32>,
    /// The number of each token's example; -1 of padding.
    pub segments: Vec<i32>,
}

/// An example as it is shown.
pub struct Sample {
    /// `FILE:LINE`.
    pub place: String,
    pub ids: Vec<i32>,
    pub scored: Vec<bool>,
    /// Its text, with what is scored in brackets.
    pub shown: String,
}

/// What examples are opened with.
pub struct Setup<'a> {
    /// A folder with tokenizer.json, or that file.
    pub tokenizer: &'a Path,
    /// Tokens of the model.
    pub vocab: usize,
    /// Tokens of a row.
    pub seq: usize,
    /// Several examples in a row.
    pub pack: bool,
    pub reading: &'a Reading,
    /// How many rows are kept as samples.
    pub show: usize,
}
