//! Functions of one number, element by element: a row each, with the function that terms apply, and
//! the slope of it, or that it is constant almost everywhere.

use super::*;

/// Declares what is believed of functions of a number: attributes of the op, its function `is`, and
/// the slope for op `k` at work `at`; an op that is `constant` has none.
macro_rules! unary {
    ($($op:ident $fields:tt is $function:expr
       $(, constant $constant:literal)? $(, slope |$k:pat_param, $at:ident| $slope:expr)?;)*) => {$(
        impl Law for ops::$op {
            fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
                alike(1, 1, ranks)
            }
            fn typing(&self) -> Option<Typing> {
                Some(NONLINEAR)
            }
            fn function(&self, _: &[&Type]) -> Result<Option<Fun>, String> {
                let ops::$op $fields = self;
                Ok(Some($function.into()))
            }
            $(fn is_constant(&self) -> bool {
                $constant
            })?
            $(fn back(&self, $at: &mut At) -> Result<Back, String> {
                let $k = self;
                let slope = $slope;
                let d = $at.d()?;
                Ok(vec![Some($at.times(&[d, slope]))])
            })?
        }
    )*};
}

unary! {
    Exp {} is Each("exp", None), slope |_, at| at.y[0];
    Log {} is Each("log", None), slope |_, at| at.s.reciprocal(at.x[0]);
    Sqrt {} is Each("sqrt", None), slope |_, at| {
        let by = at.s.reciprocal(at.y[0]);
        at.affine(0.5, by, 0.0)
    };
    // (x^-½)' = -½ x^-3/2
    Rsqrt {} is Each("rsqrt", None), slope |_, at| {
        let cube = at.times(&[at.y[0]; 3]);
        at.affine(-0.5, cube, 0.0)
    };
    Tanh {} is Each("tanh", None), slope |_, at| {
        let square = at.times(&[at.y[0]; 2]);
        at.affine(-1.0, square, 1.0)
    };
    Logistic {} is Each("logistic", None), slope |_, at| {
        let rest = at.affine(-1.0, at.y[0], 1.0);
        at.times(&[at.y[0], rest])
    };
    // (xσ(βx))' = σ + βxσ - βxσσ
    Silu { beta } is Each("silu", beta.map(Real::new)), slope |k, at| {
        let (x, beta) = (at.x[0], k.beta.unwrap_or(1.0));
        let inner = at.affine(beta, x, 0.0);
        let l = at.each("logistic", inner);
        let (once, twice) = (at.times(&[x, l]), at.times(&[x, l, l]));
        let (more, less) = (at.affine(beta, once, 0.0), at.affine(-beta, twice, 0.0));
        at.s.add(&[l, more, less])
    };
    Gelu {} is Each("gelu", None), slope |_, at| gelu(at);
    Sin {} is Each("sin", None), slope |_, at| at.each("cos", at.x[0]);
    Cos {} is Each("cos", None), slope |_, at| {
        let sin = at.each("sin", at.x[0]);
        at.affine(-1.0, sin, 0.0)
    };
    Abs {} is Each("abs", None), slope |_, at| at.each("sign", at.x[0]);
    Sign {} is Each("sign", None), constant true;
    // 1 where the operand is within the bounds, which is where it is kept.
    Clamp { lo, hi } is Clamp::new(*lo, *hi), slope |_, at| at.both("equal", [at.x[0], at.y[0]]);
    // 2/√π e^(-x²)
    Erf {} is Each("erf", None), slope |_, at| {
        let square = at.times(&[at.x[0]; 2]);
        let minus = at.affine(-1.0, square, 0.0);
        let e = at.each("exp", minus);
        at.affine(2.0 / std::f64::consts::PI.sqrt(), e, 0.0)
    };
    Pow { to } is Each("pow", Some(Real::new(*to))), slope |k, at| match k.to {
        0.0 => at.affine(0.0, at.x[0], 0.0),
        1.0 => at.affine(0.0, at.x[0], 1.0),
        2.0 => at.affine(2.0, at.x[0], 0.0),
        to => {
            let shape = at.shape(0);
            let less = at.s.apply(Each("pow", Some(Real::new(to - 1.0))), &[at.x[0]], 0, &shape);
            at.affine(to, less, 0.0)
        }
    };
    Log1p {} is Each("log1p", None), slope |_, at| {
        let more = at.affine(1.0, at.x[0], 1.0);
        at.s.reciprocal(more)
    };
    Softplus {} is Each("softplus", None), slope |_, at| at.each("logistic", at.x[0]);
    Round { to } is Each(to.name(), None), constant true;
}

