//! Exact matchers: groups of ops that are one op of ours, or one of a shape that passes know.
//!
//! Each is the same function as what it replaces, in the same order of rounding but for the last bits.

use super::graph::Node;
use super::lower::Lower;
use super::table::Arithmetic;
use shardc_ir::diag::Result;
use shardc_ir::func::Value;
use shardc_ir::ops::rope::Pairs;
use shardc_ir::ops::{Add, Gelu, Mul, Op, Rope, Silu};
use shardc_ir::rule::Dims;

/// √(2/π) and the factor of the cube, in the tanh formula of GELU (Hendrycks and Gimpel, 2016).
const ROOT: f64 = 0.797_884_560_802_865_4;
const CUBE: f64 = 0.044_715;

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-6 * b.abs()
}

impl Lower<'_> {
    /// What a sum or product of two values is besides, if it is known.
    pub(super) fn raised(
        &mut self,
        n: &Node,
        how: Arithmetic,
        ins: [Value; 2],
        [a, b, out]: [&str; 3],
    ) -> Result<Option<Value>> {
        let [x, y] = ins;
        match how {
            Arithmetic::Add if self.raise.rope && a == out && b == out => match self.turned(x, y) {
                Some((pairs, ins)) => self.emit(n, "turned", Rope { pairs }, &ins).map(Some),
                None => Ok(None),
            },
            Arithmetic::Mul => {
                if self.raise.activations && a == out && b == out {
                    for (x, y) in [(x, y), (y, x)] {
                        if let Some(x) = self.gelu_of(x, y) {
                            return self.emit(n, "act", Gelu {}, &[x]).map(Some);
                        }
                        if matches!(self.maker(y), Some((Op::Logistic(_), &[z])) if z == x) {
                            return self.emit(n, "act", Silu { beta: None }, &[x]).map(Some);
                        }
                    }
                }
                let Some(w) = self.around_one(y).filter(|_| self.raise.norms && a == out) else {
                    return Ok(None);
                };
                // Not x (1 + w): in bf16 the sum would lose the weight's digits.
                let rule = self.spread(n, &[a, b], out, &[x, w])?;
                let weighted = self.emit(n, "normed", Mul { rule }, &[x, w])?;
                self.emit(n, "normed", Add::same(), &[x, weighted]).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// The parameter w of 1 + w.
    fn around_one(&self, v: Value) -> Option<Value> {
        match self.maker(v)? {
            (Op::Shift(s), &[w]) if s.by == 1.0 && self.params.iter().any(|p| p.value == w) => {
                Some(w)
            }
            _ => None,
        }
    }

    /// x, if these are x/2 and 1 + tanh(√(2/π) (x + 0.044715 x³)).
    fn gelu_of(&self, half: Value, rest: Value) -> Option<Value> {
        let (Op::Scale(h), &[x]) = self.maker(half)? else { return None };
        let (Op::Shift(one), &[t]) = self.maker(rest)? else { return None };
        let (Op::Tanh(_), &[t]) = self.maker(t)? else { return None };
        let (Op::Scale(root), &[sum]) = self.maker(t)? else { return None };
        let (Op::Add(_), &[a, b]) = self.maker(sum)? else { return None };
        let (_, cube) = [(a, b), (b, a)].into_iter().find(|p| p.0 == x)?;
        let (Op::Scale(c), &[cube]) = self.maker(cube)? else { return None };
        let (Op::Mul(_), &[square, y]) = self.maker(cube)? else { return None };
        let (Op::Mul(_), &[p, q]) = self.maker(square)? else { return None };
        let right = h.by == 0.5 && one.by == 1.0 && close(root.by, ROOT) && close(c.by, CUBE);
        (right && [y, p, q] == [x; 3]).then_some(x)
    }

    /// x, cosines and sines, if these are x cos and y sin, where y has [-x2, x1] of halves x1 and x2, or
    /// -x2 and x1 in turn of neighbours x1, x2.
    fn turned(&self, a: Value, b: Value) -> Option<(Pairs, [Value; 3])> {
        [(a, b), (b, a)].into_iter().find_map(|(a, b)| {
            let (x, cos) = self.by_token(a)?;
            let (y, sin) = self.by_token(b)?;
            let (pairs, known) = match self.halves.contains_key(&cos) {
                true => (Pairs::Halves, &self.halves),
                false => (Pairs::Adjacent, &self.pairs),
            };
            let is = match pairs {
                Pairs::Halves => self.is_turned_half(x, y),
                Pairs::Adjacent => self.is_turned_pair(x, y),
            };
            is?;
            Some((pairs, [x, *known.get(&cos)?, *known.get(&sin)?]))
        })
    }

    /// The negative of a value.
    fn minus(&self, v: Value) -> Option<Value> {
        match self.maker(v)? {
            (Op::Scale(s), &[x]) if s.by == -1.0 => Some(x),
            _ => None,
        }
    }

    fn is_turned_half(&self, x: Value, y: Value) -> Option<()> {
        let half = self.draft.ty(x).dims[3].size / 2;
        let (Op::Concat(_), &[minus, first]) = self.maker(y)? else { return None };
        let part = |v: Value, start: usize| match self.maker(v)? {
            (Op::Narrow(p), &[of]) if p.start == start => {
                (of == x && self.draft.ty(v).dims[3].size == half).then_some(())
            }
            _ => None,
        };
        part(self.minus(minus)?, half)?;
        part(first, 0)
    }

    fn is_turned_pair(&self, x: Value, y: Value) -> Option<()> {
        let (Op::Concat(_), &[minus, first]) = self.maker(self.bare(y))? else { return None };
        let sizes = |v: Value| self.draft.ty(v).sizes();
        let own = sizes(x);
        // One of each pair, from x as [b, s, n, d/2, 2].
        let part = |v: Value, start: usize| match self.maker(self.bare(v))? {
            (Op::Narrow(p), &[of]) if p.start == start => {
                let split = sizes(of);
                let is = split.len() == 5 && split[..3] == own[..3] && split[4] == 2;
                (is && self.bare(of) == self.bare(x)).then_some(())
            }
            _ => None,
        };
        part(self.minus(self.bare(minus))?, 1)?;
        part(first, 0)
    }

    /// The value before it was reshaped: the same elements in the same order.
    fn bare(&self, mut v: Value) -> Value {
        while let Some((Op::Reshape(_), &[x])) = self.maker(v) {
            v = x;
        }
        v
    }

    /// x [b, s, n, d] and y [s, d] of a product x y.
    fn by_token(&self, v: Value) -> Option<(Value, Value)> {
        let (Op::Mul(m), &[x, y]) = self.maker(v)? else { return None };
        let rule = m.rule.0.as_ref()?;
        let same = |a: &Dims, b: &Dims| a[..] == b[..];
        let fits = |x: &Dims, y: &Dims| {
            x.len() == 4 && y.len() == 2 && same(x, &rule.outs[0]) && y[0] == x[1] && y[1] == x[3]
        };
        match () {
            () if fits(&rule.ins[0], &rule.ins[1]) => Some((x, y)),
            () if fits(&rule.ins[1], &rule.ins[0]) => Some((y, x)),
            () => None,
        }
    }

    /// A joined value that is known besides: the same twice, or a turned part with the part that stays.
    pub(super) fn raised_concat(&mut self, n: &Node, a: Value, b: Value) -> Result<Option<Value>> {
        if a == b {
            let size = self.draft.ty(a).dims.last().map_or(0, |d| d.size);
            let v = self.emit(n, "twice", shardc_ir::ops::Concat::new(2 * size), &[a, b])?;
            self.halves.insert(v, a);
            return Ok(Some(v));
        }
        let Some((Op::Rope(r), &[turned, cos, sin])) = self.maker(a) else { return Ok(None) };
        let Some((Op::Narrow(first), &[x])) = self.maker(turned) else { return Ok(None) };
        let Some((Op::Narrow(rest), &[y])) = self.maker(b) else { return Ok(None) };
        let width = |v: Value| self.draft.ty(v).dims.last().map_or(0, |d| d.size);
        let whole =
            first.start == 0 && rest.start == width(turned) && width(turned) + width(b) == width(x);
        if x != y || !whole || !self.raise.rope {
            return Ok(None);
        }
        let pairs = r.pairs;
        self.emit(n, "turned", Rope { pairs }, &[x, cos, sin]).map(Some)
    }
}
