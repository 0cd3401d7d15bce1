//! Fused weights as several: a product of which only ranges of the result are used becomes one product for
//! each range, with its part of the weight, so that each can be split over ranks alone.
//!
//! Before:  `%y = dot[abc,zc->abz] %x, %qkv_proj`, `%q = narrow[p=8; start=0] %y`, …
//! After:   `%q = dot[abc,zc->abz] %x, %qkv_proj_0`, …

use super::lower::{Lower, Param};
use shardc_ir::func::{Node, Patch, Role, RoleKind, Uses, Value};
use shardc_ir::ops::{Add, Dot, Op};
use shardc_ir::rule::Group;
use shardc_ir::types::Type;
use shardc_ir::weights::TensorSlice;

/// A fused weight and what is made of it.
struct Fused {
    /// Parameters: the weight, with its dim of results, and the bias.
    weight: (usize, usize),
    bias: Option<usize>,
    /// Nodes: the product, the sum with the bias, and the ranges.
    dot: usize,
    add: Option<usize>,
    ranges: Vec<Range>,
}

/// One range of a result.
struct Range {
    node: usize,
    start: usize,
    len: usize,
    out: Value,
}

/// Cuts every fused weight.
pub(super) fn cut(l: &mut Lower) {
    let (uses, mut patch) = (l.draft.uses(), Patch::of(&l.draft));
    let found: Vec<Fused> = (0..l.params.len()).filter_map(|p| fused(l, &uses, p)).collect();
    for f in &found {
        let gone = f.ranges.iter().map(|r| r.node).chain(f.add).chain([f.dot]);
        gone.for_each(|n| patch.erase(n));
        products(l, f).into_iter().for_each(|n| patch.insert(f.dot, n));
    }
    patch.apply(&mut l.draft);
}

fn fused(l: &Lower, uses: &Uses, p: usize) -> Option<Fused> {
    let nodes = &l.draft.nodes;
    let is_single = |p: &Param| p.names.len() == 1 && p.part.is_none();
    let w = l.params[p].value;
    let dot = uses.only_user(w)?;
    let Op::Dot(d) = &nodes[dot].op else { return None };
    let j = nodes[dot].ins.iter().position(|&v| v == w)?;
    let rule = &d.rule.0;
    // The last dim of the result is one of the weight's alone.
    let last: &Group = rule.outs[0].last()?;
    let dim = rule.ins[j].iter().position(|g| g == last)?;
    if l.rank(w) != 2 || !is_single(&l.params[p]) || rule.ins[1 - j].contains(last) {
        return None;
    }
    let mut y = nodes[dot].outs[0];
    let (mut add, mut bias) = (None, None);
    if let Some(a) = uses.only_user(y)
        && let Op::Add(_) = &nodes[a].op
        && let &[x, b] = &nodes[a].ins[..]
        && x == y
    {
        let q = l.params.iter().position(|q| q.value == b && l.rank(b) == 1)?;
        if uses.count(b) != 1 || !is_single(&l.params[q]) {
            return None;
        }
        (add, bias, y) = (Some(a), Some(q), nodes[a].outs[0]);
    }
    if uses.is_result(y) {
        return None;
    }
    let mut ranges = vec![];
    for i in uses.users(y) {
        let n = &nodes[i];
        let Op::Narrow(r) = &n.op else { return None };
        // Places of one tensor that are put together again are no weights of their own.
        if uses.users(n.outs[0]).any(|u| matches!(nodes[u].op, Op::Concat(_))) {
            return None;
        }
        let len = l.draft.ty(n.outs[0]).dims.last()?.size;
        ranges.push(Range { node: i, start: r.start, len, out: n.outs[0] });
    }
    ranges.sort_by_key(|r| r.start);
    let whole = l.draft.ty(y).dims.last()?.size;
    let end = ranges.iter().try_fold(0, |at, r| (r.start == at).then_some(at + r.len));
    (ranges.len() > 1 && end == Some(whole)).then_some(Fused {
        weight: (p, dim),
        bias,
        dot,
        add,
        ranges,
    })
}

/// The products and sums of all ranges, whose results are those of the ranges.
fn products(l: &mut Lower, f: &Fused) -> Vec<Node> {
    let product = l.draft.nodes[f.dot].clone();
    let sum = f.add.map(|a| l.draft.nodes[a].clone());
    let Op::Dot(Dot { rule }) = &product.op else { return vec![] };
    let w = l.params[f.weight.0].value;
    let mut out = vec![];
    for (i, r) in f.ranges.iter().enumerate() {
        let part = parameter(l, f.weight.0, i, TensorSlice::of(f.weight.1, r.start, r.len));
        let ins: Vec<Value> = product.ins.iter().map(|&v| if v == w { part } else { v }).collect();
        let dot = Dot { rule: rule.clone() };
        let Some((bias, s)) = f.bias.zip(sum.as_ref()) else {
            out.push(Node::new(dot, &ins, &[r.out], product.scope));
            continue;
        };
        let name = l.draft.name(product.outs[0]).clone();
        let y = l.draft.value(l.draft.ty(r.out).clone(), name);
        out.push(Node::new(dot, &ins, &[y], product.scope));
        let b = parameter(l, bias, i, TensorSlice::of(0, r.start, r.len));
        let Op::Add(Add { rule }) = &s.op else { continue };
        out.push(Node::new(Add { rule: rule.clone() }, &[y, b], &[r.out], s.scope));
    }
    out
}

/// A part of a parameter, as a parameter.
fn parameter(l: &mut Lower, p: usize, i: usize, part: TensorSlice) -> Value {
    let whole = &l.params[p];
    let tensor = whole.names[0].clone();
    let mut sizes = l.draft.ty(whole.value).sizes();
    sizes[part.dim] = part.len;
    let role = Role::new(RoleKind::Param, format!("{tensor}.{i}").as_str());
    let name = l.draft.name(whole.value).clone();
    let value = l.draft.arg(Type::f32(&sizes), name, Some(role));
    let (names, frozen) = (vec![tensor], whole.frozen);
    let param = Param { names, value, scopes: vec![], part: Some((i, part)), frozen };
    l.params.push(param);
    value
}
