//! One value in two orders of its dims, as an element-wise op may read it, becomes two values.
//!
//! Before:  `%y = mul[ab,ba->ab] %x, %x`
//! After:   `%x_t = transpose[ba->ab] %x`, `%y = mul[ab,ab->ab] %x, %x_t`
//! Assumes: phase Source.  Leaves: phase Source.
//!
//! Kernels over rows, and the groups of them, walk each value in one order.

use shardc_ir::attr::{Broadcast, RuleAttr};
use shardc_ir::func::{Func, Name, Node, Scope, Value};
use shardc_ir::ops::Transpose;
use shardc_ir::rule::Rule;
use shardc_ir::types::Type;
use smallvec::SmallVec;
use std::sync::Arc;

/// Gives every operand that is read in a second order a transposed copy.
pub fn orders(f: &mut Func) {
    for mut n in std::mem::take(&mut f.nodes) {
        if let Some(Broadcast(Some(rule))) = n.op.broadcast() {
            for j in 1..n.ins.len() {
                let twice = |&i: &usize| n.ins[i] == n.ins[j] && rule.ins[i] != rule.ins[j];
                let Some(i) = (0..j).find(twice) else { continue };
                let to = rule.ins[i].clone();
                let turn = Arc::new(Rule::of(&[&rule.ins[j]], &[&to]));
                let copy = transposed(f, n.ins[j], turn, n.scope);
                n.ins[j] = copy;
                Arc::make_mut(rule).ins[j] = to;
            }
        }
        f.nodes.push(n);
    }
}

/// The value with its dims in another order, made just before a node.
fn transposed(f: &mut Func, x: Value, rule: Arc<Rule>, scope: Scope) -> Value {
    let (from, to) = (&rule.ins[0], &rule.outs[0]);
    let sizes = f.ty(x).sizes();
    let place = |g| from.iter().position(|x| x == g).expect("a transpose keeps its letters");
    let sizes: SmallVec<[usize; 4]> = to.iter().map(|g| sizes[place(g)]).collect();
    let ty = Type::new(f.ty(x).dtype, &sizes);
    let name = f.name(x).clone();
    let copy = f.value(ty, Name { hint: format!("{}_t", name.hint).into(), dup: 0, ..name });
    f.nodes.push(Node::new(Transpose { rule: RuleAttr(rule) }, [x], [copy], scope));
    copy
}
