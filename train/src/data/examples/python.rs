//! Values of templates as Python writes them: `str()`, `repr()` and `json.dumps`. Chat templates are written for Jinja2,
//! where these are what `{{ x }}` and `tojson` print.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use std::fmt::Write as _;

/// Deepest nesting of lists and dicts that is written.
const DEEPEST: usize = 200;
/// Longest text of one value, in bytes.
const LONGEST: usize = 64 << 20;

fn fail(what: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.to_string())
}

/// Goes one deeper, and checks what is there so far.
fn deeper(depth: usize, out: &str) -> Result<usize, Error> {
    short(out)?;
    match depth < DEEPEST {
        true => Ok(depth + 1),
        false => Err(fail("lists and dicts are nested too deeply")),
    }
}

fn short(out: &str) -> Result<(), Error> {
    if out.len() < LONGEST { Ok(()) } else { Err(fail("a value is longer than 64 MiB")) }
}

/// A float as `repr` writes it: the shortest digits that read back, an exponent of two digits from 1e16 on and below
/// 1e-4.
pub fn float(x: f64) -> String {
    let text = format!("{x:?}");
    match text.split_once('e') {
        None if x.is_nan() => "nan".into(),
        None => text,
        Some((digits, exponent)) => {
            let digits = digits.strip_suffix(".0").unwrap_or(digits);
            let (sign, number) = match exponent.strip_prefix('-') {
                Some(number) => ('-', number),
                None => ('+', exponent),
            };
            format!("{digits}e{sign}{number:0>2}")
        }
    }
}

/// A number as both `str` and `json.dumps` write it, but for those that are none.
fn number(v: &Value) -> String {
    match f64::try_from(v.clone()) {
        Ok(x) if !v.is_integer() => float(x),
        _whole => v.to_string(),
    }
}

/// `str(v)`.
///
/// # Errors
/// For what is nested too deeply or too long.
pub fn text(v: &Value) -> Result<String, Error> {
    match v.kind() {
        ValueKind::String | ValueKind::Undefined | ValueKind::Bytes => Ok(v.to_string()),
        _other => {
            let mut out = String::new();
            repr(v, &mut out, 0)?;
            Ok(out)
        }
    }
}

/// `v|join(d, attribute=…)`: items, or what they have by a name, as `str` has them.
///
/// # Errors
/// For what has no items, and for what becomes too long.
pub fn join(v: Value, d: Option<String>, kw: Kwargs) -> Result<String, Error> {
    let attribute: Option<String> = kw.get("attribute")?;
    let named: Option<String> = kw.get("d")?;
    kw.assert_all_used()?;
    let between = d.or(named).unwrap_or_default();
    let mut out = String::new();
    for (i, x) in v.try_iter()?.enumerate() {
        out.push_str(if i > 0 { &between } else { "" });
        let own = attribute.as_deref().map(|name| x.get_attr(name)).transpose()?;
        out.push_str(&text(&own.unwrap_or(x))?);
        short(&out)?;
    }
    Ok(out)
}

/// `v|string`: a string as it is.
///
/// # Errors
/// Those of [`text`].
pub fn string(v: Value) -> Result<Value, Error> {
    match v.as_str() {
        Some(own) => short(own).map(|()| v.clone()),
        None => text(&v).map(Value::from),
    }
}

fn repr(v: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
    match v.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::Number => out.push_str(&number(v)),
        ValueKind::String => quoted(v.as_str().unwrap_or_default(), out),
        ValueKind::Seq | ValueKind::Iterable => {
            let depth = deeper(depth, out)?;
            out.push('[');
            for (i, x) in v.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(&x, out, depth)?;
                short(out)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            let depth = deeper(depth, out)?;
            out.push('{');
            for (i, k) in v.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(&k, out, depth)?;
                out.push_str(": ");
                repr(&v.get_item(&k)?, out, depth)?;
                short(out)?;
            }
            out.push('}');
        }
        _other => write!(out, "{v}").map_err(|_| fail("a value cannot be written"))?,
    }
    Ok(())
}

/// `repr` of a string: in single quotes, unless it has such and no double ones.
fn quoted(s: &str, out: &mut String) {
    let quote = if s.contains('\'') && !s.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in s.chars() {
        let n = c as u32;
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if printable(c) => out.push(c),
            _ if n < 0x100 => out.push_str(&format!("\\x{n:02x}")),
            _ if n < 0x1_0000 => out.push_str(&format!("\\u{n:04x}")),
            _ => out.push_str(&format!("\\U{n:08x}")),
        }
    }
    out.push(quote);
}

