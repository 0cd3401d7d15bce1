//! Comparisons, which give truth values, and what is chosen by those.

use super::folded::{Folded, spread};
use super::graph::{Arg, Elem, Node};
use super::lower::{Lower, Val};
use super::mask::FAR;
use super::math::Term;
use super::table::Arithmetic;
use super::view::View;
use shardc_ir::diag::Result;
use shardc_ir::ops::{Fill, Select};
use shardc_ir::types::{DType, Type};

/// How the first of two numbers compares with the second.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Order {
    Less,
    AtMost,
    Above,
    AtLeast,
    Equal,
    Other,
}

impl Lower<'_> {
    /// 1 where two operands are in this order, else 0.
    pub(super) fn compare(&mut self, n: &Node, order: Order) -> Result<Vec<Val>> {
        let (a, b) = (self.term(n, "self")?, self.term(n, "other")?);
        if [&a, &b].into_iter().any(|t| matches!(t, Term::Number(c) if !c.is_finite())) {
            return Err(
                self.refuse(n, "it compares with an infinity, or with what is not a number")
            );
        }
        // What is not a number is in none of these orders, and is other than all.
        Ok(vec![Val::Data(match order {
            Order::Less => self.combined(n, Arithmetic::Less, a, b)?,
            Order::Above => self.combined(n, Arithmetic::Less, b, a)?,
            Order::Equal => self.combined(n, Arithmetic::Equal, a, b)?,
            Order::Other => {
                let y = self.combined(n, Arithmetic::Equal, a, b)?;
                self.without(n, &y)?
            }
            Order::AtMost => self.at_most(n, a, b)?,
            Order::AtLeast => self.at_most(n, b, a)?,
        })])
    }

    /// Less or equal, which exclude each other.
    fn at_most(&mut self, n: &Node, a: Term, b: Term) -> Result<View> {
        let less = self.combined(n, Arithmetic::Less, a.clone(), b.clone())?;
        let equal = self.combined(n, Arithmetic::Equal, a, b)?;
        self.both(n, Arithmetic::Add, &less, &equal)
    }

    fn as_float(&mut self, n: &Node, x: View) -> Result<View> {
        if self.draft.ty(x.value).dtype.is_float() { Ok(x) } else { self.float(n, &x) }
    }

    /// A number of the element type of another operand.
    pub(super) fn one_number(&mut self, n: &Node, value: f64, like: &View) -> Result<View> {
        let dtype = self.draft.ty(like.value).dtype;
        if dtype == DType::I32 && (value.fract() != 0.0 || value.abs() > f64::from(i32::MAX)) {
            return Err(self.refuse(n, &format!("{value} is not a whole number")));
        }
        let value = self.finite(n, value)?;
        let v = self.emit_n(n, &["number"], Fill { value }, &[], Some(&Type::new(dtype, &[])))?[0];
        Ok(View::plain(v, &[]))
    }

    /// Of two operands each element by a truth value; of a known one scores of which it hides some.
    pub(super) fn choose(&mut self, n: &Node) -> Result<Vec<Val>> {
        let known = self.cells(self.operand(n, "condition").as_ref());
        let far = |name: &str| self.number(n, name).filter(|x| *x <= FAR);
        let one_far = far("self").is_some() != far("other").is_some();
        if let Some(known) = known.filter(|_| one_far && !self.plainly) {
            let (scores, hides, put) = match (far("self"), far("other")) {
                (None, Some(put)) => ("self", false, put),
                (Some(put), None) => ("other", true, put),
                _ => {
                    let what = "a mask that is known chooses, and not between scores and what is far below";
                    return Err(self.refuse(n, what));
                }
            };
            let Arg::Value(condition) = n.arg("condition") else {
                return Err(self.refuse(n, "it has no condition"));
            };
            let key = (*condition, hides, put.to_bits());
            if let Some((_, cells)) = self.chosen.as_ref().filter(|c| c.0 == key) {
                let cells = cells.clone();
                return Ok(vec![Val::Masked(self.data(n, scores)?, cells)]);
            }
            let [put, zero] = [put, 0.0].map(|x| Folded::full(Elem::Float, &[], x));
            let (yes, no) = if hides { (put, zero) } else { (zero, put) };
            let cells = known.map(|m| m.choose(&yes, &no));
            let cells = cells.ok_or_else(|| self.refuse(n, "its mask is too large"))?;
            self.chosen = Some((key, cells.clone()));
            return Ok(vec![Val::Masked(self.data(n, scores)?, cells)]);
        }
        let m = self.data(n, "condition")?;
        let m = self.truth(n, &m)?;
        let [a, b] = ["self", "other"].map(|name| self.term(n, name));
        let (a, b) = (a?, b?);
        let mut to = m.shape.clone();
        for x in [&a, &b] {
            if let Term::Data(x) = x {
                let both = spread(&to, &x.shape);
                to = both.ok_or_else(|| self.refuse(n, "its operands do not fit"))?;
            }
        }
        let m = self.spread_to(n, &m, &to)?;
        let m = self.whole(n, &m)?;
        let is_float = |x: &Term| match x {
            Term::Data(x) => self.draft.ty(x.value).dtype.is_float(),
            Term::Number(c) => c.fract() != 0.0 || !c.is_finite(),
        };
        let floats = is_float(&a) || is_float(&b);
        let like = match (&a, &b) {
            (Term::Data(x), _) | (_, Term::Data(x)) if !floats => x.clone(),
            _ => m.clone(),
        };
        let l = m.letters(m.shape.len());
        let (mut ins, mut letters) = (vec![m.value], vec![&*l]);
        for x in [a, b] {
            match x {
                Term::Data(x) => {
                    let x = self.spread_to(n, &x, &m.shape)?;
                    let x = if floats { self.as_float(n, x)? } else { x };
                    ins.push(self.whole(n, &x)?.value);
                    letters.push(&l);
                }
                Term::Number(c) => {
                    ins.push(self.one_number(n, c, &like)?.value);
                    letters.push("");
                }
            }
        }
        let rule = self.spread(n, &letters, &l, &ins)?;
        Ok(vec![Val::Data(m.with(self.emit(n, "chosen", Select { rule }, &ins)?))])
    }
}
