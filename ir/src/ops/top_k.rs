//! `top_k`: the places of the largest elements along a letter.

use super::*;
use crate::attr::{RuleAttr, Sizes};
use crate::tensor::each_index;

op! {
    /// The indices of the largest elements of `x` along the letter that only `x` has, largest first:
    /// `top_k[bse->bsk; k=2]`. Among equal elements the one with the lower index comes first. It has no
    /// gradient; use `take` to get the elements that were chosen.
    TopK = "top_k" (x) { rule: RuleAttr, sizes: Sizes }
    facts { kind: Choice, fusion: None, precision: Wants::Decides, gradient: Unasked, linear: Linear::No }
    samples ["top_k[bse->bsk; k=2] f32[2,3,5]", "top_k[te->tk; k=3] f32[3,3]", "top_k[abe->kba; k=2] f32[3,3,5]"]
}

impl TopK {
    /// The dim of `x` that is searched, and the dim and size of the result that counts the places.
    pub fn dims(&self) -> Option<(usize, usize, usize)> {
        let r = &self.rule.0;
        let only = |a: &crate::rule::Dims, b: &crate::rule::Dims| {
            let mut found = (0..a.len()).filter(|&d| !b.contains(&a[d]));
            found.next().filter(|_| found.next().is_none())
        };
        let (from, to) = (only(&r.ins[0], &r.outs[0])?, only(&r.outs[0], &r.ins[0])?);
        match (r.ins[0][from].single()?, r.outs[0][to].single()?, &self.sizes.0[..]) {
            (_, k, &[(l, n)]) if k == l => Some((from, to, n)),
            _ => None,
        }
    }
}

impl OpDef for TopK {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 1)?;
        let r = &self.rule.0;
        if r.ins.len() != 1 || r.ins[0].len() != ins[0].rank() || r.outs.len() != 1 {
            return Err("one operand with the dims of the rule is needed, and one result".into());
        }
        match self.dims() {
            Some((d, _, k)) if k <= ins[0].dims[d].size => Ok(()),
            Some((d, _, k)) => {
                Err(format!("{k} of {} elements cannot be chosen", ins[0].dims[d].size))
            }
            None => {
                Err("the rule replaces one letter, whose new size is given, as in `te->tk; k=2`"
                    .into())
            }
        }
    }
    fn rule(&self, _: &[usize]) -> Cow<'_, Rule> {
        let mut rule = (*self.rule.0).clone();
        let new = self.dims().map(|(from, to, _)| [rule.ins[0][from], rule.outs[0][to]]);
        new.iter().flatten().filter_map(|g| g.single()).for_each(|l| rule.keep_whole(l));
        Cow::Owned(rule)
    }
    fn dtypes(&self, _: &[&Type], _: usize) -> SmallVec<[DType; 2]> {
        smallvec::smallvec![DType::I32]
    }
    fn flops(&self, loops: &[(Letter, f64)]) -> f64 {
        loops.iter().map(|l| l.1).product()
    }
    fn grad(&self, _: &mut Builder, _: &[Value], _: &[Value], _: &[Option<Value>]) -> Grads {
        smallvec::smallvec![None]
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let (from, to, _) = self.dims().expect("accepted");
        let r = &self.rule.0;
        let at: Vec<Option<usize>> =
            r.ins[0].iter().map(|g| r.outs[0].iter().position(|o| o == g)).collect();
        let (x, n) = (ins[0], ins[0].shape[from]);
        let mut out = Tensor::full(&cx.out_shape(0), 0.0);
        let mut rows = out.shape.clone();
        rows[to] = rows[to].min(1);
        each_index(&rows, |row| {
            // Both zeros are 0, as they are equal.
            let element = |e: usize| {
                x.at(&at.iter().map(|p| p.map_or(e, |p| row[p])).collect::<Shape>()) + 0.0
            };
            let mut order: Vec<usize> = (0..n).collect();
            order.sort_by(|&a, &b| element(b).total_cmp(&element(a)));
            for (k, &e) in order.iter().take(out.shape[to]).enumerate() {
                let mut i: Shape = row.into();
                i[to] = k;
                *out.at_mut(&i) = e as f64;
            }
        });
        vec![out]
    }
}
