//! Checked reading of config.json: every number is tested before it is used, every error names its
//! key.

use serde_json::{Map, Value};
use shardc_ir::diag::{Diag, Result};
use std::sync::LazyLock;

/// Largest count in a config: token numbers are i32, and products of a few counts stay in range.
pub const MAX_COUNT: u64 = 1 << 31;

/// An object of config.json and where it stands.
#[derive(Clone, Debug)]
pub struct Config<'a> {
    object: &'a Map<String, Value>,
    file: String,
    pointer: String,
    /// Other names of keys.
    aliases: &'static [(&'static str, &'static str)],
    /// What keys are where they are absent.
    defaults: Option<&'a Map<String, Value>>,
    /// Of a text model that another one holds, or may hold: what the whole says of whether the output projection is the
    /// embedding, if it is there.
    held: Option<Option<&'a Value>>,
}

/// Key of whether the output projection is the embedding.
pub const TIED: &str = "tie_word_embeddings";

impl<'a> Config<'a> {
    /// The whole config; `file` is its path for messages.
    pub fn new(value: &'a Value, file: &str) -> Result<Config<'a>> {
        match value {
            Value::Object(object) => Ok(Config {
                object,
                file: file.into(),
                pointer: String::new(),
                aliases: &[],
                defaults: None,
                held: None,
            }),
            other => Err(Diag::new("config", format!("an object is needed, not {}", kind(other)))
                .at(file)
                .help(r#"write {"model_type": "llama", "hidden_size": 128, …}"#)),
        }
    }

    /// The same without any key.
    pub fn emptied(&self) -> Config<'a> {
        static NONE: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);
        Config { object: &NONE, ..self.clone() }
    }

    /// The same with other names of keys, each before the key that it stands for.
    pub fn called(self, aliases: &'static [(&'static str, &'static str)]) -> Config<'a> {
        Config { aliases, ..self }
    }

    /// The same with what keys are where they are absent.
    pub fn with(self, defaults: Option<&'a Map<String, Value>>) -> Config<'a> {
        Config { defaults, ..self }
    }

    /// The config of a text model that another one may hold; of one that is held, with whether the output projection,
    /// which is the whole's, is the embedding.
    pub fn of_whole(self, tied: Option<&'a Value>) -> Config<'a> {
        Config { held: Some(tied), ..self }
    }

    /// False of a text model that another one holds: the whole computes logits and losses, and knows none of the
    /// factors, caps and losses of the text model's own class.
    pub fn has_own_head(&self) -> bool {
        !matches!(self.held, Some(Some(_)))
    }

    /// True of a text model that another one may hold.
    pub fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// The name under which the config has a key: the key's own, if it has none.
    fn named<'b>(&self, key: &'b str) -> &'b str {
        #[cfg(test)]
        tests::ASKED.with_borrow_mut(|all| all.insert(format!("{}/{key}", self.pointer)));
        let there = |a: &&(&str, &str)| a.1 == key && self.object.contains_key(a.0);
        self.aliases.iter().find(there).map_or(key, |a| a.0)
    }

    /// File and JSON pointer of a key.
    pub fn place(&self, key: &str) -> String {
        format!("{}: {}/{}", self.file, self.pointer, self.named(key))
    }

    /// An error about a key, code `config`.
    pub fn error(&self, key: &str, message: impl Into<String>, help: impl Into<String>) -> Diag {
        Diag::new("config", message).at(self.place(key)).help(help)
    }

    /// An error about something this compiler cannot do, exit status 4.
    pub fn unsupported(
        &self,
        code: &'static str,
        key: &str,
        message: String,
        help: String,
    ) -> Diag {
        Diag::new(code, message).at(self.place(key)).help(help)
    }

    /// The value of a key, or its default; `None` if it is null, or absent without one.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        let named = self.named(key);
        let own = match self.held {
            Some(Some(tied)) if key == TIED => Some(tied),
            _own => {
                let default = self.defaults.and_then(|d| d.get(key));
                // A count that is null is none; all else that is null is absent.
                let counts = default.is_some_and(Value::is_u64);
                self.object.get(named).filter(|v| !v.is_null() || counts).or(default)
            }
        };
        own.filter(|v| !v.is_null())
    }

    /// True if the key is there, and null.
    pub fn is_null(&self, key: &str) -> bool {
        self.object.get(self.named(key)).is_some_and(Value::is_null)
    }

    /// Those of keys that are absent, and have a default.
    pub fn assumed<'b>(&self, keys: &[&'b str]) -> Vec<(&'b str, &'a Value)> {
        let absent = |key: &&str| !self.object.contains_key(self.named(key));
        let keys = keys.iter().copied().filter(absent);
        keys.filter_map(|key| Some((key, self.defaults?.get(key)?))).collect()
    }

    /// True if the key is there, be it null.
    pub fn has(&self, key: &str) -> bool {
        self.object.contains_key(self.named(key)) || self.get(key).is_some()
    }

    /// All keys that have a value, as they are written.
    pub fn entries(&self) -> impl Iterator<Item = (&'a str, &'a Value)> {
        self.object.iter().filter(|(_, v)| !v.is_null()).map(|(k, v)| (k.as_str(), v))
    }

    pub fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.object.keys().map(String::as_str)
    }

    /// An object under a key; `None` if absent, null or empty.
    pub fn child(&self, key: &str) -> Result<Option<Config<'a>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(m)) if m.is_empty() => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Config {
                object,
                file: self.file.clone(),
                pointer: format!("{}/{key}", self.pointer),
                aliases: &[],
                defaults: None,
                held: None,
            })),
            Some(v) => Err(self.wrong(key, "an object", v, r#"{"rope_type": "default"} or null"#)),
        }
    }

    fn wrong(&self, key: &str, want: &str, got: &Value, example: &str) -> Diag {
        let what = format!("`{key}` must be {want}, not {}", kind(got));
        self.error(key, what, format!("write {example}"))
    }

    /// A count of 1 to 2^31 that may be absent or null.
    pub fn count_if(&self, key: &str) -> Result<Option<usize>> {
        let Some(v) = self.get(key) else { return Ok(None) };
        let help = format!("write an integer from 1 to {MAX_COUNT}");
        match v.as_u64() {
            Some(n @ 1..=MAX_COUNT) => Ok(Some(n as usize)),
            Some(n) => Err(self.error(key, format!("`{key}` is {n}"), help)),
            None if v.is_number() => Err(self.error(key, format!("`{key}` is {v}"), help)),
            None => {
                let what = format!("`{key}` must be an integer, not {}", kind(v));
                Err(self.error(key, what, help))
            }
        }
    }

    /// A whole number, of any sign, that may be absent or null.
    pub fn whole_if(&self, key: &str) -> Result<Option<i64>> {
        let Some(v) = self.get(key) else { return Ok(None) };
        v.as_i64().map(Some).ok_or_else(|| {
            let got = if v.is_number() { v.to_string() } else { kind(v).to_string() };
            let what = format!("`{key}` must be an integer, not {got}");
            self.error(key, what, "write an integer such as 0, or null")
        })
    }

    /// A count of 1 to 2^31.
    pub fn count(&self, key: &str) -> Result<usize> {
        self.count_if(key)?.ok_or_else(|| self.missing(key))
    }

    fn missing(&self, key: &str) -> Diag {
        if self.is_null(key) {
            return self.error(key, format!("`{key}` is null"), "write an integer, at least 1");
        }
        let near = shardc_ir::names::nearest(key, self.keys(), 2);
        let d =
            self.error(key, format!("`{key}` is missing"), format!("add \"{key}\", at least 1"));
        match near[..] {
            [] => d,
            _ => d.help(format!("the config has `{}`", near.join("`, `"))),
        }
    }

    /// A number that f32 can hold, in which kernels have it, and that may be absent or null.
    pub fn number_if(&self, key: &str) -> Result<Option<f64>> {
        let Some(v) = self.get(key) else { return Ok(None) };
        match v.as_f64() {
            Some(x) if !(x as f32).is_finite() => {
                let most = f32::MAX;
                let help = format!("write a number between -{most:e} and {most:e}, as f32 has");
                Err(self.error(key, format!("`{key}` is {x:e}"), help))
            }
            Some(x) => Ok(Some(x)),
            None => Err(self.wrong(key, "a number", v, "a number such as 1.0")),
        }
    }

    /// A number greater than 0 that may be absent or null.
    pub fn positive_if(&self, key: &str) -> Result<Option<f64>> {
        match self.number_if(key)? {
            Some(x) if x <= 0.0 => {
                let help = "write a number greater than 0, such as 1.0";
                Err(self.error(key, format!("`{key}` is {x}"), help))
            }
            Some(x) if x < f64::from(f32::MIN_POSITIVE) => {
                let help =
                    format!("write a number of at least {:e}, as f32 has", f32::MIN_POSITIVE);
                Err(self.error(key, format!("`{key}` is {x:e}"), help))
            }
            x => Ok(x),
        }
    }

    /// A list of numbers above 0.
    ///
    /// # Errors
    /// `config` if it is none.
    pub fn positives(&self, key: &str) -> Result<Vec<f64>> {
        let list = self.get(key).and_then(Value::as_array);
        let number = |v: &Value| v.as_f64().filter(|x| x.is_finite() && *x > 0.0);
        list.and_then(|l| l.iter().map(number).collect()).ok_or_else(|| {
            self.error(
                key,
                format!("`{key}` is not a list of numbers above 0"),
                "write [1.0, 1.05]",
            )
        })
    }

    /// A number greater than 0.
    pub fn positive(&self, key: &str) -> Result<f64> {
        self.positive_if(key)?.ok_or_else(|| self.missing(key))
    }

    /// true or false, `absent` if it is absent. Null is false, as to a class that asks whether it is true.
    pub fn flag(&self, key: &str, absent: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(absent && !self.is_null(key)),
            Some(Value::Bool(b)) => Ok(*b),
            Some(v) => Err(self.wrong(key, "true or false", v, "true or false")),
        }
    }

    /// A string that may be absent or null.
    pub fn word_if(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(v) => Err(self.wrong(key, "a string", v, "a string such as \"silu\"")),
        }
    }

    /// A list of whole numbers, 0 or more, that may be absent or null.
    pub fn counts_if(&self, key: &str) -> Result<Option<Vec<usize>>> {
        let Some(v) = self.get(key) else { return Ok(None) };
        let count = |v: &Value| v.as_u64().filter(|n| *n <= MAX_COUNT).map(|n| n as usize);
        let counts = v.as_array().and_then(|a| a.iter().map(count).collect());
        counts.map(Some).ok_or_else(|| self.wrong(key, "a list of integers", v, "[0, 1]"))
    }

    /// A list of strings that may be absent or null.
    pub fn words_if(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        let Some(v) = self.get(key) else { return Ok(None) };
        let words = v.as_array().and_then(|a| a.iter().map(Value::as_str).collect());
        words
            .map(Some)
            .ok_or_else(|| self.wrong(key, "a list of strings", v, "[\"full_attention\"]"))
    }
}

/// JSON with the words `Infinity` and `NaN`, which Python writes and JSON has not, as strings.
pub fn with_words(text: &[u8]) -> Vec<u8> {
    let (mut out, mut inside, mut i) = (Vec::with_capacity(text.len()), false, 0);
    while i < text.len() {
        let word = [&b"Infinity"[..], b"NaN"].into_iter().find(|w| text[i..].starts_with(w));
        let taken = match (inside, text[i], word) {
            (false, _, Some(word)) => {
                out.extend([b"\"", word, b"\""].concat());
                i += word.len();
                continue;
            }
            (true, b'\\', _) => 2,
            (_, b'"', _) => {
                inside = !inside;
                1
            }
            _other => 1,
        };
        out.extend(text[i..].iter().take(taken));
        i += taken;
    }
    out
}

fn kind(v: &Value) -> &'static str {
    match v {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    thread_local! {
        /// Pointers of all keys that were asked for on this thread.
        pub static ASKED: RefCell<BTreeSet<String>> = const { RefCell::new(BTreeSet::new()) };
    }
}
