//! `rope`: rotary position embedding.

use super::*;
use crate::attr::Attr;

op! {
    /// Rotary embedding: rotates pairs of elements of the last dim of `x` (Su et al., 2021). Element j of the
    /// first half is paired with element j of the second half, as Hugging Face stores heads, or, with
    /// `adjacent`, element 2j with element 2j + 1: `a cos - b sin`, `b cos + a sin`. `cos` and `sin` are f32
    /// [s, r], or [b, s, r] if rows have positions of their own; the first 2r elements are rotated, the rest is
    /// unchanged.
    Rope = "rope" (x, cos, sin) { pairs: Pairs }
    facts { kind: Movement, fusion: None, precision: Wants::HalfFirst, gradient: Flows, linear: Linear::Each(1) }
    samples [
        "rope f32[2,3,2,4], f32[3,2], f32[3,2]",
        "rope f32[1,3,2,6], f32[3,2], f32[3,2]",
        "rope f32[2,3,2,6], f32[2,3,2], f32[2,3,2]",
        "rope[adjacent] f32[1,3,2,6], f32[3,2], f32[3,2]",
    ]
}

/// Which elements of a head form the pairs that turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Pairs {
    /// j and j + r.
    #[default]
    Halves,
    /// 2j and 2j + 1.
    Adjacent,
}

impl Pairs {
    /// The two elements of pair `j` of `r`.
    pub fn of(self, j: usize, r: usize) -> [usize; 2] {
        match self {
            Pairs::Halves => [j, j + r],
            Pairs::Adjacent => [2 * j, 2 * j + 1],
        }
    }
}

impl Attr for Pairs {
    const BARE: bool = true;
    fn write(&self, _: &Mesh, out: &mut String) {
        if *self == Pairs::Adjacent {
            out.push_str("adjacent");
        }
    }
    fn read(text: &str, _: &AttrCx) -> Result<Self, String> {
        match text {
            "adjacent" => Ok(Pairs::Adjacent),
            _ => Err(format!("pairs are `adjacent`, or not named, not `{text}`")),
        }
    }
    fn implied() -> Option<Self> {
        Some(Pairs::Halves)
    }
    fn is_implied(&self) -> bool {
        *self == Pairs::Halves
    }
}

impl OpDef for Rope {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 3)?;
        let rank = ins[1].rank();
        if ins[0].rank() != 4 || !(2..=3).contains(&rank) || ins[2].rank() != rank {
            return Err("`x` is [b, s, n, d], `cos` and `sin` are [s, r] or [b, s, r]".into());
        }
        if ins[1].dtype != DType::F32 || ins[2].dtype != DType::F32 {
            return Err("`cos` and `sin` are f32, whatever `x` is".into());
        }
        if ins[1].dims[rank - 1].size.saturating_mul(2) > ins[0].dims[3].size {
            return Err("`cos` is at most half as wide as `x`".into());
        }
        Ok(())
    }
    fn rule(&self, ranks: &[usize]) -> Cow<'_, Rule> {
        match ranks {
            [_, 3, _] => Rule::known("bsn!d,bs!r,bs!r->bsnd", &[4, 3, 3]),
            _line => Rule::known("bsn!d,s!r,s!r->bsnd", &[4, 2, 2]),
        }
    }
    fn flops(&self, loops: &[(Letter, f64)]) -> f64 {
        3.0 * loops.iter().filter(|l| l.0.name() != 'r').map(|l| l.1).product::<f64>()
    }
    /// Cosine and sine.
    fn untrained(&self) -> u32 {
        0b110
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        // The inverse rotation.
        let g = d[0].map(|d| {
            let back = b.push("sin_neg", Scale { by: -1.0 }, &[ins[2]]);
            b.push("rope_grad", Rope { pairs: self.pairs }, &[d, ins[1], back])
        });
        smallvec::smallvec![g, None, None]
    }
    fn eval(&self, _: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let shape = &ins[1].shape;
        let (own, r) = (3 - shape.len(), shape[shape.len() - 1]);
        let mut out = ins[0].clone();
        crate::tensor::each_index(&ins[0].shape[..3], |i| {
            for j in 0..r {
                let [p, q] = self.pairs.of(j, r).map(|d| [i[0], i[1], i[2], d]);
                let (c, s) =
                    (ins[1].at(&[i[0], i[1], j][own..]), ins[2].at(&[i[0], i[1], j][own..]));
                let (a, b) = (ins[0].at(&p), ins[0].at(&q));
                *out.at_mut(&p) = a * c - b * s;
                *out.at_mut(&q) = b * c + a * s;
            }
        });
        vec![out]
    }
}
