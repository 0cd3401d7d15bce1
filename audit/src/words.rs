//! Flags in a text: of a file of arguments, a script or a command line. Nothing is executed.

use shardc_ir::diag::{Diag, Result};
use std::collections::BTreeMap;

/// Flags with their values, each once; of one that is given twice the last, as parsers have it.
pub type Words = BTreeMap<String, Vec<String>>;

/// The words of a text, without comments, quotes and ends of lines.
fn words(text: &str) -> Vec<String> {
    let mut out = vec![];
    for line in text.lines() {
        let mut word: Option<String> = None;
        let mut quote = None;
        for c in line.chars() {
            match (quote, c) {
                (Some(q), c) if c == q => quote = None,
                (Some(_), c) => word.get_or_insert_default().push(c),
                (None, '"' | '\'') => {
                    quote = Some(c);
                    word.get_or_insert_default();
                }
                (None, '#') if word.is_none() => break,
                (None, c) if c.is_whitespace() || c == '\\' => out.extend(word.take()),
                (None, c) => word.get_or_insert_default().push(c),
            }
        }
        out.extend(word);
    }
    // In quotes there may be a flag with its value.
    out.iter().flat_map(|w| w.split_whitespace().map(String::from)).collect()
}

/// Flags of a text. What stands before the first one, and the brackets of a shell's lists, are passed over.
///
/// # Errors
/// `audit` if a text has no flags.
pub fn flags(text: &str, place: &str) -> Result<Words> {
    let mut out = Words::new();
    let mut last: Option<String> = None;
    for word in words(text) {
        if word == ")" || word.ends_with("=(") {
            last = None;
            continue;
        }
        let word = word.trim_end_matches(')').to_string();
        match (word.strip_prefix("--"), &last) {
            (Some(_), _) => {
                let (flag, value) =
                    word.split_once('=').map_or((&*word, None), |x| (x.0, Some(x.1)));
                out.insert(flag.into(), value.into_iter().map(String::from).collect());
                last = Some(flag.into());
            }
            (None, Some(flag)) => out.entry(flag.clone()).or_default().push(word),
            (None, None) => {}
        }
    }
    if out.is_empty() {
        return Err(Diag::new("audit", "no flag stands here")
            .at(place.to_string())
            .rule("a text of arguments has words that begin with --")
            .help("for example --num-layers 32 --tensor-model-parallel-size 8"));
    }
    Ok(out)
}
