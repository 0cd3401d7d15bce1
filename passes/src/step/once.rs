//! One microbatch: a gradient that one function makes needs no accumulator, which would be cleared
//! before and read again.
//!
//! ```text
//! Before:  @backward(%d_w_acc: f32[4,8] grad "w", …)    After:  @backward(…)
//!          %d_w = dot[bs,bt->st] %x, %d_y : f32[4,8]            %d_w = dot[bs,bt->st] %x, %d_y : f32[4,8]
//!          %d_w_total = add %d_w_acc, %d_w : f32[4,8]           return %d_w grad "w"
//!          return %d_w_total grad "w"
//! ```

use shardc_ir::func::{Func, Role, RoleKind, Value};

/// Takes the accumulators out of the functions that a rank of the pipeline runs, once each.
pub fn once(loops: &mut [Func]) {
    for i in 0..loops.len() {
        let grads = loops[i].args.iter().filter_map(|a| a.role.clone());
        let grads: Vec<Role> = grads.filter(|r| r.kind == RoleKind::Grad).collect();
        for role in grads {
            let takes = |f: &Func| f.args.iter().any(|a| a.role.as_ref() == Some(&role));
            if loops.iter().filter(|f| takes(f)).count() == 1 {
                direct(&mut loops[i], &role);
            }
        }
    }
}

/// Makes what a function adds to an accumulator its result, if that is a node's own result and not
/// another one of the function's.
fn direct(f: &mut Func, role: &Role) {
    let of_role = |r: &Option<Role>| r.as_ref() == Some(role);
    let (Some(arg), Some(at)) = (
        f.args.iter().position(|a| of_role(&a.role)),
        f.results.iter().position(|r| of_role(&r.role)),
    ) else {
        return;
    };
    let (acc, total) = (f.args[arg].value, f.results[at].value);
    let reads = |v: Value| f.nodes.iter().flat_map(|n| &n.ins).filter(|x| **x == v).count();
    let makes = |v: Value| f.nodes.iter().position(|n| n.outs[..] == [v]);
    let Some(sum) = makes(total) else { return };
    let [first, made] = f.nodes[sum].ins[..] else { return };
    let own = makes(made).is_some_and(|m| !f.nodes[m].op.def().is_view());
    let alone = first == acc && reads(acc) == 1 && reads(total) == 0;
    if own && alone && !f.results.iter().any(|r| r.value == made) {
        f.nodes.remove(sum);
        f.args.remove(arg);
        f.results[at].value = made;
    }
}
