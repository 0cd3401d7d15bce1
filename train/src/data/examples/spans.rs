//! What of an example is scored: all, what a template's tags say an assistant generates, or what stands in the text of a
//! chat beyond the text of the chat before it.

use super::shape::{Chat, Example};
use super::template::{self, Template};
use crate::data::LossOn;
use serde_json::Value as Json;
use shardc_ir::diag::{Diag, Result};
use std::ops::Range;

/// A text to tokenize, and what of it is scored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Marked {
    pub text: String,
    pub scored: Scored,
    /// A template wrote it, with all special tokens; else the tokenizer adds its own, and the end of a text.
    pub rendered: bool,
}

/// Bytes of a text that are scored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Scored {
    All,
    /// Tokens that lie in these ranges, in whole or in part, as transformers takes them.
    Tags(Vec<Range<usize>>),
    /// Tokens that begin in these ranges.
    Prefixes(Vec<Range<usize>>),
}

impl Scored {
    /// Whether a token of these bytes is scored.
    pub fn has(&self, (from, to): (usize, usize)) -> bool {
        let some = |all: &[Range<usize>], by: fn(&Range<usize>, usize, usize) -> bool| {
            from < to && all.iter().any(|r| by(r, from, to))
        };
        match self {
            Scored::All => true,
            Scored::Tags(all) => some(all, |r, from, to| from < r.end && to > r.start),
            Scored::Prefixes(all) => some(all, |r, from, _| r.contains(&from)),
        }
    }

    /// Whether a token of these bytes lies on both sides of a border.
    pub fn straddles(&self, (from, to): (usize, usize)) -> bool {
        let (Scored::Tags(all) | Scored::Prefixes(all)) = self else { return false };
        all.iter().flat_map(|r| [r.start, r.end]).any(|border| from < border && border < to)
    }
}

/// How chats become text, and what of it is scored.
pub struct Marker<'a> {
    pub template: Option<&'a Template>,
    pub loss_on: Option<LossOn>,
    pub split_turns: bool,
    /// Special tokens of the tokenizer, as they are written.
    pub specials: &'a [String],
    /// Where there is no template, whose tokenizer that is.
    pub model: &'a str,
}

/// The turns of an assistant in a chat, and whether each is scored.
pub fn spoken(c: &Chat, on: Option<LossOn>) -> Vec<(usize, bool)> {
    let on = on.unwrap_or(if c.prompt.is_some() { LossOn::Completion } else { LossOn::Assistant });
    let speaks = |i: &usize| Chat::role(&c.messages[*i]) == "assistant";
    let all: Vec<usize> = (0..c.messages.len()).filter(speaks).collect();
    let first = match (on, c.prompt) {
        (LossOn::Completion, Some(prompt)) => prompt,
        (LossOn::Completion, None) => all.last().copied().unwrap_or(0),
        _assistant => 0,
    };
    let scored = |i| on == LossOn::All || i >= first && Chat::scores(&c.messages[i]);
    all.into_iter().map(|i| (i, scored(i))).collect()
}

/// Two texts that should begin alike, and the turn of which they are.
struct Differs {
    turn: usize,
    now: String,
    then: String,
}

/// Why a chat has no text, or no part of it that is known to be an assistant's.
enum No {
    Refused(String),
    Mask(Differs),
    /// An assistant begins, and a template has no text of a chat before it.
    Begins(String),
    /// Tags say how often an assistant speaks, and that is otherwise.
    Tags(usize, usize),
}

