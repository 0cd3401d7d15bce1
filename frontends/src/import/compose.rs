//! Ops that are made of others, each a line of text: its operands and attributes with what they are if the archive leaves
//! them out, and an expression of ops of the [table](super::table), of other lines, and of a few words.

use super::graph::{Arg, Node};
use super::lower::{Lower, Val};
use shardc_ir::diag::Result;
use std::collections::BTreeMap;

/// Ops by name: operands, and behind `|` what they are made of. Where PyTorch's gradient at a kink is that of one side, so
/// is that of the expression.
const TEXTS: &[(&str, &str)] = &[
    ("__and__.Tensor", "self, other | truths(self) * truths(other)"),
    ("__or__.Tensor", "self, other | clamp(truths(self) + truths(other), 0, 1)"),
    ("addcdiv.default", "self, tensor1, tensor2, value=1 | self + value * tensor1 / tensor2"),
    ("addcmul.default", "self, tensor1, tensor2, value=1 | self + value * tensor1 * tensor2"),
    ("bitwise_and.Tensor", "self, other | truths(self) * truths(other)"),
    ("bitwise_or.Tensor", "self, other | clamp(truths(self) + truths(other), 0, 1)"),
    ("cdist.default", "x1, x2, p=2 | vnorm(unsqueeze(x1, -2) - unsqueeze(x2, -3), p, -1, 0)"),
    ("celu.default", "self, alpha=1 | elu(self, alpha, 1, 1 / alpha)"),
    ("clamp_max.default", "self, max | clamp(self, none, max)"),
    ("clamp_min.default", "self, min | clamp(self, min, none)"),
    (
        "cosine_similarity.default",
        "x1, x2, dim=1, eps=1e-8 | sum(x1 / clamp(vnorm(x1, 2, dim, 1), eps, none) * (x2 / clamp(vnorm(x2, 2, dim, 1), eps, none)), dim, 0)",
    ),
    (
        "elu.default",
        "self, alpha=1, scale=1, input_scale=1 | where(gt(self, 0), scale * self, alpha * scale * (exp(input_scale * where(gt(self, 0), 0, self)) - 1))",
    ),
    ("exp2.default", "self | exp(0.6931471805599453 * self)"),
    ("expm1.default", "self | exp(self) - 1"),
    ("floor_divide.default", "self, other | floor(quotient(self, other))"),
    ("glu.default", "self, dim=-1 | part(self, dim, 0, 2) * sigmoid(part(self, dim, 1, 2))"),
    ("hardsigmoid.default", "self | clamp(self + 3, 0, 6) / 6"),
    ("hardswish.default", "self | self * clamp(self + 3, 0, 6) / 6"),
    ("hardtanh.default", "self, min_val=-1, max_val=1 | clamp(self, min_val, max_val)"),
    (
        "leaky_relu.default",
        "self, negative_slope=0.01 | where(gt(self, 0), self, negative_slope * self)",
    ),
    ("lerp.Scalar", "self, end, weight | self + weight * (end - self)"),
    ("lerp.Tensor", "self, end, weight | self + weight * (end - self)"),
    ("log10.default", "self | 0.4342944819032518 * log(self)"),
    ("log2.default", "self | 1.4426950408889634 * log(self)"),
    ("log_sigmoid.default", "self | -softplus(-self)"),
    ("logaddexp.default", "self, other | maximum(self, other) + log1p(exp(-abs(self - other)))"),
    ("logical_and.default", "self, other | truth(self) * truth(other)"),
    ("logical_not.default", "self | 1 - truth(self)"),
    ("logical_or.default", "self, other | clamp(truth(self) + truth(other), 0, 1)"),
    (
        "logsumexp.default",
        "self, dim, keepdim=0 | log(sum(exp(self - detach(amax(self, dim, 1))), dim, keepdim)) + detach(amax(self, dim, keepdim))",
    ),
    (
        "margin_ranking_loss.default",
        "input1, input2, target, margin=0 | reduced(clamp(margin - target * (input1 - input2), 0, none))",
    ),
    ("mish.default", "self | self * tanh(softplus(self))"),
    ("norm.Scalar", "self, p=2 | vnorm(self, p, none, 0)"),
    ("norm.ScalarOpt_dim", "self, p=2, dim=none, keepdim=0 | vnorm(self, p, dim, keepdim)"),
    ("outer.default", "self, vec2 | unsqueeze(self, 1) * unsqueeze(vec2, 0)"),
    (
        "pairwise_distance.default",
        "x1, x2, p=2, eps=1e-6, keepdim=0 | vnorm(x1 - x2 + eps, p, -1, keepdim)",
    ),
    (
        "poisson_nll_loss.default",
        "input, target, log_input=1, full=0, eps=1e-8 | only(full, 0, reduced(choice(log_input, exp(input) - target * input, input - target * log(input + eps))))",
    ),
    ("pow.Scalar", "self, exponent | exp(log(self) * exponent)"),
    ("pow.Tensor_Tensor", "self, exponent | exp(exponent * log(self))"),
    ("prelu.default", "self, weight | where(gt(self, 0), self, channels(weight, self) * self)"),
    ("relu6.default", "self | clamp(self, 0, 6)"),
    ("remainder.Scalar", "self, other | self - other * floor(quotient(self, other))"),
    ("remainder.Tensor", "self, other | self - other * floor(quotient(self, other))"),
    ("selu.default", "self | elu(self, 1.6732632423543772, 1.0507009873554805, 1)"),
    ("soft_margin_loss.default", "self, target | reduced(softplus(-target * self))"),
    (
        "softshrink.default",
        "self, lambd=0.5 | where(gt(self, lambd), self - lambd, where(lt(self, -lambd), self + lambd, 0 * self))",
    ),
    ("square.default", "self | self * self"),
    ("threshold.default", "self, threshold, value | where(gt(self, threshold), self, value)"),
    (
        "triplet_margin_loss.default",
        "anchor, positive, negative, margin=1, p=2, eps=1e-6, swap=0 | only(swap, 0, reduced(clamp(margin + vnorm(anchor - positive + eps, p, -1, 0) - vnorm(anchor - negative + eps, p, -1, 0), 0, none)))",
    ),
];

