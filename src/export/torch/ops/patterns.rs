//! What torch has one call for, where a plan has several ops: patterns, and where they are in a function.

use super::raised::Graph;
use shardc_ir::func::Value;
use shardc_ir::ops::Op;
use shardc_ir::rule::Rule;
use std::collections::{BTreeMap, BTreeSet};

/// Ops that one call stands for.
///
/// A line is `result = op[number] SHAPES operands`. The operands of `mul` and `add` come in any order, and `add..` may have more
/// of them, which stay a sum. A number is one, `1/n` of the last dim of `x` or a name. SHAPES are those of operands and result
/// beside all dims (F): R lacks the last one, L has it alone; without SHAPES all are alike. `outer` is a product whose result
/// has the last dims of both. A line behind `known` may stand in another function, and stays; one behind `also` stays as long as
/// something else reads it.
pub(super) struct Pattern {
    /// Of the ops from the first to the last.
    pub lines: &'static str,
    pub outs: &'static [&'static str],
    /// It as Python, with names of values and numbers in braces.
    pub call: &'static str,
    /// The value whose memory its first result has; it has to be gone.
    pub over: Option<&'static str>,
    /// The operand over which its result may be written, if that is gone.
    pub spare: Option<&'static str>,
}

const RMS_NORM: Pattern = Pattern {
    lines: "squares = dot FF>R x x
            mean = scale[1/n] squares
            shifted = shift[eps] mean
            rstd = rsqrt shifted
            normed = mul FR>F x rstd
            y = mul FL>F normed weight",
    outs: &["y", "rstd"],
    call: "rms_norm({x}, {weight}, {eps})",
    over: None,
    spare: None,
};

const LAYER_NORM: Pattern = Pattern {
    lines: "sum = reduce_sum F>R x
            mean = scale[1/n] sum
            centered = sub FR>F x mean
            squares = dot FF>R centered centered
            variance = scale[1/n] squares
            shifted = shift[eps] variance
            rstd = rsqrt shifted
            normed = mul FR>F centered rstd
            scaled = mul FL>F normed weight
            y = add FL>F scaled bias",
    outs: &["y", "centered", "rstd"],
    call: "layer_norm({x}, {weight}, {bias}, {eps})",
    over: None,
    spare: None,
};

const RMS_NORM_GRAD: Pattern = Pattern {
    lines: "known normed = mul FR>F x rstd
            dw = dot FF>L d normed
            by_weight = mul FL>F d weight
            along = dot FF>R by_weight x
            square = mul rstd rstd
            cube = mul square rstd
            half = scale[-0.5] cube
            variance = mul along half
            by_root = scale[1/n] variance
            a = mul FR>F x by_root
            b = mul FR>F x by_root
            straight = mul FR>F by_weight rstd
            dx = add.. straight a b",
    outs: &["dx", "dw"],
    call: "rms_norm_grad({d}, {x}, {weight}, {rstd})",
    over: None,
    spare: None,
};

const LAYER_NORM_GRAD: Pattern = Pattern {
    lines: "known normed = mul FR>F x rstd
            dw = dot FF>L d normed
            db = reduce_sum F>L d
            by_weight = mul FL>F d weight
            along = dot FF>R by_weight x
            square = mul rstd rstd
            cube = mul square rstd
            half = scale[-0.5] cube
            variance = mul along half
            by_root = scale[1/n] variance
            a = mul FR>F x by_root
            b = mul FR>F x by_root
            straight = mul FR>F by_weight rstd
            centered = add straight a b
            sum = reduce_sum F>R centered
            mean = scale[-1/n] sum
            all = expand R>F mean
            dx = add.. centered all",
    outs: &["dx", "dw", "db"],
    call: "layer_norm_grad({d}, {x}, {weight}, {rstd})",
    over: None,
    spare: None,
};

/// Of bf16, which torch's call widens by itself.
const SILU_GRAD_CAST: Pattern = Pattern {
    lines: "wide = cast x
            s = logistic wide
            y = mul wide s
            ys = mul y s
            m = sub y ys
            p = add s m
            d_wide = cast d
            wide_grad = mul d_wide p
            dx = cast wide_grad",
    outs: &["dx"],
    call: "torch.ops.aten.silu_backward({d}, {x})",
    over: None,
    spare: Some("d"),
};

const SILU_GRAD: Pattern = Pattern {
    lines: "s = logistic x
            y = mul x s
            ys = mul y s
            m = sub y ys
            p = add s m
            dx = mul d p",
    outs: &["dx"],
    call: "torch.ops.aten.silu_backward({d}, {x})",
    over: None,
    spare: Some("d"),
};

/// Of the formula by tanh: sigmoid(2u) = (1 + tanh u) / 2 with u = √(2/π) (x + 0.044715 x³).
const GELU_GRAD: Pattern = Pattern {
    lines: "x2 = mul x x
            a = scale[0.07135481627260025] x2
            shifted = shift[1.5957691216057308] a
            u = mul x shifted
            s = logistic u
            da = scale[0.21406444881780073] x2
            du = shift[1.5957691216057308] da
            ss = mul s s
            q = sub s ss
            xq = mul x q
            pdf = mul xq du
            p = add s pdf
            dx = mul d p",
    outs: &["dx"],
    call: "torch.ops.aten.gelu_backward({d}, {x}, approximate=\"tanh\")",
    over: None,
    spare: Some("d"),
};

