//! Why a value is split as it is, why a collective is there, what a tensor costs.

mod collective;
mod facts;
mod memory;
mod price;
mod schedule;
mod tensor;
mod trace;
mod transfers;
mod value;
mod words;
mod zero;

pub use collective::brief;
pub use price::time;
pub use trace::Why;

use serde_json::{Map, Value as Json};
use shardc_ir::diag::{Diag, Result, one_line};
use shardc_ir::names::nearest;
use shardc_process::terminal::json_line;

/// An answer: named parts of a few lines each.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// One line that says what is explained.
    pub subject: String,
    pub parts: Vec<(&'static str, Vec<String>)>,
    /// The same as data.
    pub facts: Map<String, Json>,
}

impl Answer {
    fn new(subject: impl Into<String>) -> Answer {
        Answer { subject: subject.into(), parts: vec![], facts: Map::new() }
    }

    /// Adds a part; one without lines is left out.
    fn part(&mut self, name: &'static str, lines: Vec<String>) {
        if !lines.is_empty() {
            self.parts.push((name, lines));
        }
    }

    /// The text a person reads: part names in a column, lines beside them.
    pub fn text(&self) -> String {
        let mut out = one_line(&self.subject).into_owned() + "\n";
        for (name, lines) in &self.parts {
            for (i, l) in lines.iter().enumerate() {
                let head = if i == 0 { *name } else { "" };
                out.push_str(format!("{head:<10}{}", one_line(l)).trim_end());
                out.push('\n');
            }
        }
        out
    }

    /// The same as a line of JSON.
    pub fn json(&self) -> String {
        let mut o = Map::new();
        o.insert("subject".into(), self.subject.clone().into());
        o.insert("facts".into(), self.facts.clone().into());
        for (name, lines) in &self.parts {
            o.insert((*name).into(), lines.clone().into());
        }
        json_line("explain", Json::Object(o))
    }
}

/// A word that is nearly one of those that need no name of a value.
fn meant(what: &str, mut d: Diag) -> Diag {
    let words = ["collective", "tensor", "schedule", "memory", "transfers", "price", "rule"];
    let near = nearest(what, words.into_iter(), 1).first().map(|near| match *near {
        "collective" => "did you mean collective:1, or another number?".to_string(),
        "tensor" => "did you mean tensor:NAME, with a name of the checkpoint?".into(),
        "rule" => "did you mean rule:CODE, with the code of a message?".into(),
        word => format!("did you mean {word}?"),
    });
    d.help.splice(..0, near);
    d
}

/// An answer about a plan, which is compiled again only once for many of them: of `%value` (the `%` may be left out,
/// `@func %value` chooses a function), `collective:N`, `tensor:NAME` (or the name alone), `schedule`, `transfers`,
/// `memory`, or `price`.
///
/// # Errors
/// `unknown-value`, `unknown-collective` or `unknown-tensor`, with what there is.
pub fn answer(why: &Why, what: &str) -> Result<Answer> {
    let what = what.trim();
    if what == "price" {
        Ok(price::explain(why))
    } else if what == "memory" {
        Ok(memory::explain(why.s))
    } else if what == "schedule" {
        Ok(schedule::explain(why.s))
    } else if what == "transfers" {
        transfers::explain(why)
    } else if let Some(n) = what.strip_prefix("collective:") {
        collective::explain(why, n)
    } else if let Some(name) = what.strip_prefix("tensor:") {
        tensor::explain(why, name)
    } else if tensor::is_one(why, what) {
        tensor::explain(why, what)
    } else {
        value::explain(why, what).map_err(|d| meant(what, d))
    }
}

/// At most `n` items of a list, and how many more there are.
fn some(mut lines: Vec<String>, n: usize) -> Vec<String> {
    if lines.len() > n {
        let more = lines.len() - n;
        lines.truncate(n);
        lines.push(format!("… {more} more"));
    }
    lines
}
