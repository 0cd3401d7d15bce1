//! One microbatch: a gradient that one function makes needs no accumulator, which would be cleared
//! before and read again.
//!
//! ```text
//! Before:  @backward(%d_w_acc: f32[4,8] grad "w", …)    After:  @backward(…)
//!          %d_w = dot[bs,bt->st] %x, %d_y : f32[4,8]            %d_w = dot[bs,bt->st] %x, %d_y : f32[4,8]
//!          %d_w_total = accumulate %d_w_acc, %d_w : f32[4,8]    return %d_w grad "w"
//!          return %d_w_total grad "w"
//! ```

use shardc_ir::func::{Func, Node, Patch, Port, Role, RoleKind, Value};
use shardc_ir::maps::{HashMap, HashSet};
use shardc_ir::ops::{Accumulate, Add};
use std::iter::successors;

/// Takes the accumulators out of the functions that a rank of the pipeline runs, once each.
pub fn elide_accumulators(loops: &mut [Func]) {
    let mut takers: HashMap<Role, usize> = HashMap::default();
    let roles = loops.iter().flat_map(|f| f.args.iter().filter_map(|a| a.role.as_ref()));
    for r in roles.filter(|r| r.kind == RoleKind::Grad) {
        *takers.entry(r.clone()).or_default() += 1;
    }
    takers.retain(|_, n| *n == 1);
    for f in loops {
        direct(f, &takers);
    }
}

/// Makes what a function first adds to an accumulator of these roles what the rest is added to, or its result, if
/// that is a node's own result and not another one of the function's.
fn direct(f: &mut Func, alone: &HashMap<Role, usize>) {
    let (uses, mut patch) = (f.uses(), Patch::of(f));
    // Accumulators that go, what is given in place of their sums, and what is added to that.
    let (mut gone, mut given) = (HashSet::default(), HashSet::default());
    let mut rest = vec![];
    for a in f.args.iter().filter(|a| a.role.as_ref().is_some_and(|r| alone.contains_key(r))) {
        let Some(at) = uses.only_user(a.value) else { continue };
        let sum = &f.nodes[at];
        let (&[first, made], total) = (&sum.ins[..], sum.outs[0]) else { continue };
        let own = uses.made_by(&f.nodes, made).is_some_and(|n| !n.op.def().is_view());
        let adds = sum.op.accumulates() && first == a.value;
        if adds && uses.count(total) == 1 && own && !uses.is_result(made) && given.insert(made) {
            patch.erase(at);
            patch.replace(total, made);
            gone.insert(a.value);
            let next = |v: Value| uses.only_user(v).filter(|&n| f.nodes[n].op.accumulates());
            rest.extend(successors(next(total), |&n| next(f.nodes[n].outs[0])));
        }
    }
    // What nobody gave need not be written over.
    rest.into_iter().for_each(|n| f.nodes[n].op = Add::same().into());
    f.args.retain(|a| !gone.contains(&a.value));
    patch.apply(f);
}

/// Writes sums of rows over the tensor that they are added to, if nothing else reads that: only
/// these rows are read and written then.
///
/// Before:  `%p = index_add[bh,b->vh; v=6] %g, %i`, `%s = add %d, %p`
/// After:   `%p = index_add[bh,b->vh; v=6] %g, %i`, `%s = accumulate %d, %p`
pub fn accumulate_rows(f: &mut Func) {
    if !f.nodes.iter().any(|n| n.op.adds_to_rows()) {
        return;
    }
    let (uses, roots) = (f.uses(), f.roots());
    // A result with the role of an argument lies over this, which may be read until then.
    let given: HashSet<&Role> = f.args.iter().filter_map(|a| a.role.as_ref()).collect();
    let replaces = |r: &&Port| r.role.as_ref().is_some_and(|r| given.contains(r));
    let replacing: HashSet<Value> =
        f.results.iter().filter(replaces).map(|r| roots[r.value]).collect();
    let is = |n: &Node| {
        let (&[first, second], sum) = (&n.ins[..], n.outs[0]) else { return false };
        let maker = |v: Value| uses.made_by(&f.nodes, v);
        n.op.is_plain_sum()
            && [first, second].iter().all(|v| uses.count(*v) == 1)
            && f.ty(first) == f.ty(sum)
            && maker(second).is_some_and(|n| n.op.adds_to_rows())
            && maker(first).is_some_and(|n| !n.op.def().is_view())
            && !replacing.contains(&roots[sum])
    };
    let all: Vec<usize> = (0..f.nodes.len()).filter(|&i| is(&f.nodes[i])).collect();
    all.into_iter().for_each(|i| f.nodes[i].op = Accumulate {}.into());
}
