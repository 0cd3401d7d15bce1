//! Reverse mode on the model of one device, from a textbook: one rule per op, written of terms alone.
//!
//! It shares nothing with the gradients of the compiler. For y = f(x) and a cotangent d of y it gives
//! that of x, the transposed Jacobian applied to d. Constants are the f64 numbers nearest to what is
//! meant.

use crate::fun::{Fun, Pattern, Places, Real};
use crate::meaning::{function, letters, rule};
use crate::number::Coef;
use crate::product::Letter;
use crate::term::{Store, Term};
use shardc_ir::func::{Func, Node, RoleKind, Value};
use shardc_ir::ops::Op;
use shardc_ir::types::Type;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Cotangents of operands; `None` where there is none.
type Back = Vec<Option<Term>>;

/// A node at work: operands and results with their types, and the results' cotangents.
struct At<'a> {
    s: &'a mut Store,
    op: &'a Op,
    types: Vec<&'a Type>,
    x: Vec<Term>,
    y: Vec<Term>,
    d: Vec<Option<Term>>,
}

/// What reverse mode stops at.
#[derive(Debug)]
pub struct Stop {
    /// Index of the node.
    pub node: usize,
    pub why: String,
}

/// By parameter, the cotangent that the seeds on values give; `values` are the terms of all values.
pub fn gradients(
    s: &mut Store,
    f: &Func,
    values: &[Option<Term>],
    seeds: &[(Value, Term)],
) -> Result<BTreeMap<Arc<str>, Term>, Stop> {
    let wants = wants(f);
    let mut cotangents: Vec<Vec<Term>> = vec![vec![]; f.values.len()];
    for &(v, t) in seeds {
        cotangents[v.0 as usize].push(t);
    }
    for (i, n) in f.nodes.iter().enumerate().rev() {
        let total = |s: &mut Store, v: &Value| {
            let parts = &cotangents[v.0 as usize];
            (wants[v.0 as usize] && !parts.is_empty()).then(|| s.add(parts))
        };
        let d: Vec<Option<Term>> = n.outs.iter().map(|v| total(s, v)).collect();
        if d.iter().all(Option::is_none) {
            continue;
        }
        let stop = |why: String| Stop { node: i, why };
        let made =
            |v: &Value| values[v.0 as usize].ok_or_else(|| stop("a value is missing".into()));
        let x = n.ins.iter().map(made).collect::<Result<_, _>>()?;
        let y = n.outs.iter().map(made).collect::<Result<_, _>>()?;
        let types = n.ins.iter().map(|&v| f.ty(v)).collect();
        let back = At { s, op: &n.op, types, x, y, d }.back().map_err(stop)?;
        for (v, g) in n.ins.iter().zip(back) {
            if let (true, Some(g)) = (wants[v.0 as usize], g) {
                cotangents[v.0 as usize].push(g);
            }
        }
    }
    let params = f.args.iter().filter_map(|a| Some((a.value, a.role.as_ref()?)));
    let params = params.filter(|(_, r)| r.kind == RoleKind::Param);
    let mut out = BTreeMap::new();
    for (v, r) in params {
        let parts = &cotangents[v.0 as usize];
        if !parts.is_empty() {
            out.insert(r.name.text().clone(), s.add(parts));
        }
    }
    Ok(out)
}

/// Values on a way from a parameter that a derivative follows.
fn wants(f: &Func) -> Vec<bool> {
    let mut wants = vec![false; f.values.len()];
    for a in &f.args {
        wants[a.value.0 as usize] = a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Param);
    }
    for n in &f.nodes {
        let through = !constant(n) && n.ins.iter().any(|v| wants[v.0 as usize]);
        for (k, o) in n.outs.iter().enumerate() {
            wants[o.0 as usize] = through && f.ty(n.outs[k]).dtype.is_float();
        }
    }
    wants
}

/// Ops that are constant almost everywhere, or say that they are to be held constant.
fn constant(n: &Node) -> bool {
    matches!(
        n.op,
        Op::StopGradient(_)
            | Op::AtLeast(_)
            | Op::Sign(_)
            | Op::Round(_)
            | Op::Less(_)
            | Op::Equal(_)
            | Op::TopK(_)
            | Op::Route(_)
            | Op::Draw(_)
    )
}

