//! Sums along a dim up to each element, or from it on.

use super::*;

/// Of a dim.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Cumsum {
    pub dim: usize,
    pub reverse: bool,
}

impl Function for Cumsum {
    fn name(&self) -> String {
        format!("cumsum[{}; reverse={}]", self.dim, self.reverse)
    }
    fn results(&self, x: &[&Tensor], shape: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        let Cumsum { dim, reverse } = *self;
        Ok(vec![Tensor::from_fn(shape, |i| {
            let own = if reverse { i[dim]..shape[dim] } else { 0..i[dim] + 1 };
            own.fold(0, |sum, k| {
                let mut j = i.to_vec();
                j[dim] = k;
                add(sum, x[0].at(&j), P)
            })
        })])
    }
}

impl Law for ops::Cumsum {
    fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
        let &[rank] = ranks else { return None };
        (self.dim < rank).then(|| Cow::Owned(Rule::along(rank, self.dim, &[N], N)))
    }
    fn typing(&self) -> Option<Typing> {
        Some(Typing { linear: Linear::All, ..NONLINEAR })
    }
    fn function(&self, _: &[&Type]) -> Result<Option<Fun>, String> {
        let ops::Cumsum { dim, reverse } = self;
        Ok(Some(Cumsum { dim: *dim, reverse: *reverse }.into()))
    }
    fn back(&self, at: &mut At) -> Result<Back, String> {
        let (d, shape) = (at.d()?, at.shape(0));
        let back = Cumsum { dim: self.dim, reverse: !self.reverse };
        Ok(vec![Some(at.s.apply(back, &[d], 0, &shape))])
    }
}

/// The letter that is summed along.
const N: Name = Name(b'n' - b'a');
