//! Functions of elements, by rules whose letters the views choose.

use super::folded::{Folded, spread};
use super::graph::{Arg, Elem, Node};
use super::lower::{Lower, Val};
use super::mask::FAR;
use super::padding::Cells;
use super::table::Arithmetic;
use super::view::{View, letter};
use shardc_ir::diag::Result;
use shardc_ir::func::Value;
use shardc_ir::ops::{
    Add, Div, Equal, Erf, Fill, Gelu, Less, Max, Min, Mul, Op, Pow, Rsqrt, Scale, Shift, Softplus,
    Sqrt, Sub,
};
use shardc_ir::types::Type;

/// An operand of arithmetic: data, or one number.
#[derive(Clone)]
pub(super) enum Term {
    Data(View),
    Number(f64),
}

impl Lower<'_> {
    pub(super) fn term(&mut self, n: &Node, name: &str) -> Result<Term> {
        if let Some(x) = self.number(n, name) {
            return Ok(Term::Number(x));
        }
        self.data(n, name).map(Term::Data)
    }

    /// The same of numbers that are not whole ones to ops: those of f32 are exact below 2^24.
    fn number_term(&mut self, n: &Node, name: &str) -> Result<Term> {
        match self.term(n, name)? {
            Term::Data(x) if !self.draft.ty(x.value).dtype.is_float() => {
                self.float(n, &x).map(Term::Data)
            }
            other => Ok(other),
        }
    }

    pub(super) fn arithmetic(&mut self, n: &Node, how: Arithmetic) -> Result<Val> {
        let by = self.number(n, "alpha").unwrap_or(1.0);
        let how = match (n.outs.iter().any(|o| self.g.truths.contains(o)), how) {
            (false, how) => how,
            // Of truth values it is or.
            (true, Arithmetic::Add | Arithmetic::Max) if by == 1.0 => Arithmetic::Max,
            (true, Arithmetic::Mul | Arithmetic::Min) => Arithmetic::Mul,
            (true, _) => return Err(self.refuse(n, "differences of truth values")),
        };
        if by == 1.0
            && let Some(v) = self.masked(n, how)?
        {
            return Ok(v);
        }
        let (mut a, mut b) = (self.number_term(n, "self")?, self.number_term(n, "other")?);
        let how = match how {
            Arithmetic::Rsub => {
                std::mem::swap(&mut a, &mut b);
                Arithmetic::Sub
            }
            other => other,
        };
        // The factor of the second operand.
        if by != 1.0 {
            b = match b {
                Term::Number(x) => Term::Number(x * by),
                Term::Data(v) => Term::Data(self.scaled(n, &v, by)?),
            };
        }
        if let (Arithmetic::Max | Arithmetic::Min, Term::Data(a), Term::Data(b)) = (how, &a, &b) {
            return self.tied(n, how, a, b).map(Val::Data);
        }
        self.combined(n, how, a, b).map(Val::Data)
    }

    /// What an op makes of two operands, of which one may be a number.
    pub(super) fn combined(&mut self, n: &Node, how: Arithmetic, a: Term, b: Term) -> Result<View> {
        match (a, b) {
            (Term::Data(a), Term::Data(b)) => self.both(n, how, &a, &b),
            (Term::Data(a), Term::Number(c)) => match how {
                Arithmetic::Add => self.shifted(n, &a, c),
                Arithmetic::Sub | Arithmetic::Rsub => self.shifted(n, &a, -c),
                Arithmetic::Mul => self.scaled(n, &a, c),
                Arithmetic::Div => self.scaled(n, &a, 1.0 / c),
                Arithmetic::Max | Arithmetic::Min => self.bounded(n, how, c, &a),
                Arithmetic::Less | Arithmetic::Equal => {
                    let c = self.one_number(n, c, &a)?;
                    self.both(n, how, &a, &c)
                }
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
                Arithmetic::Less | Arithmetic::Equal => {
                    let c = self.one_number(n, c, &b)?;
                    self.both(n, how, &c, &b)
                }
            },
            _ => Err(self.refuse(n, "none of its operands is a tensor")),
        }
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
        let x = self.float_data(n, "self")?;
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

    /// The elements within bounds.
    pub(super) fn clamp(&mut self, n: &Node) -> Result<Vec<Val>> {
        let mut x = self.float_data(n, "self")?;
        for (key, how) in [("min", Arithmetic::Max), ("max", Arithmetic::Min)] {
            let Some(c) = self.number(n, key) else {
                if *n.arg(key) != Arg::None {
                    let bound = self.float_data(n, key)?;
                    x = self.both(n, how, &x, &bound)?;
                }
                continue;
            };
            // An infinite bound is none.
            if c != if key == "min" { f64::NEG_INFINITY } else { f64::INFINITY } {
                x = self.bounded(n, how, c, &x)?;
            }
        }
        Ok(vec![Val::Data(x)])
    }

    /// Known numbers within bounds.
    pub(super) fn fold_clamp(&self, n: &Node, x: &Folded) -> Result<Folded> {
        let bound = |k: &str, or: f64| match (n.arg(k), self.number(n, k)) {
            (Arg::None, _) => Ok(or),
            (_, Some(c)) => Ok(c),
            _ => Err(self.refuse(n, "its bounds are not numbers")),
        };
        let (low, high) = (bound("min", f64::NEG_INFINITY)?, bound("max", f64::INFINITY)?);
        let of_float = ["min", "max"].iter().any(|k| matches!(n.arg(k), Arg::Float(_)));
        let elem = if of_float && x.elem == Elem::Int { Elem::Float } else { x.elem };
        self.fits(n, x.map(elem, |v| v.max(low).min(high)))
    }

    /// The larger, or smaller, one of a number and each element. No gradient flows where they are equal, as in
    /// PyTorch's `relu` and `clamp`.
    pub(super) fn bounded(&mut self, n: &Node, how: Arithmetic, c: f64, x: &View) -> Result<View> {
        let bound = self.emit_n(n, &["bound"], Fill { value: c }, &[], Some(&Type::f32(&[])))?[0];
        let l = x.letters(x.shape.len());
        let rule = self.spread(n, &["", &l], &l, &[bound, x.value])?;
        let op: Op = match how {
            Arithmetic::Min => Min { rule }.into(),
            _max => Max { rule }.into(),
        };
        Ok(x.with(self.emit(n, "bounded", op, &[bound, x.value])?))
    }

    /// log(1 + exp(b x)) / b. Where b x is above a threshold PyTorch gives x itself: from ln 2^24 on that is the same
    /// number of f32.
    pub(super) fn softplus(&mut self, n: &Node) -> Result<Vec<Val>> {
        let by = self.number(n, "beta").unwrap_or(1.0);
        if by == 0.0 || self.number(n, "threshold").unwrap_or(20.0) < 17.0 {
            let what = "its beta is 0, or its threshold is below 17, where it is not smooth";
            return Err(self.refuse(n, what));
        }
        let x = self.data(n, "input").or_else(|_| self.data(n, "self"))?;
        let x = self.scaled(n, &x, by)?;
        let y = self.each(n, "softplus", Softplus {}.into(), &x)?;
        Ok(vec![Val::Data(self.scaled(n, &y, 1.0 / by)?)])
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
        // As in torch, of whole numbers and floats floats are made.
        let [fa, fb] = [a, b].map(|x| self.draft.ty(x.value).dtype.is_float());
        let (a, b) = match (fa, fb) {
            (true, false) => (&a.clone(), &self.float(n, b)?),
            (false, true) => (&self.float(n, a)?, &b.clone()),
            _ => (a, b),
        };
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
            Arithmetic::Less => self.emit(n, "less", Less { rule }, &ins)?,
            Arithmetic::Equal => self.emit(n, "equal", Equal { rule }, &ins)?,
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
            Some(to) if to.is_finite() => self.each(n, "power", Pow { to }.into(), &x)?,
            _ => return Err(self.refuse(n, "the exponent is not one number")),
        };
        Ok(vec![Val::Data(y)])
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

    /// Scores of which a known mask hides some.
    pub(super) fn masked_fill(&mut self, n: &Node) -> Result<Vec<Val>> {
        let (scores, old) = match self.operand(n, "self") {
            Some(Val::Masked(v, f)) => (v, f),
            _ => {
                let v = self.data(n, "self")?;
                (v, Cells::known(Folded::full(Elem::Float, &[], 0.0)))
            }
        };
        let (mask, value) = (self.cells(self.operand(n, "mask").as_ref()), self.number(n, "value"));
        let far = value.is_some_and(|c| c <= FAR);
        let plain = self.plainly || !far;
        if let (true, Some(m), Some(c)) = (plain, &mask, value)
            && m.tried.is_none()
            && (self.plainly || !m.plain.is_one_number())
        {
            if m.plain.is_one_number() && m.plain.first() == Some(0.0) {
                return Ok(vec![Val::Data(self.data(n, "self")?)]);
            }
            let m = self.constant(n, &m.plain.clone())?;
            return self.filled(n, &m, c).map(|y| vec![Val::Data(y)]);
        }
        if let (Some(Val::Data(m)), Some(c)) = (self.operand(n, "mask"), value) {
            return self.filled(n, &m, c).map(|y| vec![Val::Data(y)]);
        }
        let Some((mask, value)) = mask.zip(value) else {
            return Err(self.refuse(n, "a mask that depends on data"));
        };
        // A fill replaces a score, and a mask is added to it: the same only where nothing of it is left.
        let plain = &mask.plain;
        let nowhere = mask.tried.is_none() && plain.is_one_number() && plain.first() == Some(0.0);
        if (value.is_nan() || value > FAR) && !nowhere {
            let what =
                format!("it puts {value:?} in the place of elements, and not {FAR:?} or less");
            return Err(self.refuse(n, &what).help("fill with -inf, in scores of attention"));
        }
        let put = Folded::full(Elem::Float, &[], value);
        let made = mask.zip(&old, |m, old| m.choose(&put, old));
        let made = made.ok_or_else(|| self.refuse(n, "its operands do not fit"))?;
        Ok(vec![Val::Masked(scores, made)])
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
        // Of the keys of scores, where there is one head: a product of what has rows and heads.
        let by_key = |f: &Folded, v: &View| {
            let last = f.shape.len().checked_sub(1).filter(|&d| !f.is_same_along(d));
            let scores = || self.scores_of(v).is_some_and(|s| s.k.shape.len() > 2);
            f.elem != Elem::Int && last.is_some() && v.shape.len() > 2 && scores()
        };
        if how != Arithmetic::Add || self.plainly {
            return Ok(None);
        }
        let (v, old, c) = match (a, b) {
            (Some(Val::Data(v)), Some(Val::Padded(c)))
            | (Some(Val::Padded(c)), Some(Val::Data(v)))
                if c.plain.elem != Elem::Int =>
            {
                (v, None, c)
            }
            (Some(Val::Data(v)), Some(Val::Folded(f)))
            | (Some(Val::Folded(f)), Some(Val::Data(v)))
                if is_mask(&f) || by_head(&f) || by_key(&f, &v) =>
            {
                (v, None, Cells::known(f))
            }
            // A bias of these scores, with a mask.
            (Some(Val::Data(v)), Some(Val::Masked(bias, c)))
            | (Some(Val::Masked(bias, c)), Some(Val::Data(v)))
                if self.offsets_of(&bias).is_some() =>
            {
                return Ok(Some(Val::Masked(self.both(n, Arithmetic::Add, &v, &bias)?, c)));
            }
            (Some(Val::Masked(v, old)), Some(other)) | (Some(other), Some(Val::Masked(v, old))) => {
                let Some(c) = self.cells(Some(&other)) else { return Ok(None) };
                (v, Some(old), c)
            }
            _ => return Ok(None),
        };
        let sum = match old {
            Some(old) => old.zip(&c, |a, b| a.zip(b, Elem::Float, |a, b| a + b)),
            // A truth value that is added is 1 or 0, and hides nothing.
            None => c.map(|m| m.cast(Elem::Float)),
        };
        sum.map(|c| Some(Val::Masked(v, c)))
            .ok_or_else(|| self.refuse(n, "its operands do not fit"))
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
