//! Examples as tokens: a tokenizer, a template, and what of a text is scored.

mod prompt;

use super::shape::Example;
use super::spans::{Marked, Marker};
use super::template::{self, Template, special_tokens};
use crate::data::{Reading, TooLong, short, tokenizer};
pub use prompt::{Prompt, Prompts};
use serde_json::{Map, Value as Json};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use std::path::{Path, PathBuf};

/// Longest template or config, in bytes.
const MOST_BYTES: u64 = 16 << 20;

/// An example, or a turn or a part of one, as tokens.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Coded {
    pub ids: Vec<i32>,
    /// Whether each is scored: never the first, which follows from nothing.
    pub scored: Vec<bool>,
    /// The bytes of `text` that each is.
    pub bytes: Vec<(usize, usize)>,
    pub text: String,
    /// Tokens on both sides of a border of what is scored.
    pub straddling: usize,
    /// It was cut.
    pub cut: bool,
}

impl Coded {
    /// How many tokens are scored.
    pub fn scores(&self) -> usize {
        self.scored.iter().filter(|s| **s).count()
    }

    fn part(&self, from: usize, to: usize) -> Coded {
        let mut scored = self.scored[from..to].to_vec();
        scored.iter_mut().take(1).for_each(|s| *s = false);
        Coded {
            ids: self.ids[from..to].to_vec(),
            scored,
            bytes: self.bytes[from..to].to_vec(),
            text: self.text.clone(),
            straddling: 0,
            cut: true,
        }
    }
}

/// Makes tokens of examples.
pub struct Coder {
    tokenizer: tokenizer::Opened,
    pub template: Option<Template>,
    /// That of chats with tools, if they have one of their own.
    with_tools: Option<Template>,
    /// Tokens are below this.
    vocab: usize,
    bos: Option<u32>,
    /// What fills rows up.
    pub pad: i32,
    pub reading: Reading,
    /// Hash of the tokenizer.
    pub hash: String,
    place: PathBuf,
}

impl Coder {
    /// The tokenizer of a folder, or in a file, with the template beside it or that is given; of a model of so many
    /// tokens.
    ///
    /// # Errors
    /// `tokenizer`, `data` for templates that are none, `flag`.
    pub fn open(place: &Path, vocab: usize, reading: &Reading) -> Result<Coder> {
        let opened = tokenizer::open_whole(place)?;
        let folder = if place.is_dir() { place } else { place.parent().unwrap_or(Path::new("")) };
        let json = |name: &str| -> Result<Json> {
            let path = folder.join(name);
            if !path.exists() {
                return Ok(Json::Null);
            }
            let wrong = |e: serde_json::Error| {
                Diag::new("tokenizer", format!("it is not JSON: {e}"))
                    .at(path.display().to_string())
                    .help("write it again with save_pretrained of transformers")
            };
            serde_json::from_slice(&files::read(&path, MOST_BYTES)?).map_err(wrong)
        };
        let config = json("tokenizer_config.json")?;
        let mut tokens = special_tokens(&json("special_tokens_map.json")?);
        tokens.extend(special_tokens(&config));
        let id = |name: &str| {
            tokens.get(name).and_then(Json::as_str).and_then(|t| opened.tokenizer.token_to_id(t))
        };
        let (bos, pad) = (id("bos_token"), id("pad_token").or(opened.end).unwrap_or(0) as i32);
        let (source, of) = source(folder, &config, reading)?;
        tokens.extend(reading.arguments()?);
        let made = |source: Option<String>| {
            let wrong = |e| {
                Diag::new("data", format!("the chat template is not one: {e}"))
                    .at(&of)
                    .rule("a chat template is Jinja2, as transformers runs it")
                    .help("give another one: --chat-template FILE")
            };
            let one = |s: String| Template::new(&s, tokens.clone(), reading.date()).map_err(wrong);
            source.map(one).transpose()
        };
        let template = made(source)?;
        let own = reading.template.chat_template.is_none()
            && !folder.join("chat_template.jinja").is_file();
        let with_tools = made(named(&config, "tool_use").filter(|_| own))?;
        let hash = short(&opened.bytes);
        let (reading, place) = (reading.clone(), place.into());
        Ok(Coder { tokenizer: opened, template, with_tools, vocab, bos, pad, reading, hash, place })
    }

    /// What the model is called: its folder.
    pub fn model(&self) -> String {
        let folder = if self.place.is_dir() {
            &self.place
        } else {
            self.place.parent().unwrap_or(&self.place)
        };
        let whole = std::fs::canonicalize(folder).unwrap_or_else(|_| folder.into());
        whole.file_name().map_or(folder.display().to_string(), |n| n.to_string_lossy().into_owned())
    }

    /// The template of chats, with tools or without.
    fn template_of(&self, tools: bool) -> Option<&Template> {
        self.with_tools.as_ref().filter(|_| tools).or(self.template.as_ref())
    }

