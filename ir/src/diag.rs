//! A message to the user: what is wrong, where, by which rule, and what would be right.

use serde::Serialize;
use std::borrow::Cow;
use std::fmt::Write as _;

/// A user's mistake (or a limit of ours), never a bug: bugs panic.
///
/// Printed as
/// ```text
/// error[heads-not-divisible]: 6 query heads cannot be split over tp=4
///    --> config.json: num_attention_heads
///    = rule: heads % tp == 0
///    = why: ...
///    = help: use tp=2, tp=3 or tp=6
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{}", self.render())]
pub struct Diag {
    /// Word code, as in `shardc explain rule:CODE`.
    pub code: &'static str,
    /// As all texts of a diagnostic, of one line: ends of lines in it are of names, and are shown escaped.
    pub message: String,
    /// File, flag, JSON pointer or program line the message is about; behind an empty line, lines of a picture of it.
    pub place: Option<String>,
    pub rule: Option<String>,
    /// How it came to this, nearest cause first.
    pub why: Vec<String>,
    /// Ways out, with numbers.
    pub help: Vec<String>,
    pub exit: Exit,
    /// Of a text, what it is about.
    pub spot: Option<Box<Spot>>,
}

/// What of a text a message is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Spot {
    /// The place where a function defines a value, by their names.
    Value { func: String, value: String },
    /// A line and a column of it, from 1; of a file, if it is one.
    Text { file: Option<String>, line: usize, column: usize },
}

/// Exit status of the command that ends with this diagnostic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Exit {
    Problems = 1,
    Usage = 2,
    Infeasible = 3,
    Unsupported = 4,
    Environment = 5,
    RankFailed = 6,
    /// Nobody reads standard output any more: 128 + SIGPIPE, as other programs end then.
    ReaderGone = 141,
}

/// The status that a command ends with, by the code of what ends it: each code has one. What is not here is a mistake
/// of use.
const STATUS: &[(&str, Exit)] = &[
    ("activation", Exit::Unsupported),
    ("archive-version", Exit::Unsupported),
    ("c-compiler", Exit::Environment),
    ("checkpoint", Exit::Environment),
    ("cluster", Exit::Environment),
    ("cuda-compile", Exit::Environment),
    ("cuda-driver", Exit::RankFailed),
    ("cuda-limit", Exit::Unsupported),
    ("export", Exit::Unsupported),
    ("import-input", Exit::Unsupported),
    ("import-loss", Exit::Unsupported),
    ("import-op", Exit::Unsupported),
    ("io", Exit::Environment),
    ("launcher", Exit::Environment),
    ("mask-rule", Exit::Unsupported),
    ("merged-parameters", Exit::Unsupported),
    ("missing-library", Exit::Environment),
    ("moe-bound", Exit::RankFailed),
    ("mpi", Exit::Environment),
    ("nan-loss", Exit::RankFailed),
    ("no-device", Exit::Environment),
    ("no-layout", Exit::Infeasible),
    ("no-memory", Exit::Environment),
    ("no-secret", Exit::Environment),
    ("not-built", Exit::Unsupported),
    ("not-understood", Exit::Unsupported),
    ("numbers-too-large", Exit::Unsupported),
    ("out-of-memory", Exit::Infeasible),
    ("part-of-stack", Exit::Unsupported),
    ("plans-differ", Exit::Environment),
    ("rank-failed", Exit::RankFailed),
    ("rope-type", Exit::Unsupported),
    ("save", Exit::RankFailed),
    ("save-locked", Exit::Environment),
    ("schedule-memory", Exit::Infeasible),
    ("start-timeout", Exit::RankFailed),
    ("tensor-dtype", Exit::Unsupported),
    ("threads", Exit::Environment),
    ("too-many-ranks", Exit::Environment),
    ("too-many-stages", Exit::Infeasible),
    ("torch", Exit::Environment),
    ("trust", Exit::Environment),
    ("unknown-model-type", Exit::Unsupported),
    ("unsupported-config", Exit::Unsupported),
];

/// The exit status of a code.
fn status(code: &str) -> Exit {
    STATUS.iter().find(|s| s.0 == code).map_or(Exit::Usage, |s| s.1)
}

