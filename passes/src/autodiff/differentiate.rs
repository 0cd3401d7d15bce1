//! Appends the backward program to a forward program.
//!
//! Before:  `%y = dot[mk,kn->mn] %x, %w`, result `%loss`
//! After:   … `%d_w = dot[mn,mk->kn] %d_y, %x`, results `%loss`, `%d_w`
//! Assumes: phase Ranked.  Leaves: phase Ranked.
//!
//! Reverse mode over the typed program: the gradient of each op comes from its own file, typed by the
//! same rules, so f becomes g, a gather a scatter, and a weight's gradient a pending sum.

use crate::shard::partition::active;
use shardc_ir::builder::Builder;
use shardc_ir::func::{Func, Name, Port, Role, RoleKind, Value};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::Add;
use smallvec::SmallVec;

/// Where backward begins in the joint program: nodes from here on are backward.
pub struct Joint {
    pub func: Func,
    pub backward_from: usize,
}

/// Differentiates the result with role `sum "loss"` with respect to every trained parameter. The
/// cotangent of the loss is an argument, `step "loss_scale"`; gradients are results `grad NAME`.
pub fn differentiate(mesh: &Mesh, mut f: Func, frozen: &dyn Fn(&str) -> bool) -> Joint {
    let on = active(&f, frozen);
    let backward_from = f.nodes.len();
    let known = f.values.len();
    let loss = f
        .results
        .iter()
        .find(|r| r.role.as_ref().is_some_and(|r| r.kind == RoleKind::Sum))
        .map(|r| r.value);
    let loss = loss.expect("a training program has a loss");
    let seed_type = f.ty(loss).cotangent();
    let name = Name { grad: true, layer: None, hint: "loss".into(), dup: 0 };
    let seed = f.arg(seed_type, name, Some(Role::new(RoleKind::Step, "loss_scale")));
    let mut parts: Vec<SmallVec<[Value; 2]>> = vec![SmallVec::new(); known];
    parts[loss.0 as usize].push(seed);
    for i in (0..backward_from).rev() {
        let n = f.nodes[i].clone();
        if !n.outs.iter().any(|o| on[o.0 as usize] && !parts[o.0 as usize].is_empty()) {
            continue;
        }
        let mut b = Builder::new(mesh, &mut f);
        (b.scope, b.grad, b.wanted) = (n.scope, true, &on);
        let d: SmallVec<[Option<Value>; 2]> =
            n.outs.iter().map(|&o| total(&mut b, &parts[o.0 as usize], o)).collect();
        let first = b.f.nodes.len();
        let grads = n.op.def().grad(&mut b, &n.ins, &n.outs, &d);
        let made: SmallVec<[Value; 8]> =
            b.f.nodes[first..].iter().flat_map(|m| m.outs.clone()).collect();
        for (&x, g) in n.ins.iter().zip(grads) {
            let Some(g) = g.filter(|_| on[x.0 as usize]) else { continue };
            assert_eq!(*f.ty(g), f.ty(x).cotangent(), "gradient of {} by {:?}", f.name(x), n.op);
            if made.contains(&g) {
                let name = f.name(x).clone();
                f.rename(g, Name { grad: true, dup: 0, ..name });
            }
            parts[x.0 as usize].push(g);
        }
    }
    let args: Vec<Port> = f.args.clone();
    for a in args {
        let Some(role) = a.role.filter(|r| r.kind == RoleKind::Ready && on[a.value.0 as usize])
        else {
            continue;
        };
        let mut b = Builder::new(mesh, &mut f);
        b.grad = true;
        let value = total(&mut b, &parts[a.value.0 as usize], a.value);
        if let Some(value) = value {
            f.results
                .push(Port { value, role: Some(Role { kind: RoleKind::Grad, name: role.name }) });
        }
    }
    let mut joint = Joint { func: f, backward_from };
    drop_dead_backward(&mut joint);
    joint
}

/// Sum of the cotangents that the users of a value sent back.
fn total(b: &mut Builder, parts: &[Value], of: Value) -> Option<Value> {
    match parts {
        [] => None,
        [one] => Some(*one),
        many => {
            let v = b.push("sum", Add::same(), many);
            let name = b.f.name(of).clone();
            b.f.rename(v, Name { grad: true, dup: 0, ..name });
            Some(v)
        }
    }
}

/// Drops what nobody uses; only backward can have any.
fn drop_dead_backward(j: &mut Joint) {
    j.func.drop_dead();
    // Forward nodes are live through results or backward; recount them.
    let mut forward = 0;
    while forward < j.func.nodes.len()
        && !j.func.nodes[forward].outs.iter().any(|&o| j.func.name(o).grad)
    {
        forward += 1;
    }
    j.backward_from = j.backward_from.min(forward);
}
