//! Hugging Face's tokenizers: `tokenizer.json`, read with bounds.

mod growth;

use growth::Bounded;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::files;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use tokenizers::Encoding;
use tokenizers::models::ModelWrapper;

/// Longest tokenizer.json that is read; the largest that are known have 35 MB.
const MOST_BYTES: u64 = 256 << 20;
/// Names of the end of text where tokenizer_config.json says none.
const ENDS: [&str; 3] = ["<|endoftext|>", "<|end_of_text|>", "</s>"];

fn wrong(path: &Path, what: impl Into<String>) -> Diag {
    Diag::new("tokenizer", what)
        .at(path.display().to_string())
        .rule("--tokenizer: a folder with tokenizer.json, or that file, as Hugging Face's tokenizers write it")
        .help("write it again with save_pretrained of transformers, version 4.35 or later")
}

/// Calls the library. It panics at some files that are wrong; that is said as an error.
fn call<T>(path: &Path, work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    // At the start of a run no other thread may panic meanwhile.
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let done = panic::catch_unwind(AssertUnwindSafe(work));
    panic::set_hook(hook);
    let what = match done {
        Ok(Ok(x)) => return Ok(x),
        Ok(Err(e)) => e.to_string(),
        Err(panic) => panic.downcast_ref::<String>().cloned().unwrap_or("it is broken".into()),
    };
    Err(wrong(path, format!("the tokenizer cannot be used: {what}")))
}

/// A tokenizer, and what is known of it.
pub struct Opened {
    pub tokenizer: Bounded,
    /// The token that ends a text.
    pub end: Option<u32>,
    /// Special tokens, as they are written.
    pub specials: Vec<String>,
    /// Its file.
    pub bytes: Vec<u8>,
}

/// The tokenizer of a folder or file, and its token for the end of a text.
///
/// # Errors
/// `tokenizer`.
pub fn open(place: &Path) -> Result<(Bounded, Option<u32>)> {
    open_whole(place).map(|o| (o.tokenizer, o.end))
}

/// The tokenizer of a folder or file.
///
/// # Errors
/// `tokenizer`.
pub fn open_whole(place: &Path) -> Result<Opened> {
    let path = if place.is_dir() { &place.join("tokenizer.json") } else { place };
    if !path.exists() {
        let mut d = wrong(path, "the file does not exist");
        if !place.exists() {
            d.help = vec!["check the path".into()];
        }
        return Err(d.help("or train on bytes, which need no tokenizer: --data 'bytes:GLOB'"));
    }
    let bytes = files::read(path, MOST_BYTES)?;
    growth::check(path, &bytes)?;
    let mut tokenizer = call(path, || Bounded::from_bytes(&bytes))?;
    if let ModelWrapper::BPE(model) = tokenizer.get_model()
        && let Some(p) = model.dropout.filter(|&p| p > 0.0)
    {
        return Err(wrong(path, format!("its model skips merges at random (dropout {p})"))
            .help("set model.dropout to null: tokens must be the same in every run"));
    }
    // What is kept there are lengths that somebody once wanted.
    tokenizer.with_truncation(None).map_err(|e| wrong(path, e.to_string()))?;
    tokenizer.with_padding(None);
    let end = end(&tokenizer, &path.with_file_name("tokenizer_config.json"))?;
    let added = tokenizer.get_added_tokens_decoder();
    let mut specials: Vec<String> = added
        .values()
        .filter(|t| t.special && !t.content.is_empty())
        .map(|t| t.content.clone())
        .collect();
    specials.sort();
    Ok(Opened { tokenizer, end, specials, bytes })
}

/// `eos_token` of tokenizer_config.json, or else a token that is usually called so.
fn end(tokenizer: &Bounded, config: &Path) -> Result<Option<u32>> {
    if config.exists() {
        let json: serde_json::Value = serde_json::from_slice(&files::read(config, MOST_BYTES)?)
            .map_err(|e| wrong(config, e.to_string()))?;
        let said = &json["eos_token"];
        if let Some(name) = said.as_str().or(said["content"].as_str()) {
            let none =
                || wrong(config, format!("eos_token `{name}` is not a token of the tokenizer"));
            return tokenizer.token_to_id(name).ok_or_else(none).map(Some);
        }
    }
    Ok(ENDS.iter().find_map(|name| tokenizer.token_to_id(name)))
}

/// Tokens of every document.
///
/// # Errors
/// `data` for a document that is not text; `tokenizer`.
pub fn ids(
    tokenizer: &Bounded,
    place: &Path,
    documents: &[(PathBuf, Vec<u8>)],
) -> Result<Vec<Vec<u32>>> {
    let texts = documents.iter().map(|(path, bytes)| {
        std::str::from_utf8(bytes).map_err(|e| {
            Diag::new("data", format!("it is not text: {e}"))
                .at(path.display().to_string())
                .rule("text is UTF-8")
                .help("write it again, for example with iconv -t utf-8, or leave it out")
        })
    });
    let texts = texts.collect::<Result<Vec<&str>>>()?;
    let done = checked(tokenizer, place, || tokenizer.encode_batch_fast(texts, true))?;
    Ok(done.iter().map(|e| e.get_ids().to_vec()).collect())
}

/// Texts as tokens with the bytes that each is, and with the tokens that the tokenizer adds, if they are wanted.
///
/// # Errors
/// `tokenizer`.
pub fn encode(
    tokenizer: &Bounded,
    place: &Path,
    texts: Vec<&str>,
    adds: bool,
) -> Result<Vec<Encoding>> {
    checked(tokenizer, place, || tokenizer.encode_batch(texts, adds))
}

/// Tokens as text, without special ones.
///
/// # Errors
/// `tokenizer`.
pub fn decode(tokenizer: &Bounded, place: &Path, ids: &[u32]) -> Result<String> {
    call(place, || tokenizer.decode(ids, true))
}

/// What the library makes of texts. It goes on where one cannot be normalized.
fn checked(
    tokenizer: &Bounded,
    place: &Path,
    work: impl FnOnce() -> tokenizers::Result<Vec<Encoding>>,
) -> Result<Vec<Encoding>> {
    call(place, || {
        let done = work();
        let failed = tokenizer.get_normalizer().and_then(|n| n.failure());
        failed.map_or(done, |why| Err(why.into()))
    })
}
