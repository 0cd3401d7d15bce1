//! What ops do to one element: a short program, which every op over rows writes of itself
//! ([`crate::ops::OpDef::element`]).

use super::{Binary, Scalar, Unary};
use smallvec::SmallVec;

/// Writes the program of a row; instructions are named by their numbers.
#[derive(Default)]
pub struct Body(pub Vec<Scalar>);

/// Instructions with the results of an op.
pub type Results = SmallVec<[usize; 3]>;

impl Body {
    /// Appends an instruction, unless the same is there.
    pub fn push(&mut self, s: Scalar) -> usize {
        if let Some(i) = self.0.iter().position(|x| *x == s) {
            return i;
        }
        self.0.push(s);
        self.0.len() - 1
    }
    pub fn constant(&mut self, x: f64) -> usize {
        self.push(Scalar::Const(x as f32))
    }
    pub fn unary(&mut self, f: Unary, x: usize) -> usize {
        self.push(Scalar::Unary(f, x))
    }
    pub fn binary(&mut self, f: Binary, x: usize, y: usize) -> usize {
        self.push(Scalar::Binary(f, x, y))
    }
    pub fn add(&mut self, x: usize, y: usize) -> usize {
        self.binary(Binary::Add, x, y)
    }
    pub fn sub(&mut self, x: usize, y: usize) -> usize {
        self.binary(Binary::Sub, x, y)
    }
    pub fn mul(&mut self, x: usize, y: usize) -> usize {
        self.binary(Binary::Mul, x, y)
    }
    pub fn div(&mut self, x: usize, y: usize) -> usize {
        self.binary(Binary::Div, x, y)
    }
    /// The same with a constant.
    pub fn by(&mut self, f: Binary, x: usize, c: f64) -> usize {
        let c = self.constant(c);
        self.binary(f, x, c)
    }
    /// The operands folded from the left.
    pub fn chain(&mut self, f: Binary, x: &[usize]) -> usize {
        x[1..].iter().fold(x[0], |a, &b| self.binary(f, a, b))
    }
}
