//! Writes solutions back into a function: names, scopes and notes of what stays are kept.

use super::choose::{Item, Solution};
use super::segment::{Ref, Segment};
use shardc_ir::func::{Func, Name, Node, Value};
use std::borrow::Cow;

/// Replaces segments, given in program order, by their solutions.
pub(crate) fn apply(f: &mut Func, changes: &[(&Segment, &Solution)]) {
    if changes.is_empty() {
        return;
    }
    let mut old = std::mem::take(&mut f.nodes).into_iter().map(Some).collect::<Vec<_>>();
    // What stands for every old value now.
    let mut now: Vec<Value> = (0..f.values.len() as u32).map(Value).collect();
    let mut at = 0;
    for (s, solution) in changes {
        copy(f, &mut old[at..s.run.start], &now);
        segment(f, &mut old[s.run.clone()], s, solution, &mut now);
        at = s.run.end;
    }
    copy(f, &mut old[at..], &now);
}

fn copy(f: &mut Func, nodes: &mut [Option<Node>], now: &[Value]) {
    for node in nodes {
        let mut node = node.take().expect("each node is written once");
        node.ins.iter_mut().for_each(|v| *v = now[v.0 as usize]);
        f.nodes.push(node);
    }
}

fn segment(
    f: &mut Func,
    old: &mut [Option<Node>],
    s: &Segment,
    solution: &Solution,
    now: &mut [Value],
) {
    let outs: Vec<_> = old.iter().map(|n| n.as_ref().expect("untouched").outs.clone()).collect();
    let outer: Vec<Value> = s.outer.iter().map(|v| now[v.0 as usize]).collect();
    let mut fresh: Vec<Value> = vec![];
    let value = |r: Ref, fresh: &[Value]| match r {
        Ref::Outer(i) => outer[i as usize],
        Ref::Inner { node, out } => outs[node as usize][out as usize],
        Ref::Fresh(i) => fresh[i as usize],
    };
    let scopes: Vec<_> = old.iter().map(|n| n.as_ref().expect("untouched").scope).collect();
    for item in &solution.items {
        match item {
            Item::Keep { node, ins } => {
                let mut n = old[*node as usize].take().expect("kept once");
                n.ins = ins.iter().map(|&r| value(r, &fresh)).collect();
                f.nodes.push(n);
            }
            Item::New { node, op, ins, fresh: ty, rule } => {
                let (scope, own) = (scopes[*node as usize], outs[*node as usize][0]);
                let out = match ty {
                    None => own,
                    Some(ty) => {
                        let grad = f.name(own).grad;
                        let layer = f.scope_info(scope).layer;
                        let hint = op.mnemonic().into();
                        let v = f.value((**ty).clone(), Name { grad, layer, hint, dup: 0 });
                        fresh.push(v);
                        v
                    }
                };
                let ins: Vec<Value> = ins.iter().map(|&r| value(r, &fresh)).collect();
                let note = (!rule.is_empty()).then_some(Cow::Borrowed(*rule));
                f.nodes.push(Node { note, ..Node::new(op.clone(), &ins, &[out], scope) });
            }
        }
    }
    for &(node, r) in &solution.aliases {
        now[outs[node as usize][0].0 as usize] = value(r, &fresh);
    }
}
