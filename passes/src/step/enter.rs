//! Makes `@enter`, which runs once per step before the microbatches.
//!
//! It fans parameters out (or gathers them), clears the accumulators, and counts the labels of the
//! whole global batch, so that the loss is a mean per token whatever the layout.

use crate::options::Options;
use crate::shard::partition::{Preparation, step_scope};
use shardc_ir::builder::Builder;
use shardc_ir::func::{Func, Name, Node, Port, Role, RoleKind, Value};
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::*;
use shardc_ir::types::Type;
use smallvec::SmallVec;

/// Builds the function; `forward` and `backward` say which accumulators there are and in which type
/// the loss scale is used.
pub fn enter(
    mesh: &Mesh,
    params: &[Preparation],
    forward: &Func,
    backward: Option<&Func>,
    o: &Options,
) -> Func {
    let mut f = Func::new("enter");
    let mut ready = Vec::new();
    for p in params {
        let v = f.arg(p.stored.clone(), p.name.clone(), Some(p.param.clone()));
        ready.push(v);
    }
    let targets = backward.and_then(|_| targets(&mut f, forward, o));
    for (p, v) in params.iter().zip(&mut ready) {
        let scope = f.scope(&p.scope);
        for s in &p.steps {
            let mut name = p.name.clone();
            name.hint = format!("{}_f", name.hint).into();
            let out = f.value(s.ty.clone(), name);
            let (ins, outs) = (SmallVec::from_slice(&[*v]), SmallVec::from_slice(&[out]));
            f.nodes.push(Node { op: s.op.clone(), ins, outs, scope, note: None });
            *v = out;
        }
        let role = Role { kind: RoleKind::Ready, name: p.param.name.clone() };
        f.results.push(Port { value: *v, role: Some(role) });
    }
    let Some(backward) = backward else { return f };
    let mut b = Builder::new(mesh, &mut f);
    b.enter("step");
    if let Some(targets) = targets {
        count(&mut b, targets, backward);
    }
    let accumulators = forward
        .args
        .iter()
        .map(|a| (forward, a))
        .chain(backward.args.iter().map(|a| (backward, a)));
    for (g, a) in accumulators {
        let Some(role) =
            a.role.as_ref().filter(|r| matches!(r.kind, RoleKind::Sum | RoleKind::Grad))
        else {
            continue;
        };
        b.enter(if role.kind == RoleKind::Grad { step_scope(&role.name) } else { "step" });
        let v = b.push_as("zero", Fill { value: 0.0 }, &[], g.ty(a.value));
        let name = g.name(a.value).clone();
        b.f.rename(v, Name { dup: 0, ..name });
        b.f.results.push(Port { value: v, role: Some(role.clone()) });
    }
    f
}

/// The labels of the whole global batch, as an argument.
fn targets(f: &mut Func, forward: &Func, o: &Options) -> Option<Value> {
    let a = forward.args.iter().find(|a| a.role.as_ref().is_some_and(|r| &*r.name == "targets"))?;
    let mut ty = forward.ty(a.value).clone();
    ty.dims[0].size = o.global_batch;
    ty.replicated = AtomSet::EMPTY;
    Some(f.arg(ty, forward.name(a.value).clone(), a.role.clone()))
}

/// One over the number of labels: `step inv_tokens` (invariant) and `step loss_scale` (the loss's
/// cotangent).
fn count(b: &mut Builder, targets: Value, backward: &Func) {
    let valid = b.push("valid", AtLeast { bound: 0.0 }, &[targets]);
    let mut n = b.push(
        "tokens",
        ReduceSum { rule: shardc_ir::attr::RuleAttr::new("bs->", &[2]) },
        &[valid],
    );
    let axes = b.ty(n).sum;
    if !axes.is_empty() {
        n = b.push("tokens", AllReduce { axes }, &[n]);
        b.note("labels of the global batch");
    }
    // A batch without labels has loss 0, not NaN.
    let n = b.push("tokens", Clamp { lo: 1.0, hi: f64::INFINITY }, &[n]);
    let one = b.push_as("one", Fill { value: 1.0 }, &[], &Type::f32(&[]));
    let inv = b.push("inv_tokens", Div::same(), &[one, n]);
    b.f.results.push(Port { value: inv, role: Some(Role::new(RoleKind::Step, "inv_tokens")) });
    let seed =
        backward.args.iter().find(|a| a.role.as_ref().is_some_and(|r| r.kind == RoleKind::Step));
    if let Some(seed) = seed {
        let axes = backward.ty(seed.value).replicated;
        let scale =
            if axes.is_empty() { inv } else { b.push("loss_scale", FanOut { axes }, &[inv]) };
        b.f.results
            .push(Port { value: scale, role: Some(Role::new(RoleKind::Step, "loss_scale")) });
    }
}
