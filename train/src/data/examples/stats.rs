//! What is told of examples before they are trained on.

use super::coder::Coded;
use super::shape::{Chat, Example, Shape};
use crate::data::number;
use serde_json::{Value as Json, json};
use shardc_ir::diag::count;
use std::collections::BTreeMap;

/// How many places of something are kept.
const PLACES: usize = 3;

/// Examples that something is to be said of.
#[derive(Clone, Debug, Default)]
pub struct Found {
    pub count: usize,
    /// `FILE:LINE` of the first.
    pub places: Vec<String>,
    /// That of the last one.
    last: String,
}

impl Found {
    /// Counts the example at a place, if it is one.
    pub fn add(&mut self, is: bool, place: &str) {
        // An example may be several rows.
        if !is || self.last == place {
            return;
        }
        self.last = place.into();
        self.count += 1;
        if self.places.len() < PLACES {
            self.places.push(place.into());
        }
    }

    /// `2 cut (0.1 %): FILE:LINE, FILE:LINE`; nothing if there is none.
    fn line(&self, what: &str, of: usize) -> Option<String> {
        let share = 100.0 * self.count as f64 / of.max(1) as f64;
        let more = if self.count > self.places.len() { ", …" } else { "" };
        let places = self.places.join(", ");
        (self.count > 0).then(|| format!("{} {what} ({share:.1} %): {places}{more}", self.count))
    }
}

/// What a pass over all examples has counted.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    pub shape: Option<Shape>,
    pub examples: usize,
    /// Messages of chats.
    pub turns: usize,
    /// Tokens of all examples, before any is cut.
    pub tokens: u64,
    /// Tokens that are scored in an epoch.
    pub scored: u64,
    /// How many have so many tokens.
    pub lens: BTreeMap<u32, u64>,
    /// Examples that were cut at the end of a row, or into several.
    pub cut: Found,
    /// Those that are left out as too long, and as nothing of them is scored.
    pub long: Found,
    pub unscored: Found,
    /// Those with an answer, or a completion, that says nothing: the end of the turn alone is scored.
    pub empty: Found,
    /// Those of which a template writes a content of null as a word.
    pub none: Found,
    /// Those of which a template writes the parts of a content as a list.
    pub parts: Found,
    /// Chats that say of each turn of an assistant that it is not scored.
    pub barred: usize,
    /// Tokens on both sides of a border of what is scored.
    pub straddling: usize,
    /// Keys that are not read.
    pub unused: Vec<String>,
}

impl Stats {
    /// Counts an example, which stands at a place; an answer of it may be empty.
    pub fn example(&mut self, e: &Example, empty: bool, place: &str) {
        self.examples += 1;
        self.empty.add(empty, place);
        if let Example::Chat(chat) = e {
            self.turns += chat.messages.len();
            let mut turns =
                chat.messages.iter().filter(|m| Chat::role(m) == "assistant").peekable();
            self.barred += usize::from(turns.peek().is_some() && !turns.any(Chat::scores));
        }
    }

    /// Counts its tokens, or those of a turn of it.
    pub fn coded(&mut self, c: &Coded) {
        self.tokens += c.ids.len() as u64;
        *self.lens.entry(c.ids.len() as u32).or_default() += 1;
        self.straddling += c.straddling;
    }

    /// The least length, the median, the one that 95 % do not exceed, and the most.
    pub fn lengths(&self) -> [u32; 4] {
        let all: u64 = self.lens.values().sum();
        let at = |share: f64| {
            let mut left = ((share * all as f64).ceil() as u64).max(1);
            let reaches = |(_, n): &(&u32, &u64)| {
                let there = **n >= left;
                left = left.saturating_sub(**n);
                there
            };
            self.lens.iter().find(reaches).map_or(0, |(len, _)| *len)
        };
        [at(0.0), at(0.5), at(0.95), at(1.0)]
    }

