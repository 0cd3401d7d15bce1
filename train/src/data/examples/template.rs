//! Chat templates: Jinja2 as transformers runs it. What is not in the engine by itself: `tojson`, `str()` and `iterable`
//! of Python, `raise_exception`, `strftime_now`, and `{% generation %}`, which says what an assistant generates.
//!
//! A template is a stranger's program. It may take so many steps and write so much; it reads no file and no clock.

mod concat;

use super::python;
use super::room::timed;
use crate::data::Date;
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use serde_json::{Map, Value as Json, json};
use shardc_runtime::memory::Memory;
use std::io;
use std::ops::Range;

/// Most steps of the engine for one text.
pub const FUEL: u64 = 2_000_000;
/// Longest text that a template may write, in bytes.
const LONGEST: usize = 64 << 20;
/// Most memory for one text, in bytes.
const MEMORY: usize = 1 << 30;
/// Where a span of `{% generation %}` begins and ends in what is written, until it is taken out: characters for private
/// use.
const MARKS: [char; 2] = ['\u{f8f0}', '\u{f8f1}'];

/// A template, ready to render.
pub struct Template {
    env: Environment<'static>,
    /// Whether it says what is generated.
    pub tags: bool,
    /// blake3 of its text.
    pub hash: String,
    source: String,
    /// Values by name that each rendering begins with: special tokens, and arguments of the user.
    globals: Map<String, Json>,
}

/// What a template made of a chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    pub text: String,
    /// Bytes between `{% generation %}` and `{% endgeneration %}`.
    pub spans: Vec<Range<usize>>,
}

/// What a template is given.
pub struct TemplateInput<'a> {
    pub messages: &'a [Json],
    pub tools: &'a Json,
    pub kwargs: &'a Map<String, Json>,
    /// What an assistant says is to follow.
    pub prompt: bool,
}

impl Template {
    /// Reads a template, with values that it may use by name, and the day that `strftime_now` tells.
    ///
    /// # Errors
    /// What the engine says of a template that is none.
    pub fn new(source: &str, globals: Map<String, Json>, date: Date) -> Result<Template, String> {
        if source.contains(MARKS) {
            return Err("it has the characters U+F8F0 or U+F8F1, which are kept for marks".into());
        }
        let mut env = Environment::empty();
        // All that is built in, but nothing that reads files: there is no loader.
        env.clone_from(&Environment::new());
        env.set_trim_blocks(true);
        env.set_lstrip_blocks(true);
        env.set_fuel(Some(FUEL));
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.set_formatter(format);
        env.add_filter("tojson", |v: Value, kw| python::tojson(&v, kw));
        env.add_filter("string", python::string);
        env.add_filter("trim", |v: Value, chars: Option<String>| {
            let text = python::text(&v)?;
            Ok::<String, Error>(match chars {
                None => text.trim().into(),
                Some(all) => text.trim_matches(|c| all.contains(c)).into(),
            })
        });
        env.add_filter("join", python::join);
        env.add_test("iterable", |v: Value| {
            !v.is_none() && !v.is_undefined() && v.try_iter().is_ok()
        });
        env.add_function("raise_exception", |m: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, format!("{REFUSED}{m}")))
        });
        env.add_function("strftime_now", move |f: String| {
            date.strftime(&f).map_err(|e| Error::new(ErrorKind::InvalidOperation, e))
        });
        let (marked, tags) = marked(&concat::with_strings(source))?;
        // What is known of constants is computed at once.
        let work = || env.add_template_owned("chat", marked).map_err(|e| said(&e));
        timed(|| Memory::within(MEMORY, work))?;
        let hash = blake3::hash(source.as_bytes()).to_hex().to_string();
        Ok(Template { env, tags, hash, source: source.into(), globals })
    }

    /// Whether a key of a chat or of a message stands in its text, under one of its names.
    pub fn names(&self, key: &str) -> bool {
        let thought = THOUGHT.contains(&key);
        self.source.contains(key) || thought && THOUGHT[..2].iter().any(|k| self.source.contains(k))
    }

    /// The text of a chat.
    ///
    /// # Errors
    /// What the template or the engine says.
    pub fn render(&self, chat: &TemplateInput) -> Result<Rendered, String> {
        let mut all = self.globals.clone();
        all.extend(chat.kwargs.iter().map(|(k, v)| (k.clone(), v.clone())));
        all.insert("messages".into(), chat.messages.iter().map(aliased).collect());
        all.insert("tools".into(), chat.tools.clone());
        all.insert("documents".into(), Json::Null);
        all.insert("add_generation_prompt".into(), chat.prompt.into());
        let template = self.env.get_template("chat").map_err(|e| said(&e))?;
        let work = || {
            let mut out = Limited(vec![]);
            let done = template.render_captured_to(Value::from_serialize(&all), &mut out).map(drop);
            done.map_err(|e| said(&e))?;
            String::from_utf8(out.0).map_err(|e| e.to_string())
        };
        let text = timed(|| Memory::within(MEMORY, work))?;
        Ok(unmarked(&text))
    }
}

/// What stands before what a template says in `raise_exception`.
const REFUSED: &str = "\u{f8f0}";

