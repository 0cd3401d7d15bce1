//! Where a pattern is in a function.

use super::patterns::Pattern;
use super::raised::Graph;
use shardc_ir::func::Value;
use shardc_ir::ops::Op;
use shardc_ir::rule::Rule;
use std::collections::{BTreeMap, BTreeSet};

/// A pattern that was found: values and numbers by their names, and the nodes.
#[derive(Clone, Default)]
pub(super) struct Found {
    pub values: BTreeMap<&'static str, Value>,
    pub numbers: BTreeMap<&'static str, f64>,
    pub nodes: BTreeSet<usize>,
    /// Those that stay as long as something else reads them.
    pub shared: BTreeSet<usize>,
    /// What an `add..` leaves: the value that stands for the pattern's part of it.
    pub rest: Option<(&'static str, Value)>,
    checks: Vec<(&'static str, f64)>,
}

/// A line of a pattern.
struct PatternLine {
    known: bool,
    also: bool,
    out: &'static str,
    op: &'static str,
    more: bool,
    number: Option<&'static str>,
    shapes: Option<&'static str>,
    ins: Vec<&'static str>,
}

impl PatternLine {
    fn of(text: &'static str) -> Option<PatternLine> {
        let (out, made) = text.trim().split_once(" = ")?;
        let (known, also) = (out.starts_with("known "), out.starts_with("also "));
        let mut words = made.split(' ');
        let head = words.next()?;
        let (op, number) = match head.split_once('[') {
            Some((op, rest)) => (op, rest.strip_suffix(']')),
            None => (head, None),
        };
        let mut ins: Vec<&str> = words.collect();
        let is_shapes = |w: &&&str| {
            ["outer", "linear", "turned"].contains(*w) || w.bytes().all(|b| b"FRL>".contains(&b))
        };
        let shapes = ins.first().filter(is_shapes).copied();
        if shapes.is_some() {
            ins.remove(0);
        }
        let out = out.trim_start_matches("known ").trim_start_matches("also ");
        let more = op.ends_with("..");
        Some(PatternLine {
            known,
            also,
            out,
            op: op.trim_end_matches('.'),
            more,
            number,
            shapes,
            ins,
        })
    }
}

impl Pattern {
    /// Where its last op is this node.
    pub fn find(&self, g: &Graph, all: &[Graph], root: usize) -> Option<Found> {
        let last = self.lines.rsplit('\n').next().and_then(PatternLine::of)?;
        if g.f.nodes[root].op.mnemonic() != last.op {
            return None;
        }
        let mut found = Found::default();
        found.values.insert(last.out, g.out(root));
        let lines: Vec<PatternLine> = self.lines.lines().filter_map(PatternLine::of).collect();
        let found = Search { g, all, root, lines: &lines }.rest(lines.len(), found)?;
        let x = found.values.get("x");
        let width = || x.and_then(|x| g.width(*x)).map(|n| n as f64);
        let fits = |(text, is): &(&str, f64)| match *text {
            "1/n" => width().is_some_and(|n| (is * n - 1.0).abs() < 1e-6),
            "-1/n" => width().is_some_and(|n| (is * n + 1.0).abs() < 1e-6),
            number => number.parse().is_ok_and(|n: f64| (is - n).abs() <= 1e-9 * n.abs()),
        };
        found.checks.iter().all(fits).then_some(found)
    }

    /// Names of values in the call.
    pub fn ins(&self, found: &Found) -> Vec<&'static str> {
        let mut out = vec![];
        for part in self.call.split('{').skip(1) {
            let name = part.split('}').next().unwrap_or(part);
            if found.values.contains_key(name) && !out.contains(&name) {
                out.push(name);
            }
        }
        out
    }
}

/// The search for lines, from the last to the first.
struct Search<'a> {
    g: &'a Graph<'a>,
    all: &'a [Graph<'a>],
    root: usize,
    lines: &'a [PatternLine],
}

