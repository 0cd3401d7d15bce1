//! Writes every iteration of the `repeat` blocks of a text out: the inverse of folding.

use super::types::push_number;
use crate::diag::{Diag, Spot};
use std::borrow::Cow;

/// Most bytes of a text, before and after expansion.
pub const MAX_BYTES: usize = 1 << 28;
/// Most lines of a text after expansion.
pub const MAX_LINES: usize = 4_000_000;
/// Most iterations of one `repeat`.
pub const MAX_COUNT: usize = 100_000;
/// Most `P at K is V` of one `repeat`.
const MAX_CHANGES: usize = 64;
/// Bound of layer numbers, as in names.
pub(super) const MAX_LAYER: u32 = 1 << 24;

/// A text without `repeat`, and where its lines come from.
#[derive(Clone, Debug)]
pub struct Expanded<'t> {
    pub text: Cow<'t, str>,
    /// Per line its line in the source, counted from 1, and the value of `i`; empty if nothing was
    /// repeated.
    origin: Vec<(u32, Option<u32>)>,
}

impl<'t> Expanded<'t> {
    /// A text without `repeat`.
    pub(super) fn plain(text: &'t str) -> Self {
        Expanded { text: Cow::Borrowed(text), origin: vec![] }
    }
    /// Source line (from 1) and value of `i` of a line (from 0) of the expanded text.
    pub fn origin(&self, line: usize) -> (usize, Option<u32>) {
        match self.origin.get(line) {
            Some(&(l, i)) => (l as usize, i),
            None => (line + 1, None),
        }
    }
}

/// The head of a `repeat`: `repeat i in 0..=31, %l{i-1}.y at 0 is %h {`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Head<'t> {
    pub first: u32,
    pub last: u32,
    /// Distance between iterations, at least 1; they count down if `last < first`.
    pub by: u32,
    pub changes: Vec<Change<'t>>,
}

/// In iteration `at`, the name `from` (with its `{i}`) reads `to`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Change<'t> {
    pub at: u32,
    pub from: Cow<'t, str>,
    pub to: &'t str,
}

impl Head<'_> {
    fn count(&self) -> usize {
        self.first.abs_diff(self.last) as usize / self.by as usize + 1
    }
    fn layers(&self) -> impl Iterator<Item = u32> {
        let (first, by, down) = (self.first, self.by, self.last < self.first);
        (0..self.count() as u32).map(move |k| if down { first - k * by } else { first + k * by })
    }
    pub fn write(&self, out: &mut String) {
        out.push_str("repeat i in ");
        push_number(self.first as usize, out);
        out.push_str("..=");
        push_number(self.last as usize, out);
        if self.by != 1 {
            out.push_str(" by ");
            push_number(self.by as usize, out);
        }
        for c in &self.changes {
            out.push_str(", ");
            out.push_str(&c.from);
            out.push_str(" at ");
            push_number(c.at as usize, out);
            out.push_str(" is ");
            out.push_str(c.to);
        }
        out.push_str(" {");
    }
}

/// Writes every iteration of every `repeat` out. Costs nothing if there is none.
///
/// ```
/// # use shardc_ir::text::expand;
/// let e = expand("repeat i in 2..=1 {\n  %l{i}.y, %l{i+1}.x\n}\n").unwrap();
/// assert_eq!(e.text, "%l2.y, %l3.x\n%l1.y, %l2.x\n");
/// ```
///
/// # Errors
/// `repeat` if a head cannot be read, a block is not closed or contains another; `too-large` if the
/// result has more than [`MAX_LINES`] lines, [`MAX_COUNT`] iterations or [`MAX_BYTES`] bytes.
pub fn expand(text: &str) -> Result<Expanded<'_>, Diag> {
    if text.len() > MAX_BYTES {
        return Err(too_large(format!("{} bytes of text", text.len()), 1));
    }
    if !text.lines().any(is_head) {
        return Ok(Expanded::plain(text));
    }
    let mut out = String::new();
    let mut origin: Vec<(u32, Option<u32>)> = vec![];
    let mut lines = text.split_inclusive('\n').enumerate();
    while let Some((at, line)) = lines.next() {
        if !is_head(line) {
            out.push_str(line);
            origin.push((at as u32 + 1, None));
            continue;
        }
        let head = read_head(line.trim()).map_err(|m| bad_repeat(m, at))?;
        let (mut body, mut length) = (String::new(), 0);
        let closed = lines.by_ref().find_map(|(n, l)| {
            if l.trim() == "}" || is_head(l) {
                return Some((n, is_head(l)));
            }
            body.push_str(l.strip_prefix("  ").unwrap_or(l));
            length += 1;
            None
        });
        match closed {
            Some((_, false)) => {}
            Some((n, true)) => return Err(bad_repeat("a repeat contains no other".into(), n)),
            None => return Err(bad_repeat("this repeat is not closed by a line `}`".into(), at)),
        }
        let count = head.count();
        let bytes = body.len().saturating_mul(count).saturating_add(out.len());
        if count > MAX_COUNT || origin.len() + count * length > MAX_LINES || bytes > MAX_BYTES {
            return Err(too_large(format!("{count} iterations of {length} lines"), at + 1));
        }
        for i in head.layers() {
            let here = head.changes.iter().filter(|c| c.at == i);
            let changes: Vec<(&str, &str)> = here.map(|c| (&*c.from, c.to)).collect();
            instantiate(&body, i, &changes, &mut out).map_err(|m| bad_repeat(m, at))?;
            origin.extend((0..length).map(|k| ((at + k + 2) as u32, Some(i))));
        }
    }
    Ok(Expanded { text: Cow::Owned(out), origin })
}