    /// Keys of a chat with something in them that its template does not name: what they say is in no text.
    pub fn unnamed<'e>(&self, e: &'e Example) -> Vec<&'e str> {
        let Example::Chat(c) = e else { return vec![] };
        let Some(template) = self.template_of(!c.tools.is_null()) else { return vec![] };
        let of = c.messages.iter().filter_map(Json::as_object).flatten();
        // What they say of the message is done here: a weight is 0 or 1.
        let done = |k: &str, v: &Json| match k {
            "weight" => v.as_f64().is_some_and(|x| x == 0.0 || x == 1.0),
            _other => ["role", "content", "train"].contains(&k),
        };
        let own = of.filter(|(k, v)| !v.is_null() && !done(k, v));
        let tools = (!c.tools.is_null()).then_some("tools");
        own.map(|x| &**x.0).chain(tools).filter(|key| !template.names(key)).collect()
    }

    /// Whether an answer of an example has nothing in it that its template reads.
    pub fn says_nothing(&self, e: &Example) -> bool {
        let tools = matches!(e, Example::Chat(c) if !c.tools.is_null());
        let reads = |key: &str| self.template_of(tools).is_none_or(|t| t.names(key));
        e.says_nothing(self.reading.loss_on, &reads) && !self.writes_none(e)
    }

    /// Whether a template writes a content of null as the word that Python has for it.
    pub fn writes_none(&self, e: &Example) -> bool {
        let is = |content: &Json| content.is_null().then(String::new);
        self.writes(e, &is, "None")
    }

    /// Whether a template writes the parts of a content as the list that Python has for them.
    pub fn writes_parts(&self, e: &Example) -> bool {
        let is = |content: &Json| {
            let parts = content.as_array()?;
            Some(parts.iter().filter_map(|p| p["text"].as_str()).collect())
        };
        self.writes(e, &is, "'type': 'text'")
    }

    /// Whether words are in the text of a chat that are not there with other contents in place of some.
    fn writes(&self, e: &Example, other: &dyn Fn(&Json) -> Option<String>, words: &str) -> bool {
        let Example::Chat(c) = e else { return false };
        let Some(t) = self.template_of(!c.tools.is_null()) else { return false };
        let mut plain = c.messages.clone();
        let mut some = false;
        for content in plain.iter_mut().filter_map(|m| m.get_mut("content")) {
            if let Some(text) = other(content) {
                (*content, some) = (text.into(), true);
            }
        }
        if !some {
            return false;
        }
        let text = |messages: &[Json]| {
            let (tools, kwargs) = (&c.tools, &c.kwargs);
            t.render(&template::TemplateInput { messages, tools, kwargs, prompt: false })
                .map(|r| r.text)
        };
        let times = |messages: &[Json]| text(messages).map(|text| text.matches(words).count());
        matches!((times(&c.messages), times(&plain)), (Ok(own), Ok(plain)) if own > plain)
    }

    /// The texts of an example of a line.
    ///
    /// # Errors
    /// `data`, `chat-mask`, `flag`, without a place.
    pub fn texts(&self, e: &Example, line: &str) -> Result<Vec<Marked>> {
        let tools = matches!(e, Example::Chat(c) if !c.tools.is_null());
        let marker = Marker {
            template: self.template_of(tools),
            loss_on: self.reading.loss_on,
            split_turns: self.reading.split_turns,
            specials: &self.tokenizer.specials,
            model: &self.model(),
        };
        marker.texts(e, line)
    }

    /// Tokens of texts, together: the library shares them among threads. `at` says where a text is.
    ///
    /// # Errors
    /// `tokenizer`, `token-range`, `chat-bos`.
    pub fn code(&self, texts: Vec<Marked>, at: &dyn Fn(usize) -> String) -> Result<Vec<Coded>> {
        let rendered = texts.first().is_some_and(|t| t.rendered);
        let all: Vec<&str> = texts.iter().map(|t| &*t.text).collect();
        let done = tokenizer::encode(&self.tokenizer.tokenizer, &self.place, all, !rendered)?;
        let both = done.into_iter().zip(texts).enumerate();
        let one = |(i, (e, m)): (usize, (tokenizers::Encoding, Marked))| {
            self.coded(e.get_ids(), e.get_offsets(), m).map_err(|d| d.at(at(i)))
        };
        both.map(one).collect()
    }

    fn coded(&self, ids: &[u32], offsets: &[(usize, usize)], m: Marked) -> Result<Coded> {
        if let (true, Some(bos), [first, second, ..]) = (m.rendered, self.bos, ids)
            && *first == bos
            && *second == bos
        {
            let text: String = m.text.chars().take(24).collect();
            return Err(Diag::new("chat-bos", format!("the text begins with two {}", self.name(bos)))
                .rule("a template writes the token that begins a text once")
                .why(format!("it begins with {text:?}"))
                .help("take it out of the template or of the first message: tokens are not added to what a template writes"));
        }
        let mut out = Coded { text: m.text, ..Coded::default() };
        for (&id, &bytes) in ids.iter().zip(offsets) {
            self.push(&mut out, id, bytes, m.scored.has(bytes))?;
            out.straddling += usize::from(m.scored.straddles(bytes));
        }
        if let (false, Some(end)) = (m.rendered, self.tokenizer.end) {
            let at = out.text.len();
            if out.ids.last() == Some(&(end as i32)) && out.bytes.last() == Some(&(0, 0)) {
                // The tokenizer adds it by itself.
                out.scored.iter_mut().last().into_iter().for_each(|s| *s = true);
            } else {
                self.push(&mut out, end, (at, at), true)?;
            }
        }
        out.scored.iter_mut().take(1).for_each(|s| *s = false);
        Ok(out)
    }

    fn push(&self, out: &mut Coded, id: u32, bytes: (usize, usize), scored: bool) -> Result<()> {
        let token = i32::try_from(id).ok().filter(|_| (id as usize) < self.vocab);
        let token = token.ok_or_else(|| {
            Diag::new("token-range", format!("the text has token {id}"))
                .why(format!("the model has {} tokens", self.vocab))
                .rule("a token is in 0..vocab_size")
                .help("use the tokenizer of this model")
        })?;
        out.ids.push(token);
        out.scored.push(scored);
        out.bytes.push(bytes);
        Ok(())
    }

    /// A token as it is written.
    pub fn name(&self, id: u32) -> String {
        self.tokenizer.tokenizer.id_to_token(id).unwrap_or_else(|| id.to_string())
    }
}