/// Seconds with their unit.
pub fn time(s: f64) -> String {
    match s {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} us", s * 1e6),
    }
}

/// Bytes for people, in the units of all messages: `1.50 GiB`.
pub fn bytes(n: usize) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut x = n as f64;
    let mut u = 0;
    while x >= 1024.0 && u + 1 < units.len() {
        x /= 1024.0;
        u += 1;
    }
    if u == 0 { format!("{n} B") } else { format!("{x:.2} {}", units[u]) }
}

/// A number with its word: `1 step`, `2 steps`.
pub fn count(n: usize, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}

/// Bytes for people, and how many exactly: of what is compared with a limit.
pub fn exact_bytes(n: usize) -> String {
    if n < 1024 { bytes(n) } else { format!("{} ({n} B)", bytes(n)) }
}

/// Whether a character changes what a terminal shows beyond its own place: controls, and marks of the direction
/// of writing, which make a text look like another.
pub fn is_hidden(c: char) -> bool {
    let turns = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || turns
}

/// A text without hidden characters but tabs and those that `keep` names: the others stand there as JSON writes
/// them, so that a line of JSON still says the same.
pub fn escaped(text: &str, keep: impl Fn(char) -> bool) -> Cow<'_, str> {
    let is_hidden = |c: char| is_hidden(c) && c != '\t' && !keep(c);
    if !text.contains(is_hidden) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            '\n' if is_hidden(c) => out.push_str("\\n"),
            // All of them have four digits of hex at most.
            c if is_hidden(c) => drop(write!(out, "\\u{:04x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.into()
}

/// A text of one line, whatever names are in it.
///
/// ```
/// # use shardc_ir::diag::one_line;
/// assert_eq!(one_line("key `a\nerror: b`"), "key `a\\nerror: b`");
/// ```
pub fn one_line(text: &str) -> Cow<'_, str> {
    escaped(text, |_| false)
}

/// Result with a diagnostic.
pub type Result<T> = std::result::Result<T, Diag>;

impl Diag {
    /// A diagnostic with a code, which says the exit status, and a message.
    pub fn new(code: &'static str, message: impl Into<String>) -> Diag {
        Diag {
            code,
            message: message.into(),
            place: None,
            rule: None,
            why: vec![],
            help: vec![],
            exit: status(code),
            spot: None,
        }
    }
    pub fn at(mut self, place: impl Into<String>) -> Diag {
        self.place = Some(place.into());
        self
    }
    /// About what stands somewhere in a text.
    pub fn of(mut self, spot: Spot) -> Diag {
        self.spot = Some(Box::new(spot));
        self
    }
    pub fn rule(mut self, rule: impl Into<String>) -> Diag {
        self.rule = Some(rule.into());
        self
    }
    pub fn why(mut self, why: impl Into<String>) -> Diag {
        self.why.push(why.into());
        self
    }
    pub fn help(mut self, help: impl Into<String>) -> Diag {
        self.help.push(help.into());
        self
    }
    /// The same under another code, with its exit status.
    pub fn coded(mut self, code: &'static str) -> Diag {
        (self.code, self.exit) = (code, status(code));
        self
    }
    /// Nobody reads what the command prints: it ends as other programs do then, without a word.
    pub fn reader_gone(mut self) -> Diag {
        self.exit = Exit::ReaderGone;
        self
    }

    /// The place, and the picture of it, from its empty line on.
    pub fn pictured(place: &str) -> (&str, &str) {
        place.find("\n\n").map_or((place, ""), |at| (&place[..at], &place[at + 1..]))
    }

    /// The text a person reads.
    pub fn render(&self) -> String {
        let mut s = format!("error[{}]: {}", self.code, one_line(&self.message));
        let mut line = |head: &str, text: &str| {
            s.push_str(format!("\n   {head}{}", one_line(text)).trim_end());
        };
        if let Some(p) = &self.place {
            let (head, picture) = Diag::pictured(p);
            line("--> ", head);
            picture.lines().for_each(|l| line(" | ", l));
        }
        if let Some(r) = &self.rule {
            line("= rule: ", r);
        }
        self.why.iter().for_each(|w| line("= why: ", w));
        self.help.iter().for_each(|h| line("= help: ", h));
        s
    }
}
