//! `draw`: numbers at random, the same on every mesh.

use super::*;
use crate::attr::{Attr, RuleAttr, Sizes};
use crate::rng::{self, Distribution, Draws};
use std::sync::Arc;

op! {
    /// Random numbers, each computed by Philox from the run, the name of a stream, the place of the element and
    /// its index there, so that every mesh and every recomputation draws the same numbers. `run` is three i32:
    /// the seed in two halves, and the step, which is at least 0. `place` has dims of the result; elements with
    /// the same place number share their draws. The index counts the other dims of the result, row by row.
    /// `from=uniform` is between 0 and 1, `from=normal` standard normal, and `from=keep 0.9` (dropout) is 1/0.9
    /// with probability 0.9, else 0, but 1 at step 0, which is an evaluation: `draw[k,bs->bsh; from=keep 0.9;
    /// stream=h.0.mlp; h=64]`.
    Draw = "draw" (run, place) { rule: RuleAttr, from: Distribution, stream: StreamName, sizes: Sizes }
    facts { kind: Constant, fusion: None, precision: Wants::AsTheyAre, gradient: Unasked, linear: Linear::No }
    samples ["draw[k,bs->bsh; from=uniform; stream=a.0; h=4] i32[3], i32[2,3]",
             "draw[k,bs->hbs; from=normal; stream=a.0; h=5] i32[3], i32[2,3]",
             "draw[k,s->bsh; from=keep 0.5; stream=b; b=2,h=4] i32[3], i32[3]",
             "draw[k->ab; from=uniform; stream=c; a=3,b=4] i32[3]"]
}

/// Most elements that share a place: their indices are of 32 bits.
const MOST: usize = 1 << 32;

/// The name of a stream: letters, digits, `.`, `_`, `-` and `/`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct StreamName(pub Arc<str>);

impl StreamName {
    /// A name with `_` for what a name may not have.
    pub fn of(text: &str) -> StreamName {
        let one = |c: char| if StreamName::takes(c) { c } else { '_' };
        StreamName(text.chars().map(one).collect::<String>().into())
    }
    fn takes(c: char) -> bool {
        c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '/')
    }
}

impl Attr for StreamName {
    const BARE: bool = false;
    fn write(&self, _: &Mesh, out: &mut String) {
        out.push_str(&self.0);
    }
    fn read(text: &str, _: &AttrCx) -> Result<Self, String> {
        match !text.is_empty() && text.chars().all(StreamName::takes) {
            true => Ok(StreamName(text.into())),
            false => Err(format!(
                "`{text}` is not a name of a stream: letters, digits, `.`, `_`, `-`, `/`"
            )),
        }
    }
}

impl Attr for Distribution {
    const BARE: bool = false;
    fn write(&self, mesh: &Mesh, out: &mut String) {
        match self {
            Distribution::Uniform => out.push_str("uniform"),
            Distribution::Normal => out.push_str("normal"),
            Distribution::Keep(p) => {
                out.push_str("keep ");
                p.write(mesh, out);
            }
        }
    }
    fn read(text: &str, cx: &AttrCx) -> Result<Self, String> {
        match text {
            "uniform" => Ok(Distribution::Uniform),
            "normal" => Ok(Distribution::Normal),
            _ => match text.strip_prefix("keep ").map(|p| f64::read(p.trim(), cx)) {
                Some(Ok(p)) if p > 0.0 && p <= 1.0 => Ok(Distribution::Keep(p)),
                _ => Err(format!(
                    "`{text}` is none of uniform, normal, and keep with a number up to 1"
                )),
            },
        }
    }
}

impl Draw {
    /// Which numbers there are at a step of a run.
    fn draws(&self, run: &Tensor) -> Draws {
        let word = |i: usize| run.data[i] as i64 as u32;
        Draws::new(self.from, rng::stream(&self.stream.0), [word(0), word(1), word(2)])
    }

    /// By dim of the result: the place's dim, or how far apart indices are.
    pub fn walks(&self) -> Vec<DrawDim> {
        let r = &self.rule.0;
        let size = |g: &crate::rule::Group| {
            let letter = g.single()?;
            self.sizes.0.iter().find(|s| s.0 == letter).map(|s| s.1)
        };
        let mut all = vec![];
        let mut next = 1usize;
        for g in r.outs[0].iter().rev() {
            let dim = r.ins.get(1).and_then(|place| place.iter().position(|p| p == g));
            all.push(match dim {
                Some(dim) => DrawDim::Place(dim),
                None => {
                    let stride = next;
                    next = next.saturating_mul(size(g).unwrap_or(MOST + 1));
                    DrawDim::Index(stride)
                }
            });
        }
        all.reverse();
        all
    }
}

/// What a dim of the result is to a draw.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DrawDim {
    /// A dim of the place.
    Place(usize),
    /// One of indices, so far apart.
    Index(usize),
}

impl OpDef for Draw {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        let r = &self.rule.0;
        let fits =
            |(d, t): (&crate::rule::Dims, &&Type)| d.len() == t.rank() && t.dtype == DType::I32;
        let run = ins.first().is_some_and(|t| t.sizes()[..] == [3]);
        if !run || ins.len() > 2 || r.ins.len() != ins.len() || !r.ins.iter().zip(ins).all(fits) {
            return Err(
                "i32[3] and, for a place, integers with the dims of the rule are needed".into()
            );
        }
        let out = &r.outs[0];
        let single = r.ins.iter().chain(&r.outs).flatten().all(|g| g.single().is_some());
        let kept = r.ins[1..].iter().flatten().all(|g| out.contains(g));
        if !single || !kept || out.contains(&r.ins[0][0]) {
            return Err("the result has the letters of the place, and not that of the run".into());
        }
        let new = out.iter().filter(|g| !r.ins[1..].iter().flatten().any(|p| p == *g)).count();
        let all = self.sizes.0.iter().try_fold(1usize, |n, s| n.checked_mul(s.1));
        match self.sizes.0.len() == new && all.is_some_and(|n| n <= MOST) {
            true => Ok(()),
            false => {
                Err(format!("sizes of all other letters are needed, of up to {MOST} elements"))
            }
        }
    }
    fn rule(&self, _: &[usize]) -> Cow<'_, Rule> {
        let mut r = (*self.rule.0).clone();
        if let Some(l) = r.ins.first().and_then(|d| d.first()?.single()) {
            r.keep_whole(l);
        }
        Cow::Owned(r)
    }
    fn dtypes(&self, _: &[&Type], _: usize) -> SmallVec<[DType; 2]> {
        smallvec::smallvec![DType::F32]
    }
    fn grad(&self, _: &mut Builder, ins: &[Value], _: &[Value], _: &[Option<Value>]) -> Grads {
        ins.iter().map(|_| None).collect()
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let (draws, walks) = (self.draws(ins[0]), self.walks());
        let first: Shape = (0..walks.len()).map(|d| cx.out_extent(0, d).offset).collect();
        vec![Tensor::from_fn(&cx.out_shape(0), |i| {
            let mut at: Shape = ins[1..].iter().flat_map(|t| t.shape.iter().map(|_| 0)).collect();
            let mut index = 0;
            for (d, w) in walks.iter().enumerate() {
                match *w {
                    DrawDim::Place(p) => at[p] = i[d],
                    DrawDim::Index(stride) => index += (first[d] + i[d]) * stride,
                }
            }
            let place = ins.get(1).map_or(0, |t| t.at(&at) as i64 as u32);
            draws.at(place, index as u32)
        })]
    }
}