    /// How many of what, and the tokens: `18432 chats, 61205 turns`.
    pub fn what(&self) -> String {
        let (one, many) = self.shape.map_or(("example", "examples"), Shape::words);
        let all = count(self.examples, one, many);
        match self.turns {
            0 => all,
            n => format!("{all}, {}", count(n, "turn", "turns")),
        }
    }

    /// Lines on tokens, and on what was cut or left out.
    pub fn lines(&self, kept: u64) -> Vec<String> {
        let [least, median, most95, most] = self.lengths();
        let share = 100.0 * self.scored as f64 / (kept.max(1)) as f64;
        let mut out = vec![format!(
            "{}{}, {} scored ({share:.0} %); length {least} / {median} / {most95} / {most} (least, median, 95 %, most)",
            tokens(self.tokens),
            if kept < self.tokens {
                format!(", {} of them in rows", number(kept))
            } else {
                String::new()
            },
            number(self.scored)
        )];
        let found = [
            (&self.cut, "cut"),
            (&self.long, "too long and left out"),
            (&self.unscored, "without a scored token left out"),
            (&self.empty, "with an empty answer"),
            (&self.none, "with the word None, as which the template writes a content of null"),
            (&self.parts, "with a list of parts, which the template writes as Python does"),
        ];
        out.extend(found.iter().filter_map(|(of, what)| of.line(what, self.examples)));
        if self.straddling > 0 {
            let tokens = count(self.straddling, "token lies", "tokens lie");
            out.push(format!("{tokens} on both sides of a border of what is scored"));
        }
        if !self.unused.is_empty() {
            let keys: Vec<&str> = self.unused.iter().take(8).map(String::as_str).collect();
            let more = if self.unused.len() > 8 { ", …" } else { "" };
            out.push(format!("keys not used: {}{more}", keys.join(", ")));
        }
        out
    }

    /// The same as JSON.
    pub fn json(&self) -> Json {
        let [least, median, most95, most] = self.lengths();
        json!({
            "examples": self.examples,
            "turns": self.turns,
            "tokens": self.tokens,
            "scored": self.scored,
            "length": { "least": least, "median": median, "p95": most95, "most": most },
            "cut": self.cut.count,
            "too_long": self.long.count,
            "unscored": self.unscored.count,
            "empty": self.empty.count,
            "none": self.none.count,
            "parts": self.parts.count,
            "places": {
                "cut": self.cut.places,
                "too_long": self.long.places,
                "unscored": self.unscored.places,
                "empty": self.empty.places,
                "none": self.none.places,
                "parts": self.parts.places,
            },
            "straddling": self.straddling,
            "unused": self.unused,
        })
    }
}

/// `1234 tokens`, `9.8 M tokens`.
fn tokens(n: u64) -> String {
    if n == 1 { "1 token".into() } else { format!("{} tokens", number(n)) }
}

/// The text of tokens, what is scored in brackets, in one line; of a long one the beginning and the end.
pub fn shown(c: &Coded, end: impl Fn(i32) -> String) -> String {
    let mut out = String::new();
    let mut open = false;
    let mut at = 0;
    let line = |s: &str| s.replace("\r\n", "\n").replace('\n', "⏎").replace('\t', "⇥");
    let part = |a: usize, b: usize| line(c.text.get(a..b).unwrap_or_default());
    for ((&id, &scored), &(from, to)) in c.ids.iter().zip(&c.scored).zip(&c.bytes) {
        if scored != open {
            if scored && from > at {
                out += &part(at, from);
                at = from;
            }
            out.push(if scored { '[' } else { ']' });
            open = scored;
        }
        if from == to {
            // It is not of the text: the tokenizer adds it.
            out += &end(id);
        } else if to > at {
            // Of several tokens of one character the first one shows it.
            out += &part(at, to);
            at = to;
        }
    }
    if open {
        out.push(']');
    }
    const MOST: usize = 1200;
    let n = out.chars().count();
    if n > MOST {
        let (a, b): (String, String) =
            (out.chars().take(MOST / 2).collect(), out.chars().skip(n - MOST / 2).collect());
        return format!("{a} … {} characters … {b}", n - MOST);
    }
    out
}
