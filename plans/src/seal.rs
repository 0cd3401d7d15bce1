//! Hashes by which a changed file is known: of bytes, and of a JSON text that has its own.

/// blake3 of bytes, in hex.
pub fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

/// The text with another hash in place of its own.
fn with(text: &str, own: &str, other: &str) -> String {
    let line = |hash: &str| format!("\"hash\": \"{hash}\"");
    text.replacen(&line(own), &line(other), 1)
}

/// A JSON text with `"hash": ""` in it, which becomes the hash of the text as it is.
///
/// ```
/// # use shardc_plans::seal::{is_sealed, seal};
/// let text = seal("{\n  \"hash\": \"\",\n  \"step\": 3\n}\n");
/// let own = text.split('"').nth(3).unwrap();
/// assert!(is_sealed(&text, own) && !is_sealed(&text.replace('3', "2"), own));
/// ```
pub fn seal(text: &str) -> String {
    with(text, "", &hash(text.as_bytes()))
}

/// Whether a JSON text is as [`seal`] left it; `own` is the hash that stands in it.
pub fn is_sealed(text: &str, own: &str) -> bool {
    hash(with(text, own, "").as_bytes()) == own
}
