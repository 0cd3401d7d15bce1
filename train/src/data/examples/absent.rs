//! Examples without a tokenizer: they are refused.

#[path = "made.rs"]
mod made;

use super::{Picks, Reading, Recipe};
pub use made::{Row, Sample, Setup};
use serde_json::Value as Json;
use shardc_ir::diag::{Diag, Result};
use std::path::{Path, PathBuf};

/// Nothing of strangers is done.
pub fn guarded() -> bool {
    false
}

/// Examples of files: none can be opened.
pub struct Examples {
    pub pack: bool,
    pub stats: Stats,
    pub samples: Vec<Sample>,
    never: Never,
}

enum Never {}

/// A prompt of a file.
pub struct Prompt {
    pub place: String,
    pub ids: Vec<u32>,
}

/// Makes tokens of prompts: there are none.
pub struct Prompts(Never);

impl Prompts {
    /// Refuses.
    ///
    /// # Errors
    /// `not-built`.
    pub fn open(place: &Path, _: &Reading) -> Result<Prompts> {
        Err(none(place))
    }

    /// # Errors
    /// None.
    pub fn text(&self, _: &str) -> Result<Vec<u32>> {
        match self.0 {}
    }

    /// # Errors
    /// None.
    pub fn chat(&self, _: Option<&str>, _: &str) -> Result<Vec<u32>> {
        match self.0 {}
    }

    /// # Errors
    /// None.
    pub fn file(&self, _: &Path) -> Result<Vec<Prompt>> {
        match self.0 {}
    }

    /// # Errors
    /// None.
    pub fn decode(&self, _: &[u32]) -> Result<String> {
        match self.0 {}
    }

    pub fn name(&self, _: u32) -> String {
        match self.0 {}
    }

    pub fn end(&self) -> Option<u32> {
        match self.0 {}
    }

    pub fn turn_end(&self) -> Option<u32> {
        match self.0 {}
    }
}

/// There is no tokenizer in this command.
fn none(place: &Path) -> Diag {
    Diag::new("not-built", "this shardc was built without tokenizers")
        .at(place.display().to_string())
        .help("cargo build --release builds with them: leave --no-default-features out")
}

/// What a pass over all examples has counted.
pub struct Stats(Never);

impl Stats {
    /// The numbers as JSON.
    pub fn json(&self) -> Json {
        match self.0 {}
    }
}

impl Examples {
    /// Refuses.
    ///
    /// # Errors
    /// `not-built`.
    pub fn open(_: &[PathBuf], setup: &Setup) -> Result<Examples> {
        Err(none(setup.tokenizer).help(
            "or tokenize the examples with Python, to columns input_ids and labels: docs/data.md",
        ))
    }

    pub fn rows_of(&self, _: &Picks, _: f64) -> u64 {
        match self.never {}
    }

    pub fn full(&self, _: &Picks, _: bool) -> f64 {
        match self.never {}
    }

    /// # Errors
    /// None.
    pub fn batch(&self, _: &Picks, _: impl Iterator<Item = u64>) -> Result<Vec<Row>> {
        match self.never {}
    }

    pub fn recipe(&self) -> Recipe {
        match self.never {}
    }

    pub fn mark(&self) -> String {
        match self.never {}
    }

    pub fn told(&self) -> Vec<String> {
        match self.never {}
    }

    pub fn told_rows(&self, _: &Picks, _: Option<usize>) -> Vec<String> {
        match self.never {}
    }
}