impl At<'_> {
    fn back(mut self) -> Result<Back, String> {
        match self.op {
            Op::Mul(_) | Op::Dot(_) => self.bilinear(),
            Op::ReduceSum(_) | Op::Transpose(_) | Op::Expand(_) | Op::Add(_) | Op::Sub(_) => {
                self.linear()
            }
            Op::Div(_) => self.quotient(),
            Op::Scale(k) => {
                let c = Coef::of(k.by).ok_or("an infinite factor")?;
                let g = self.d()?;
                Ok(vec![Some(self.s.scale(c, g))])
            }
            Op::Shift(_) | Op::Cast(_) => Ok(vec![Some(self.d()?)]),
            Op::Reshape(_) => {
                let (g, shape) = (self.d()?, self.s.shape(self.x[0]).to_vec());
                Ok(vec![Some(self.s.reshape(g, &shape))])
            }
            Op::Exp(_)
            | Op::Log(_)
            | Op::Sqrt(_)
            | Op::Rsqrt(_)
            | Op::Tanh(_)
            | Op::Logistic(_)
            | Op::Silu(_)
            | Op::Gelu(_)
            | Op::Sin(_)
            | Op::Cos(_)
            | Op::Abs(_)
            | Op::Clamp(_)
            | Op::Erf(_)
            | Op::Pow(_)
            | Op::Softplus(_) => {
                let (g, slope) = (self.d()?, self.slope()?);
                Ok(vec![Some(self.times(&[g, slope]))])
            }
            Op::Cumsum(k) => {
                let (g, shape) = (self.d()?, self.shape(0));
                let back = Fun::Cumsum { dim: k.dim, reverse: !k.reverse };
                Ok(vec![Some(self.s.apply(back, &[g], 0, &shape))])
            }
            Op::Take(_) | Op::Narrow(_) | Op::Widen(_) | Op::Concat(_) | Op::Rope(_) => {
                self.moved()
            }
            Op::Max(_) => self.larger([0, 1]),
            Op::Min(_) => self.larger([1, 0]),
            Op::Select(_) => self.selected(),
            Op::ReduceMax(_) | Op::ReduceMin(_) => self.extreme(),
            Op::Attention(_) => self.attention(),
            Op::Dispatch(_) | Op::Combine(_) | Op::GroupedDot(_) => self.experts(),
            other => Err(format!("the textbook has no derivative of `{}`", other.mnemonic())),
        }
    }

    /// The cotangent of the first result.
    fn d(&self) -> Result<Term, String> {
        self.d[0].ok_or_else(|| format!("no cotangent of what `{}` makes", self.op.mnemonic()))
    }

    fn shape(&self, i: usize) -> Vec<usize> {
        self.s.shape(self.x[i]).to_vec()
    }

    /// The product, element by element.
    fn times(&mut self, all: &[Term]) -> Term {
        let shape = self.s.shape(all[0]).to_vec();
        let own: Vec<Letter> = (0..shape.len() as Letter).collect();
        let factors: Vec<(Term, Vec<Letter>)> = all.iter().map(|&t| (t, own.clone())).collect();
        self.s.product(&factors, &own, &shape).expect("factors of one shape")
    }

    /// c·t, and a number.
    fn affine(&mut self, c: f64, t: Term, plus: f64) -> Term {
        let shape = self.s.shape(t).to_vec();
        let [c, plus] = [c, plus].map(|x| Coef::of(x).expect("a finite constant"));
        let one = self.s.fill(plus, &shape);
        self.s.sum(&[(c, t), (Coef::ONE, one)], &shape)
    }

    fn each(&mut self, name: &'static str, t: Term) -> Term {
        let shape = self.s.shape(t).to_vec();
        self.s.apply(Fun::Each(name), &[t], 0, &shape)
    }

    /// y = a·b: each cotangent is the product of d with the other operand.
    fn bilinear(&mut self) -> Result<Back, String> {
        let (g, r) = (self.d()?, rule(self.op, &self.types));
        let (a, b) = (letters(&r.ins[0])?, letters(&r.ins[1])?);
        let o = letters(&r.outs[0])?;
        let [of_a, of_b] = [self.shape(0), self.shape(1)];
        let d_a = self.s.product(&[(g, o.clone()), (self.x[1], b.clone())], &a, &of_a)?;
        let d_b = self.s.product(&[(g, o), (self.x[0], a)], &b, &of_b)?;
        Ok(vec![Some(d_a), Some(d_b)])
    }

    /// A sum of operands that are spread, reduced, turned: the transposed map.
    fn linear(&mut self) -> Result<Back, String> {
        let (g, r) = (self.d()?, rule(self.op, &self.types));
        let o = letters(&r.outs[0])?;
        let mut back = vec![];
        for i in 0..self.x.len() {
            let shape = self.shape(i);
            let t = self.s.product(&[(g, o.clone())], &letters(&r.ins[i])?, &shape)?;
            let negative = i == 1 && matches!(self.op, Op::Sub(_));
            back.push(Some(if negative { self.s.scale(Coef::ONE.minus(), t) } else { t }));
        }
        Ok(back)
    }

    /// y = a / b: d/b and -d·y/b.
    fn quotient(&mut self) -> Result<Back, String> {
        let (g, r) = (self.d()?, rule(self.op, &self.types));
        let (a, b) = (letters(&r.ins[0])?, letters(&r.ins[1])?);
        let o = letters(&r.outs[0])?;
        let by = (self.s.reciprocal(self.x[1]), b.clone());
        let [of_a, of_b] = [self.shape(0), self.shape(1)];
        let d_a = self.s.product(&[(g, o.clone()), by.clone()], &a, &of_a)?;
        let d_b = self.s.product(&[(g, o.clone()), by, (self.y[0], o)], &b, &of_b)?;
        Ok(vec![Some(d_a), Some(self.s.scale(Coef::ONE.minus(), d_b))])
    }

    /// The derivative of a function of a number.
    fn slope(&mut self) -> Result<Term, String> {
        let (x, y) = (self.x[0], self.y[0]);
        Ok(match self.op {
            Op::Exp(_) => y,
            Op::Log(_) => self.s.reciprocal(x),
            Op::Sqrt(_) => {
                let by = self.s.reciprocal(y);
                self.affine(0.5, by, 0.0)
            }
            // (x^-½)' = -½ x^-3/2
            Op::Rsqrt(_) => {
                let cube = self.times(&[y, y, y]);
                self.affine(-0.5, cube, 0.0)
            }
            Op::Tanh(_) => {
                let square = self.times(&[y, y]);
                self.affine(-1.0, square, 1.0)
            }
            Op::Logistic(_) => {
                let rest = self.affine(-1.0, y, 1.0);
                self.times(&[y, rest])
            }
            // (xσ(βx))' = σ + βxσ - βxσσ
            Op::Silu(k) => {
                let beta = k.beta.unwrap_or(1.0);
                let at = self.affine(beta, x, 0.0);
                let l = self.each("logistic", at);
                let (once, twice) = (self.times(&[x, l]), self.times(&[x, l, l]));
                let (more, less) = (self.affine(beta, once, 0.0), self.affine(-beta, twice, 0.0));
                self.s.add(&[l, more, less])
            }
            Op::Gelu(_) => self.gelu(),
            Op::Sin(_) => self.each("cos", x),
            Op::Abs(_) => self.each("sign", x),
            // 1 where the operand is within the bounds, which is where it is kept.
            Op::Clamp(_) => self.both("equal", [x, y]),
            // 2/√π e^(-x²)
            Op::Erf(_) => {
                let square = self.times(&[x, x]);
                let minus = self.affine(-1.0, square, 0.0);
                let e = self.each("exp", minus);
                self.affine(2.0 / std::f64::consts::PI.sqrt(), e, 0.0)
            }
            Op::Pow(k) => match k.to {
                0.0 => self.affine(0.0, x, 0.0),
                1.0 => self.affine(0.0, x, 1.0),
                2.0 => self.affine(2.0, x, 0.0),
                to => {
                    let shape = self.shape(0);
                    let less = self.s.apply(Fun::Pow(Real::new(to - 1.0)), &[x], 0, &shape);
                    self.affine(to, less, 0.0)
                }
            },
            Op::Softplus(_) => self.each("logistic", x),
            Op::Cos(_) => {
                let sin = self.each("sin", x);
                self.affine(-1.0, sin, 0.0)
            }
            other => return Err(format!("no slope of `{}`", other.mnemonic())),
        })
    }

    /// y = x/2 (1 + tanh u), u = √(2/π) (x + 0.044715 x³), is x σ(2u): y' = σ + x (σ - σσ) 2u'.
    fn gelu(&mut self) -> Term {
        let x = self.x[0];
        let (twice, cube) = (2.0 * (2.0 / std::f64::consts::PI).sqrt(), 0.044715);
        let square = self.times(&[x, x]);
        let at = self.affine(cube * twice, square, twice);
        let at = self.times(&[x, at]);
        let l = self.each("logistic", at);
        let square_of_l = self.times(&[l, l]);
        let minus = self.affine(-1.0, square_of_l, 0.0);
        let rest = self.s.add(&[l, minus]);
        let slope = self.affine(3.0 * cube * twice, square, twice);
        let inner = self.times(&[x, rest, slope]);
        self.s.add(&[l, inner])
    }

    fn both(&mut self, name: &'static str, x: [Term; 2]) -> Term {
        let shape = self.s.shape(x[0]).to_vec();
        self.s.apply(Fun::Both(name), &x, 0, &shape)
    }

    /// The operands with the dims of the result, whose letters come behind theirs.
    fn spread(&mut self) -> Result<(Vec<Term>, Vec<Vec<Letter>>), String> {
        let r = rule(self.op, &self.types);
        let mut all = r.ins.iter().chain(&r.outs).map(letters).collect::<Result<Vec<_>, _>>()?;
        let shape = self.s.shape(self.y[0]).to_vec();
        let out = all.last().cloned().unwrap_or_default();
        let mut parts = vec![];
        for (&x, own) in self.x.iter().zip(&all) {
            parts.push(self.s.product(&[(x, own.clone())], &out, &shape)?);
        }
        all.truncate(self.x.len() + 1);
        Ok((parts, all))
    }

    /// y = one of two: the second where `less` of these two is 1, else the first.
    fn larger(&mut self, less: [usize; 2]) -> Result<Back, String> {
        let (g, (parts, dims)) = (self.d()?, self.spread()?);
        let second = self.both("less", less.map(|i| parts[i]));
        let first = self.affine(-1.0, second, 1.0);
        let mut back = vec![];
        for (i, mask) in [first, second].into_iter().enumerate() {
            let (shape, out) = (self.shape(i), &dims[2]);
            let factors = [(g, out.clone()), (mask, out.clone())];
            back.push(Some(self.s.product(&factors, &dims[i], &shape)?));
        }
        Ok(back)
    }

    /// The largest or smallest of a row: those that equal it share the cotangent.
    fn extreme(&mut self) -> Result<Back, String> {
        let (g, r) = (self.d()?, rule(self.op, &self.types));
        let (all, out) = (letters(&r.ins[0])?, letters(&r.outs[0])?);
        let (shape, rows) = (self.shape(0), self.s.shape(g).to_vec());
        let y = self.s.product(&[(self.y[0], out.clone())], &all, &shape)?;
        let is = self.both("equal", [self.x[0], y]);
        let count = self.s.product(&[(is, all.clone())], &out, &rows)?;
        let share = (self.s.reciprocal(count), out.clone());
        Ok(vec![Some(self.s.product(&[(g, out), share, (is, all.clone())], &all, &shape)?)])
    }

    /// y = a where m, else b: d where m, and d where not.
    fn selected(&mut self) -> Result<Back, String> {
        let (g, (parts, dims)) = (self.d()?, self.spread()?);
        let whole = self.s.shape(g).to_vec();
        let zero = self.s.fill(Coef::of(0.0).expect("a number"), &whole);
        let mut back = vec![None];
        for (i, from) in [(1, [g, zero]), (2, [zero, g])] {
            let t = self.s.apply(Fun::Select, &[parts[0], from[0], from[1]], 0, &whole);
            let shape = self.shape(i);
            back.push(Some(self.s.product(&[(t, dims[3].clone())], &dims[i], &shape)?));
        }
        Ok(back)
    }

    /// Elements that are only moved: they move back.
    fn moved(&mut self) -> Result<Back, String> {
        let (g, shape) = (self.d()?, self.shape(0));
        Ok(match self.op {
            Op::Take(k) => {
                let pattern = Pattern::of(&rule(self.op, &self.types));
                let p = pattern.ok_or("a dim is made of several letters")?;
                // Put what was taken at its index: d and index are operands, x is the result.
                let mut seen: Vec<u8> = vec![];
                let mut rename = |l: &Vec<u8>| -> Vec<u8> {
                    let one = |x: &u8| {
                        seen.iter().position(|s| s == x).unwrap_or_else(|| {
                            seen.push(*x);
                            seen.len() - 1
                        }) as u8
                    };
                    l.iter().map(one).collect()
                };
                let ins = vec![rename(&p.out), rename(&p.ins[1])];
                // A padding token's row has no gradient, be it looked up or 0.
                let put = Pattern { ins, out: rename(&p.ins[0]) };
                let put = Fun::Put(put, k.padding.index());
                vec![Some(self.s.apply(put, &[g, self.x[1]], 0, &shape)), None]
            }
            Op::Narrow(_) | Op::Widen(_) => {
                let back = match function(self.op, &self.types)? {
                    Some(Fun::Narrow(p)) => Fun::Widen(p),
                    Some(Fun::Widen(p)) => Fun::Narrow(p),
                    Some(Fun::Shifted { dim, start }) => Fun::Shifted { dim, start: -start },
                    _other => return Err("elements of a dim".into()),
                };
                vec![Some(self.s.apply(back, &[g], 0, &shape))]
            }
            Op::Concat(k) => {
                let dim = k.dim.of(shape.len()).ok_or("a tensor without dims")?;
                let (mut start, mut back) = (0, vec![]);
                for i in 0..self.x.len() {
                    let shape = self.shape(i);
                    let part = Fun::Narrow(Places { dim, start, step: 1 });
                    start += shape[dim];
                    back.push(Some(self.s.apply(part, &[g], 0, &shape)));
                }
                back
            }
            // The rotation by the opposite angle.
            _rope => {
                let f = function(self.op, &self.types)?.ok_or("a rotation is a function")?;
                let sin = self.s.scale(Coef::ONE.minus(), self.x[2]);
                vec![Some(self.s.apply(f, &[g, self.x[1], sin], 0, &shape)), None, None]
            }
        })
    }

    /// Of scores x and weights p = e^(x - lse): dv = pᵀ d, dx = p (d vᵀ - delta), with delta the row sums
    /// of d·o, less the cotangent of lse.
    fn attention(&mut self) -> Result<Back, String> {
        let g = self.d()?;
        let f = match function(self.op, &self.types)? {
            Some(Fun::Attention(c)) => Fun::AttentionGrad(c),
            _other => return Err("attention has constants".into()),
        };
        let rows = self.s.shape(self.y[1]).to_vec();
        let all: Vec<Letter> = (0..4).collect();
        let pair = [(g, all.clone()), (self.y[0], all)];
        let mut delta = self.s.product(&pair, &[0, 1, 2], &rows)?;
        if let Some(d_lse) = self.d.get(1).copied().flatten() {
            delta = self.s.sum(&[(Coef::ONE, delta), (Coef::ONE.minus(), d_lse)], &rows);
        }
        let x = &self.x;
        let args = [&[x[0], x[1], x[2], self.y[1], g, delta], &x[3..]].concat();
        let mut back: Back = vec![];
        for k in 0..3 {
            let shape = self.shape(k);
            back.push(Some(self.s.apply(f.clone(), &args, k as u8, &shape)));
        }
        back.extend(x[3..].iter().map(|_| None));
        Ok(back)
    }

    /// Rows go to experts as they come from them, and back; gates have the products of rows. Weights of
    /// experts are matrices, and their gradients outer products.
    fn experts(&mut self) -> Result<Back, String> {
        let g = self.d()?;
        let [of_x, of_w] = [self.shape(0), self.shape(2)];
        let (x, n, w) = (self.x[0], self.x[1], self.x[2]);
        let (d_x, d_w) = match self.op {
            Op::Dispatch(_) => ((Fun::Combine, [g, n, w]), (Fun::RowDots, [g, n, x])),
            Op::Combine(_) => ((Fun::Dispatch, [g, n, w]), (Fun::RowDots, [x, n, g])),
            _grouped => ((Fun::GroupedDotT, [g, n, w]), (Fun::GroupedOuter, [g, n, x])),
        };
        let d_x = self.s.apply(d_x.0, &d_x.1, 0, &of_x);
        let d_w = self.s.apply(d_w.0, &d_w.1, 0, &of_w);
        Ok(vec![Some(d_x), None, Some(d_w)])
    }
}
