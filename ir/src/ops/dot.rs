//! `dot`: products summed over letters: matrix products, batched or not.

use super::*;
use crate::attr::RuleAttr;
use crate::rule::{Dims, has_letter};
use crate::tensor::each_offset;
use std::sync::Arc;

op! {
    /// The product of two operands, summed over the letters missing on the right (einsum). The result has the
    /// element type of `a`, also where that of `b` is another.
    Dot = "dot" (a, b) { rule: RuleAttr }
    facts |o| let folds = folds(&o.rule.0); { kind: Product, fusion: folds.then(|| folded(&o.rule.0)),
            precision: if folds { Wants::Wide } else { Wants::Half }, gradient: Flows, linear: Linear::Each(3) }
    samples [
        "dot[mk,kn->mn] f32[3,5], f32[5,4]",
        "dot[bsh,oh->bso] f32[2,3,4], f32[5,4]",
        "dot[bsh,bsh->bs] f32[2,3,4], f32[2,3,4]",
        "dot[ab,ab->] f32[3,4], f32[3,4]",
        "dot[mk,kn->nm] f32[3,3], f32[3,3]",
        "dot[ab,ba->ba] f32[3,3], f32[3,3]",
        "dot[abk,bak->ba] f32[3,3,2], f32[3,3,2]",
        "dot[bsh,hos->obs] f32[2,3,4], f32[4,5,3]"
    ]
}

impl Dot {
    /// `text` is the rule, for operands of these ranks.
    pub fn by(text: &str, ranks: &[usize]) -> Dot {
        Dot { rule: RuleAttr::new(text, ranks) }
    }
}

impl OpDef for Dot {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        floats(ins, 2)?;
        let r = &self.rule.0;
        if r.ins.len() != 2 || r.outs.len() != 1 || (0..2).any(|i| r.ins[i].len() != ins[i].rank())
        {
            return Err("two operands with the dims of the rule are needed".into());
        }
        let plain = r.ins.iter().chain(&r.outs).flatten().all(|g| g.single().is_some());
        if !plain {
            return Err("a dim of a dot is one letter".into());
        }
        let tensors = || r.ins.iter().chain(&r.outs);
        let once = |&l: &Letter| tensors().filter(|t| has_letter(t, l)).count() == 1;
        let once: Vec<String> =
            r.letters().into_iter().filter(once).map(|l| format!("`{}`", l.name())).collect();
        match &once[..] {
            [] => Ok(()),
            names => Err(format!(
                "{} in one tensor alone: each letter of a dot is in two of its operands and result",
                match names {
                    [one] => format!("{one} is"),
                    many => format!("{} are each", many.join(" and ")),
                }
            )),
        }
    }
    fn rule(&self, _: &[usize]) -> Cow<'_, Rule> {
        Cow::Borrowed(&self.rule.0)
    }
    fn flops(&self, loops: &[(Letter, f64)]) -> f64 {
        2.0 * loops.iter().map(|l| l.1).product::<f64>()
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let Some(d) = d[0] else { return smallvec::smallvec![None, None] };
        let r = &self.rule.0;
        // A gradient has its operand's own order of dims, so a weight's gradient is laid out as the weight.
        let a = b
            .wants(ins[0])
            .then(|| product(b, "dot_grad", (d, &r.outs[0]), (ins[1], &r.ins[1]), &r.ins[0]));
        let w = b
            .wants(ins[1])
            .then(|| product(b, "dot_grad", (d, &r.outs[0]), (ins[0], &r.ins[0]), &r.ins[1]));
        smallvec::smallvec![a, w]
    }
    fn element(&self, b: &mut Body, x: &[usize]) -> Option<Results> {
        Some(smallvec::smallvec![b.chain(Binary::Mul, x)])
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let r = &self.rule.0;
        let letters = r.letters();
        let place = |dims: &Dims| -> Shape {
            dims.iter()
                .map(|g| {
                    letters.iter().position(|&l| g.single() == Some(l)).expect("plain letters")
                })
                .collect()
        };
        let at = [place(&r.ins[0]), place(&r.ins[1]), place(&r.outs[0])];
        let mut shape: Shape = letters.iter().map(|_| 0).collect();
        for i in 0..2 {
            at[i].iter().zip(&ins[i].shape).for_each(|(&p, &n)| shape[p] = n);
        }
        let mut out = Tensor::full(&cx.out_shape(0), 0.0);
        let steps = [ins[0], ins[1], &out];
        let steps: Vec<Shape> = steps.iter().zip(&at).map(|(t, at)| t.steps(&shape, at)).collect();
        each_offset(&shape, [&steps[0], &steps[1], &steps[2]], |[x, y, o]| {
            out.data[o] += ins[0].data[x] * ins[1].data[y];
        });
        vec![out]
    }
}

/// `a` times `b` with the letters `to`: a `dot` if letters are summed, else a `mul`.
pub(crate) fn product(
    b: &mut Builder,
    hint: &'static str,
    x: (Value, &Dims),
    y: (Value, &Dims),
    to: &Dims,
) -> Value {
    let rule = Arc::new(Rule::of(&[x.1, y.1], &[to]));
    let summed = x.1.iter().chain(y.1).any(|g| !to.contains(g));
    if x.1 == y.1 && x.1 == to {
        b.push(hint, Mul::same(), &[x.0, y.0])
    } else if summed {
        b.push(hint, Dot { rule: RuleAttr(rule) }, &[x.0, y.0])
    } else {
        b.push(hint, Mul { rule: crate::attr::Broadcast(Some(rule)) }, &[x.0, y.0])
    }
}
