//! The largest and the smallest element along letters.

use super::*;

/// The largest elements, by the rule.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Max(pub Pattern);

/// The smallest elements, by the rule.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Min(pub Pattern);

impl Function for Max {
    fn name(&self) -> String {
        format!("reduce_max[{}]", self.0)
    }
    fn results(&self, x: &[&Tensor], shape: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        Ok(vec![fold(&self.0, x[0], shape, 0, u64::max)])
    }
    fn letters(&self, _: usize, _: usize) -> Option<Signature> {
        Some(self.0.wide())
    }
}

impl Function for Min {
    fn name(&self) -> String {
        format!("reduce_min[{}]", self.0)
    }
    fn results(&self, x: &[&Tensor], shape: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        Ok(vec![fold(&self.0, x[0], shape, P - 1, u64::min)])
    }
    fn letters(&self, _: usize, _: usize) -> Option<Signature> {
        Some(self.0.wide())
    }
}

/// The largest or smallest representative; of nothing, the other end.
fn fold(
    p: &Pattern,
    x: &Tensor,
    shape: &[usize],
    of_nothing: u64,
    by: fn(u64, u64) -> u64,
) -> Tensor {
    let mut out = Tensor::full(shape, of_nothing);
    let at: Vec<Option<usize>> =
        p.out.iter().map(|l| p.ins[0].iter().position(|m| m == l)).collect();
    each(&x.shape, |i| {
        let j: Vec<usize> = at.iter().map(|d| d.map_or(0, |d| i[d])).collect();
        let place = out.place(&j);
        out.data[place] = by(out.data[place], x.at(i));
    });
    out
}

macro_rules! extremes {
    ($($op:ident is $function:ident by $lost:expr;)*) => {$(
        impl Law for ops::$op {
            fn letters(&self, ranks: &[usize]) -> Option<Cow<'_, Rule>> {
                let ops::$op { rule } = self;
                given(&rule.0, 1, ranks)
            }
            /// The largest of sums is not the sum of the largest.
            fn typing(&self) -> Option<Typing> {
                Some(Typing { lost: Some($lost), picks: true, ..NONLINEAR })
            }
            fn function(&self, _: &[&Type]) -> Result<Option<Fun>, String> {
                Ok(Some($function(pattern(&self.rule.0)?).into()))
            }
            fn back(&self, at: &mut At) -> Result<Back, String> {
                extreme(self, at)
            }
        }
    )*};
}

extremes! {
    ReduceMax is Max by Reduction::Max;
    ReduceMin is Min by Reduction::Min;
}

/// The largest or smallest of a row: those that equal it share the cotangent.
fn extreme(law: &dyn Law, at: &mut At) -> Result<Back, String> {
    let (g, r) = (at.d()?, at.rule(law)?);
    let (all, out) = (letters(&r.ins[0])?, letters(&r.outs[0])?);
    let (shape, rows) = (at.shape(0), at.s.shape(g).to_vec());
    let y = at.s.product(&[(at.y[0], out.clone())], &all, &shape)?;
    let is = at.both("equal", [at.x[0], y]);
    let count = at.s.product(&[(is, all.clone())], &out, &rows)?;
    let share = (at.s.reciprocal(count), out.clone());
    Ok(vec![Some(at.s.product(&[(g, out), share, (is, all.clone())], &all, &shape)?)])
}