/// `str.isprintable` of a character: no control, no mark of format, no space but the usual one, no private use.
fn printable(c: char) -> bool {
    !matches!(c,
        '\0'..='\u{1f}' | '\u{7f}'..='\u{a0}' | '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}'
        | '\u{1680}' | '\u{180e}' | '\u{2000}'..='\u{200f}' | '\u{2028}'..='\u{202f}' | '\u{205f}'..='\u{206f}'
        | '\u{3000}' | '\u{e000}'..='\u{f8ff}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{fffe}' | '\u{ffff}'
        | '\u{e0000}'..='\u{10ffff}')
}

/// How `json.dumps` writes.
struct Dumps {
    indent: Option<String>,
    comma: String,
    colon: String,
    ascii: bool,
    sorted: bool,
}

/// The filter `tojson` as transformers has it: `json.dumps(x, ensure_ascii=False, …)`.
///
/// # Errors
/// For keywords that it does not have, and for what is nested too deeply or too long.
pub fn tojson(v: &Value, kw: Kwargs) -> Result<Value, Error> {
    let indent: Option<Value> = kw.get("indent")?;
    let indent = match indent.filter(|i| !i.is_none()) {
        None => None,
        Some(i) if i.as_str().is_some() => i.as_str().map(String::from),
        Some(i) => {
            let n = i.as_i64().filter(|n| (-1..=64).contains(n));
            let n = n.ok_or_else(|| fail("indent of tojson is a number up to 64"))?;
            Some(" ".repeat(n.max(0) as usize))
        }
    };
    let given: Option<Vec<String>> = kw.get("separators")?;
    let [comma, colon] = match (given, &indent) {
        (Some(own), _) => own.try_into().map_err(|_| fail("separators of tojson are two texts"))?,
        (None, Some(_)) => [",".into(), ": ".into()],
        (None, None) => [", ".into(), ": ".into()],
    };
    let yes = |key| kw.get::<Option<bool>>(key).map(|x| x.unwrap_or(false));
    let how =
        Dumps { indent, comma, colon, ascii: yes("ensure_ascii")?, sorted: yes("sort_keys")? };
    kw.assert_all_used()?;
    let mut out = String::new();
    how.value(v, &mut out, 0)?;
    Ok(Value::from(out))
}

impl Dumps {
    fn line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn value(&self, v: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
        match v.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if v.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&match &*number(v) {
                "nan" => "NaN".into(),
                "inf" => "Infinity".into(),
                "-inf" => "-Infinity".into(),
                x => x.to_string(),
            }),
            ValueKind::String => self.string(v.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                // One byte at least is written of each.
                let all: Vec<Value> = v.try_iter()?.take(LONGEST).collect();
                self.many(('[', ']'), all.len(), out, depth, |i, out, depth| {
                    self.value(&all[i], out, depth)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = v.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.many(('{', '}'), keys.len(), out, depth, |i, out, depth| {
                    match keys[i].as_str() {
                        Some(key) => self.string(key, out),
                        None => self.string(&text(&keys[i])?, out),
                    }
                    out.push_str(&self.colon);
                    self.value(&v.get_item(&keys[i])?, out, depth)
                })?;
            }
            _other => return Err(fail("tojson: this is no value of JSON")),
        }
        Ok(())
    }

    fn many(
        &self,
        (open, close): (char, char),
        n: usize,
        out: &mut String,
        depth: usize,
        mut one: impl FnMut(usize, &mut String, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let within = deeper(depth, out)?;
        out.push(open);
        for i in 0..n {
            out.push_str(if i > 0 { &self.comma } else { "" });
            self.line(out, within);
            one(i, out, within)?;
            short(out)?;
        }
        if n > 0 {
            self.line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn string(&self, s: &str, out: &mut String) {
        out.push('"');
        for c in s.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 => out.push_str(&format!("\\u{:04x}", c as u32)),
                c if self.ascii && (c as u32) > 0x7e => {
                    for u in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{u:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `repr` of Python 3.11 gives.
    #[test]
    fn floats_and_texts_are_pythons() {
        for (x, want) in [
            (1e22, "1e+22"),
            (1e-7, "1e-07"),
            (1.5e-300, "1.5e-300"),
            (1e16, "1e+16"),
            (123456789012345.0, "123456789012345.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (2.0, "2.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
        ] {
            assert_eq!(float(x), want);
        }
        let v: serde_json::Value = serde_json::from_str(
            r#"["a", "it's", "\"'", {"k": null, "t": [true, 1, 2.5, 1e22]}, "\n\u0001\u00a0ü\u200b🎉\ue000", []]"#,
        )
        .unwrap();
        assert_eq!(
            text(&Value::from_serialize(&v)).unwrap(),
            r#"['a', "it's", '"\'', {'k': None, 't': [True, 1, 2.5, 1e+22]}, '\n\x01\xa0ü\u200b🎉\ue000', []]"#
        );
    }
}
