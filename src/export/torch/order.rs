//! The order of lines: exchanges of weights and of gradients go on beside a product.

use super::ops;
use super::ops::memory;
use super::seen::Line;
use shardc_ir::func::{Func, Port, RoleKind, Value, ValueMap};
use shardc_ir::ops::Kind;
use std::collections::BTreeSet;

/// Lines, in which a weight is gathered from the product before the one that reads it on, and what was exchanged is added
/// behind the next product; within their layer.
pub(super) fn beside_products<'a>(
    f: &Func,
    same: &ValueMap<Value>,
    lines: Vec<Line<'a>>,
) -> Vec<Line<'a>> {
    let layer = |l: &Line| f.scope_info(l.n.scope).layer;
    let touches = |l: &Line, v: Value| l.outs.iter().chain(&l.ins).any(|o| same[*o] == v);
    let is_param = |a: &&Port| a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Param);
    let params: BTreeSet<Value> = f.args.iter().filter(is_param).map(|a| same[a.value]).collect();
    let mut out: Vec<Line> = Vec::with_capacity(lines.len());
    for l in lines {
        let mut at = out.len();
        if l.call.is_none() && memory::gathers(&l.n.op) && params.contains(&l.ins[0]) {
            let free =
                |b: &Line| layer(b) == layer(&l) && !b.outs.iter().any(|o| same[*o] == l.ins[0]);
            let before = out.iter().rev().take_while(|b| free(b));
            if let Some(far) = before.enumerate().find(|(_, b)| is_product(b)).map(|x| x.0) {
                at -= far + 1;
            }
        }
        out.insert(at, l);
    }
    let collective = |l: &&Line| l.call.is_none() && ops::is_exchange(&l.n.op);
    let exchanged: BTreeSet<Value> =
        out.iter().filter(collective).flat_map(|l| l.outs.iter().copied()).collect();
    // The last first: each goes behind those that stay.
    let mut late: Vec<Line> = Vec::with_capacity(out.len());
    while let Some(l) = out.pop() {
        let mut at = late.len();
        if let [sum, x] = &l.ins[..]
            && l.n.op.accumulates()
            && l.call.is_none()
            && exchanged.contains(x)
        {
            let free =
                |b: &Line| layer(b) == layer(&l) && !touches(b, same[*sum]) && !touches(b, *x);
            let behind = late.iter().rev().take_while(|b| free(b));
            if let Some(far) = behind.enumerate().find(|(_, b)| is_product(b)).map(|x| x.0) {
                at -= far + 1;
            }
        }
        late.insert(at, l);
    }
    late.reverse();
    late
}

/// True of lines that take longer than others.
fn is_product(l: &Line) -> bool {
    let kind = l.n.op.facts().kind;
    let is = matches!(kind, Kind::Product | Kind::Attention | Kind::GroupedProduct);
    l.call.map_or(is, |c| c.is_linear())
}
