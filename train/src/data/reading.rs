//! Flags of how examples are read.

use super::date::Date;
use serde::{Deserialize, Serialize};

/// What of an example is scored.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossOn {
    /// All turns of an assistant
    Assistant,
    /// The completion, or the last turn of a chat
    Completion,
    /// All tokens
    All,
}

impl LossOn {
    /// As it is given.
    pub fn name(self) -> &'static str {
        match self {
            LossOn::Assistant => "assistant",
            LossOn::Completion => "completion",
            LossOn::All => "all",
        }
    }
}

/// What becomes of examples that are longer than a row.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TooLong {
    /// The run does not begin
    Error,
    /// Their end is left out
    Truncate,
    /// They are left out
    Drop,
    /// They become several rows
    Split,
}

/// Whether something is done.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum YesNo {
    Yes,
    No,
}

/// How chats become texts.
#[derive(clap::Args, Clone, Debug, Default)]
#[group(skip)]
pub struct Templating {
    /// Chat template for messages: a file of Jinja2, or the name of one in the tokenizer's folder
    /// [default: that of the tokenizer's folder]
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<String>,
    /// A value that the chat template uses by its name, for example enable_thinking=false
    #[arg(long, value_name = "NAME=VALUE")]
    pub template_arg: Vec<String>,
    /// The day that a chat template is told as today's [default: today's in UTC, or that of the run that is resumed]
    #[arg(long, value_name = "YYYY-MM-DD")]
    pub template_date: Option<Date>,
}

impl Templating {
    /// The first of its flags that is given, as it is given.
    pub fn given(&self) -> Option<String> {
        let template = self.chat_template.as_ref().map(|t| format!("--chat-template {t}"));
        let arg = || self.template_arg.first().map(|a| format!("--template-arg {a}"));
        template.or_else(arg).or_else(|| self.template_date.map(|_| "--template-date".into()))
    }
}

/// How examples become tokens.
#[derive(clap::Args, Clone, Debug, Default)]
#[group(skip)]
pub struct Reading {
    #[command(flatten)]
    pub template: Templating,
    /// Which tokens of an example are scored [default: assistant for chats, completion for prompts with completions,
    /// all for texts]
    #[arg(long, value_name = "WHICH")]
    pub loss_on: Option<LossOn>,
    /// Make a row of each turn of an assistant where a template changes earlier turns as a chat goes on
    #[arg(long)]
    pub split_turns: bool,
    /// What becomes of examples that are longer than a row [default: truncate, of texts split]
    #[arg(long, value_name = "WHAT")]
    pub too_long: Option<TooLong>,
    /// Whether rows have several examples, which do not attend to each other [default: yes for a plan that was compiled
    /// with --documents rows]
    #[arg(long, value_name = "YES|NO", hide_possible_values = true)]
    pub pack: Option<YesNo>,
}

/// How examples became rows: what a run that goes on must have as it was.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Hash of the files.
    pub file: String,
    /// Hash of the chat template, if there is one.
    pub template: Option<String>,
    /// Hash of the tokenizer.
    pub tokenizer: String,
    pub seq: usize,
    pub pack: bool,
    pub too_long: TooLong,
    pub loss_on: Option<LossOn>,
    pub split_turns: bool,
    /// The day that templates are told.
    pub date: Date,
    /// Hash of which rows examples make, and of their lengths.
    pub rows: String,
}

impl Recipe {
    /// What decides which row a number means.
    pub const ROWS: [&str; 5] = ["file", "template", "seq", "pack", "rows"];

    /// What is not as it was: its name, and how it is and was.
    pub fn differs(&self, was: &Recipe) -> Vec<(&'static str, String, String)> {
        let all = |r: &Recipe| {
            [
                ("file", r.file.clone()),
                ("template", r.template.clone().unwrap_or("none".into())),
                ("tokenizer", r.tokenizer.clone()),
                ("seq", r.seq.to_string()),
                ("pack", if r.pack { "yes".into() } else { "no".into() }),
                ("too-long", format!("{:?}", r.too_long).to_lowercase()),
                ("loss-on", r.loss_on.map_or("default", LossOn::name).into()),
                ("split-turns", r.split_turns.to_string()),
                ("template-date", String::from(r.date)),
                ("rows", r.rows.clone()),
            ]
        };
        let both = all(self).into_iter().zip(all(was));
        let other = both.filter(|(now, then)| now.1 != then.1);
        other.map(|(now, then)| (now.0, now.1, then.1)).collect()
    }
}

impl Reading {
    /// The same with a day that templates are told: the one that is given, or that of a run that goes on, or today.
    pub fn dated(&self, then: Option<Date>) -> Reading {
        let date = self.template.template_date.or(then).unwrap_or_else(Date::today);
        let template = Templating { template_date: Some(date), ..self.template.clone() };
        Reading { template, ..self.clone() }
    }

    /// The day that templates are told.
    pub fn date(&self) -> Date {
        self.template.template_date.unwrap_or_else(Date::today)
    }

    /// The first of these flags that is given, as it is given.
    pub fn given(&self) -> Option<String> {
        let word = |flag: &str, given: bool| given.then(|| flag.to_string());
        let rest = [
            word("--loss-on", self.loss_on.is_some()),
            word("--split-turns", self.split_turns),
            word("--too-long", self.too_long.is_some()),
            word("--pack", self.pack.is_some()),
        ];
        self.template.given().or_else(|| rest.into_iter().flatten().next())
    }
}