fn is_head(line: &str) -> bool {
    let t = line.trim();
    t.starts_with("repeat ") && t.ends_with('{')
}

fn bad_repeat(message: String, line: usize) -> Diag {
    Diag::new("repeat", message)
        .at(format!("line {}", line + 1))
        .of(Spot::Text { file: None, line: line + 1, column: 1 })
        .rule("repeat i in FIRST..=LAST [by N] {, %name at K is %other} { lines }")
        .help("for example `repeat i in 0..=31, %l{i-1}.y at 0 is %h {`, closed by a line `}`")
}

fn too_large(what: String, line: usize) -> Diag {
    Diag::new("too-large", format!("{what} are more than this compiler reads"))
        .at(format!("line {line}"))
        .of(Spot::Text { file: None, line, column: 1 })
        .rule(format!("lines <= {MAX_LINES}, iterations <= {MAX_COUNT}, bytes <= {MAX_BYTES}"))
        .help(format!("repeat fewer layers, at most {MAX_COUNT}"))
}

fn read_head(line: &str) -> Result<Head<'_>, String> {
    let inner = line.strip_prefix("repeat i in ").and_then(|l| l.strip_suffix('{'));
    let mut parts = inner.ok_or("a repeat begins with `repeat i in `")?.trim().split(',');
    let range = parts.next().unwrap_or("");
    let (range, by) = match range.split_once(" by ") {
        Some((r, by)) => (r, number(by)?),
        None => (range, 1),
    };
    let (first, last) = range.split_once("..=").ok_or("a range is written `0..=31` or `31..=0`")?;
    let (first, last) = (number(first)?, number(last)?);
    if by == 0 {
        return Err("`by 0` never ends".into());
    }
    let mut changes = vec![];
    for p in parts {
        let bad = || format!("`{}` is not of the form `%name at 0 is %other`", p.trim());
        let (from, rest) = p.trim().split_once(" at ").ok_or_else(bad)?;
        let (at, to) = rest.split_once(" is ").ok_or_else(bad)?;
        let (from, to) = (from.trim(), to.trim());
        let whole = token(from, true) == from.len() && token(to, false) == to.len();
        if !whole || from.is_empty() || to.is_empty() {
            return Err(bad());
        }
        changes.push(Change { at: number(at)?, from: from.into(), to });
        if changes.len() > MAX_CHANGES {
            return Err(format!("more than {MAX_CHANGES} changed names"));
        }
    }
    Ok(Head { first, last, by, changes })
}

fn number(text: &str) -> Result<u32, String> {
    let t = text.trim();
    let n = t.parse().ok().filter(|&n| n < MAX_LAYER && t.bytes().all(|b| b.is_ascii_digit()));
    n.ok_or_else(|| format!("`{t}` is not a number below {MAX_LAYER}"))
}

/// Length of the `%name` at the start of a text; with `{i}` in it, if `holes`.
pub(super) fn token(text: &str, holes: bool) -> usize {
    let b = text.as_bytes();
    if b.first() != Some(&b'%') {
        return 0;
    }
    let mut n = 1;
    loop {
        match b.get(n) {
            Some(c) if c.is_ascii_alphanumeric() || matches!(c, b'_' | b'.') => n += 1,
            Some(b'{') if holes => match hole(&b[n..]) {
                Some((len, _)) => n += len,
                None => return n,
            },
            _ => return n,
        }
    }
}

/// Length and offset of the `{i}`, `{i+1}` or `{i-1}` at the start of a text.
fn hole(text: &[u8]) -> Option<(usize, i64)> {
    let rest = text.strip_prefix(b"{i")?;
    let sign = match rest.first()? {
        b'}' => return Some((3, 0)),
        b'+' => 1,
        b'-' => -1,
        _ => return None,
    };
    let digits = rest[1..].iter().take(9).take_while(|c| c.is_ascii_digit()).count();
    let closed = digits > 0 && rest.get(1 + digits) == Some(&b'}');
    let value = rest[1..1 + digits].iter().fold(0, |n, c| n * 10 + i64::from(c - b'0'));
    closed.then_some((digits + 4, sign * value))
}

/// Appends iteration `i` of a block: `{i}` is its number, names in `changes` are replaced.
pub(super) fn instantiate(
    body: &str,
    i: u32,
    changes: &[(&str, &str)],
    out: &mut String,
) -> Result<(), String> {
    let mut rest = body;
    loop {
        let special = |c: &u8| matches!(c, b'{' | b'}') || *c == b'%' && !changes.is_empty();
        let Some(n) = rest.as_bytes().iter().position(special) else {
            out.push_str(rest);
            return Ok(());
        };
        out.push_str(&rest[..n]);
        rest = &rest[n..];
        let mut len = token(rest, true);
        if len > 0 {
            match changes.iter().find(|c| c.0 == &rest[..len]) {
                Some((_, to)) => out.push_str(to),
                None => {
                    out.push('%');
                    len = 1;
                }
            }
        } else {
            let (size, offset) = hole(rest.as_bytes())
                .ok_or("a brace inside a repeat is part of `{i}`, `{i-1}` or `{i+1}`")?;
            len = size;
            let n = usize::try_from(i64::from(i) + offset).map_err(|_| {
                format!("`{}` is negative for i = {i}: add `%name at {i} is %other`", &rest[..len])
            })?;
            push_number(n, out);
        }
        rest = &rest[len..];
        if out.len() > MAX_BYTES {
            return Err(format!("the repeat makes more than {MAX_BYTES} bytes"));
        }
    }
}