/// y = x/2 (1 + tanh u), u = √(2/π) (x + 0.044715 x³), is x σ(2u): y' = σ + x (σ - σσ) 2u'.
fn gelu(at: &mut At) -> Term {
    let x = at.x[0];
    let (twice, cube) = (2.0 * (2.0 / std::f64::consts::PI).sqrt(), 0.044715);
    let square = at.times(&[x, x]);
    let inner = at.affine(cube * twice, square, twice);
    let inner = at.times(&[x, inner]);
    let l = at.each("logistic", inner);
    let square_of_l = at.times(&[l, l]);
    let minus = at.affine(-1.0, square_of_l, 0.0);
    let rest = at.s.add(&[l, minus]);
    let slope = at.affine(3.0 * cube * twice, square, twice);
    let inner = at.times(&[x, rest, slope]);
    at.s.add(&[l, inner])
}

impl Law for ops::AtLeast {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        alike(1, 1, ranks)
    }
    fn typing(&self) -> Option<Typing> {
        Some(Typing { kinds: ["s", "n"], ..NONLINEAR })
    }
    fn operands(&self, x: &mut Operands) {
        // Some below the bound, some not.
        let below = (self.bound as i64).wrapping_sub(1);
        x.all[0] = x.noise(0).map(|v| below.wrapping_add((v % 3) as i64) as u64);
    }
    fn function(&self, _: &[&Type]) -> Result<Option<Fun>, String> {
        let ops::AtLeast { bound } = self;
        Ok(Some(AtLeast(Real::new(*bound)).into()))
    }
    fn is_constant(&self) -> bool {
        true
    }
}

impl Law for ops::Scale {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        alike(1, 1, ranks)
    }
    fn typing(&self) -> Option<Typing> {
        Some(Typing { linear: Linear::All, ..NONLINEAR })
    }
    fn terms(&self, t: &mut Terms) -> Result<Vec<Term>, String> {
        Ok(vec![t.s.scale(coef(self.by)?, t.ins[0])])
    }
    fn results(&self, e: &Field) -> Result<Vec<Tensor>, String> {
        let by = number(self.by);
        Ok(vec![e.x[0].map(|v| times(v, by))])
    }
    fn back(&self, at: &mut At) -> Result<Back, String> {
        let c = Coef::of(self.by).ok_or("an infinite factor")?;
        let d = at.d()?;
        Ok(vec![Some(at.s.scale(c, d))])
    }
}

impl Law for ops::Shift {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        alike(1, 1, ranks)
    }
    fn typing(&self) -> Option<Typing> {
        Some(NONLINEAR)
    }
    fn terms(&self, t: &mut Terms) -> Result<Vec<Term>, String> {
        let c = t.s.fill(coef(self.by)?, t.shape());
        Ok(vec![t.s.add(&[t.ins[0], c])])
    }
    fn results(&self, e: &Field) -> Result<Vec<Tensor>, String> {
        let by = number(self.by);
        Ok(vec![e.x[0].map(|v| add(v, by, P))])
    }
    fn back(&self, at: &mut At) -> Result<Back, String> {
        Ok(vec![Some(at.d()?)])
    }
}

impl Law for ops::Cast {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        alike(1, 1, ranks)
    }
    fn typing(&self) -> Option<Typing> {
        let to = if self.to.is_float() { "n" } else { "i" };
        Some(Typing { kinds: ["s", to], ..MOVER })
    }
    /// Whole numbers made numbers are a function; rounding is none, on terms.
    fn function(&self, ins: &[&Type]) -> Result<Option<Fun>, String> {
        let ops::Cast { to } = self;
        match (ins[0].dtype.is_float(), to.is_float()) {
            (false, true) => Ok(Some(Number.into())),
            (true, true) | (false, false) => Ok(None),
            (true, false) => Err("a number is made an integer".into()),
        }
    }
    fn terms(&self, t: &mut Terms) -> Result<Vec<Term>, String> {
        if let Some(f) = self.function(t.types)? {
            return Ok(t.call(&f, t.ins));
        }
        t.s.lemma("reals: a float in another element type is the same number");
        Ok(t.ins.to_vec())
    }
    fn results(&self, e: &Field) -> Result<Vec<Tensor>, String> {
        match self.function(e.types)? {
            Some(f) => f.results(e.x, e.shape, e.at),
            None => Ok(vec![e.x[0].clone()]),
        }
    }
    fn back(&self, at: &mut At) -> Result<Back, String> {
        Ok(vec![Some(at.d()?)])
    }
}

impl Law for ops::StopGradient {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        alike(1, 1, ranks)
    }
    fn typing(&self) -> Option<Typing> {
        Some(MOVER)
    }
    fn terms(&self, t: &mut Terms) -> Result<Vec<Term>, String> {
        Ok(t.ins.to_vec())
    }
    fn results(&self, e: &Field) -> Result<Vec<Tensor>, String> {
        Ok(vec![e.x[0].clone()])
    }
    fn is_constant(&self) -> bool {
        true
    }
}
