//! Appends the backward program to a forward program.
//!
//! Before:  `%y = dot[mk,kn->mn] %x, %w`, result `%loss`
//! After:   … `%d_w = dot[mn,mk->kn] %d_y, %x`, results `%loss`, `%d_w`
//! Assumes: phase Ranked.  Leaves: phase Ranked.
//!
//! Reverse mode over the typed program: the gradient of each op comes from its own file, typed by the
//! same rules, so f becomes g, a gather a scatter, and a weight's gradient a pending sum.

use crate::shard::partition::{Preparation, active};
use crate::stages::Stages;
use crate::step::correct::is_load;
use shardc_ir::builder::Builder;
use shardc_ir::func::{Func, Name, Port, Role, RoleKind, Scope, Value};
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{Add, Cast, Op};
use shardc_ir::types::{DType, Type};
use smallvec::SmallVec;

/// Where backward begins in the joint program: nodes from here on are backward.
pub struct Joint {
    pub func: Func,
    pub backward_from: usize,
    /// By value: it is the gradient of something computed from data, not of a parameter.
    pub of_data: Vec<bool>,
}

/// What the users of a value sent back: gradients, and the scopes of the users.
type Parts = SmallVec<[(Value, Scope); 2]>;

/// Differentiates the sums that are losses (`sum "loss"`, and of experts `sum "aux_loss"` and
/// `sum "z_loss"`; not what a router counted) with respect to every trained parameter. The cotangent of each is an argument, `step "loss_scale"`; gradients are results
/// `grad NAME`, one per stage that uses the parameter. A gradient has its value's element type; that of
/// a 16-bit parameter, and of what is made of parameters alone, has `grad_dtype`, from where it is made
/// on: so it is summed and reduced in that.
pub fn differentiate(
    mesh: &Mesh,
    mut f: Func,
    frozen: &dyn Fn(&str) -> bool,
    stages: &Stages,
    params: &[Preparation],
    grad_dtype: DType,
) -> Joint {
    let on = active(&f, frozen);
    let backward_from = f.nodes.len();
    let known = f.values.len();
    let is_sum =
        |r: &&Port| r.role.as_ref().is_some_and(|r| r.kind == RoleKind::Sum && !is_load(r));
    let sums: Vec<Port> = f.results.iter().filter(is_sum).cloned().collect();
    let weights = only_weights(&f);
    let mut of_data = vec![false; known];
    let mut parts: Vec<Parts> = vec![Parts::new(); known];
    for Port { value, role } in sums {
        let sum = role.map_or_else(String::new, |r| r.name.to_string());
        let role = Some(Role::new(RoleKind::Step, format!("{sum}_scale")));
        let name = Name { grad: true, layer: None, hint: sum.into(), dup: 0 };
        let seed = f.arg(f.ty(value).cotangent(), name, role);
        parts[value.0 as usize].push((seed, Scope(0)));
    }
    for i in (0..backward_from).rev() {
        let n = f.nodes[i].clone();
        if !n.outs.iter().any(|o| on[o.0 as usize] && !parts[o.0 as usize].is_empty()) {
            continue;
        }
        let mut b = Builder::new(mesh, &mut f);
        (b.scope, b.grad, b.wanted) = (n.scope, true, &on);
        let d: SmallVec<[Option<Value>; 2]> =
            n.outs.iter().map(|&o| total(&mut b, &parts[o.0 as usize], o, stages)).collect();
        let first = b.f.nodes.len();
        // The one conversion of a cast's gradient is that to the wanted type.
        let mut grads = match &n.op {
            Op::Cast(_) => smallvec::smallvec![d[0]],
            op => op.def().grad(&mut b, &n.ins, &n.outs, &d),
        };
        for (&x, g) in n.ins.iter().zip(&mut grads) {
            let wanted = wanted(b.ty(x).dtype, weights[x.0 as usize], grad_dtype);
            *g = g.filter(|_| on[x.0 as usize]).map(|g| convert(&mut b, g, wanted));
        }
        let made: SmallVec<[Value; 8]> =
            b.f.nodes[first..].iter().flat_map(|m| m.outs.clone()).collect();
        for (&x, g) in n.ins.iter().zip(grads) {
            let Some(g) = g else { continue };
            let like = Type { dtype: f.ty(g).dtype, ..f.ty(x).cotangent() };
            assert_eq!(*f.ty(g), like, "gradient of {} by {:?}", f.name(x), n.op);
            // That of a weight's cast is passed on as it is.
            if made.contains(&g) || matches!(n.op, Op::Cast(_)) {
                let name = f.name(x).clone();
                f.rename(g, Name { grad: true, dup: 0, ..name });
            }
            parts[x.0 as usize].push((g, n.scope));
            of_data.resize(f.values.len(), false);
            of_data[g.0 as usize] |= !weights[x.0 as usize];
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
        for of_stage in by_stage(&parts[a.value.0 as usize], stages) {
            let [.., (_, last)] = of_stage else { continue };
            b.scope = *last;
            if let Some(value) = sum(&mut b, of_stage, a.value) {
                let prepared = params.iter().find(|p| p.param.name == role.name);
                let value = prepared.map_or(value, |p| mirror_early(&mut b, p, value));
                let role = Some(Role { kind: RoleKind::Grad, name: role.name.clone() });
                b.f.results.push(Port { value, role });
            }
        }
    }
    of_data.resize(f.values.len(), false);
    let mut joint = Joint { func: f, backward_from, of_data };
    drop_dead_backward(&mut joint);
    joint
}

/// The element type of a value's gradient.
fn wanted(dtype: DType, weight: bool, grad_dtype: DType) -> DType {
    if weight && dtype != DType::F32 { grad_dtype } else { dtype }
}

/// The value in this element type.
fn convert(b: &mut Builder, v: Value, to: DType) -> Value {
    match b.ty(v).dtype == to {
        true => v,
        false => b.push("cast_grad", Cast { to }, &[v]),
    }
}

/// The mirror of those of a parameter's last steps that are mirrored in backward.
fn mirror_early(b: &mut Builder, p: &Preparation, mut d: Value) -> Value {
    let all: Vec<&Type> = std::iter::once(&p.stored).chain(p.steps.iter().map(|s| &s.ty)).collect();
    for i in (p.steps.len() - p.early..p.steps.len()).rev() {
        // Only the types of the primal values are asked for: nothing reads them here.
        let ends = [all[i], all[i + 1]].map(|t| {
            let name = Name { grad: false, layer: None, hint: "primal".into(), dup: 0 };
            b.f.value(t.clone(), name)
        });
        let g = p.steps[i].op.def().grad(b, &[ends[0]], &[ends[1]], &[Some(d)]);
        d = g[0].expect("preparations are differentiable");
        b.f.rename(d, Name { grad: true, ..p.name.clone() });
        b.note("each rank keeps its piece of the gradient");
    }
    d
}

/// Values that are made of parameters alone.
pub(super) fn only_weights(f: &Func) -> Vec<bool> {
    let mut only = vec![false; f.values.len()];
    for a in &f.args {
        only[a.value.0 as usize] = a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Ready);
    }
    for n in &f.nodes {
        let all = n.ins.iter().all(|v| only[v.0 as usize]);
        n.outs.iter().for_each(|o| only[o.0 as usize] = all);
    }
    only
}