impl Search<'_> {
    /// The lines before this one.
    fn rest(&self, before: usize, found: Found) -> Option<Found> {
        let Some(at) = before.checked_sub(1) else { return Some(found) };
        let (g, l) = (self.g, &self.lines[at]);
        if l.known {
            let [out, a, b] = [l.out, l.ins[0], l.ins[1]].map(|n| found.values.get(n).copied());
            let product = [out?, a?, b?];
            let known = self.all.iter().any(|h| h.is_product(g, product));
            return if known { self.rest(at, found) } else { None };
        }
        let nodes: Vec<usize> = match found.values.get(l.out) {
            Some(_) if before == self.lines.len() => vec![self.root],
            Some(v) => g.maker[*v].into_iter().collect(),
            None => {
                // Of operands that are known all are read there: the one that fewest read says most.
                let bound = l.ins.iter().filter_map(|n| found.values.get(n));
                let bound = bound.min_by_key(|v| g.readers[**v].len())?;
                g.readers[*bound].clone()
            }
        };
        nodes.into_iter().find_map(|n| self.node(at, n, &found))
    }

    /// This line as a node.
    fn node(&self, at: usize, node: usize, found: &Found) -> Option<Found> {
        let (g, l) = (self.g, &self.lines[at]);
        let n = &g.f.nodes[node];
        let ins = g.ins(node);
        let many = if l.more { ins.len() >= l.ins.len() } else { ins.len() == l.ins.len() };
        if n.op.mnemonic() != l.op || !many || !is_plain(&n.op) {
            return None;
        }
        let mut found = found.clone();
        if *found.values.entry(l.out).or_insert(g.out(node)) != g.out(node) {
            return None;
        }
        if let Some(text) = l.number {
            let is = number(&n.op)?;
            if text.starts_with(|c: char| c.is_ascii_alphabetic()) {
                found.numbers.insert(text, is);
            } else {
                found.checks.push((text, is));
            }
        }
        let rest = ins.len() > l.ins.len();
        match (rest, l.also) {
            (true, _) => {}
            (false, true) => _ = found.shared.insert(node),
            (false, false) => _ = found.nodes.insert(node),
        }
        self.operands(at, node, &ins, &mut vec![], found)
    }

    /// The operands of a line in some order.
    fn operands(
        &self,
        at: usize,
        node: usize,
        ins: &[Value],
        taken: &mut Vec<usize>,
        found: Found,
    ) -> Option<Found> {
        let l = &self.lines[at];
        let k = taken.len();
        let Some(name) = l.ins.get(k) else {
            if !self.fits(l, node, taken) {
                return None;
            }
            let mut found = found;
            if ins.len() > l.ins.len() {
                found.rest = Some((l.out, found.values[l.ins[0]]));
            }
            return self.rest(at, found);
        };
        let any_order = ["mul", "add"].contains(&l.op) || l.shapes == Some("outer");
        // A sum may have as many terms as there are parameters: those that no line can make are left out at once.
        let makes = |m: &&PatternLine| m.out == *name && !m.known;
        let maker = self.lines[..at].iter().find(makes).map(|m| m.op);
        let made = |v: Value| self.g.maker[v].map(|n| self.g.f.nodes[n].op.mnemonic());
        for i in 0..ins.len() {
            if maker.is_some_and(|op| made(ins[i]) != Some(op)) {
                continue;
            }
            if taken.contains(&i) || (!any_order && i != k) {
                continue;
            }
            if found.values.get(name).is_some_and(|v| *v != ins[i]) {
                continue;
            }
            let mut next = found.clone();
            next.values.insert(name, ins[i]);
            taken.push(i);
            let all = self.operands(at, node, ins, taken, next);
            taken.pop();
            if all.is_some() {
                return all;
            }
        }
        None
    }

    /// Whether operands and result have the dims of a line.
    fn fits(&self, l: &PatternLine, node: usize, order: &[usize]) -> bool {
        let n = &self.g.f.nodes[node];
        let ranks: Vec<usize> = n.ins.iter().map(|v| self.g.f.ty(*v).rank()).collect();
        let rule: std::borrow::Cow<Rule> = n.op.def().rule(&ranks);
        let ins: Vec<_> = order.iter().filter_map(|i| rule.ins.get(*i)).collect();
        let Some(out) = rule.outs.first() else { return false };
        let Some(shapes) = l.shapes else {
            return rule.ins.iter().all(|d| d == out);
        };
        if let ["outer" | "linear" | "turned", ..] = [shapes] {
            let [a, b] = ins[..] else { return false };
            let (Some((i, rows)), Some((j, others))) = (a.split_last(), b.split_last()) else {
                return false;
            };
            return match (shapes, &out[..]) {
                ("outer", [k, m]) => {
                    rows == others && !rows.is_empty() && k == i && m == j && i != j
                }
                ("linear", [front @ .., m]) => others == [*m] && j == i && front == rows,
                ("turned", [front @ .., m]) => others == [*i] && j == m && front == rows,
                _other => false,
            };
        }
        let all: Vec<_> = ins.into_iter().chain([out]).collect();
        let letters = || shapes.bytes().filter(|b| *b != b'>');
        let whole = letters().position(|b| b == b'F').map(|i| all.get(i));
        let Some(Some((last, front))) = whole.map(|w| w.and_then(|w| w.split_last())) else {
            return false;
        };
        letters().count() == all.len()
            && letters().zip(&all).all(|(b, dims)| match b {
                b'F' => dims.split_last() == Some((last, front)),
                b'R' => dims[..] == *front,
                _last => dims[..] == [*last],
            })
    }
}

/// The number that an op has.
fn number(op: &Op) -> Option<f64> {
    match op {
        Op::Scale(o) => Some(o.by),
        Op::Shift(o) => Some(o.by),
        _other => None,
    }
}

/// False of an op that leaves out indices.
fn is_plain(op: &Op) -> bool {
    match op {
        Op::Take(o) => o.padding.zero().is_none(),
        Op::IndexAdd(o) => o.padding.zero().is_none(),
        _other => true,
    }
}
