//! Folds lines of layers that differ only in their layer numbers into `repeat` blocks.
//!
//! The lines of one layer that follow each other are a segment. Two units of `p` segments each are
//! equal if, byte for byte, they are the same but for numbers that lie equally far from the layer
//! number of their unit; those become `{i}`, `{i-1}`, … . The first and the last unit may also name
//! a few values differently (`%h` instead of the output of layer -1). What is written is what
//! [`instantiate`] gives back; anything that cannot be written so stays as it is.

use super::expand::{Change, Head, MAX_COUNT, MAX_LAYER, instantiate, token};
use super::print::{Line, NO_LAYER};
use super::types::push_number;
use crate::func::RoleKind;
use std::ops::Range;

/// Most segments that repeat together, as layers of sliding and of full attention do in turn.
const MAX_PERIOD: usize = 8;
/// Most names the first or the last iteration may have for itself.
const MAX_CHANGES: usize = 8;
/// A run that covers so many segments is taken without looking at longer periods.
const ENOUGH: usize = 4;

/// Lines of one layer and kind.
#[derive(Clone, Copy)]
struct Segment {
    layer: u32,
    kind: Option<RoleKind>,
    start: usize,
    end: usize,
    marks: Marks,
}

/// The marks of some lines, as digits: lines that are equal have equal ones.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
struct Marks {
    lines: u32,
    digits: u64,
}

impl Marks {
    fn of(line: &Line) -> Marks {
        Marks { lines: 1, digits: line.fused as u64 }
    }

    /// These, and others behind them.
    fn and(self, more: Marks) -> Marks {
        let before = self.digits.wrapping_mul(3u64.wrapping_pow(more.lines));
        Marks { lines: self.lines + more.lines, digits: before.wrapping_add(more.digits) }
    }
}

/// Equal units: `count` of `period` segments each.
struct EqualUnits<'t> {
    period: usize,
    count: usize,
    template: Template<'t>,
    changes: Vec<Change<'t>>,
}

/// A unit cut at its numbers: texts, and after each but the last an offset from the layer.
struct Template<'t> {
    texts: Vec<&'t str>,
    offsets: Vec<i64>,
}

/// Folds a printed text, given its lines.
pub(super) fn fold(text: &str, lines: &[Line]) -> String {
    let mut out = String::with_capacity(text.len() / 2);
    let mut at = 0;
    while at < lines.len() {
        // A stretch of lines that all have layers, or none.
        let none = lines[at].layer == NO_LAYER;
        let len = lines[at..].iter().take_while(|l| (l.layer == NO_LAYER) == none).count();
        let start = lines[at].start;
        let end = lines.get(at + len).map_or(text.len(), |l| l.start);
        if none {
            out.push_str(&text[start..end]);
        } else {
            fold_layers(text, &segments(&lines[at..at + len], end), &mut out);
        }
        at += len;
    }
    out
}

fn segments(lines: &[Line], end: usize) -> Vec<Segment> {
    let mut segs: Vec<Segment> = vec![];
    for l in lines {
        match segs.last_mut() {
            Some(s) if s.layer == l.layer && s.kind == l.kind => {
                s.marks = s.marks.and(Marks::of(l));
            }
            last => {
                if let Some(s) = last {
                    s.end = l.start;
                }
                let Line { start, layer, kind, .. } = *l;
                segs.push(Segment { layer, kind, start, end, marks: Marks::of(l) });
            }
        }
    }
    segs
}

fn fold_layers(text: &str, segs: &[Segment], out: &mut String) {
    let mut at = 0;
    while at < segs.len() {
        let rest = &segs[at..];
        match best_run(text, rest) {
            Some(run) => {
                write_run(text, rest, &run, out);
                at += run.period * run.count;
            }
            None => {
                out.push_str(&text[range(&rest[..1])]);
                at += 1;
            }
        }
    }
}

fn range(segs: &[Segment]) -> Range<usize> {
    segs[0].start..segs[segs.len() - 1].end
}

