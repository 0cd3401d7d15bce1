//! `concat`: tensors one after the other along a dim.

use super::*;
use crate::attr::{Along, Sizes};

op! {
    /// The operands one after another along a dim, by default the last; all other dims are equal. The first
    /// attribute is the new size: `concat[d=6]`, `concat[d=7; dim=0]`.
    Concat = "concat" (a, b) { sizes: Sizes, dim: Along }
    facts { kind: Movement, fusion: None, precision: Wants::Same, gradient: Flows, linear: Linear::Together(!0) }
    samples ["concat[d=6] f32[2,3,4], f32[2,3,2]", "concat[d=7; dim=0] f32[2,3], f32[4,3], f32[1,3]",
             "concat[d=5; dim=1] f32[2,3,4], f32[2,2,4]", "concat[d=3] f32[2,3]", "concat[d=5; dim=1] i32[2,4], i32[2,1]"]
}

/// Most operands: each has a letter of its own.
const MOST: usize = 24;
/// Most dims beside the one along which elements are chosen.
pub(crate) const MOST_OTHERS: usize = 8;

impl Concat {
    /// Along the last dim, which has this size in the result.
    pub fn new(size: usize) -> Concat {
        Concat { sizes: Sizes(smallvec::smallvec![(Letter(b'd' - b'a'), size)]), dim: Along::LAST }
    }
    /// Along another dim.
    pub fn along(dim: usize, size: usize) -> Concat {
        Concat { dim: crate::attr::Usual(dim), ..Concat::new(size) }
    }
}

impl OpDef for Concat {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        if ins.is_empty() || ins.len() > MOST {
            return Err(format!("1 to {MOST} operands are needed"));
        }
        let rank = ins[0].rank();
        let fits = ins.iter().all(|t| t.rank() == rank && t.dtype == ins[0].dtype);
        let dim = self.dim.of(rank).filter(|_| fits && rank <= MOST_OTHERS + 1);
        let Some(dim) = dim else {
            return Err("operands of one element type with as many dims are needed, of which the \
                        named one is one"
                .into());
        };
        let all = ins.iter().try_fold(0usize, |n, t| n.checked_add(t.dims[dim].size));
        match self.sizes.0[..] {
            [(l, n)] if l.name() == 'd' && all == Some(n) => Ok(()),
            _ => Err("the sum of the operands' sizes is needed, as in `d=6`".into()),
        }
    }
    fn rule(&self, ranks: &[usize]) -> Cow<'_, Rule> {
        let rank = ranks.first().copied().unwrap_or(0);
        // p, q, r, …, z, A, B, …
        let own = |i: usize| Letter(b'p' - b'a' + i as u8);
        let ins: SmallVec<[Letter; 4]> = (0..ranks.len()).map(own).collect();
        Cow::Owned(Rule::along(rank, self.dim.of(rank).unwrap_or(0), &ins, Letter(b'd' - b'a')))
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let Some(d) = d[0] else { return ins.iter().map(|_| None).collect() };
        let mut start = 0;
        let mut one = |v: Value| {
            let dim = self.dim.of(b.ty(v).rank()).expect("accepted");
            let n = b.ty(v).dims[dim].size;
            let part = Narrow { dim: self.dim, ..Narrow::new(start, n) };
            start += n;
            let trained = b.ty(v).dtype.is_float() && b.wants(v);
            trained.then(|| b.push("concat_grad", part, &[d]))
        };
        ins.iter().map(|&v| one(v)).collect()
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        vec![Tensor::concat(self.dim.of(ins[0].shape.len()).expect("accepted"), ins)]
    }
}
