//! Functions of numbers, element by element, that ops and the textbook have in common. Over the
//! field one of which nothing is known is an oracle.

use super::*;

/// Letters of a function that works on each element for itself.
pub(super) fn own_letters(args: usize, rank: usize) -> Option<Lettered> {
    let same: Vec<Letter> = (0..rank as Letter).collect();
    Some((vec![same.clone(); args], same))
}

/// A function of a number: `exp`, `log`, `sqrt`, …; some depend on a constant.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Each(pub &'static str, pub Option<Real>);

impl Function for Each {
    fn name(&self) -> String {
        match self.1 {
            None => self.0.into(),
            Some(x) => format!("{}[{x:?}]", self.0),
        }
    }
    fn results(&self, x: &[&Tensor], _: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        let name = seed(&self.name());
        Ok(vec![x[0].map(|v| oracle(name, &[v]))])
    }
    fn letters(&self, args: usize, rank: usize) -> Option<Lettered> {
        own_letters(args, rank)
    }
}

/// The number, or the bound that it is beyond.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Clamp(pub Real, pub Real);

impl Clamp {
    /// By the bounds.
    pub fn new(lo: f64, hi: f64) -> Clamp {
        Clamp(Real::new(lo), Real::new(hi))
    }
}

impl Function for Clamp {
    fn name(&self) -> String {
        format!("clamp[{:?}; hi={:?}]", self.0, self.1)
    }
    fn results(&self, x: &[&Tensor], _: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        let name = seed(&self.name());
        Ok(vec![x[0].map(|v| oracle(name, &[v]))])
    }
    fn letters(&self, args: usize, rank: usize) -> Option<Lettered> {
        own_letters(args, rank)
    }
}

/// 1 / x.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Reciprocal;

impl Function for Reciprocal {
    fn name(&self) -> String {
        "1/".into()
    }
    fn results(&self, x: &[&Tensor], _: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        Ok(vec![x[0].map(|v| inverse(v, P))])
    }
    fn letters(&self, args: usize, rank: usize) -> Option<Lettered> {
        own_letters(args, rank)
    }
}

/// 1 where an integer is at least the bound, else 0.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct AtLeast(pub Real);

impl Function for AtLeast {
    fn name(&self) -> String {
        format!("at_least[{:?}]", self.0)
    }
    fn results(&self, x: &[&Tensor], _: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        Ok(vec![x[0].map(|v| u64::from(v as i64 as f64 >= self.0.get()))])
    }
    fn letters(&self, args: usize, rank: usize) -> Option<Lettered> {
        own_letters(args, rank)
    }
}

/// An integer as a number.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Number;

impl Function for Number {
    fn name(&self) -> String {
        "number".into()
    }
    fn results(&self, x: &[&Tensor], _: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        let of_integer = |x: i64| {
            let n = x.unsigned_abs() % P;
            if x < 0 { neg(n, P) } else { n }
        };
        Ok(vec![x[0].map(|v| of_integer(v as i64))])
    }
    fn letters(&self, args: usize, rank: usize) -> Option<Lettered> {
        own_letters(args, rank)
    }
}
