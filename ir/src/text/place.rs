//! Where in a file stands what a message is about.

use super::expand::expand;
use crate::diag::{Diag, Spot};

/// The message about the text of a file, with the file, and the line and column that it is about.
pub fn in_file(mut d: Diag, text: &str, file: &str) -> Diag {
    let found = match d.spot.as_deref() {
        Some(Spot::Value { func, value }) => defined(text, func, value),
        Some(&Spot::Text { line, column, .. }) => Some((line, column)),
        None => None,
    };
    let old = d.place.take().unwrap_or_default();
    let (head, picture) = Diag::pictured(&old);
    let mut parts = vec![file.to_string()];
    if let Some((line, column)) = found {
        parts[0] += &format!(":{line}:{column}");
        d.spot = Some(Box::new(Spot::Text { file: Some(file.into()), line, column }));
    }
    // The numbers are said already.
    let numbers = |p: &&str| p.starts_with("line ") || p.starts_with("column ");
    let rest = head.split(", ").filter(|p| !(p.is_empty() || found.is_some() && numbers(p)));
    parts.extend(rest.map(String::from));
    let picture = if picture.is_empty() { String::new() } else { format!("\n{picture}") };
    d.place = Some(parts.join(", ") + &picture);
    d
}

/// Line and column, from 1, where a function defines a value.
fn defined(text: &str, func: &str, value: &str) -> Option<(usize, usize)> {
    let expanded = expand(text).ok()?;
    let (mut inside, mut mentioned) = (false, None);
    for (number, line) in expanded.text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or(line);
        if let Some(head) = code.trim_start().strip_prefix("func @") {
            inside = head.strip_prefix(func).is_some_and(|rest| !rest.starts_with(in_name));
        }
        let Some(at) = word(code, value).filter(|_| inside) else { continue };
        let place = (expanded.origin(number).0, code[..at].chars().count() + 1);
        let before = |equals: usize| code.trim_start().starts_with('%') && at < equals;
        if code.find('=').is_some_and(before) {
            return Some(place);
        }
        // An argument stands before all uses.
        mentioned.get_or_insert(place);
    }
    mentioned
}

fn in_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '.'
}

/// Where a name stands that is no part of another.
fn word(line: &str, name: &str) -> Option<usize> {
    let ends = |at: &usize| !line[at + name.len()..].starts_with(in_name);
    line.match_indices(name).map(|x| x.0).find(ends)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "func @f(\n  %x: f32[4],\n  %xy: f32[4]\n) -> (%y: f32[4]) {\n  %z = gelu %xy : f32[4]\n  \
        repeat i in 0..=1, %l{i-1}.a at 0 is %z {\n    %l{i}.a = add %l{i-1}.a, %x : f32[4]\n  }\n  \
        %y, %q = gelu %z : f32[4]\n}\n";

    #[test]
    fn values_are_found_where_they_are_defined() {
        let at = |value: &str| defined(TEXT, "f", value);
        assert_eq!(at("%x"), Some((2, 3)));
        assert_eq!(at("%xy"), Some((3, 3)));
        assert_eq!(at("%y"), Some((9, 3)));
        assert_eq!(at("%q"), Some((9, 7)));
        assert_eq!(at("%l1.a"), Some((7, 3)));
        assert_eq!(at("%none"), None);
        assert_eq!(defined(TEXT, "g", "%x"), None);
    }

    #[test]
    fn a_place_has_the_file_and_what_else_it_said() {
        let spot = Spot::Value { func: "f".into(), value: "%z".into() };
        let d = Diag::new("size", "wrong").at("@f, m.0\n\n%z = gelu\n^^").of(spot);
        let d = in_file(d, TEXT, "a.ir");
        assert_eq!(d.place.as_deref(), Some("a.ir:5:3, @f, m.0\n\n%z = gelu\n^^"));
        let again = Diag { place: Some("@f, line 5, column 3, for i = 2".into()), ..d };
        assert_eq!(in_file(again, TEXT, "a.ir").place.as_deref(), Some("a.ir:5:3, @f, for i = 2"));
        let none = in_file(Diag::new("size", "wrong"), TEXT, "a.ir");
        assert_eq!((none.place.as_deref(), none.spot), (Some("a.ir"), None));
    }
}
