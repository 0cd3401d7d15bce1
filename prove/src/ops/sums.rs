//! Sums and differences, element by element; a rule spreads smaller operands.

use super::*;

impl Law for ops::Add {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        broadcast(&self.rule.0, None, ranks)
    }
    fn typing(&self) -> Option<Typing> {
        Some(Typing { linear: Linear::All, ..NONLINEAR })
    }
    fn terms(&self, t: &mut Terms) -> Result<Vec<Term>, String> {
        let parts: Vec<_> = t.spread(self)?.into_iter().map(|t| (Coef::ONE, t)).collect();
        Ok(vec![t.s.sum(&parts, t.shape())])
    }
    fn results(&self, e: &Field) -> Result<Vec<Tensor>, String> {
        e.fold(self, |a, b| add(a, b, P))
    }
    fn back(&self, at: &mut At) -> Result<Back, String> {
        at.transposed(self)
    }
}

impl Law for ops::Sub {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        broadcast(&self.rule.0, Some(2), ranks)
    }
    fn typing(&self) -> Option<Typing> {
        Some(Typing { linear: Linear::All, ..NONLINEAR })
    }
    fn terms(&self, t: &mut Terms) -> Result<Vec<Term>, String> {
        let parts = t.spread(self)?;
        let parts: Vec<_> = [Coef::ONE, Coef::ONE.minus()].into_iter().zip(parts).collect();
        Ok(vec![t.s.sum(&parts, t.shape())])
    }
    fn results(&self, e: &Field) -> Result<Vec<Tensor>, String> {
        e.fold(self, |a, b| add(a, neg(b, P), P))
    }
    fn back(&self, at: &mut At) -> Result<Back, String> {
        let mut back = at.transposed(self)?;
        if let [_, Some(t)] = &mut back[..] {
            *t = at.s.scale(Coef::ONE.minus(), *t);
        }
        Ok(back)
    }
}
