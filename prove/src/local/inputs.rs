//! Operands of an evaluation: numbers at random, and integers of which the op makes something.

use super::{Held, Obligation};
use crate::field::functions::{mix, oracle, seed};
use crate::field::tensor::Tensor;
use crate::ops::law;
use shardc_ir::mesh::AtomSet;

/// Whole operands that are being drawn.
pub(crate) struct Operands<'a> {
    pub o: &'a Obligation,
    pub all: Vec<Tensor>,
    names: Vec<String>,
}

impl Operands<'_> {
    /// Numbers of an operand at random.
    pub fn noise(&self, i: usize) -> Tensor {
        noise(&self.names[i], &self.all[i].shape)
    }
}

/// Whole operands, with integers that the op can use. They depend on the places of a rank on the axes over
/// which they vary.
pub fn operands(o: &Obligation, place: impl Fn(AtomSet) -> usize) -> Vec<Tensor> {
    let law = law(&o.op);
    let worlds = law.between().map_or(AtomSet::EMPTY, |b| b.worlds());
    let varying = o.ins.iter().map(|h| h.ty.varying.union(worlds)).enumerate();
    let names: Vec<String> =
        varying.map(|(i, axes)| format!("operand {i} of {}", place(axes))).collect();
    let one = |(h, name): (&Held, &String)| {
        let x = noise(name, &h.ty.sizes());
        if h.ty.dtype.is_float() { x } else { x.map(|v| v % 5) }
    };
    let all = o.ins.iter().zip(&names).map(one).collect();
    let mut drawn = Operands { o, all, names };
    law.operands(&mut drawn);
    drawn.all
}

/// Numbers that depend on a name alone.
pub fn noise(name: &str, shape: &[usize]) -> Tensor {
    let (name, mut k) = (seed(name), 0);
    Tensor::from_fn(shape, |_| {
        k += 1;
        oracle(mix(name, 7), &[k])
    })
}
