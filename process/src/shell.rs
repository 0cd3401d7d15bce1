//! Words of commands that a shell reads.

use shardc_ir::diag::is_hidden;
use std::path::Path;

/// In quotes of a shell, on one line: what has line ends in those of bash.
pub fn quoted(text: &str) -> String {
    let ends = |c: char| is_hidden(c) || ['\u{2028}', '\u{2029}'].contains(&c);
    if !text.contains(ends) {
        return format!("'{}'", text.replace('\'', r"'\''"));
    }
    let one = |c: char| match c {
        '\'' | '\\' => format!("\\{c}"),
        c if ends(c) => c.to_string().bytes().map(|b| format!("\\x{b:02x}")).collect(),
        c => c.to_string(),
    };
    format!("$'{}'", text.chars().map(one).collect::<String>())
}

/// A path that a command does not take for a flag.
pub fn no_flag(path: &str) -> String {
    if path.starts_with('-') { format!("./{path}") } else { path.into() }
}

/// A path as a word of a command that somebody may type: in quotes where a shell would see more than a word.
pub fn word(path: &Path) -> String {
    let path = no_flag(&path.display().to_string());
    let plain = |c: char| c.is_alphanumeric() || "/._-+=,:@%".contains(c);
    if !path.is_empty() && path.chars().all(plain) { path } else { quoted(&path) }
}
