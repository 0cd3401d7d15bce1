//! Sums, products and functions of elements, by rules whose letters the views choose.

use super::folded::{Folded, spread};
use super::graph::{Arg, Elem, Node};
use super::lower::{Lower, Val};
use super::mask::FAR;
use super::operands::dim_of;
use super::table::Arithmetic;
use super::view::{Dim, View, letter};
use shardc_ir::attr::{Broadcast, Padding};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::Value;
use shardc_ir::ops::{
    Add, Div, Dot, Erf, Fill, Gelu, Max, Min, Mul, Op, ReduceSum, Rsqrt, Scale, Shift, Sqrt, Sub,
    Take,
};
use shardc_ir::types::Type;

/// An operand of arithmetic: data, or one number.
enum Term {
    Data(View),
    Number(f64),
}

impl Lower<'_> {
    fn term(&mut self, n: &Node, name: &str) -> Result<Term> {
        if let Some(x) = self.number(n, name) {
            return Ok(Term::Number(x));
        }
        self.data(n, name).map(Term::Data)
    }

    pub(super) fn arithmetic(&mut self, n: &Node, how: Arithmetic) -> Result<Val> {
        let by = self.number(n, "alpha").unwrap_or(1.0);
        if let Some(v) = self.masked(n, how)? {
            return Ok(v);
        }
        let (mut a, mut b) = (self.term(n, "self")?, self.term(n, "other")?);
        // The factor of the second operand.
        if by != 1.0 {
            b = match b {
                Term::Number(x) => Term::Number(x * by),
                Term::Data(v) => Term::Data(self.scaled(n, &v, by)?),
            };
        }
        let how = match how {
            Arithmetic::Rsub => {
                std::mem::swap(&mut a, &mut b);
                Arithmetic::Sub
            }
            other => other,
        };
        match (a, b) {
            (Term::Data(a), Term::Data(b)) => self.both(n, how, &a, &b),
            (Term::Data(a), Term::Number(c)) => match how {
                Arithmetic::Add => self.shifted(n, &a, c),
                Arithmetic::Sub | Arithmetic::Rsub => self.shifted(n, &a, -c),
                Arithmetic::Mul => self.scaled(n, &a, c),
                Arithmetic::Div => self.scaled(n, &a, 1.0 / c),
                Arithmetic::Max | Arithmetic::Min => self.bounded(n, how, c, &a),
            },
            (Term::Number(c), Term::Data(b)) => match how {
                Arithmetic::Add => self.shifted(n, &b, c),
                Arithmetic::Mul => self.scaled(n, &b, c),
                Arithmetic::Sub | Arithmetic::Rsub => {
                    let minus = self.scaled(n, &b, -1.0)?;
                    self.shifted(n, &minus, c)
                }
                Arithmetic::Div => self.over(n, c, &b),
                Arithmetic::Max | Arithmetic::Min => self.bounded(n, how, c, &b),
            },
            _ => return Err(self.refuse(n, "none of its operands is a tensor")),
        }
        .map(Val::Data)
    }

    /// An op of one operand, and of its half where its last dim is twice the same.
    pub(super) fn each(&mut self, n: &Node, hint: &'static str, op: Op, x: &View) -> Result<View> {
        let v = self.emit(n, hint, op.clone(), &[x.value])?;
        if let Some(&h) = self.halves.get(&x.value) {
            let h = self.emit(n, hint, op, &[h])?;
            self.halves.insert(v, h);
        }
        Ok(x.with(v))
    }

    pub(super) fn unary(&mut self, n: &Node, hint: &'static str, op: Op) -> Result<View> {
        let x = self.data(n, "self")?;
        self.each(n, hint, op, &x)
    }

    pub(super) fn scaled(&mut self, n: &Node, x: &View, by: f64) -> Result<View> {
        if by == 1.0 { Ok(x.clone()) } else { self.each(n, "scaled", Scale { by }.into(), x) }
    }

    pub(super) fn shifted(&mut self, n: &Node, x: &View, by: f64) -> Result<View> {
        if by == 0.0 { Ok(x.clone()) } else { self.each(n, "shifted", Shift { by }.into(), x) }
    }

    /// A number over each element.
    fn over(&mut self, n: &Node, c: f64, x: &View) -> Result<View> {
        let one = self.emit_n(n, &["one"], Fill { value: c }, &[], Some(&Type::f32(&[])))?[0];
        let l = x.letters(x.shape.len());
        let rule = self.spread(n, &["", &l], &l, &[one, x.value])?;
        Ok(x.with(self.emit(n, "over", Div { rule }, &[one, x.value])?))
    }

    /// The larger, or smaller, one of a number and each element. No gradient flows where they are equal, as in
    /// PyTorch's `relu`.
    fn bounded(&mut self, n: &Node, how: Arithmetic, c: f64, x: &View) -> Result<View> {
        let bound = self.emit_n(n, &["bound"], Fill { value: c }, &[], Some(&Type::f32(&[])))?[0];
        let l = x.letters(x.shape.len());
        let rule = self.spread(n, &["", &l], &l, &[bound, x.value])?;
        let op: Op = match how {
            Arithmetic::Min => Min { rule }.into(),
            _max => Max { rule }.into(),
        };
        Ok(x.with(self.emit(n, "bounded", op, &[bound, x.value])?))
    }

    pub(super) fn relu(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        Ok(vec![Val::Data(self.bounded(n, Arithmetic::Max, 0.0, &x)?)])
    }

    pub(super) fn reciprocal(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        Ok(vec![Val::Data(self.over(n, 1.0, &x)?)])
    }

    /// A sum or product of two values, each spread over the dims that it lacks.
    pub(super) fn both(&mut self, n: &Node, how: Arithmetic, a: &View, b: &View) -> Result<View> {
        let shape =
            spread(&a.shape, &b.shape).ok_or_else(|| self.refuse(n, "its operands do not fit"))?;
        let alike = a.dims == b.dims && a.shape == b.shape;
        let (a, b) = match alike {
            true => (a.clone(), b.clone()),
            false => (self.settled(n, a)?, self.settled(n, b)?),
        };
        let (a, b) = (self.thinned(n, &a, &shape)?, self.thinned(n, &b, &shape)?);
        let rank = shape.len();
        let (la, lb) = (a.letters(rank), b.letters(rank));
        // The order of the operand that has all dims, so that nothing is moved.
        let has = |l: &str, of: &str| of.chars().all(|c| l.contains(c));
        let swap =
            matches!(how, Arithmetic::Add | Arithmetic::Mul) && !has(&la, &lb) && has(&lb, &la);
        let (a, b, la, lb) = if swap { (b, a, lb, la) } else { (a, b, la, lb) };
        let out = match (has(&la, &lb), has(&lb, &la)) {
            (true, _) => la.clone(),
            (_, true) => lb.clone(),
            _ => (0..rank).map(letter).filter(|&c| la.contains(c) || lb.contains(c)).collect(),
        };
        let ins = [a.value, b.value];
        if let Some(v) = self.raised(n, how, ins, [&la, &lb, &out])? {
            return Ok(view_of(v, &out, shape, &a));
        }
        let rule = self.spread(n, &[&la, &lb], &out, &ins)?;
        let v = match how {
            Arithmetic::Add => self.emit(n, "sum", Add { rule }, &ins)?,
            Arithmetic::Sub | Arithmetic::Rsub => self.emit(n, "difference", Sub { rule }, &ins)?,
            Arithmetic::Mul => self.emit(n, "product", Mul { rule }, &ins)?,
            Arithmetic::Div => self.emit(n, "quotient", Div { rule }, &ins)?,
            Arithmetic::Max => self.emit(n, "larger", Max { rule }, &ins)?,
            Arithmetic::Min => self.emit(n, "smaller", Min { rule }, &ins)?,
        };
        Ok(view_of(v, &out, shape, &a))
    }

    pub(super) fn pow(&mut self, n: &Node) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let p = self.number(n, "exponent");
        let y = match p {
            Some(1.0) => x,
            Some(2.0) => self.both(n, Arithmetic::Mul, &x, &x)?,
            Some(3.0) => {
                let square = self.both(n, Arithmetic::Mul, &x, &x)?;
                self.both(n, Arithmetic::Mul, &square, &x)?
            }
            Some(0.5) => self.each(n, "sqrt", Sqrt {}.into(), &x)?,
            Some(-0.5) => self.each(n, "rstd", Rsqrt {}.into(), &x)?,
            Some(-1.0) => self.over(n, 1.0, &x)?,
            _ => {
                let what = format!("the exponent is {p:?}, and not 1, 2, 3, 1/2, -1/2 or -1");
                return Err(self.refuse(n, &what).help("write it as products and roots"));
            }
        };
        Ok(vec![Val::Data(y)])
    }

    pub(super) fn dropout(&mut self, n: &Node) -> Result<Vec<Val>> {
        let p = self.number(n, "p").unwrap_or(0.0);
        let x = self.data(n, "input").map(Val::Data)?;
        if p > 0.0
            && !matches!(n.arg("train"), Arg::Bool(false))
            && self.warnings.iter().all(|w| w.code != "dropout-ignored")
        {
            let what = format!("the model drops {p} of its activations, which is ignored");
            self.warnings.push(
                Diag::new("dropout-ignored", what)
                    .at(n.scope.to_string())
                    .help("set its rate to 0 before exporting, so that this goes away"),
            );
        }
        Ok(vec![x])
    }

    pub(super) fn gelu(&mut self, n: &Node) -> Result<Vec<Val>> {
        if matches!(n.arg("approximate"), Arg::Text(t) if &**t == "tanh") {
            let v = self.unary(n, "act", Gelu {}.into())?;
            return Ok(vec![Val::Data(v)]);
        }
        // x/2 (1 + erf(x/√2)).
        let x = self.data(n, "self")?;
        let t = self.scaled(n, &x, std::f64::consts::FRAC_1_SQRT_2)?;
        let e = self.each(n, "erf", Erf {}.into(), &t)?;
        let e = self.shifted(n, &e, 1.0)?;
        let y = self.both(n, Arithmetic::Mul, &x, &e)?;
        Ok(vec![Val::Data(self.scaled(n, &y, 0.5)?)])
    }

    pub(super) fn embedding(&mut self, n: &Node) -> Result<Vec<Val>> {
        let mut w = self.data(n, "weight")?;
        let i = match self.folded(n, "indices", usize::MAX)? {
            Some(f) if f.elements() > 1 && f.is_one_number() => {
                return self.one_row(n, &w, &f).map(|y| vec![Val::Data(y)]);
            }
            Some(f) => {
                // Positions that are counted from another number look into the rest of the table.
                let first = f.scalar().is_none().then(|| f.first()).flatten();
                let first = first.filter(|x| *x > 0.0 && w.shape.len() == 2);
                let from = first.map_or(0, |x| x as usize);
                let seq = self.sizes.seq;
                if from > 0 && from.checked_add(seq).is_some_and(|end| end <= w.shape[0]) {
                    w = self.narrowed(n, &w, 0, from, seq)?;
                }
                let by = if from > 0 { f.map(Elem::Int, |x| x - from as f64) } else { Some(f) };
                let by = by.ok_or_else(|| self.refuse(n, "its index is too large"))?;
                self.constant(n, &by)?
            }
            None => self.data(n, "indices")?,
        };
        let (rank, i) = (i.shape.len(), self.ordered(n, &i)?);
        if w.shape.len() != 2 || w.real() != 2 {
            return Err(self.refuse(n, "its table has not 2 dims"));
        }
        let li = i.letters(rank);
        let lw: String = w.letters(2).chars().map(|c| if c == 'a' { 'y' } else { 'z' }).collect();
        let rule = self.rule(n, &format!("{lw},{li}->{li}z"), &[w.value, i.value])?;
        let padding = match self.int(n, "padding_idx")? {
            Some(p) if p >= 0 && (p as usize) < w.shape[0] => Padding::Constant(p as usize),
            _ => Padding::None,
        };
        let v = self.emit(n, "embedded", Take { rule, padding }, &[w.value, i.value])?;
        let mut y = View { value: v, ..i };
        y.dims.push(Dim::Real(y.real()));
        y.shape.push(w.shape[1]);
        Ok(vec![Val::Data(y)])
    }

    /// The row of a table that every element of an index names.
    fn one_row(&mut self, n: &Node, w: &View, index: &Folded) -> Result<View> {
        let rows = w.shape.first().copied().unwrap_or(0);
        let at = dim_of(index.first().unwrap_or(0.0) as i64, rows, self, n)?;
        let row = self.narrowed(n, w, 0, at, 1)?;
        let mut y = self.reshaped(n, &row, &w.shape[1..])?;
        for &size in index.shape.iter().rev() {
            y.dims.insert(0, Dim::Virtual);
            y.shape.insert(0, size);
        }
        Ok(y)
    }

    /// Scores of which a known mask hides some.
    pub(super) fn masked_fill(&mut self, n: &Node) -> Result<Vec<Val>> {
        let (scores, old) = match self.operand(n, "self") {
            Some(Val::Masked(v, f)) => (v, f),
            _ => {
                let v = self.data(n, "self")?;
                (v, Folded::full(Elem::Float, &[], 0.0))
            }
        };
        let (mask, value) = (self.folded(n, "mask", 1)?, self.number(n, "value"));
        let Some((mask, value)) = mask.zip(value) else {
            return Err(self.refuse(n, "a mask that depends on data"));
        };
        // A fill replaces a score, and a mask is added to it: the same only where nothing of it is left.
        let nowhere = mask.is_one_number() && mask.first() == Some(0.0);
        if (value.is_nan() || value > FAR) && !nowhere {
            let what =
                format!("it puts {value:?} in the place of elements, and not {FAR:?} or less");
            return Err(self.refuse(n, &what).help("fill with -inf, in scores of attention"));
        }
        let made = mask.choose(&Folded::full(Elem::Float, &[], value), &old);
        let made = made.ok_or_else(|| self.refuse(n, "its operands do not fit"))?;
        Ok(vec![Val::Masked(scores, made)])
    }

    pub(super) fn linear(&mut self, n: &Node) -> Result<Vec<Val>> {
        let (x, w) = (self.data(n, "input")?, self.data(n, "weight")?);
        let y = self.product(n, &x, &w)?;
        self.biased(n, y, "bias")
    }

    pub(super) fn addmm(&mut self, n: &Node) -> Result<Vec<Val>> {
        let (x, w) = (self.data(n, "mat1")?, self.data(n, "mat2")?);
        let plain = ["alpha", "beta"].iter().all(|k| self.number(n, k).unwrap_or(1.0) == 1.0);
        if !plain || w.shape.len() != 2 {
            return Err(self.refuse(n, "its factors are not 1"));
        }
        let y = self.product(n, &x, &w.transpose(0, 1))?;
        self.biased(n, y, "self")
    }

    pub(super) fn biased(&mut self, n: &Node, y: View, name: &str) -> Result<Vec<Val>> {
        let y = match n.arg(name) {
            Arg::None => y,
            _ => {
                let b = self.data(n, name)?;
                self.both(n, Arithmetic::Add, &y, &b)?
            }
        };
        Ok(vec![Val::Data(y)])
    }

    /// x [.., c] times a weight [o, c].
    fn product(&mut self, n: &Node, x: &View, w: &View) -> Result<View> {
        let x = self.settled(n, x)?;
        let rank = x.shape.len();
        let last = rank.checked_sub(1).map(|d| x.dims[d]);
        let fits = w.shape.len() == 2 && w.real() == 2 && matches!(last, Some(Dim::Real(_)));
        if !fits || x.shape[rank - 1] != w.shape[1] {
            return Err(self.refuse(n, "its operands do not fit"));
        }
        let c = letter(rank - 1);
        let (lx, lw) = (x.letters(rank), w.letters(2));
        let lw: String = lw.chars().map(|l| if l == 'a' { 'z' } else { c }).collect();
        let out: String = lx.chars().filter(|&l| l != c).chain(['z']).collect();
        let rule = self.rule(n, &format!("{lx},{lw}->{out}"), &[x.value, w.value])?;
        let v = self.emit(n, "linear", Dot { rule }, &[x.value, w.value])?;
        let mut shape = x.shape.clone();
        shape[rank - 1] = w.shape[0];
        let out: String = out.chars().map(|l| if l == 'z' { c } else { l }).collect();
        Ok(View::of(v, &out, shape))
    }

    /// Products of matrices in the last two dims, batched over the others.
    pub(super) fn matmul(&mut self, n: &Node, other: &str) -> Result<Vec<Val>> {
        if let Some(v) = self.raised_probs(n, other)? {
            return Ok(vec![Val::Data(v)]);
        }
        let (a, b) = (self.data(n, "self")?, self.data(n, other)?);
        let (ra, rb) = (a.shape.len(), b.shape.len());
        if ra < 2 || rb < 2 || a.shape[ra - 1] != b.shape[rb - 2] {
            return Err(self.refuse(n, "its operands are not matrices that fit"));
        }
        let (m, c) = (a.shape[ra - 2], b.shape[rb - 1]);
        let outer = spread(&a.shape[..ra - 2], &b.shape[..rb - 2]);
        let mut shape = outer.ok_or_else(|| self.refuse(n, "its operands do not fit"))?;
        shape.extend([m, c]);
        let given = (a.clone(), b.clone());
        let (a, b) = (self.settled(n, &a)?, self.settled(n, &b)?);
        // Dims: those of the result, and behind them the one that is summed over.
        let rank = shape.len();
        let put = |v: &View, keep: usize, sum: usize, at: usize| {
            let mut dims = vec![Dim::Virtual; rank + 1];
            let off = rank - v.shape.len();
            let outer = v.shape.len() - 2;
            dims[off..off + outer].copy_from_slice(&v.dims[..outer]);
            (dims[at], dims[rank]) = (v.dims[keep], v.dims[sum]);
            View { value: v.value, dims, shape: vec![1; rank + 1] }
        };
        let pa = put(&a, ra - 2, ra - 1, rank - 2);
        let pb = put(&b, rb - 1, rb - 2, rank - 1);
        let (la, lb) = (pa.letters(rank + 1), pb.letters(rank + 1));
        let out: String =
            (0..rank).map(letter).filter(|&l| la.contains(l) || lb.contains(l)).collect();
        let ins = [a.value, b.value];
        let summed = letter(rank);
        let v = match (la.contains(summed), lb.contains(summed)) {
            (true, true) => {
                let rule = self.rule(n, &format!("{la},{lb}->{out}"), &ins)?;
                self.emit(n, "scores", Dot { rule }, &ins)?
            }
            (false, false) if a.shape[ra - 1] == 1 => {
                let rule = self.spread(n, &[&la, &lb], &out, &ins)?;
                self.emit(n, "product", Mul { rule }, &ins)?
            }
            _ => {
                return Err(
                    self.refuse(n, "one of its operands is repeated where it is summed over")
                );
            }
        };
        self.products.insert(v, (given.0, given.1.transpose(rb - 2, rb - 1)));
        Ok(vec![Val::Data(View::of(v, &out, shape))])
    }

    /// Dims that are reduced, and whether they stay as dims of one element.
    fn reduced(&self, n: &Node, rank: usize) -> Result<(Vec<usize>, bool)> {
        let all = self.ints(n, "dim")?;
        let dims: Vec<usize> = match all.is_empty() {
            true => (0..rank).collect(),
            false => all.iter().map(|&d| dim_of(d, rank, self, n)).collect::<Result<_>>()?,
        };
        Ok((dims, self.flag(n, "keepdim")))
    }

    /// The mean or sum over dims.
    pub(super) fn mean(&mut self, n: &Node, is_mean: bool) -> Result<Vec<Val>> {
        let x = self.data(n, "self")?;
        let (dims, keep) = self.reduced(n, x.shape.len())?;
        let count: f64 = dims.iter().map(|&d| x.shape[d] as f64).product();
        let y = self.sum_over(n, &x, &dims, keep)?;
        // Along a repeat a sum is a multiple.
        let summed: f64 = dims
            .iter()
            .filter(|&&d| x.dims[d] != Dim::Virtual)
            .map(|&d| x.shape[d] as f64)
            .product();
        let by = if is_mean { 1.0 / summed } else { count / summed };
        Ok(vec![Val::Data(self.scaled(n, &y, by)?)])
    }

    /// The mean of squares of differences, their sum, or they themselves.
    pub(super) fn mse(&mut self, n: &Node) -> Result<Vec<Val>> {
        let (x, y) = (self.data(n, "self")?, self.data(n, "target")?);
        let d = self.both(n, Arithmetic::Sub, &x, &y)?;
        let square = self.both(n, Arithmetic::Mul, &d, &d)?;
        let dims: Vec<usize> = (0..d.shape.len()).collect();
        let real: f64 = d.shape.iter().map(|&s| s as f64).product();
        let reduction = self.int(n, "reduction")?.unwrap_or(1);
        if reduction == 0 {
            return Ok(vec![Val::Data(square)]);
        }
        let whole = self.whole(n, &square)?;
        let sum = self.sum_over(n, &whole, &dims, false)?;
        let by = if reduction == 1 { 1.0 / real } else { 1.0 };
        Ok(vec![Val::Data(self.scaled(n, &sum, by)?)])
    }

    /// The sum over dims, of those along which something changes.
    pub(super) fn sum_over(
        &mut self,
        n: &Node,
        x: &View,
        dims: &[usize],
        keep: bool,
    ) -> Result<View> {
        let x = self.settled(n, x)?;
        let rank = x.shape.len();
        let from = x.letters(rank);
        let gone = |d: usize| dims.contains(&d);
        let to: String =
            from.chars().filter(|&c| !(0..rank).any(|d| letter(d) == c && gone(d))).collect();
        let v = if from == to {
            x.value
        } else {
            match self.square_of(x.value) {
                Some(y) if self.raise.norms => {
                    let rule = self.rule(n, &format!("{from},{from}->{to}"), &[y, y])?;
                    self.emit(n, "squares", Dot { rule }, &[y, y])?
                }
                _ => {
                    let rule = self.rule(n, &format!("{from}->{to}"), &[x.value])?;
                    self.emit(n, "total", ReduceSum { rule }, &[x.value])?
                }
            }
        };
        let shape = (0..rank).map(|d| if gone(d) { 1 } else { x.shape[d] }).collect();
        let mut y = View::of(v, &to, shape);
        if !keep {
            for d in (0..rank).rev().filter(|&d| gone(d)) {
                y = y.squeeze(d);
            }
        }
        Ok(y)
    }

    /// x where the value is x times x.
    fn square_of(&self, v: Value) -> Option<Value> {
        match self.maker(v)? {
            (Op::Mul(m), &[a, b]) if a == b && m.rule == Broadcast::SAME => Some(a),
            _ => None,
        }
    }

    /// Scores plus known numbers of two dims: a mask, which the softmax behind it takes.
    fn masked(&mut self, n: &Node, how: Arithmetic) -> Result<Option<Val>> {
        let (a, b) = (self.operand(n, "self"), self.operand(n, "other"));
        let is_mask = |f: &Folded| {
            let r = f.shape.len();
            f.elem != Elem::Int
                && r >= 2
                && f.shape[r - 1] > 1
                && f.shape[r - 2] > 1
                && !(f.is_same_along(r - 1) && f.is_same_along(r - 2))
        };
        // Of each head other numbers for its keys: the slopes of ALiBi.
        let by_head = |f: &Folded| {
            let r = f.shape.len();
            f.elem != Elem::Int && r >= 3 && !f.is_same_along(r - 1) && !f.is_same_along(r - 3)
        };
        match (how, a, b) {
            (Arithmetic::Add, Some(Val::Data(v)), Some(Val::Folded(f)))
            | (Arithmetic::Add, Some(Val::Folded(f)), Some(Val::Data(v)))
                if is_mask(&f) || by_head(&f) =>
            {
                Ok(Some(Val::Masked(v, f)))
            }
            (Arithmetic::Add, Some(Val::Masked(v, old)), Some(Val::Folded(f)))
            | (Arithmetic::Add, Some(Val::Folded(f)), Some(Val::Masked(v, old))) => {
                let sum = old.zip(&f, Elem::Float, |a, b| a + b);
                let sum = sum.ok_or_else(|| self.refuse(n, "its operands do not fit"))?;
                Ok(Some(Val::Masked(v, sum)))
            }
            _ => Ok(None),
        }
    }
}

/// A result with these letters; where both operands have a repeat, so has the result.
fn view_of(v: Value, out: &str, shape: Vec<usize>, like: &View) -> View {
    let mut y = View::of(v, out, shape);
    if like.shape == y.shape && like.has_repeats() {
        y.dims.clone_from(&like.dims);
    }
    y
}