/// What expressions call ops, and their operands.
const CALLS: &[(&str, &str, &[&str])] = &[
    ("abs", "abs.default", &["self"]),
    ("amax", "amax.default", &["self", "dim", "keepdim"]),
    ("clamp", "clamp.default", &["self", "min", "max"]),
    ("detach", "detach.default", &["self"]),
    ("exp", "exp.default", &["self"]),
    ("floor", "floor.default", &["self"]),
    ("gt", "gt.Tensor", &["self", "other"]),
    ("log", "log.default", &["self"]),
    ("log1p", "log1p.default", &["self"]),
    ("lt", "lt.Tensor", &["self", "other"]),
    ("maximum", "maximum.default", &["self", "other"]),
    ("neg", "neg.default", &["self"]),
    ("sigmoid", "sigmoid.default", &["self"]),
    ("softplus", "softplus.default", &["self"]),
    ("sum", "sum.dim_IntList", &["self", "dim", "keepdim"]),
    ("tanh", "tanh.default", &["self"]),
    ("unsqueeze", "unsqueeze.default", &["self", "dim"]),
    ("vnorm", "linalg_vector_norm.default", &["self", "ord", "dim", "keepdim"]),
    ("where", "where.self", &["condition", "self", "other"]),
];

/// The text of an op.
pub(super) fn text(op: &str) -> Option<&'static str> {
    TEXTS.iter().find(|t| t.0 == op).map(|t| t.1)
}

/// Names of operands with what they are by default, as text.
fn operands(text: &str) -> Vec<(&str, Option<&str>)> {
    let all = text.split('|').next().unwrap_or("").split(',');
    all.map(|p| p.trim().split_once('=').map_or((p.trim(), None), |(p, d)| (p, Some(d)))).collect()
}

/// An attribute as its text says it.
fn default(text: &str) -> Arg {
    text.parse().map_or(Arg::None, Arg::Float)
}

/// An expression as it is read.
struct Reader<'t> {
    rest: &'t str,
    names: BTreeMap<&'t str, Arg>,
}

impl<'t> Reader<'t> {
    /// Takes a sign, if it is next.
    fn takes(&mut self, sign: char) -> bool {
        let rest = self.rest.trim_start();
        let next = rest.strip_prefix(sign);
        self.rest = next.unwrap_or(rest);
        next.is_some()
    }