impl Marker<'_> {
    /// The texts of an example of a line: one, or one for each turn.
    ///
    /// # Errors
    /// `data`, `chat-mask`, `flag`.
    pub fn texts(&self, e: &Example, line: &str) -> Result<Vec<Marked>> {
        let one = |text: String, scored| vec![Marked { text, scored, rendered: false }];
        match (e, self.loss_on) {
            (Example::Text(text), None | Some(LossOn::All)) => Ok(one(text.clone(), Scored::All)),
            (Example::Text(_), Some(other)) => Err(self.no_turns(other, "a text", "all")),
            (Example::Pair { .. }, Some(LossOn::Assistant)) => {
                Err(self.no_turns(LossOn::Assistant, "a prompt with its completion", "completion"))
            }
            (Example::Pair { prompt, completion }, on) => {
                let text = format!("{prompt}{completion}");
                let scored = match on {
                    Some(LossOn::All) => Scored::All,
                    _completion => {
                        Scored::Prefixes(std::iter::once(prompt.len()..text.len()).collect())
                    }
                };
                Ok(one(text, scored))
            }
            (Example::Chat(chat), on) => {
                let Some(t) = self.template else { return Err(no_template(self.model)) };
                self.chat(t, chat, on).map_err(|no| self.said(no, line))
            }
        }
    }

    fn no_turns(&self, on: LossOn, what: &str, instead: &str) -> Diag {
        Diag::new("flag", format!("{what} has no turns"))
            .at(format!("--loss-on {}", on.name()))
            .help(format!("use --loss-on {instead}, or leave it out"))
    }

    fn chat(
        &self,
        t: &Template,
        c: &Chat,
        on: Option<LossOn>,
    ) -> std::result::Result<Vec<Marked>, No> {
        let full = render(t, c, c.messages.len(), false)?;
        if on == Some(LossOn::All) {
            return Ok(vec![Marked { text: full.text, scored: Scored::All, rendered: true }]);
        }
        let turns = spoken(c, on);
        if t.tags {
            let spans = match turns.iter().all(|turn| turn.1) {
                true => full.spans,
                false if full.spans.len() == turns.len() => {
                    let both = full.spans.into_iter().zip(&turns);
                    both.filter(|(_, turn)| turn.1).map(|(span, _)| span).collect()
                }
                false => return Err(No::Tags(full.spans.len(), turns.len())),
            };
            return Ok(vec![Marked {
                text: full.text,
                scored: Scored::Tags(spans),
                rendered: true,
            }]);
        }
        let scored: Vec<usize> =
            turns.into_iter().filter(|turn| turn.1).map(|turn| turn.0).collect();
        let row =
            |text: String, spans| Marked { text, scored: Scored::Prefixes(spans), rendered: true };
        let spans: std::result::Result<Vec<_>, No> =
            scored.iter().map(|&i| self.span(t, c, i, &full.text)).collect();
        match spans {
            Ok(spans) => Ok(vec![row(full.text, spans)]),
            Err(No::Mask(_)) if self.split_turns => {
                let alone = |&i: &usize| {
                    let own = render(t, c, i + 1, false)?.text;
                    let span = self.span(t, c, i, &own)?;
                    Ok(row(own, vec![span]))
                };
                scored.iter().map(alone).collect()
            }
            Err(no) => Err(no),
        }
    }

    /// The bytes of message `i` in the text of a chat: those that the text up to it has beyond the text before it.
    fn span(
        &self,
        t: &Template,
        c: &Chat,
        i: usize,
        full: &str,
    ) -> std::result::Result<Range<usize>, No> {
        let before = render(t, c, i, true).map_err(|no| match no {
            No::Refused(why) if i == 0 => No::Begins(why),
            other => other,
        });
        let before = before?.text;
        let with = match i + 1 == c.messages.len() {
            true => full.to_string(),
            false => render(t, c, i + 1, false)?.text,
        };
        let differs = |now: &str, then: &str| {
            No::Mask(Differs { turn: i, now: now.into(), then: then.into() })
        };
        let Some(own) = with.strip_prefix(&*before) else { return Err(differs(&before, &with)) };
        if !full.starts_with(with.trim_end()) {
            return Err(differs(with.trim_end(), full));
        }
        // What a template writes behind the token that ends a turn is none of the turn.
        let ends = self.specials.iter().filter_map(|s| own.rfind(&**s).map(|at| at + s.len()));
        let end = ends.max().filter(|&end| own[end..].trim().is_empty());
        let own =
            end.unwrap_or(if full.starts_with(&with) { own.len() } else { own.trim_end().len() });
        Ok(before.len()..before.len() + own)
    }

    fn said(&self, no: No, line: &str) -> Diag {
        match no {
            No::Refused(why) => Diag::new("data", format!("the template refuses line {line}: {why}"))
                .rule("a template says which chats it has a form for")
                .help("change the chat, or give another --chat-template FILE"),
            No::Begins(why) => Diag::new(
                "chat-mask",
                format!("the assistant begins the chat of line {line}, and the template has no text of no messages"),
            )
            .rule("a turn is what the text up to it has beyond the text before it")
            .why(format!("it says: {why}"))
            .help("add \"train\": false to this message, which is then not scored; or begin with a user or system message")
            .help("or score the last turn alone: --loss-on completion")
            .help("or give a template with {% generation %} around what is generated: --chat-template FILE")
            .help("or score all tokens: --loss-on all"),
            No::Tags(spans, turns) => Diag::new(
                "chat-mask",
                format!("the template marks {spans} spans as generated, the chat has {turns} turns of an assistant"),
            )
            .rule("which turn is not scored is known only if there is a span for each")
            .help("give a template with {% generation %} around each turn: --chat-template FILE")
            .help("or score all turns: without \"train\": false, and with --loss-on assistant")
            .help("or score all tokens: --loss-on all"),
            No::Mask(d) => {
                let at = d.now.bytes().zip(d.then.bytes()).take_while(|(a, b)| a == b).count();
                let shown = |s: &str| {
                    let from = (0..=at.min(s.len())).rev().find(|&i| s.is_char_boundary(i)).unwrap_or(0);
                    let text: String = s[from..].chars().take(24).collect();
                    format!("{text:?}")
                };
                let d = Diag::new(
                    "chat-mask",
                    format!("what the assistant says in turn {} is not found in the text of the chat", d.turn + 1),
                )
                .rule("the text up to a turn is the beginning of the text of the whole chat")
                .why(format!(
                    "behind {at} bytes there is {} with what is up to it, and {} with what follows",
                    shown(&d.now),
                    shown(&d.then)
                ))
                .help("give a template with {% generation %} around what is generated: --chat-template FILE");
                // Where each turn is the last one already, the template begins what follows otherwise than it writes it.
                let d = match self.split_turns {
                    true => d,
                    false => d.help("or make a row of each turn: --split-turns"),
                };
                d.help("or score all tokens: --loss-on all")
            }
        }
    }
}

/// A model has no template.
pub fn no_template(model: &str) -> Diag {
    Diag::new("data", format!("no chat template: {model} has none"))
        .rule("a chat becomes text by the template of its model")
        .help("give --chat-template FILE")
        .help("that of a model that was trained on chats is in its folder: chat_template.jinja, or tokenizer_config.json")
}

fn render(
    t: &Template,
    c: &Chat,
    n: usize,
    prompt: bool,
) -> std::result::Result<template::Rendered, No> {
    let messages: &[Json] = &c.messages[..n];
    t.render(&template::TemplateInput { messages, tools: &c.tools, kwargs: &c.kwargs, prompt })
        .map_err(No::Refused)
}
