//! What functions over the field have in common; each is in the file of its op, in `ops`.
//!
//! What is a polynomial, or a choice by an integer, is what it is. Any other function of a number
//! is an oracle: a fixed function of which nothing is known. Of attention e^x is the oracle, and
//! the exponential of the log-sum-exp is kept in its place, so that merging is what it is.

use super::tensor::{Tensor, einsum};
use crate::meaning::{letters, rule};
use crate::number::{P, image};
use crate::ops::Law;
use shardc_ir::rule::Dims;
use shardc_ir::types::Type;

/// Where pieces begin in whole tensors: of operand `i`, or of the result, along a dim.
pub struct Begins<'a> {
    pub operand: &'a dyn Fn(usize, usize) -> usize,
    pub result: &'a dyn Fn(usize) -> usize,
}

impl Begins<'_> {
    /// Of whole tensors.
    pub const WHOLE: Begins<'static> = Begins { operand: &|_, _| 0, result: &|_| 0 };
}

/// Stirs a number into another.
pub fn mix(h: u64, x: u64) -> u64 {
    let h = (h ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let h = (h ^ (h >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    h ^ (h >> 32)
}

/// A number for a name.
pub fn seed(name: &str) -> u64 {
    name.bytes().fold(0x1234_5678_9abc, |h, b| mix(h, u64::from(b)))
}

/// An element of the field that depends on the name and the arguments, and on nothing else.
pub fn oracle(name: u64, args: &[u64]) -> u64 {
    mix(args.iter().fold(name, |h, x| mix(h, *x)), 1) % P
}

/// The image of an f64; infinities are elements of their own.
pub fn number(x: f64) -> u64 {
    image(x, P).unwrap_or_else(|| oracle(seed("infinite"), &[x.to_bits()]))
}

/// A rank's pieces of an op's operands, with the types of the whole and the shape of its piece of
/// the first result.
pub(crate) struct Field<'a> {
    pub x: &'a [&'a Tensor],
    pub types: &'a [&'a Type],
    pub shape: &'a [usize],
    pub at: &'a Begins<'a>,
}

impl Field<'_> {
    /// Each operand with the dims of the result.
    pub fn spread(&self, law: &dyn Law) -> Result<Vec<Tensor>, String> {
        let r = rule(law, self.types)?;
        let to = letters(&r.outs[0])?;
        let one =
            |(t, d): (&&Tensor, &Dims)| Ok(einsum(&[(*t, &letters(d)?[..])], &to, self.shape));
        self.x.iter().zip(&r.ins).map(one).collect()
    }

    /// A function of the elements of operands with the dims of the result, of two at a time.
    pub fn fold(&self, law: &dyn Law, f: impl Fn(u64, u64) -> u64) -> Result<Vec<Tensor>, String> {
        let mut all = self.spread(law)?.into_iter();
        let first = all.next().ok_or("an op without operands")?;
        Ok(vec![all.fold(first, |a, b| a.zip(&b, &f))])
    }

    /// The Einstein sum of the operands.
    pub fn einsum(&self, law: &dyn Law) -> Result<Vec<Tensor>, String> {
        let r = rule(law, self.types)?;
        let of: Vec<Vec<u32>> = r.ins.iter().map(letters).collect::<Result<_, _>>()?;
        let factors: Vec<(&Tensor, &[u32])> =
            self.x.iter().zip(&of).map(|(t, l)| (*t, &l[..])).collect();
        Ok(vec![einsum(&factors, &letters(&r.outs[0])?, self.shape)])
    }
}
