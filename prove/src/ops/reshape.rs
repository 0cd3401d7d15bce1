//! The same elements in the same order.

use super::*;

/// To the shape of the result.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Reshape;

impl Function for Reshape {
    fn name(&self) -> String {
        "reshape".into()
    }
    fn results(&self, x: &[&Tensor], shape: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        Ok(vec![x[0].reshaped(shape)])
    }
}

impl Law for ops::Reshape {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        given(&self.rule.0, 1, ranks)
    }
    fn typing(&self) -> Option<Typing> {
        Some(MOVER)
    }
    /// A term may be one already in its new shape.
    fn function(&self, _: &[&Type]) -> Result<Option<Fun>, String> {
        Ok(Some(Reshape.into()))
    }
    fn terms(&self, t: &mut Terms) -> Result<Vec<Term>, String> {
        Ok(vec![t.s.reshape(t.ins[0], t.shape())])
    }
    fn back(&self, at: &mut At) -> Result<Back, String> {
        let (d, shape) = (at.d()?, at.shape(0));
        Ok(vec![Some(at.s.reshape(d, &shape))])
    }
}
