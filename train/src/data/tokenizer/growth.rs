//! Text that a tokenizer makes longer, within bounds whoever wrote its file: each step of it says how long a text
//! becomes before it is made.
//!
//! A few words of a file can ask for more than any memory holds: five replacements, each of which writes a hundred
//! letters for one, make ten thousand million of it. What honest ones do is little: a space becomes three bytes, a byte
//! two, a ligature a line.

use super::wrong;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value as Json;
use shardc_ir::diag::Result;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use tokenizers::models::ModelWrapper;
use tokenizers::normalizers::{NormalizerWrapper, Replace};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::{
    DecoderWrapper, NormalizedString, Normalizer, OffsetReferential, OffsetType,
    PostProcessorWrapper, PreTokenizedString, PreTokenizer, TokenizerImpl,
};

/// A tokenizer whose normalizer and pre-tokenizer are bounded.
pub type Bounded = TokenizerImpl<ModelWrapper, Normal, Words, PostProcessorWrapper, DecoderWrapper>;

/// Most bytes that a byte of text becomes, and bytes that a piece of text may have besides.
const TIMES: usize = 8;
const BESIDES: usize = 64;
/// Longest name, in bytes, of what stands for unknown text, or before or behind parts of words: it is written for
/// each of them. Also what one character becomes by a table.
const NAME: usize = 64;
/// Most tokens that a template puts around a text.
const AROUND: usize = 1024;

type Library<T> = tokenizers::Result<T>;

/// Most bytes that so many may become.
fn most(bytes: usize) -> usize {
    bytes.saturating_mul(TIMES).saturating_add(BESIDES)
}

fn within(now: usize, least: usize, what: &str) -> Library<()> {
    if least <= most(now) {
        return Ok(());
    }
    let of = format!("{what} makes {least} bytes or more of {now}");
    Err(format!("{of}, more than {TIMES} for each").into())
}

/// One step of a normalizer.
struct Step {
    work: NormalizerWrapper,
    /// If it replaces: the same with nothing and with one byte in place, which counts what it finds.
    counts: Option<[Replace; 2]>,
}

impl Step {
    fn new(work: NormalizerWrapper) -> Library<Step> {
        let counts = match &work {
            NormalizerWrapper::Replace(r) => {
                let mut other = serde_json::to_value(r)?;
                let mut with = |content: &str| -> Library<Replace> {
                    other["content"] = content.into();
                    Ok(serde_json::from_value(other.clone())?)
                };
                Some([with("")?, with("x")?])
            }
            _none => None,
        };
        Ok(Step { work, counts })
    }

    /// Bytes that a text has at least when the step is done; all of them if the step can make many.
    fn least(&self, text: &NormalizedString) -> Library<usize> {
        let now = text.get().len();
        Ok(match (&self.work, &self.counts) {
            (NormalizerWrapper::Prepend(p), _) => now.saturating_add(p.prepend.len()),
            (NormalizerWrapper::Replace(r), Some(counts)) if !r.content.is_empty() => {
                // A replacement for each byte, and one at the end.
                let all = now.saturating_add(1).saturating_mul(r.content.len());
                if now.saturating_add(all) <= most(now) {
                    return Ok(0);
                }
                let length = |r: &Replace| -> Library<usize> {
                    let mut copy = text.clone();
                    r.normalize(&mut copy)?;
                    Ok(copy.get().len())
                };
                let (none, one) = (length(&counts[0])?, length(&counts[1])?);
                let found = one.saturating_sub(none);
                none.saturating_add(found.saturating_mul(r.content.len()))
            }
            // Tables of characters: what they make is looked at afterwards.
            _others => 0,
        })
    }
}

/// A normalizer, step by step.
pub struct Normal {
    steps: Vec<Step>,
    /// Why a text could not be normalized, which the library does not ask.
    failed: Mutex<Option<String>>,
}