/// The runs of parts that users of one stage sent; users come last first.
fn by_stage<'a>(
    parts: &'a Parts,
    stages: &'a Stages,
) -> impl Iterator<Item = &'a [(Value, Scope)]> {
    parts.chunk_by(|a, b| stages.of(a.1) == stages.of(b.1))
}

/// Sum of the cotangents that the users of a value sent back. Those of another stage are summed
/// there, so that one tensor is sent.
fn total(b: &mut Builder, parts: &Parts, of: Value, stages: &Stages) -> Option<Value> {
    let (home, scope) = (stages.of(b.scope), b.scope);
    let mut here: Parts = Parts::new();
    for run in by_stage(parts, stages) {
        let [.., (_, last)] = run else { continue };
        if run.len() == 1 || stages.of(*last) == home {
            here.extend_from_slice(run);
            continue;
        }
        b.scope = *last;
        here.extend(sum(b, run, of).map(|v| (v, *last)));
        b.scope = scope;
    }
    sum(b, &here, of)
}

fn sum(b: &mut Builder, parts: &[(Value, Scope)], of: Value) -> Option<Value> {
    match parts {
        [] => None,
        [one] => Some(one.0),
        many => {
            let many: SmallVec<[Value; 4]> = many.iter().map(|p| p.0).collect();
            let v = b.push("sum", Add::same(), &many);
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