impl Coded {
    /// What becomes of an example in rows of `seq` tokens; nothing, if it is left out.
    ///
    /// # Errors
    /// `data` if that is to be an error.
    pub fn cut(self, seq: usize, how: TooLong) -> Result<Vec<Coded>> {
        let (c, n) = (&self, self.ids.len());
        if n <= seq {
            return Ok(vec![self]);
        }
        match how {
            TooLong::Truncate => Ok(vec![c.part(0, seq)]),
            TooLong::Drop => Ok(vec![]),
            TooLong::Split => {
                Ok((0..n).step_by(seq).map(|from| c.part(from, (from + seq).min(n))).collect())
            }
            TooLong::Error => Err(Diag::new("data", format!("it has {n} tokens, a row has {seq}"))
                .at("--too-long error")
                .help(format!(
                    "compile with --seq {n}, or use --too-long truncate, drop or split"
                ))),
        }
    }
}

/// A template of several in tokenizer_config.json.
fn named(config: &Json, name: &str) -> Option<String> {
    let one = config["chat_template"].as_array()?.iter().find(|t| t["name"] == name)?;
    one["template"].as_str().map(String::from)
}

/// The text of the template, and where it comes from.
fn source(folder: &Path, config: &Json, reading: &Reading) -> Result<(Option<String>, String)> {
    let read = |path: &Path| -> Result<(Option<String>, String)> {
        let text = files::read_text(path, MOST_BYTES)?;
        // Python reads files of text with ends of lines of one kind.
        Ok((Some(text.replace("\r\n", "\n")), path.display().to_string()))
    };
    let place = folder.join("tokenizer_config.json").display().to_string();
    let by_name = |name: &str| Some((Some(named(config, name)?), format!("{place}: {name}")));
    if let Some(given) = &reading.template.chat_template {
        let path = Path::new(given);
        let more = folder.join("additional_chat_templates").join(format!("{given}.jinja"));
        return match (path.exists(), by_name(given)) {
            (true, _) => read(path),
            (false, Some(found)) => Ok(found),
            (false, None) if !given.contains('/') && more.is_file() => read(&more),
            (false, None) => Err(Diag::new("data", "there is no such template")
                .at(format!("--chat-template {given}"))
                .help(
                    "give a file of Jinja2, or the name of a template in the tokenizer's folder",
                )),
        };
    }
    let own = folder.join("chat_template.jinja");
    if own.is_file() {
        return read(&own);
    }
    if let Some(text) = config["chat_template"].as_str() {
        return Ok((Some(text.into()), place));
    }
    Ok(by_name("default").unwrap_or((None, place.clone())))
}

impl Reading {
    /// Values of `--template-arg`, by name.
    ///
    /// # Errors
    /// `flag` for what is not `NAME=VALUE`.
    fn arguments(&self) -> Result<Map<String, Json>> {
        let one = |word: &String| match word.split_once('=') {
            Some((name, value)) if !name.is_empty() => {
                // What is no JSON is a text.
                let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
                Ok((name.to_string(), value))
            }
            _none => Err(Diag::new("flag", "an argument of a template is NAME=VALUE")
                .at(format!("--template-arg {word}"))
                .help("for example --template-arg enable_thinking=false")),
        };
        self.template.template_arg.iter().map(one).collect()
    }
}