impl Normal {
    /// Why some text could not be normalized, if that was so.
    pub fn failure(&self) -> Option<String> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn work(&self, text: &mut NormalizedString) -> Library<()> {
        let begin = text.get().len();
        for step in &self.steps {
            within(begin, step.least(text)?, "a normalizer")?;
            step.work.normalize(text)?;
            within(begin, text.get().len(), "a normalizer")?;
        }
        Ok(())
    }
}

impl Normalizer for Normal {
    fn normalize(&self, text: &mut NormalizedString) -> Library<()> {
        self.work(text).inspect_err(|e| {
            text.clear();
            *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(e.to_string());
        })
    }
}

impl<'de> Deserialize<'de> for Normal {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Normal, D::Error> {
        fn flat(of: NormalizerWrapper, out: &mut Vec<NormalizerWrapper>) {
            match of {
                NormalizerWrapper::Sequence(all) => all.into_iter().for_each(|n| flat(n, out)),
                one => out.push(one),
            }
        }
        let mut all = vec![];
        flat(NormalizerWrapper::deserialize(d)?, &mut all);
        let steps = all.into_iter().map(Step::new).collect::<Library<_>>();
        Ok(Normal { steps: steps.map_err(D::Error::custom)?, failed: Mutex::default() })
    }
}

/// A pre-tokenizer, step by step.
pub struct Words(Vec<PreTokenizerWrapper>);