/// By erf: x / 2 (1 + erf(x / √2)).
const GELU_ERF: Pattern = Pattern {
    lines: "scaled = scale[0.7071067811865476] x
            erf = erf scaled
            shifted = shift[1] erf
            half = scale[0.5] x
            y = mul half shifted",
    outs: &["y"],
    call: "F.gelu({x})",
    over: None,
    spare: None,
};

const GELU_ERF_GRAD: Pattern = Pattern {
    lines: "also scaled = scale[0.7071067811865476] x
            also erf = erf scaled
            also shifted = shift[1] erf
            also half = scale[0.5] x
            d_half = mul shifted d
            straight = scale[0.5] d_half
            d_erf = mul half d
            square = mul scaled scaled
            negative = scale[-1] square
            exp = exp negative
            slope = scale[1.1283791670955126] exp
            d_scaled = mul slope d_erf
            along = scale[0.7071067811865476] d_scaled
            dx = add along straight",
    outs: &["dx"],
    call: "torch.ops.aten.gelu_backward({d}, {x})",
    over: None,
    spare: Some("d"),
};

const CROSS_ENTROPY: Pattern = Pattern {
    lines: "max = reduce_max F>R x
            z = sub FR>F x max
            exp = exp z
            sum = reduce_sum F>R exp
            lse = log sum
            target = take FR>R z targets
            nll = sub lse target",
    outs: &["nll", "exp"],
    call: "cross_entropy({x}, {targets})",
    over: None,
    spare: None,
};

/// What backward reads of the exponentials, which [`CROSS_ENTROPY`] has left as log-probabilities.
const CROSS_ENTROPY_GRAD: Pattern = Pattern {
    lines: "negative = scale[-1] d
            at = index_add RR>F negative targets
            by_sum = div d sum
            all = expand R>F by_sum
            p = mul all exp
            dx = add at p",
    outs: &["dx"],
    call: "cross_entropy_grad({d}, {exp}, {targets}, {start})",
    over: Some("exp"),
    spare: None,
};

/// The same, of exponentials and their sum: where ranks split the vocabulary, or logits are computed again.
const EXPONENTIALS_GRAD: Pattern = Pattern {
    call: "cross_entropy_grad({d}, {exp}, {targets}, {start}, {sum})",
    ..CROSS_ENTROPY_GRAD
};

const ADD_PRODUCT: Pattern = Pattern {
    lines: "product = dot outer a b
            sum = accumulate accumulator product",
    outs: &["sum"],
    call: "{accumulator}.addmm_({a}.flatten(0, -2).t(), {b}.flatten(0, -2))",
    over: Some("accumulator"),
    spare: None,
};

const LINEAR: Pattern = Pattern {
    lines: "product = dot linear x weight
            y = add FL>F product bias",
    outs: &["y"],
    call: "F.linear({x}, {weight}, {bias})",
    over: None,
    spare: None,
};

const LINEAR_TURNED: Pattern = Pattern {
    lines: "product = dot turned x weight
            y = add FL>F product bias",
    outs: &["y"],
    call: "F.linear({x}, {weight}.t(), {bias})",
    over: None,
    spare: None,
};

/// Those that read what forward has saved.
pub(super) const BACKWARD: &[&Pattern] = &[
    &LAYER_NORM_GRAD,
    &RMS_NORM_GRAD,
    &SILU_GRAD_CAST,
    &SILU_GRAD,
    &GELU_GRAD,
    &GELU_ERF_GRAD,
    &ADD_PRODUCT,
];
/// Those that save it.
pub(super) const FORWARD: &[&Pattern] = &[&LAYER_NORM, &RMS_NORM, &GELU_ERF, &LINEAR, &LINEAR_TURNED];
/// The loss, its gradient, and that of a loss that is not one call.
pub(super) const LOSS: [&Pattern; 3] = [&CROSS_ENTROPY, &CROSS_ENTROPY_GRAD, &EXPONENTIALS_GRAD];

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
struct Line {
    known: bool,
    also: bool,
    out: &'static str,
    op: &'static str,
    more: bool,
    number: Option<&'static str>,
    shapes: Option<&'static str>,
    ins: Vec<&'static str>,
}

impl Line {
    fn of(text: &'static str) -> Option<Line> {
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
        Some(Line { known, also, out, op: op.trim_end_matches('.'), more, number, shapes, ins })
    }
}

impl Pattern {
    /// Where its last op is this node.
    pub fn find(&self, g: &Graph, all: &[Graph], root: usize) -> Option<Found> {
        let last = self.lines.rsplit('\n').next().and_then(Line::of)?;
        if g.f.nodes[root].op.mnemonic() != last.op {
            return None;
        }
        let mut found = Found::default();
        found.values.insert(last.out, g.out(root));
        let lines: Vec<Line> = self.lines.lines().filter_map(Line::of).collect();
        let found = Search { g, all, lines: &lines }.rest(lines.len(), found)?;
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
    lines: &'a [Line],
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
            Some(v) => g.maker[*v].into_iter().collect(),
            None => {
                let bound = l.ins.iter().find_map(|n| found.values.get(n))?;
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
        for i in 0..ins.len() {
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
    fn fits(&self, l: &Line, node: usize, order: &[usize]) -> bool {
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
                ("outer", [k, m]) => rows == others && !rows.is_empty() && k == i && m == j && i != j,
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
