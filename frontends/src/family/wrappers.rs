//! Models that hold a text model of a known family, such as those of pictures and text: the text model is compiled. Of
//! text alone they compute what it does, but for the output projection, which is the whole's own: no factor or cap
//! of logits and no loss of routers that the text model's own class has.

use super::{Attention, FAMILIES, Family, Window, defaults, qwen2, qwen3};
use crate::config::{Config, TIED};
use serde_json::Value;
use shardc_ir::diag::{Diag, Result};

/// A class of models around a text model.
struct Wrapper {
    model_type: &'static str,
    text: Text,
    tied: Tied,
    without: Without,
}

/// Which class of text models reads `text_config`.
#[derive(Clone, Copy)]
enum Text {
    /// This one, whatever `model_type` is there.
    Fixed(&'static str),
    /// That of its `model_type`; this one if there is none.
    Said(&'static str),
}

/// What a config without `text_config` has.
#[derive(Clone, Copy)]
enum Without {
    /// The text model that its class assumes.
    Class,
    /// As older files, the keys of the text model itself.
    Flat,
    /// One that is no class's own: it is not known here.
    Another,
}

/// Whether the output projection is the embedding.
#[derive(Clone, Copy)]
enum Tied {
    /// As the whole's own `tie_word_embeddings` says, and this where it is absent. That of `text_config` does not count.
    Whole(bool),
    /// Where the whole's or that of the text model says so.
    Either,
}

const fn wrapper(model_type: &'static str, text: Text, tied: Tied) -> Wrapper {
    Wrapper { model_type, text, tied, without: Without::Class }
}

const fn flat(model_type: &'static str, text: &'static str) -> Wrapper {
    Wrapper { model_type, text: Text::Fixed(text), tied: Tied::Either, without: Without::Flat }
}

const fn another(model_type: &'static str, text: &'static str, tied: bool) -> Wrapper {
    let (text, tied) = (Text::Said(text), Tied::Whole(tied));
    Wrapper { model_type, text, tied, without: Without::Another }
}

const WRAPPERS: [Wrapper; 11] = [
    wrapper("gemma3", Text::Fixed("gemma3_text"), Tied::Whole(true)),
    another("idefics3", "llama", false),
    wrapper("internvl", Text::Said("qwen2"), Tied::Whole(true)),
    wrapper("llama4", Text::Fixed("llama4_text"), Tied::Whole(false)),
    wrapper("llava", Text::Said("llama"), Tied::Either),
    wrapper("llava_next", Text::Said("llama"), Tied::Whole(false)),
    another("mistral3", "mistral", true),
    flat("qwen2_5_vl", "qwen2_5_vl_text"),
    flat("qwen2_vl", "qwen2_vl_text"),
    wrapper("qwen3_vl", Text::Fixed("qwen3_vl_text"), Tied::Whole(false)),
    another("smolvlm", "llama", false),
];

/// Types of text models that are a known family under another name.
const TEXTS: [(&str, &Family); 3] = [
    ("qwen2_5_vl_text", &qwen2::FAMILY),
    ("qwen2_vl_text", &qwen2::FAMILY),
    ("qwen3_vl_text", &WITHOUT_WINDOWS),
];

/// Its class reads no key of windows.
const WITHOUT_WINDOWS: Family = Family {
    attention: Attention { window: Window::Never, ..qwen3::FAMILY.attention },
    ..qwen3::FAMILY
};

/// Keys of the whole in older files that have those of the text model beside them.
pub(super) const OF_PICTURES: [&str; 6] = [
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
];

/// Whether a type is that of a model that holds one of text.
pub fn is_wrapper(model_type: &str) -> bool {
    WRAPPERS.iter().any(|w| w.model_type == model_type)
}

/// The family of a type of text model.
fn family(text: &str) -> Option<&'static Family> {
    let under = TEXTS.iter().find(|t| t.0 == text).map(|t| t.1);
    under.or_else(|| FAMILIES.into_iter().find(|f| f.model_type == text))
}

/// The text model of a config of this type, and its family; `None` if none is known.
///
/// # Errors
/// `config` if `text_config` is no object.
pub(super) fn text<'a>(
    whole: &Config<'a>,
    word: &str,
) -> Result<Option<(Config<'a>, &'static Family)>> {
    let known = |own: Config<'a>, text: &str, tied| -> Result<Option<_>> {
        let Some(f) = family(text) else { return Ok(None) };
        let own = own.with(defaults::of(text));
        let absent = match tied {
            None => None,
            Some(Tied::Whole(absent)) => Some(whole.get(TIED).unwrap_or(said(absent))),
            Some(Tied::Either) if own.flag(TIED, false)? => Some(said(true)),
            Some(Tied::Either) => Some(whole.get(TIED).unwrap_or(said(false))),
        };
        Ok(Some((own.of_whole(absent), f)))
    };
    let Some(w) = WRAPPERS.iter().find(|w| w.model_type == word) else {
        let alone = TEXTS.iter().any(|t| t.0 == word);
        return if alone { known(whole.clone(), word, None) } else { Ok(None) };
    };
    let (Text::Fixed(text) | Text::Said(text)) = w.text;
    let Some(own) = whole.child("text_config")? else {
        let own = match w.without {
            Without::Class => whole.emptied(),
            Without::Flat => whole.clone(),
            Without::Another => {
                let help = "write the config of the text model under `text_config`";
                return Err(whole.error("text_config", "`text_config` is missing", help));
            }
        };
        return known(own, text, Some(w.tied));
    };
    let text = match w.text {
        Text::Said(text) => own.word_if("model_type")?.unwrap_or(text),
        Text::Fixed(text) => text,
    };
    known(own, text, Some(w.tied))
}

/// As a config says it.
fn said<'a>(tied: bool) -> &'a Value {
    if tied { &Value::Bool(true) } else { &Value::Bool(false) }
}

/// Adds what a config of an unknown type may be compiled as, if it holds a known family.
pub(super) fn advise(c: &Config, d: Diag) -> Diag {
    let inside = c.child("text_config").ok().flatten();
    let own = inside.as_ref().and_then(|t| t.word_if("model_type").ok().flatten());
    let Some((text, known)) = own.and_then(|text| Some((text, family(text)?.model_type))) else {
        return d;
    };
    let d = d.why(format!("the model in its `text_config`, `{text}`, is of a known type"));
    d.help(format!(
        "for its sizes: write the object under `text_config` into config.json of a new folder, there with \
         \"model_type\": \"{known}\", and compile that folder"
    ))
}