/// The run of equal units at the front that saves most lines.
fn best_run<'t>(text: &'t str, segs: &[Segment]) -> Option<EqualUnits<'t>> {
    let mut best: Option<(usize, EqualUnits)> = None;
    for period in 1..=MAX_PERIOD.min(segs.len() / 2) {
        let Some(run) = run_of(text, segs, period) else { continue };
        let lines: usize = segs[..period].iter().map(|s| s.marks.lines as usize).sum();
        // Head and closing brace are two lines more.
        let saved = (lines * (run.count - 1)).saturating_sub(2);
        let enough = run.count * period >= ENOUGH;
        if saved > best.as_ref().map_or(0, |b| b.0) {
            best = Some((saved, run));
            if enough {
                break;
            }
        }
    }
    best.map(|b| b.1)
}

/// Equal units of `period` segments at the front.
fn run_of<'t>(text: &'t str, segs: &[Segment], period: usize) -> Option<EqualUnits<'t>> {
    let unit = |k: usize| segs.get(k * period..(k + 1) * period);
    let body = |k: usize| unit(k).map(|u| &text[range(u)]);
    let layer = |k: usize| unit(k).map(|u| i64::from(u[0].layer));
    let (start, step) = (layer(0)?, layer(1)? - layer(0)?);
    if step == 0 {
        return None;
    }
    let follows = |k: usize| k < MAX_COUNT && layer(k) == Some(start + step * k as i64);
    // What a look at the lines tells apart is not compared by bytes.
    let marks = |k: usize| {
        let add = |all: Marks, s: &Segment| all.and(s.marks);
        unit(k).map(|u| u.iter().fold(Marks::default(), add))
    };
    let same = |k: usize| match marks(k)? == marks(k + 1)? {
        true => template(body(k)?, layer(k)?, body(k + 1)?, layer(k + 1)?),
        false => None,
    };
    let mut changes = vec![];
    let (template, mut count) = match same(0) {
        Some(t) => (t, 2),
        None if follows(2) => {
            // Is it only the first that is different?
            let t = same(1)?;
            changes = differences(&t.write(), segs[0].layer, body(0)?)?;
            (t, 3)
        }
        None => return None,
    };
    while follows(count) && body(count).is_some_and(|b| template.matches(b, layer(count))) {
        count += 1;
    }
    if follows(count)
        && let (Some(b), Some(u)) = (body(count), unit(count))
        && let Some(more) = differences(&template.write(), u[0].layer, b)
    {
        changes.extend(more);
        count += 1;
    }
    Some(EqualUnits { period, count, template, changes })
}

/// What two units have in common; `None` if they differ in more than numbers relative to the layer.
fn template<'t>(a: &'t str, i: i64, b: &str, j: i64) -> Option<Template<'t>> {
    let mut t = Template { texts: Vec::with_capacity(64), offsets: Vec::with_capacity(64) };
    let (x, y) = (a.as_bytes(), b.as_bytes());
    let layers = i.max(j) < i64::from(MAX_LAYER);
    if !layers {
        return None;
    }
    // Everything before `from` is in the template already.
    let (mut from, mut p, mut q) = (0, 0, 0);
    loop {
        let same = common(&x[p..], &y[q..]);
        (p, q) = (p + same, q + same);
        if p == x.len() && q == y.len() {
            t.texts.push(&a[from..]);
            let plain = !x.contains(&b'{') && !x.contains(&b'}');
            return plain.then_some(t);
        }
        // Back to where the number begins in which they differ.
        let back = x[from..p].iter().rev().take_while(|c| c.is_ascii_digit()).count();
        (p, q) = (p - back, q - back);
        let (m, n) = (number(&x[p..])?, number(&y[q..])?);
        if m.value - i != n.value - j {
            return None;
        }
        t.texts.push(&a[from..p]);
        t.offsets.push(m.value - i);
        (p, q) = (p + m.len, q + n.len);
        from = p;
    }
}

/// Length of the common prefix.
fn common(a: &[u8], b: &[u8]) -> usize {
    let mut n = 0;
    for (x, y) in a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0) {
        let differ = u64::from_le_bytes(*x) ^ u64::from_le_bytes(*y);
        if differ != 0 {
            return n + differ.trailing_zeros() as usize / 8;
        }
        n += 8;
    }
    n + a[n..].iter().zip(&b[n..]).take_while(|(x, y)| x == y).count()
}

