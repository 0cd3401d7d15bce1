//! `take`: looks elements up by index, along one letter.

use super::*;
use crate::attr::{Padding, RuleAttr, Sizes};
use std::sync::Arc;

op! {
    /// Gather: elements of `x` at `index` along the letter that only `x` has, as in an embedding
    /// (`take[vh,bs->bsh]`) or the logit of a label (`take[bsv,bs->bs]`). An index outside this rank's shard
    /// gives 0, so a split letter leaves a pending sum. With `padding=7` the gradient of index 7 is defined as
    /// 0, as for the padding token of an embedding; with `padding=zero 7` the element is 0 too.
    Take = "take" (x, index) { rule: RuleAttr, padding: Padding }
    facts |o| { kind: Lookup, fusion: o.padding.zero().is_none().then_some(FusionClass::Take),
            precision: Wants::Same, gradient: Flows, linear: Linear::Each(1) }
    samples ["take[vh,bs->bsh] f32[5,4], i32[2,3]", "take[bsv,bs->bs] f32[2,3,5], i32[2,3]",
             "take[hv,sb->bhs] f32[4,5], i32[3,3]", "take[vbs,sb->bs] f32[5,3,3], i32[3,3]",
             "take[vh,bs->bsh; padding=3] f32[5,4], i32[2,6]",
             "take[vh,bs->bsh; padding=zero 3] f32[5,4], i32[2,6]"]
}

/// The letter that the index runs over: in `all`, but in neither `index` nor `rest`.
pub(crate) fn index_letter(
    all: &[crate::rule::Group],
    index: &[crate::rule::Group],
    rest: &[crate::rule::Group],
) -> Option<(usize, Letter)> {
    let mut only = all.iter().enumerate().filter(|(_, g)| !index.contains(g) && !rest.contains(g));
    match (only.next(), only.next()) {
        (Some((i, g)), None) => Some((i, g.single()?)),
        _ => None,
    }
}

impl Take {
    /// Without padding, by a rule of operands of these ranks.
    pub fn by(text: &str, ranks: &[usize]) -> Take {
        Take { rule: RuleAttr::new(text, ranks), padding: Padding::None }
    }
    fn letter(&self) -> Option<(usize, Letter)> {
        let r = &self.rule.0;
        index_letter(&r.ins[0], &r.ins[1], &r.outs[0])
    }
}

impl OpDef for Take {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        let r = &self.rule.0;
        if ins.len() != 2
            || r.ins.len() != 2
            || (0..2).any(|i| r.ins[i].len() != ins[i].rank())
            || r.outs.len() != 1
        {
            return Err("two operands with the dims of the rule are needed".into());
        }
        if !ins[0].dtype.is_float() || ins[1].dtype != DType::I32 {
            return Err("a float and an i32 index are needed".into());
        }
        if let Some((dim, _)) = self.letter() {
            self.padding.accepts(ins[0].dims[dim].size)?;
        }
        let known = r.outs[0].iter().all(|g| r.ins[0].contains(g) || r.ins[1].contains(g));
        let kept = r.ins[1].iter().all(|g| r.outs[0].contains(g));
        if self.letter().is_none() || !known || !kept {
            return Err("the rule has one letter that only `x` has, and keeps the others".into());
        }
        Ok(())
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let r = &self.rule.0;
        let (Some(d), Some((dim, letter))) = (d[0], self.letter()) else {
            return smallvec::smallvec![None, None];
        };
        let rule = RuleAttr(Arc::new(Rule::of(&[&r.outs[0], &r.ins[1]], &[&r.ins[0]])));
        let like = b.ty(ins[0]).cotangent();
        let sizes = Sizes(smallvec::smallvec![(letter, like.dims[dim].size)]);
        let padding = self.padding.of_gradient();
        smallvec::smallvec![
            Some(b.push_as("take_grad", IndexAdd { rule, sizes, padding }, &[d, ins[1]], &like)),
            None
        ]
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let r = &self.rule.0;
        let (dim, _) = self.letter().expect("accepted");
        let e = cx.in_extent(0, dim);
        let place = |dims: &crate::rule::Dims| -> Vec<Option<usize>> {
            dims.iter().map(|g| r.outs[0].iter().position(|o| o == g)).collect()
        };
        let (at_x, at_i) = (place(&r.ins[0]), place(&r.ins[1]));
        vec![Tensor::from_fn(&cx.out_shape(0), |o| {
            let i: Shape = at_i.iter().map(|p| o[p.expect("kept")]).collect();
            if self.padding.zero().is_some_and(|p| ins[1].at(&i) == p as f64) {
                return 0.0;
            }
            let k = ins[1].at(&i) - e.offset as f64;
            if k < 0.0 || k >= e.len as f64 {
                return 0.0;
            }
            let x: Shape = at_x.iter().map(|p| p.map_or(k as usize, |p| o[p])).collect();
            ins[0].at(&x)
        })]
    }
}
