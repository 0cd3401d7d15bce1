//! Fused weights as several: a product of which only ranges of the result are used becomes one product for
//! each range, with its part of the weight, so that each can be split over ranks alone.
//!
//! Before:  `%y = dot[abc,zc->abz] %x, %qkv_proj`, `%q = narrow[p=8; start=0] %y`, …
//! After:   `%q = dot[abc,zc->abz] %x, %qkv_proj_0`, …

use super::lower::{Lower, Param};
use shardc_ir::func::{Node, Role, RoleKind, Value};
use shardc_ir::ops::{Add, Dot, Op};
use shardc_ir::rule::Group;
use shardc_ir::types::Type;
use shardc_ir::weights::TensorSlice;
use std::collections::{BTreeMap, BTreeSet};

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
    let mut users: BTreeMap<Value, Vec<usize>> = BTreeMap::new();
    for (i, n) in l.draft.nodes.iter().enumerate() {
        n.ins.iter().for_each(|&v| users.entry(v).or_default().push(i));
    }
    for r in &l.draft.results {
        // No node: a result is used whole.
        users.entry(r.value).or_default().push(usize::MAX);
    }
    let found: Vec<Fused> = (0..l.params.len()).filter_map(|p| fused(l, &users, p)).collect();
    let mut gone = BTreeSet::new();
    let mut made: BTreeMap<usize, Vec<Node>> = BTreeMap::new();
    for f in &found {
        gone.extend(f.ranges.iter().map(|r| r.node).chain(f.add).chain([f.dot]));
        made.insert(f.dot, products(l, f));
    }
    let nodes = std::mem::take(&mut l.draft.nodes);
    for (i, n) in nodes.into_iter().enumerate() {
        l.draft.nodes.extend(made.remove(&i).into_iter().flatten());
        if !gone.contains(&i) {
            l.draft.nodes.push(n);
        }
    }
}

fn fused(l: &Lower, users: &BTreeMap<Value, Vec<usize>>, p: usize) -> Option<Fused> {
    let nodes = &l.draft.nodes;
    let of = |v: Value| users.get(&v).map_or(&[][..], |u| &u[..]);
    let is_single = |p: &Param| p.names.len() == 1 && p.part.is_none();
    let w = l.params[p].value;
    let &[dot] = of(w) else { return None };
    let Op::Dot(d) = &nodes.get(dot)?.op else { return None };
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
    if let &[a] = of(y)
        && let Op::Add(_) = &nodes.get(a)?.op
        && let &[x, b] = &nodes[a].ins[..]
        && x == y
    {
        let q = l.params.iter().position(|q| q.value == b && l.rank(b) == 1)?;
        if of(b).len() != 1 || !is_single(&l.params[q]) {
            return None;
        }
        (add, bias, y) = (Some(a), Some(q), nodes[a].outs[0]);
    }
    let mut ranges = vec![];
    for &i in of(y) {
        let n = nodes.get(i)?;
        let Op::Narrow(r) = &n.op else { return None };
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
        let part = parameter(
            l,
            f.weight.0,
            i,
            TensorSlice { dim: f.weight.1, start: r.start, len: r.len },
        );
        let ins: Vec<Value> = product.ins.iter().map(|&v| if v == w { part } else { v }).collect();
        let dot = Dot { rule: rule.clone() };
        let Some((bias, s)) = f.bias.zip(sum.as_ref()) else {
            out.push(Node::new(dot, &ins, &[r.out], product.scope));
            continue;
        };
        let name = l.draft.name(product.outs[0]).clone();
        let y = l.draft.value(l.draft.ty(r.out).clone(), name);
        out.push(Node::new(dot, &ins, &[y], product.scope));
        let b = parameter(l, bias, i, TensorSlice { dim: 0, start: r.start, len: r.len });
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
