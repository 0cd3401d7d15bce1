//! `mul`: product, element by element.

use super::*;
use crate::attr::{Broadcast, RuleAttr};
use crate::rule::{Dims, has_letter};
use std::sync::Arc;

op! {
    /// The product of two operands; a rule broadcasts a smaller operand.
    Mul = "mul" (a, b) { rule: Broadcast }
    facts { kind: Elementwise, fusion: Some(Each), precision: Wants::Same, gradient: Flows, linear: Linear::Each(3) }
    samples [
        "mul f32[3,4], f32[3,4]",
        "mul[bsh,h->bsh] f32[2,3,4], f32[4]",
        "mul[bs,bsh->bsh] f32[2,3], f32[2,3,4]",
        "mul[ab,->ab] f32[3,2], f32[]",
        "mul[bsh,bsh->sbh] f32[2,3,4], f32[2,3,4]",
        "mul[ab,ab->ba] f32[3,3], f32[3,3]",
        "mul[ab,ba->ab] f32[3,3], f32[3,3]",
        "mul[ba,h->hab] f32[2,3], f32[4]"
    ]
}

impl Mul {
    /// The product of operands of the same dims.
    pub fn same() -> Mul {
        Mul { rule: Broadcast::SAME }
    }
    pub fn by(rule: &str, ranks: &[usize]) -> Mul {
        Mul { rule: Broadcast::new(rule, ranks) }
    }
}

/// Sums `d` over the letters that `to` lacks, and puts the rest into its order.
pub fn reduce_to(b: &mut Builder, d: Value, from: &Dims, to: &Dims) -> Value {
    if from == to {
        return d;
    }
    let rule = RuleAttr(Arc::new(Rule::of(&[from], &[to])));
    let kept = from.iter().flat_map(|g| g.letters()).all(|&l| has_letter(to, l));
    if kept {
        b.push("t", Transpose { rule }, &[d])
    } else {
        b.push("sum", ReduceSum { rule }, &[d])
    }
}

pub(crate) fn ranks(ins: &[&Tensor]) -> SmallVec<[usize; 4]> {
    ins.iter().map(|t| t.shape.len()).collect()
}

/// Each operand with the dims of the result.
pub(crate) fn spread(cx: &EvalCx, rule: &Rule, ins: &[&Tensor]) -> Vec<Tensor> {
    let shape = cx.out_shape(0);
    let out = &rule.outs[0];
    let one = |(dims, t): (&Dims, &&Tensor)| {
        let at: Shape = dims
            .iter()
            .map(|g| out.iter().position(|o| o == g).expect("checked by accepts"))
            .collect();
        t.spread(&shape, &at)
    };
    rule.ins.iter().zip(ins).map(one).collect()
}

impl OpDef for Mul {
    fn accepts(&self, ins: &[&Type]) -> Result<(), String> {
        binary(&self.rule, ins)
    }
    fn in_place(&self, _: usize) -> Option<usize> {
        Some(0)
    }
    fn grad(&self, b: &mut Builder, ins: &[Value], _: &[Value], d: &[Option<Value>]) -> Grads {
        let Some(d) = d[0] else { return smallvec::smallvec![None, None] };
        let r = self.rule(&[b.ty(ins[0]).rank(), b.ty(ins[1]).rank()]);
        // d * other, in the order of this operand and summed over the letters that it lacks.
        let mut one = |this: usize, other: usize| {
            let (d, x) = ((d, &r.outs[0]), (ins[other], &r.ins[other]));
            b.wants(ins[this]).then(|| dot::product(b, "mul_grad", d, x, &r.ins[this]))
        };
        smallvec::smallvec![one(0, 1), one(1, 0)]
    }
    fn element(&self, b: &mut Body, x: &[usize]) -> Option<Results> {
        Some(smallvec::smallvec![b.chain(Binary::Mul, x)])
    }
    fn eval(&self, cx: &EvalCx, ins: &[&Tensor]) -> Vec<Tensor> {
        let parts = spread(cx, &self.rule(&ranks(ins)), ins);
        vec![parts[0].zip(&parts[1], |x, y| x * y)]
    }
}

/// Two operands of one element type that fit a broadcast.
pub(crate) fn binary(rule: &Broadcast, ins: &[&Type]) -> Result<(), String> {
    floats(ins, 2)?;
    if ins[0].dtype != ins[1].dtype {
        return Err("operands of one element type are needed".into());
    }
    rule.accepts(&[ins[0].rank(), ins[1].rank()])
}
