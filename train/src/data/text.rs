//! Text as tokens, by a tokenizer of Hugging Face's form: all of it when a run begins.

use super::short;
#[cfg(feature = "tokenizers")]
use super::tokenizer;
use shardc_ir::diag::{Diag, Result, count};
use std::path::{Path, PathBuf};

/// Bytes of documents that threads share at a time: the library needs 160 times as much memory.
#[cfg(feature = "tokenizers")]
const GROUP: usize = 4 << 20;

/// Tokens of text, in memory.
pub struct Text {
    pub tokens: Vec<i32>,
    documents: usize,
    /// What stands behind every document.
    end: Option<i32>,
}

/// What editors of some systems write before a text, and is no part of it.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// The documents of files: each is one, but of `.jsonl` each line has one, its `text`.
///
/// # Errors
/// `data` for a line that has none, and for other JSON.
pub fn documents(files: Vec<(PathBuf, Vec<u8>)>) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut out = vec![];
    for (path, mut bytes) in files {
        if bytes.starts_with(BYTE_ORDER_MARK) {
            bytes.drain(..BYTE_ORDER_MARK.len());
        }
        let kind = path.extension().map(|e| e.to_string_lossy().to_lowercase());
        match kind.as_deref() {
            Some("jsonl" | "ndjson") => {}
            Some("json") => {
                return Err(Diag::new("data", "a .json file is not text to train on")
                    .at(path.display().to_string())
                    .rule("a line of a .jsonl file is a document: {\"text\": \"…\"}")
                    .help("write its documents to a .jsonl file, an object in each line"));
            }
            _text => {
                out.push((path, bytes));
                continue;
            }
        }
        for (i, line) in bytes.split(|b| *b == b'\n').enumerate() {
            if line.trim_ascii().is_empty() {
                continue;
            }
            let place = format!("{}:{}", path.display(), i + 1);
            let text = text_of(line).map_err(|what| {
                Diag::new("data", what)
                    .at(&place)
                    .rule("a line of a .jsonl file is a document: {\"text\": \"…\"}")
                    .help("write the text of each document as `text`, or one file per document as .txt")
                    .help(format!("chats, and prompts with completions: --data {}", path.display()))
            })?;
            out.push((PathBuf::from(place), text.into_bytes()));
        }
    }
    Ok(out)
}

/// The text of a line of JSON; or what it is instead.
fn text_of(line: &[u8]) -> std::result::Result<String, String> {
    let json: serde_json::Value =
        serde_json::from_slice(line).map_err(|e| format!("the line is not JSON: {e}"))?;
    match json {
        serde_json::Value::Object(mut all) => match all.remove("text") {
            Some(serde_json::Value::String(text)) => Ok(text),
            Some(_other) => Err("`text` of the line is not a text".into()),
            None => {
                let has: Vec<&str> = all.keys().take(8).map(String::as_str).collect();
                Err(format!("the line has no `text`, but {}", has.join(", ")))
            }
        },
        _other => Err("the line is not an object of JSON".into()),
    }
}

impl Text {
    /// Tokens of documents, each with what its tokenizer puts around it, and the end of text. Those of
    /// a document depend on all of it, so documents are what threads share.
    ///
    /// # Errors
    /// `tokenizer`, `data` for what is not text, `token-range`.
    #[cfg(feature = "tokenizers")]
    pub fn open(place: &Path, documents: &[(PathBuf, Vec<u8>)], vocab: usize) -> Result<Text> {
        let (tokenizer, end) = tokenizer::open(place)?;
        let token = |id: u32| match i32::try_from(id) {
            Ok(token) if (id as usize) < vocab => Ok(token),
            _ => Err(Diag::new("token-range", format!("the text has token {id}"))
                .at(place.display().to_string())
                .why(format!("the model has {vocab} tokens"))
                .rule("a token is in 0..vocab_size")
                .help("use the tokenizer of this model")),
        };
        let end = end.map(token).transpose()?;
        let mut tokens = vec![];
        let mut rest = documents;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |d: &&(PathBuf, Vec<u8>)| {
                bytes += d.1.len();
                bytes <= GROUP
            };
            let group;
            (group, rest) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            for ids in tokenizer::ids(&tokenizer, place, group)? {
                for id in ids {
                    tokens.push(token(id)?);
                }
                tokens.extend(end);
            }
        }
        if tokens.is_empty() {
            return Err(Diag::new("data", "the tokenizer makes no tokens of the text")
                .at(place.display().to_string())
                .help("name files with more in them"));
        }
        Ok(Text { tokens, documents: documents.len(), end })
    }

    #[cfg(not(feature = "tokenizers"))]
    pub fn open(place: &Path, _: &[(PathBuf, Vec<u8>)], _: usize) -> Result<Text> {
        Err(Diag::new("not-built", "this shardc was built without tokenizers")
            .at(place.display().to_string())
            .help("cargo build --release builds with them: leave --no-default-features out")
            .help("or tokenize the text to a file first: docs/data.md lists the formats"))
    }

    /// What tells it from other text.
    pub fn mark(&self) -> String {
        let documents = count(self.documents, "document", "documents");
        let tokens = count(self.tokens.len(), "token", "tokens");
        let end = self.end.map_or("no end of text".into(), |t| format!("end of text {t}"));
        let hash = short(bytemuck::cast_slice(&self.tokens));
        format!("of {documents}, {tokens}, {end}, hash {hash}")
    }
}