struct Number {
    value: i64,
    len: usize,
}

/// The decimal number at the start, if it is written as this compiler writes numbers.
fn number(b: &[u8]) -> Option<Number> {
    let len = b.iter().take_while(|c| c.is_ascii_digit()).count();
    if len == 0 || len > 9 || (b[0] == b'0' && len > 1) {
        return None;
    }
    let value = b[..len].iter().fold(0, |n, c| n * 10 + i64::from(c - b'0'));
    Some(Number { value, len })
}

impl Template<'_> {
    /// True if this is the template's text for layer `i`.
    fn matches(&self, text: &str, i: Option<i64>) -> bool {
        let (mut rest, Some(i)) = (text.as_bytes(), i) else { return false };
        for (k, t) in self.texts.iter().enumerate() {
            let Some(r) = rest.strip_prefix(t.as_bytes()) else { return false };
            rest = r;
            let Some(offset) = self.offsets.get(k) else { break };
            match number(rest) {
                Some(n) if n.value == i + offset => rest = &rest[n.len..],
                _ => return false,
            }
        }
        rest.is_empty() && i < i64::from(MAX_LAYER)
    }

    /// The text with `{i}`.
    fn write(&self) -> String {
        let mut out = String::with_capacity(self.texts.iter().map(|t| t.len() + 5).sum());
        for (k, t) in self.texts.iter().enumerate() {
            out.push_str(t);
            if let Some(&offset) = self.offsets.get(k) {
                out.push_str(match offset.signum() {
                    0 => "{i",
                    1 => "{i+",
                    _ => "{i-",
                });
                if offset != 0 {
                    push_number(offset.unsigned_abs() as usize, &mut out);
                }
                out.push('}');
            }
        }
        out
    }
}

/// The names for which the unit of layer `i` has others than the template says; `None` if it
/// differs in anything else.
fn differences<'t>(template: &str, i: u32, unit: &'t str) -> Option<Vec<Change<'t>>> {
    let mut changes: Vec<Change> = vec![];
    let (mut a, mut b) = (template, unit);
    let mut scratch = String::new();
    // Length of a name, or of the text up to the next.
    let piece = |t: &str, name: bool, holes: bool| match name {
        true => token(t, holes),
        false => t.bytes().skip(1).position(|c| c == b'%').map_or(t.len(), |n| n + 1),
    };
    while !a.is_empty() {
        let name = a.starts_with('%') && b.starts_with('%');
        let (la, lb) = (piece(a, name, true), piece(b, name, false));
        scratch.clear();
        let plain = instantiate(&a[..la], i, &[], &mut scratch).is_ok() && scratch == b[..lb];
        if !plain && !name {
            return None;
        }
        if !plain && !changes.iter().any(|c| c.from == a[..la]) {
            if changes.len() == MAX_CHANGES || lb == 1 {
                return None;
            }
            changes.push(Change { at: i, from: a[..la].to_string().into(), to: &b[..lb] });
        }
        (a, b) = (&a[la..], &b[lb..]);
    }
    // A name stands for another everywhere or nowhere.
    scratch.clear();
    let here: Vec<(&str, &str)> = changes.iter().map(|c| (&*c.from, c.to)).collect();
    instantiate(template, i, &here, &mut scratch).ok()?;
    (scratch == unit && i < MAX_LAYER).then_some(changes)
}

fn write_run(text: &str, segs: &[Segment], run: &EqualUnits, out: &mut String) {
    let at = |k: usize| segs[k * run.period].layer;
    let head = Head {
        first: at(0),
        last: at(run.count - 1),
        by: at(0).abs_diff(at(1)),
        changes: run.changes.clone(),
    };
    let indent = if text[segs[0].start..].starts_with("    ") { "    " } else { "  " };
    out.push_str(indent);
    head.write(out);
    out.push('\n');
    for line in run.template.write().split_inclusive('\n') {
        out.push_str("  ");
        out.push_str(line);
    }
    out.push_str(indent);
    out.push_str("}\n");
}
