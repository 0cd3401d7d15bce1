//! The arguments of Megatron-LM, by its own parser: `tests/exports/arguments.py` made the table. Exports write no others,
//! and audits read them.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// One argument.
#[derive(Deserialize, Debug)]
pub struct Argument {
    /// Values: 0, 1, or `"+"`.
    takes: serde_json::Value,
    /// `int`, `float` or `text`.
    #[serde(rename = "type", default)]
    pub kind: String,
    /// The values that it has; empty: any.
    #[serde(default)]
    pub choices: Vec<String>,
}

impl Argument {
    /// The number of its values; nothing if it is any number.
    pub fn takes(&self) -> Option<u64> {
        self.takes.as_u64()
    }

    /// What is wrong with a value, if something is.
    pub fn misfit(&self, value: &str) -> Option<String> {
        let good = match self.kind.as_str() {
            "int" => value.parse::<i64>().is_ok(),
            "float" => value.parse::<f64>().is_ok(),
            _ => true,
        };
        match (good, self.choices.is_empty() || self.choices.iter().any(|c| c == value)) {
            (true, true) => None,
            (false, _) => Some(format!("{} is wanted", self.kind)),
            (true, false) => Some(format!("one of {} is wanted", self.choices.join(", "))),
        }
    }
}

#[derive(Deserialize)]
struct Table {
    commit: String,
    #[serde(flatten)]
    all: BTreeMap<String, Argument>,
}

static TABLE: LazyLock<Table> =
    LazyLock::new(|| serde_json::from_str(include_str!("arguments.json")).expect("a table"));

/// The argument of a name that begins with `--`.
pub fn find(flag: &str) -> Option<&'static Argument> {
    TABLE.all.get(flag)
}

/// The names of all.
pub fn names() -> impl Iterator<Item = &'static str> {
    TABLE.all.keys().map(String::as_str)
}

/// The commit that the table is of.
pub fn commit() -> &'static str {
    &TABLE.commit
}
