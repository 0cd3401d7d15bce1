//! Functions of numbers, element by element, that ops and the textbook have in common. Over the
//! field one of which nothing is known is an oracle.

use super::*;

/// Letters of a function that works on each element for itself.
pub(super) fn own_letters(args: usize, rank: usize) -> Option<Signature> {
    let same: Vec<Letter> = (0..rank as Letter).collect();
    Some((vec![same.clone(); args], same))
}

/// A function of a number: `exp`, `log`, `sqrt`, …; some depend on a constant.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Each(pub &'static str, pub Option<Real>);

/// The number, or the bound that it is beyond.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Clamp(pub Real, pub Real);

impl Clamp {
    /// By the bounds.
    pub fn new(lo: f64, hi: f64) -> Clamp {
        Clamp(Real::new(lo), Real::new(hi))
    }
}

/// 1 / x.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Reciprocal;

/// 1 where an integer is at least the bound, else 0.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct AtLeast(pub Real);

/// An integer as a number.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Number;

/// Declares functions of each element for itself: how one is called, and what makes a number of a number.
macro_rules! functions {
    ($($of:ident, |$o:pat_param| $name:expr, $f:expr;)*) => {$(
        impl Function for $of {
            fn name(&self) -> String {
                let $o = self;
                $name
            }
            fn results(&self, x: &[&Tensor], _: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
                let $o = self;
                Ok(vec![x[0].map($f)])
            }
            fn letters(&self, args: usize, rank: usize) -> Option<Signature> {
                own_letters(args, rank)
            }
        }
    )*};
}

/// Nothing is known of it.
fn unknown(f: &impl Function) -> impl Fn(u64) -> u64 {
    let name = seed(&f.name());
    move |v| oracle(name, &[v])
}

functions! {
    Each, |o| o.1.map_or(o.0.into(), |x| format!("{}[{x:?}]", o.0)), unknown(o);
    Clamp, |o| format!("clamp[{:?}; hi={:?}]", o.0, o.1), unknown(o);
    Reciprocal, |_| "1/".into(), |v| inverse(v, P);
    AtLeast, |o| format!("at_least[{:?}]", o.0), |v| u64::from(v as i64 as f64 >= o.0.get());
    Number, |_| "number".into(), |v| {
        let n = (v as i64).unsigned_abs() % P;
        if (v as i64) < 0 { neg(n, P) } else { n }
    };
}
