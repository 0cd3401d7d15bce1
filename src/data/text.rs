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
