//! A place in a text, what can be read there, and why it cannot.

use super::expand::Expanded;
use crate::diag::{Diag, Spot};

/// Why a text cannot be read, and where.
#[derive(Debug)]
pub(super) struct Fail {
    code: &'static str,
    message: String,
    rule: Option<String>,
    help: Vec<String>,
    at: usize,
    /// Length of what is wrong.
    len: usize,
}

pub(super) type Res<T> = Result<T, Box<Fail>>;

/// Longest line that a message shows.
const MAX_SHOWN: usize = 160;

impl Fail {
    pub fn new(code: &'static str, at: usize, len: usize, message: impl Into<String>) -> Box<Fail> {
        Box::new(Fail { code, message: message.into(), rule: None, help: vec![], at, len })
    }
    pub fn rule(mut self: Box<Self>, rule: impl Into<String>) -> Box<Self> {
        self.rule = Some(rule.into());
        self
    }
    pub fn help(mut self: Box<Self>, help: impl Into<String>) -> Box<Self> {
        self.help.push(help.into());
        self
    }
    /// A message of the mesh, about this place.
    pub fn of(d: Diag, at: usize, len: usize) -> Box<Fail> {
        Box::new(Fail { code: d.code, message: d.message, rule: d.rule, help: d.help, at, len })
    }

    /// The message with the line it is about.
    pub fn diag(self, text: &Expanded, func: Option<&str>) -> Diag {
        let t = text.text.as_bytes();
        let mut at = self.at.min(t.len());
        while !text.text.is_char_boundary(at) {
            at -= 1;
        }
        let number = t[..at].iter().filter(|&&c| c == b'\n').count();
        let start = t[..at].iter().rposition(|&c| c == b'\n').map_or(0, |n| n + 1);
        let end = t[at..].iter().position(|&c| c == b'\n').map_or(t.len(), |n| at + n);
        let (line, i) = text.origin(number);
        let column = text.text[start..at].chars().count() + 1;
        let mut place = func.map_or(String::new(), |f| format!("@{f}, "));
        place += &format!("line {line}, column {column}");
        if let Some(i) = i {
            place += &format!(", for i = {i}");
        }
        let shown = text.text[start..end].trim_end();
        if shown.len() <= MAX_SHOWN && !shown.contains('\t') {
            let indent = shown.len() - shown.trim_start().len();
            place += &format!("\n\n{}\n", shown.trim_start());
            place += &" ".repeat((column - 1).saturating_sub(indent));
            place += &"^".repeat(self.len.clamp(1, (end - at).max(1)));
        }
        let spot = Spot::Text { file: None, line, column };
        let mut d = Diag::new(self.code, self.message).at(place).of(spot);
        d.rule = self.rule;
        d.help = self.help;
        d
    }
}

/// A place in a text. It only ever stands between characters.
#[derive(Clone, Copy)]
pub(super) struct Cursor<'t> {
    pub text: &'t str,
    pub at: usize,
}

impl<'t> Cursor<'t> {
    pub fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }
    pub fn rest(&self) -> &'t str {
        &self.text[self.at..]
    }
    /// The rest of this line.
    pub fn line(&self) -> &'t str {
        let rest = &self.text.as_bytes()[self.at..];
        let len = rest.iter().position(|&c| c == b'\n').unwrap_or(rest.len());
        &self.text[self.at..self.at + len]
    }

    fn take(&mut self, f: impl Fn(u8) -> bool) -> &'t str {
        let start = self.at;
        // Only ASCII is ever taken, so this ends between characters.
        while self.peek().is_some_and(|c| c.is_ascii() && f(c)) {
            self.at += 1;
        }
        &self.text[start..self.at]
    }
    /// Skips spaces on this line.
    pub fn spaces(&mut self) {
        self.take(|c| matches!(c, b' ' | b'\t' | b'\r'));
    }
    /// Skips spaces, comments and line ends.
    pub fn blank(&mut self) {
        loop {
            self.take(|c| c.is_ascii_whitespace());
            if !self.rest().starts_with("//") {
                return;
            }
            self.at += self.line().len();
        }
    }
    /// Steps over `s` if it stands here.
    pub fn eat(&mut self, s: &str) -> bool {
        let here = self.rest().starts_with(s);
        if here {
            self.at += s.len();
        }
        here
    }
    pub fn word(&mut self) -> &'t str {
        self.take(|c| c.is_ascii_alphanumeric() || c == b'_')
    }
    /// A word that may have dots in it.
    pub fn name(&mut self) -> &'t str {
        self.take(|c| c.is_ascii_alphanumeric() || c == b'_' || c == b'.')
    }
    pub fn digits(&mut self) -> &'t str {
        self.take(|c| c.is_ascii_digit())
    }
    /// `1e-5`: everything that looks like a number.
    pub fn decimal(&mut self) -> &'t str {
        self.take(|c| c.is_ascii_digit() || matches!(c, b'.' | b'e' | b'E' | b'+' | b'-'))
    }
    /// `dp*tp:(2)4`: everything that looks like a list of atoms.
    pub fn atoms(&mut self) -> &'t str {
        let start = self.at;
        loop {
            self.word();
            if self.eat(":(") {
                self.digits();
                self.eat(")");
                self.digits();
            }
            if !self.eat("*") {
                return &self.text[start..self.at];
            }
        }
    }

    /// What stands here, for a message.
    fn found(&self) -> String {
        match self.line().split_whitespace().next() {
            None if self.at >= self.text.len() => "the end of the text".into(),
            None => "the end of the line".into(),
            Some(w) => format!("`{}`", w.chars().take(40).collect::<String>()),
        }
    }
    /// An error: `what` is needed here.
    pub fn needs(&self, what: &str) -> Box<Fail> {
        let len = self.line().split_whitespace().next().map_or(1, |w| w.chars().count());
        Fail::new("syntax", self.at, len, format!("{what} is needed here, not {}", self.found()))
    }
    /// Steps over `s`, which must stand here.
    pub fn must(&mut self, s: &str) -> Res<()> {
        if self.eat(s) {
            return Ok(());
        }
        Err(self.needs(&format!("`{s}`")).help(format!("write `{s}` before {}", self.found())))
    }

    /// A string in quotes.
    pub fn quoted(&mut self) -> Res<String> {
        let start = self.at;
        self.must("\"")?;
        let mut out = String::new();
        let mut chars = self.line().char_indices();
        let bad = |at: usize| {
            Fail::new("syntax", at, 1, "a string with an escape this compiler does not know")
                .help("the escapes are `\\\\`, `\\\"` and `\\u{7f}`")
        };
        while let Some((n, c)) = chars.next() {
            match c {
                '"' => {
                    self.at += n + 1;
                    return Ok(out);
                }
                '\\' => match chars.next() {
                    Some((_, c @ ('"' | '\\'))) => out.push(c),
                    Some((_, 'u')) => {
                        let code = chars.by_ref().map(|c| c.1).take_while(|&c| c != '}').take(8);
                        let code: String = code.collect();
                        let hex = code.strip_prefix('{');
                        let hex = hex.and_then(|h| u32::from_str_radix(h, 16).ok());
                        out.push(hex.and_then(char::from_u32).ok_or_else(|| bad(self.at + n))?);
                    }
                    _ => return Err(bad(self.at + n)),
                },
                c => out.push(c),
            }
        }
        let message = "a string is not closed on its line";
        Err(Fail::new("syntax", start, 1, message).help("close it with `\"`"))
    }
}