    /// A name, or digits.
    fn word(&mut self) -> &'t str {
        let rest = self.rest.trim_start();
        let digits = rest.starts_with(|c: char| c.is_ascii_digit());
        let mut before = ' ';
        let end = rest.find(|c: char| {
            let exponent = digits && before == 'e' && c == '-';
            before = c;
            !(c.is_ascii_alphanumeric() || c == '_' || digits && c == '.' || exponent)
        });
        let (word, rest) = rest.split_at(end.unwrap_or(rest.len()));
        self.rest = rest;
        word
    }
}

impl Lower<'_> {
    /// What the text of an op makes of the node's operands.
    pub(super) fn composed(&mut self, n: &Node, text: &'static str) -> Result<Vec<Val>> {
        let arg = |(name, or): (&'static str, Option<&str>)| match (n.arg(name), or) {
            (Arg::None, Some(or)) => (name, default(or)),
            (Arg::Bool(b), _) => (name, Arg::Float(f64::from(u8::from(*b)))),
            (given, _) => (name, given.clone()),
        };
        let names = operands(text).into_iter().map(arg).collect();
        let rest = text.split_once('|').map_or("", |t| t.1);
        let mut r = Reader { rest, names };
        let made = self.sums(n, &mut r)?;
        match made {
            Arg::Value(id) => Ok(vec![self.val(id).clone()]),
            _number => Err(self.refuse(n, "none of its operands is a tensor")),
        }
    }

    fn sums(&mut self, n: &Node, r: &mut Reader<'static>) -> Result<Arg> {
        let mut a = self.factors(n, r)?;
        loop {
            let (op, f): (_, fn(f64, f64) -> f64) = match () {
                () if r.takes('+') => ("add.Tensor", |a, b| a + b),
                () if r.takes('-') => ("sub.Tensor", |a, b| a - b),
                () => return Ok(a),
            };
            let b = self.factors(n, r)?;
            a = self.pair(n, op, f, a, b)?;
        }
    }

    fn factors(&mut self, n: &Node, r: &mut Reader<'static>) -> Result<Arg> {
        let mut a = self.atom(n, r)?;
        loop {
            let (op, f): (_, fn(f64, f64) -> f64) = match () {
                () if r.takes('*') => ("mul.Tensor", |a, b| a * b),
                () if r.takes('/') => ("div.Tensor", |a, b| a / b),
                () => return Ok(a),
            };
            let b = self.atom(n, r)?;
            a = self.pair(n, op, f, a, b)?;
        }
    }

    fn pair(&mut self, n: &Node, op: &str, f: fn(f64, f64) -> f64, a: Arg, b: Arg) -> Result<Arg> {
        match (plain(&a), plain(&b)) {
            (Some(a), Some(b)) => Ok(Arg::Float(f(a, b))),
            _tensors => self.made(n, op, vec![("self", a), ("other", b)]),
        }
    }

    fn atom(&mut self, n: &Node, r: &mut Reader<'static>) -> Result<Arg> {
        if r.takes('-') {
            let x = self.atom(n, r)?;
            return match plain(&x) {
                Some(x) => Ok(Arg::Float(-x)),
                None => self.made(n, "neg.default", vec![("self", x)]),
            };
        }
        if r.takes('(') {
            let x = self.sums(n, r)?;
            r.takes(')');
            return Ok(x);
        }
        let word = r.word();
        if !r.takes('(') {
            return Ok(r.names.get(word).cloned().unwrap_or_else(|| default(word)));
        }
        let mut args = vec![];
        while !r.takes(')') {
            args.push(self.sums(n, r)?);
            r.takes(',');
        }
        self.word_of(n, word, args)
    }

    /// What a word of expressions makes.
    fn word_of(&mut self, n: &Node, word: &'static str, args: Vec<Arg>) -> Result<Arg> {
        let number = |i: usize| args.get(i).and_then(plain);
        match (word, number(0)) {
            ("log", Some(x)) => return Ok(Arg::Float(x.ln())),
            ("only", x) => {
                return match (x == number(1), args.into_iter().nth(2)) {
                    (true, Some(x)) => Ok(x),
                    _other => Err(self.refuse(n, "it has an attribute that is not read")),
                };
            }
            ("choice", x) => {
                let at = if x == Some(0.0) { 2 } else { 1 };
                return Ok(args.into_iter().nth(at).unwrap_or(Arg::None));
            }
            ("reduced", _) => {
                let each = self.view_of(n, args.first())?;
                let made = self.reduced_loss(n, &each)?;
                return Ok(made.into_iter().next().map_or(Arg::None, |v| self.held(v)));
            }
            ("truth" | "truths", _) => {
                let bits = !n.outs.iter().any(|o| self.g.truths.contains(o));
                if word == "truths" && bits {
                    return Err(self.refuse(n, "bits of integers"));
                }
                let x = self.view_of(n, args.first())?;
                let y = self.truth(n, &x)?;
                return Ok(self.held(Val::Data(y)));
            }
            // Rounded once: times one over a number, whole quotients may come out too small.
            ("quotient", _) => {
                let mut x = self.view_of(n, args.first())?;
                let mut y = match args.get(1).and_then(plain) {
                    Some(c) => self.number_in(n, c, &x.shape)?,
                    None => self.view_of(n, args.get(1))?,
                };
                for v in [&mut x, &mut y] {
                    if !self.is_computed(v) {
                        *v = self.float(n, v)?;
                    }
                }
                let q = self.both(n, super::table::Arithmetic::Div, &x, &y)?;
                return Ok(self.held(Val::Data(q)));
            }
            ("part", _) => {
                let x = self.view_of(n, args.first())?;
                let [d, i, of] = [1, 2, 3].map(|k| number(k).unwrap_or(1.0) as i64);
                let d = super::operands::dim_of(d, x.shape.len(), self, n)?;
                let len = x.shape[d] / of as usize;
                let y = self.narrowed(n, &x, d, i as usize * len, len)?;
                return Ok(self.held(Val::Data(y)));
            }
            ("channels", _) => {
                let (mut w, x) = (self.view_of(n, args.first())?, self.view_of(n, args.get(1))?);
                (2..x.shape.len()).for_each(|_| w = w.unsqueeze(w.shape.len()));
                return Ok(self.held(Val::Data(w)));
            }
            _ops => {}
        }
        if let Some((_, op, names)) = CALLS.iter().find(|c| c.0 == word) {
            let args = names.iter().copied().zip(args.into_iter().map(whole)).collect();
            return self.made(n, op, args);
        }
        let op = format!("{word}.default");
        let names = operands(text(&op).unwrap_or("")).into_iter().map(|o| o.0);
        self.made(n, &op, names.zip(args).collect())
    }

    fn view_of(&mut self, n: &Node, a: Option<&Arg>) -> Result<super::view::View> {
        match a {
            Some(Arg::Value(id)) => self.data_of(n, *id),
            _other => Err(self.refuse(n, "one of its operands is not a tensor")),
        }
    }

    fn made(&mut self, n: &Node, op: &str, args: Vec<(&str, Arg)>) -> Result<Arg> {
        let v = self.call(n, op, args)?;
        Ok(self.held(v))
    }
}

