//! One value that an element-wise op reads in two ways becomes two values.
//!
//! Before:  `%y = mul[ab,ba->ab] %x, %x`, `%p = mul[ab,ac->abc] %x, %x`
//! After:   `%x_t = transpose[ba->ab] %x`, `%y = mul[ab,ab->ab] %x, %x_t`,
//!          `%x_e = expand[ac->abc; b=8] %x`, `%p = mul[ab,abc->abc] %x, %x_e`
//! Assumes: phase Source.  Leaves: phase Source.
//!
//! Kernels over rows, and the groups of them, walk each value in one way.

use shardc_ir::attr::{Broadcast, RuleAttr, Sizes};
use shardc_ir::func::{Func, Name, Node, Scope, Value};
use shardc_ir::ops::{Expand, Op, Transpose};
use shardc_ir::rule::{Dims, Rule};
use shardc_ir::types::Type;
use std::sync::Arc;

/// Gives every operand that is read in a second way a copy: turned, if it has the same letters, and else spread
/// over the result.
pub fn orders(f: &mut Func) {
    for mut n in std::mem::take(&mut f.nodes) {
        let Some(&out) = n.outs.first() else {
            f.nodes.push(n);
            continue;
        };
        let sizes = f.ty(out).sizes();
        if let Some(Broadcast(Some(rule))) = n.op.broadcast() {
            for j in 1..n.ins.len() {
                let twice = |&i: &usize| n.ins[i] == n.ins[j] && rule.ins[i] != rule.ins[j];
                let Some(i) = (0..j).find(twice) else { continue };
                let same = rule.ins[i].iter().all(|g| rule.ins[j].contains(g));
                let to = if same { rule.ins[i].clone() } else { rule.outs[0].clone() };
                let all = rule.outs[0].iter().zip(&sizes);
                let place = |g| all.clone().find(|x| x.0 == g).expect("letters of the result").1;
                let sizes: Vec<usize> = to.iter().map(place).copied().collect();
                let copy = copied(f, n.ins[j], (&rule.ins[j], &to), &sizes, n.scope);
                n.ins[j] = copy;
                Arc::make_mut(rule).ins[j] = to;
            }
        }
        f.nodes.push(n);
    }
}

/// The value with other dims, of these sizes, made just before a node.
fn copied(f: &mut Func, x: Value, (from, to): (&Dims, &Dims), sizes: &[usize], at: Scope) -> Value {
    let rule = RuleAttr(Arc::new(Rule::of(&[from], &[to])));
    let more = to.iter().zip(sizes).filter(|(g, _)| !from.contains(g));
    let more: Vec<_> = more.filter_map(|(g, &size)| Some((g.single()?, size))).collect();
    let (op, hint): (Op, &str) = match more.is_empty() {
        true => (Transpose { rule }.into(), "t"),
        false => (Expand { rule, sizes: Sizes(more.into()) }.into(), "e"),
    };
    let ty = Type::new(f.ty(x).dtype, sizes);
    let name = f.name(x).clone();
    let copy = f.value(ty, Name { hint: format!("{}_{hint}", name.hint).into(), dup: 0, ..name });
    f.nodes.push(Node::new(op, &[x], &[copy], at));
    copy
}
