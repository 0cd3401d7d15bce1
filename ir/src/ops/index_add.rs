//! `index_add`: adds elements into places given by index; the gradient of `take`.

use super::*;
use crate::attr::{Padding, RuleAttr, Sizes};
use crate::tensor::each_index;
use std::sync::Arc;

op! {
    /// Scatter-add: adds every element of `x` at position `index` of a new letter, summing over the letters
    /// missing on the right. Positions that no index names are 0, and so is position 7 with `padding=zero 7`.
    /// For 16-bit elements the sums are f32.
    IndexAdd = "index_add" (x, index) { rule: RuleAttr, sizes: Sizes, padding: Padding }
    facts |o| { kind: Scatter, fusion: o.padding.zero().is_none().then_some(FusionClass::IndexAdd),
            precision: Wants::Same, gradient: Flows, linear: Linear::Each(1) }
    samples ["index_add[bsh,bs->vh; v=5] f32[2,3,4], i32[2,3]", "index_add[bs,bs->bsv; v=5] f32[2,3], i32[2,3]",
             "index_add[bsh,sb->hv; v=5] f32[3,3,4], i32[3,3]", "index_add[bs,sb->vsb; v=5] f32[3,3], i32[3,3]",
             "index_add[bsh,bs->vh; v=5; padding=zero 3] f32[2,6,4], i32[2,6]"]
}

impl IndexAdd {
    fn letter(&self) -> Option<(usize, Letter)> {
        let r = &self.rule.0;
        take::index_letter(&r.outs[0], &r.ins[1], &r.ins[0])
    }

    /// True if elements of several places of `x` are added to one: it has a letter that the result has not.
    pub fn adds(&self) -> bool {
        let r = &self.rule.0;
        r.ins[0].iter().any(|g| !r.outs[0].contains(g))
    }
}

impl OpDef for IndexAdd {
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
        let letter = self.letter().map(|l| l.1);
        let Some(letter) = letter.filter(|_| r.ins[1].iter().all(|g| r.ins[0].contains(g))) else {
            return Err(
                "the rule has one letter that only the result has, and `x` has those of the index"
                    .into(),
            );
        };
        if matches!(self.padding, Padding::Constant(_)) {
            return Err("nothing is added at padding: write `padding=zero 7`".into());
        }
        let size = self.sizes.0.iter().find(|s| s.0 == letter).map_or(0, |s| s.1);
        self.padding.accepts(size)
    }
    fn dtypes(&self, _: &[&Type], _: usize) -> SmallVec<[DType; 2]> {
        smallvec::smallvec![DType::F32]
    }
    fn flops(&self, _: &[(Letter, f64)]) -> f64 {
        0.0
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let r = &self.rule.0;
        let rule = RuleAttr(Arc::new(Rule::of(&[&r.outs[0], &r.ins[1]], &[&r.ins[0]])));
        let take = Take { rule, padding: self.padding.of_gradient() };
        smallvec::smallvec![d[0].map(|d| b.push("put_grad", take, &[d, ins[1]])), None]
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let r = &self.rule.0;
        let (dim, _) = self.letter().expect("accepted");
        let e = cx.out_extent(0, dim);
        let mut out = Tensor::full(&cx.out_shape(0), 0.0);
        let at_i: Shape = r.ins[1]
            .iter()
            .map(|g| r.ins[0].iter().position(|x| x == g).expect("accepted"))
            .collect();
        let at_o: Vec<Option<usize>> =
            r.outs[0].iter().map(|g| r.ins[0].iter().position(|x| x == g)).collect();
        each_index(&ins[0].shape, |i| {
            let index = ins[1].at(&at_i.iter().map(|&p| i[p]).collect::<Shape>());
            let padding = self.padding.zero().is_some_and(|p| index == p as f64);
            let k = index - e.offset as f64;
            if k >= 0.0 && k < e.len as f64 && !padding {
                let o: Shape = at_o.iter().map(|p| p.map_or(k as usize, |p| i[p])).collect();
                *out.at_mut(&o) += ins[0].at(i);
            }
        });
        vec![out]
    }
}