/// A number that is an attribute.
fn plain(a: &Arg) -> Option<f64> {
    match a {
        Arg::Float(x) => Some(*x),
        Arg::Int(i) => Some(*i as f64),
        _other => None,
    }
}

/// Whole numbers as dims and flags have them.
fn whole(a: Arg) -> Arg {
    match a {
        Arg::Float(x) if x.fract() == 0.0 && x.abs() < 1e6 => Arg::Int(x as i64),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_sorted_and_name_what_there_is() {
        assert!(TEXTS.is_sorted_by(|a, b| a.0 < b.0) && CALLS.is_sorted_by(|a, b| a.0 < b.0));
        let words =
            ["only", "choice", "reduced", "truth", "truths", "quotient", "part", "channels"];
        for (op, text) in TEXTS {
            let (names, of) = text.split_once('|').expect("operands | expression");
            assert_eq!(of.matches('(').count(), of.matches(')').count(), "{op}");
            let mut r = Reader { rest: of, names: BTreeMap::new() };
            while !r.rest.trim().is_empty() {
                let word = r.word();
                if word.is_empty() {
                    r.rest = &r.rest.trim_start()[1..];
                    continue;
                }
                let known = match r.takes('(') {
                    true => {
                        words.contains(&word)
                            || CALLS.iter().any(|c| c.0 == word)
                            || super::text(&format!("{word}.default")).is_some()
                    }
                    false => {
                        word == "none"
                            || word.parse::<f64>().is_ok()
                            || operands(names).iter().any(|o| o.0 == word)
                    }
                };
                assert!(known, "{op}: {word}");
            }
        }
        for (word, op, _) in CALLS {
            assert!(super::super::table::row(op).is_some(), "{word} is {op}");
        }
    }
}
