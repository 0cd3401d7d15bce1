//! Writes solutions back into a function: names, scopes and notes of what stays are kept.

use super::choose::{Item, Solution};
use super::segment::{Ref, SegmentRun};
use shardc_ir::func::{Func, Name, Node, Patch, Value};
use std::borrow::Cow;
use std::rc::Rc;

/// Replaces segments, given in program order, by their solutions.
pub(crate) fn apply(f: &mut Func, changes: &[(SegmentRun, Rc<Solution>)]) {
    if changes.is_empty() {
        return;
    }
    let mut patch = Patch::of(f);
    changes.iter().for_each(|(run, solution)| segment(f, run, solution, &mut patch));
    patch.apply(f);
}

fn segment(f: &mut Func, run: &SegmentRun, solution: &Solution, patch: &mut Patch) {
    let start = run.nodes.start;
    let mut fresh: Vec<Value> = vec![];
    let value = |f: &Func, r: Ref, fresh: &[Value]| match r {
        Ref::Outer(i) => run.outer[i as usize],
        Ref::Inner { node, out } => f.nodes[start + node as usize].outs[out as usize],
        Ref::Fresh(i) => fresh[i as usize],
    };
    run.nodes.clone().for_each(|n| patch.erase(n));
    for item in &solution.items {
        match item {
            Item::Keep { node, ins } => {
                let ins = ins.iter().map(|&r| value(f, r, &fresh)).collect();
                let node = Node { ins, ..f.nodes[start + *node as usize].clone() };
                patch.insert(run.nodes.end, node);
            }
            Item::New { node, op, ins, fresh: ty, rule } => {
                let old = &f.nodes[start + *node as usize];
                let (scope, own) = (old.scope, old.outs[0]);
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
                let ins: Vec<Value> = ins.iter().map(|&r| value(f, r, &fresh)).collect();
                let note = (!rule.is_empty()).then_some(Cow::Borrowed(*rule));
                let node = Node { note, ..Node::new(op.clone(), &ins, &[out], scope) };
                patch.insert(run.nodes.end, node);
            }
        }
    }
    for &(node, r) in &solution.aliases {
        patch.replace(f.nodes[start + node as usize].outs[0], value(f, r, &fresh));
    }
}