/// What went wrong, in a line: what a template itself says, or what the engine does.
fn said(e: &Error) -> String {
    let mut causes = vec![];
    let mut next: Option<&dyn std::error::Error> = Some(e);
    while let Some(e) = next.filter(|_| causes.len() < 8) {
        causes.push(e.to_string());
        next = e.source();
    }
    let own = causes.iter().find_map(|c| c.split_once(REFUSED));
    let text = match own {
        Some((_, said)) => said.split(" (in chat:").next().unwrap_or(said).to_string(),
        None if e.kind() == ErrorKind::OutOfFuel => {
            format!("it takes more than {} million steps", FUEL / 1_000_000)
        }
        None => causes.join(": "),
    };
    text.chars().take(400).collect()
}

/// `{{ x }}` as Jinja2 prints it.
fn format(out: &mut Output, _: &State, v: &Value) -> Result<(), Error> {
    let done = match v.kind() {
        ValueKind::String => out.write_str(v.as_str().unwrap_or_default()),
        _other => out.write_str(&python::text(v)?),
    };
    done.map_err(|_| Error::new(ErrorKind::WriteFailure, "the text is longer than 64 MiB"))
}

/// Names of what was thought: of one a message has the first two.
const THOUGHT: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A message as transformers hands it on: with `reasoning_content` and `thinking`, if it has one of the names of what
/// was thought.
fn aliased(message: &Json) -> Json {
    let mut out = message.clone();
    let Json::Object(all) = &mut out else { return out };
    all.remove("train");
    let thought = THOUGHT.iter().find_map(|n| all.get(*n).filter(|x| !x.is_null()).cloned());
    if let Some(thought) = thought {
        for name in &THOUGHT[..2] {
            all.entry(*name).or_insert_with(|| thought.clone());
        }
    }
    out
}

/// The template with marks in place of its tags of generation, and whether it has any. The tags stay blocks, so that
/// what is trimmed around them is.
///
/// # Errors
/// For tags that do not follow each other in turn.
fn marked(source: &str) -> Result<(String, bool), String> {
    let (mut out, mut rest, mut found, mut open) = (String::new(), source, false, false);
    while let Some(at) = rest.find("{%").into_iter().chain(rest.find("{#")).min() {
        let close = if rest[at..].starts_with("{#") { "#}" } else { "%}" };
        let Some(end) = rest[at + 2..].find(close).map(|n| at + 2 + n) else { break };
        let inner = &rest[at + 2..end];
        let mark = match inner.trim_matches(['-', '+']).trim() {
            "generation" if close == "%}" => Some(MARKS[0]),
            "endgeneration" if close == "%}" => Some(MARKS[1]),
            _other => None,
        };
        match mark {
            None => out.push_str(&rest[..end + 2]),
            Some(mark) => {
                let begins = mark == MARKS[0];
                if begins == open {
                    let word = if begins { "generation" } else { "endgeneration" };
                    return Err(format!("a tag `{word}` is where none can be"));
                }
                (found, open) = (true, begins);
                let side = |c: Option<char>| match c {
                    Some(c @ ('-' | '+')) => c.to_string(),
                    _none => String::new(),
                };
                let (left, right) = (side(inner.chars().next()), side(inner.chars().last()));
                out.push_str(&rest[..at]);
                out.push_str(&format!("{{%{left} if true %}}{mark}{{% endif {right}%}}"));
            }
        }
        rest = &rest[end + 2..];
    }
    out.push_str(rest);
    if open { Err("a tag `generation` is not closed".into()) } else { Ok((out, found)) }
}

/// A text without marks, and the bytes of it between them.
fn unmarked(text: &str) -> Rendered {
    let (mut out, mut spans, mut open) = (String::with_capacity(text.len()), vec![], None);
    for c in text.chars() {
        match c {
            c if c == MARKS[0] => open = Some(out.len()),
            c if c == MARKS[1] => spans.extend(open.take().map(|from| from..out.len())),
            c => out.push(c),
        }
    }
    Rendered { text: out, spans }
}

/// Whether data have the characters of marks.
pub fn has_marks(v: &Json) -> bool {
    match v {
        Json::String(s) => s.contains(MARKS),
        Json::Array(all) => all.iter().any(has_marks),
        Json::Object(all) => all.iter().any(|(k, v)| k.contains(MARKS) || has_marks(v)),
        _other => false,
    }
}

/// Takes so many bytes and no more.
struct Limited(Vec<u8>);

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > LONGEST {
            return Err(io::Error::other("the text is longer than 64 MiB"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Special tokens by the names that templates use, of the objects of tokenizer_config.json and
/// special_tokens_map.json.
pub fn special_tokens(config: &Json) -> Map<String, Json> {
    let mut out = Map::new();
    for (key, v) in config.as_object().into_iter().flatten() {
        let content = |v: &Json| v.as_str().or(v["content"].as_str()).map(String::from);
        if key.ends_with("_token")
            && let Some(text) = content(v)
        {
            out.insert(key.clone(), text.into());
        }
        if let (true, Json::Array(all)) = (key == "additional_special_tokens", v) {
            out.insert(key.clone(), json!(all.iter().filter_map(content).collect::<Vec<_>>()));
        }
    }
    out
}

#[cfg(test)]
mod tests;