impl PreTokenizer for Words {
    fn pre_tokenize(&self, text: &mut PreTokenizedString) -> Library<()> {
        let ends = text.get_splits(OffsetReferential::Original, OffsetType::None);
        let begin = ends.iter().map(|(_, at, _)| at.1).max().unwrap_or(0);
        for step in &self.0 {
            step.pre_tokenize(text)?;
            let parts = text.get_splits(OffsetReferential::Normalized, OffsetType::None);
            let bytes = parts.iter().fold(0usize, |n, (part, _, _)| n.saturating_add(part.len()));
            within(begin, bytes, "a pre-tokenizer")?;
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for Words {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Words, D::Error> {
        fn flat(of: PreTokenizerWrapper, out: &mut Vec<PreTokenizerWrapper>) {
            match of {
                PreTokenizerWrapper::Sequence(all) => all.into_iter().for_each(|n| flat(n, out)),
                one => out.push(one),
            }
        }
        let mut all = vec![];
        flat(PreTokenizerWrapper::deserialize(d)?, &mut all);
        Ok(Words(all))
    }
}

/// What is written for each part of a text, whatever is in it.
#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    normalizer: Json,
    #[serde(default)]
    post_processor: Json,
    #[serde(default)]
    decoder: Json,
    #[serde(default)]
    model: GrowthNames,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct GrowthNames {
    unk_token: Json,
    continuing_subword_prefix: Json,
    end_of_word_suffix: Json,
}

/// Looks at a file before the library does.
///
/// # Errors
/// `tokenizer` for names and templates that write more than a text has, and tables that claim to be longer than they
/// are.
pub fn check(path: &Path, file: &[u8]) -> Result<()> {
    // Of two parts of one name the library would take the last.
    let parts = serde_json::from_slice::<Parts>(file);
    let parts = parts.map_err(|e| wrong(path, format!("the tokenizer cannot be used: {e}")))?;
    let m = &parts.model;
    for name in [&m.unk_token, &m.continuing_subword_prefix, &m.end_of_word_suffix] {
        let long = name.as_str().map_or(0, str::len);
        if long > NAME {
            let what = format!("a name of {long} bytes is written for each part of a text");
            return Err(wrong(path, what).help(format!("use at most {NAME} bytes")));
        }
    }
    let written = contents(&parts.decoder);
    if written > NAME {
        let what = format!("its decoder writes {written} bytes for what it replaces");
        return Err(wrong(path, what).help(format!("use at most {NAME} bytes")));
    }
    let texts = templates(&parts.post_processor);
    if texts > 1 {
        return Err(wrong(path, format!("its templates write a text {texts} times"))
            .help("write {\"Sequence\": {\"id\": \"A\"}} 1 time in `single`"));
    }
    let around = around(&parts.post_processor);
    if around > AROUND {
        return Err(wrong(path, format!("its templates write {around} tokens around a text"))
            .help(format!("use at most {AROUND}")));
    }
    match tables(&parts.normalizer) {
        true => Ok(()),
        false => Err(wrong(path, "a precompiled_charsmap is not what its head says")
            .rule(format!("a character becomes at most {NAME} bytes"))),
    }
}

/// The longest text that decoders, one behind the other, write in place of another.
fn contents(decoder: &Json) -> usize {
    let own = decoder["content"].as_str().map_or(0, str::len);
    let inner = decoder["decoders"].as_array().into_iter().flatten().map(contents);
    inner.fold(own, usize::max)
}

/// How often templates, one behind the other, write a text.
fn templates(post: &Json) -> usize {
    let is_text = |piece: &&Json| piece["Sequence"].is_object();
    let own = post["single"].as_array().map(|all| all.iter().filter(is_text).count());
    let inner = post["processors"].as_array().into_iter().flatten().map(templates);
    inner.fold(own.unwrap_or(1), usize::saturating_mul)
}

/// Tokens that templates write around a text, together.
fn around(post: &Json) -> usize {
    let list = |of: &Json| of.as_array().cloned().unwrap_or_default();
    let tokens = |piece: &Json| {
        let id = piece["SpecialToken"]["id"].as_str().unwrap_or("");
        post["special_tokens"][id]["ids"].as_array().map_or(0, Vec::len)
    };
    let own = list(&post["single"]).iter().map(tokens).fold(0, usize::saturating_add);
    list(&post["processors"]).iter().map(around).fold(own, usize::saturating_add)
}

/// Whether tables of characters are as long as they say, and what they write is short.
fn tables(of: &Json) -> bool {
    match of {
        Json::Array(all) => all.iter().all(tables),
        Json::Object(all) => all.iter().all(|(key, v)| match v.as_str() {
            Some(text) if key == "precompiled_charsmap" => table(&of_base64(text)),
            _other => tables(v),
        }),
        _leaf => true,
    }
}

/// Whether the bytes of a trie, behind their number, are there, and the texts behind them are short.
fn table(bytes: &[u8]) -> bool {
    let Some((head, rest)) = bytes.split_first_chunk::<4>() else { return bytes.is_empty() };
    let Some(texts) = rest.get(u32::from_le_bytes(*head) as usize..) else { return false };
    texts.split(|b| *b == 0).all(|text| text.len() <= NAME)
}

/// The bytes of a text in base64, as far as it is one.
fn of_base64(text: &str) -> Vec<u8> {
    let digit = |b: u8| match b {
        b'A'..=b'Z' => Some(b - b'A'),
        b'a'..=b'z' => Some(b - b'a' + 26),
        b'0'..=b'9' => Some(b - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _end => None,
    };
    let (mut out, mut bits, mut n) = (Vec::with_capacity(text.len() / 4 * 3), 0u32, 0);
    for d in text.bytes().map_while(digit) {
        (bits, n) = (bits << 6 | u32::from(d), n + 6);
        if n >= 8 {
            n -= 8;
            out.push((bits >> n) as u8);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_read() {
        for (text, bytes) in [("", ""), ("TQ==", "M"), ("TWE=", "Ma"), ("TWFu", "Man")] {
            assert_eq!(of_base64(text), bytes.as_bytes());
        }
    }

    #[test]
    fn tables_are_as_long_as_they_say() {
        assert!(table(&[4, 0, 0, 0, 9, 9, 9, 9, b'a', 0, b'b']));
        assert!(!table(&[5, 0, 0, 0, 9, 9, 9, 9]));
        assert!(!table(&[&[0, 0, 0, 0][..], &[b'a'; NAME + 1]].concat()));
    }
}
