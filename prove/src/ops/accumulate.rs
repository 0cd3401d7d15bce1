//! What is added up in place: to what was there, terms of the same dims.

use super::*;

impl Law for ops::Accumulate {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        alike(ranks.len().max(2), 1, ranks)
    }
    fn typing(&self) -> Option<Typing> {
        Some(Typing { linear: Linear::All, ..NONLINEAR })
    }
    fn terms(&self, t: &mut Terms) -> Result<Vec<Term>, String> {
        let parts: Vec<_> = t.ins.iter().map(|&x| (Coef::ONE, x)).collect();
        Ok(vec![t.s.sum(&parts, t.shape())])
    }
    fn results(&self, e: &Field) -> Result<Vec<Tensor>, String> {
        e.fold(self, |a, b| add(a, b, P))
    }
}
