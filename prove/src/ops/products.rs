//! Products, quotients, and what is an Einstein sum of one factor: sums, transposes, expansions.

use super::*;

/// Linear in each of both.
const BILINEAR: Typing = Typing { linear: Linear::Each(&[0, 1]), ..NONLINEAR };

/// y = a·b: each cotangent is the product of d with the other operand.
fn bilinear(law: &dyn Law, at: &mut At) -> Result<Back, String> {
    let (g, r) = (at.d()?, at.rule(law)?);
    let (a, b) = (letters(&r.ins[0])?, letters(&r.ins[1])?);
    let o = letters(&r.outs[0])?;
    let [of_a, of_b] = [at.shape(0), at.shape(1)];
    let d_a = at.s.product(&[(g, o.clone()), (at.x[1], b.clone())], &a, &of_a)?;
    let d_b = at.s.product(&[(g, o), (at.x[0], a)], &b, &of_b)?;
    Ok(vec![Some(d_a), Some(d_b)])
}

/// Declares what is believed of an Einstein sum of the operands, and its letters.
macro_rules! products {
    ($($op:ident, $typing:expr, $back:expr; |$k:ident, $ranks:ident| $letters:expr;)*) => {$(
        impl Law for ops::$op {
            fn letters(&self, $ranks: &[usize]) -> Option<Cow<'_, Rule>> {
                let $k = self;
                $letters
            }
            fn typing(&self) -> Option<Typing> {
                Some($typing)
            }
            fn terms(&self, t: &mut Terms) -> Result<Vec<Term>, String> {
                t.product(self, t.ins)
            }
            fn results(&self, e: &Field) -> Result<Vec<Tensor>, String> {
                e.einsum(self)
            }
            fn back(&self, at: &mut At) -> Result<Back, String> {
                $back(self, at)
            }
        }
    )*};
}

products! {
    Mul, BILINEAR, bilinear; |k, ranks| broadcast(&k.rule.0, Some(2), ranks);
    Dot, Typing { lost: SUM, ..BILINEAR }, bilinear; |k, ranks| given(&k.rule.0, 2, ranks);
    ReduceSum, Typing { linear: Linear::All, lost: SUM, ..NONLINEAR }, transposed;
        |k, ranks| given(&k.rule.0, 1, ranks);
    Transpose, MOVER, transposed; |k, ranks| given(&k.rule.0, 1, ranks);
    Expand, Typing { makes: true, ..MOVER }, transposed; |k, ranks| given(&k.rule.0, 1, ranks);
}

fn transposed(law: &dyn Law, at: &mut At) -> Result<Back, String> {
    at.transposed(law)
}

impl Law for ops::Div {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        broadcast(&self.rule.0, Some(2), ranks)
    }
    fn typing(&self) -> Option<Typing> {
        Some(Typing { linear: Linear::Each(&[0]), ..NONLINEAR })
    }
    fn terms(&self, t: &mut Terms) -> Result<Vec<Term>, String> {
        let by = t.s.reciprocal(t.ins[1]);
        t.product(self, &[t.ins[0], by])
    }
    fn results(&self, e: &Field) -> Result<Vec<Tensor>, String> {
        e.fold(self, |a, b| times(a, inverse(b, P)))
    }
    /// y = a / b: d/b and -d·y/b.
    fn back(&self, at: &mut At) -> Result<Back, String> {
        let (g, r) = (at.d()?, at.rule(self)?);
        let (a, b) = (letters(&r.ins[0])?, letters(&r.ins[1])?);
        let o = letters(&r.outs[0])?;
        let by = (at.s.reciprocal(at.x[1]), b.clone());
        let [of_a, of_b] = [at.shape(0), at.shape(1)];
        let d_a = at.s.product(&[(g, o.clone()), by.clone()], &a, &of_a)?;
        let d_b = at.s.product(&[(g, o.clone()), by, (at.y[0], o)], &b, &of_b)?;
        Ok(vec![Some(d_a), Some(at.s.scale(Coef::ONE.minus(), d_b))])
    }
}
