//! What an op does to whole tensors, as terms.
//!
//! Collectives are the identity here, but for indices that an exchange shifts: they change what
//! each rank holds of a tensor and not the tensor, which is what types say. The same reading is
//! used for the model and for the plan.

use crate::fun::Fun;
use crate::ops::{Law, law};
use crate::product::Letter;
use crate::term::{Store, Term};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::Op;
use shardc_ir::rule::{Dims, Rule};
use shardc_ir::types::Type;
use std::borrow::Cow;

/// Letters of an operand, one per dim.
pub fn letters(dims: &Dims) -> Result<Vec<Letter>, String> {
    let one = |g: &shardc_ir::rule::Group| g.single().map(|l| Letter::from(l.0));
    dims.iter().map(one).collect::<Option<_>>().ok_or("a dim is made of several letters".into())
}

/// Most dims of an operand: letters of leading dims are few.
const MOST_DIMS: usize = 8;

/// The letters of an op for operands of these types.
///
/// # Errors
/// Says that it takes no such operands.
pub(crate) fn rule<'a>(law: &'a dyn Law, ins: &[&Type]) -> Result<Cow<'a, Rule>, String> {
    let ranks: Vec<usize> = ins.iter().map(|t| t.rank()).collect();
    let few = ranks.iter().all(|n| *n <= MOST_DIMS);
    let rule = if few { law.letters(&ranks) } else { None };
    rule.ok_or_else(|| format!("it takes no operands of {ranks:?} dims"))
}

/// An op at work on terms: operands with their types, and shapes of the results.
pub(crate) struct Terms<'a> {
    pub s: &'a mut Store,
    pub mesh: &'a Mesh,
    pub ins: &'a [Term],
    pub types: &'a [&'a Type],
    pub shapes: &'a [Vec<usize>],
}

impl<'a> Terms<'a> {
    /// The shape of the first result.
    pub fn shape(&self) -> &'a [usize] {
        &self.shapes[0]
    }

    /// All results of a function.
    pub fn call(&mut self, f: &Fun, args: &[Term]) -> Vec<Term> {
        let all = self.shapes.iter().enumerate();
        all.map(|(k, shape)| self.s.apply(f.clone(), args, k as u8, shape)).collect()
    }

    /// Each operand with the dims of the result.
    pub fn spread(&mut self, law: &dyn Law) -> Result<Vec<Term>, String> {
        let r = rule(law, self.types)?;
        let (out, shape) = (letters(&r.outs[0])?, self.shape());
        let one = |(&t, d): (&Term, &Dims)| self.s.product(&[(t, letters(d)?)], &out, shape);
        self.ins.iter().zip(&r.ins).map(one).collect()
    }

    /// The product of these factors, with the letters of the operands.
    pub fn product(&mut self, law: &dyn Law, factors: &[Term]) -> Result<Vec<Term>, String> {
        let r = rule(law, self.types)?;
        let all = factors.iter().zip(&r.ins).map(|(&t, d)| Ok((t, letters(d)?)));
        let all = all.collect::<Result<Vec<_>, String>>()?;
        Ok(vec![self.s.product(&all, &letters(&r.outs[0])?, self.shape())?])
    }
}

/// The results of an op on terms.
///
/// # Errors
/// Says what is not understood.
pub fn apply(
    s: &mut Store,
    mesh: &Mesh,
    op: &Op,
    ins: &[Term],
    types: [&[&Type]; 2],
) -> Result<Vec<Term>, String> {
    let [types, out_types] = types;
    let shapes: Vec<Vec<usize>> = out_types.iter().map(|t| t.sizes().to_vec()).collect();
    let made = law(op).terms(&mut Terms { s: &mut *s, mesh, ins, types, shapes: &shapes })?;
    let wrong = made.iter().zip(&shapes).find(|(t, shape)| s.shape(**t) != &shape[..]);
    match wrong {
        Some((t, shape)) => Err(format!("a result {:?} is declared {shape:?}", s.shape(*t))),
        None if made.len() != shapes.len() => Err("results are missing".into()),
        None => Ok(made),
    }
}
