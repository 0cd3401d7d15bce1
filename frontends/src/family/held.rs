//! Types of models that hold one of a known family: a model of pictures and text, or another name.

use super::FAMILIES;
use crate::config::Config;
use shardc_ir::diag::Diag;

/// Types of whole models, and the family of their text model, where config.json does not say it in the family's
/// own word. Of text alone these compute what the family does.
const HELD: [(&str, &str); 8] = [
    ("gemma3", "gemma3_text"),
    ("mistral3", "mistral"),
    ("qwen3_vl", "qwen3"),
    ("qwen3_vl_text", "qwen3"),
    ("qwen2_5_vl", "qwen2"),
    ("qwen2_5_vl_text", "qwen2"),
    ("qwen2_vl", "qwen2"),
    ("qwen2_vl_text", "qwen2"),
];
/// Types that are a known one under another name, in all but the name.
const CALLED: [(&str, &str); 1] = [("kimi_k2", "deepseek_v3")];

/// Adds what a config of an unknown type may be compiled as, if it holds a known family.
///
/// # Errors
/// The diagnostic as it was, if it does not.
pub(super) fn advise(c: &Config, word: &str, d: Diag) -> Result<Diag, Diag> {
    if let Some((_, known)) = CALLED.iter().find(|h| h.0 == word) {
        let what = format!("`{word}` is the model of `{known}` under another name");
        let help = format!("write \"model_type\": \"{known}\" into a copy of its config.json");
        return Ok(d.why(what).help(help));
    }
    let family = |word: &str| {
        let known = FAMILIES.iter().map(|f| f.model_type).find(|f| *f == word);
        let row = HELD.iter().chain(&CALLED).find(|h| h.0 == word);
        known.or_else(|| row.map(|h| h.1))
    };
    let inside = c.child("text_config").ok().flatten();
    let own = inside.as_ref().and_then(|t| t.word_if("model_type").ok().flatten());
    let Some(known) = own.and_then(family).or_else(|| family(word)) else { return Err(d) };
    let sizes = match inside {
        Some(_) => format!("write the object under `text_config` into a file, say {known}.json"),
        None => format!("copy config.json to a file, say {known}.json"),
    };
    let d = d.why(format!("the text model in a `{word}` is of a known type, `{known}`"));
    let d = d.help(format!(
        "for its sizes: {sizes}, there with \"model_type\": \"{known}\", and compile that file"
    ));
    Ok(d.help(
        "with its weights: save the text model as a folder of its own, by 7 lines of Python: \
         shardc explain rule:unknown-model-type",
    ))
}
