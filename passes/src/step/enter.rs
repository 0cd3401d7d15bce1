//! Makes `@step_prologue`, which runs once per step before the microbatches.
//!
//! It fans parameters out (or gathers them), clears what microbatches add to, and counts the labels
//! of the whole global batch, so that the loss is a mean per token whatever the layout.

use crate::options::Options;
use crate::shard::partition::step_scope;
use shardc_ir::attr::RuleAttr;
use shardc_ir::builder::Builder;
use shardc_ir::func::{Func, FuncKind, Name, Node, ParamLayout, Port, Role, RoleKind, Value};
use shardc_ir::loss_scale::LOSS_SCALE;
use shardc_ir::maps::HashSet;
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::ops::*;
use shardc_ir::types::Type;
use std::collections::BTreeMap;

/// Labels of a microbatch: their type, what they are called, and their role.
pub type Labels = (Type, Name, Role);

/// Builds the function for a rank of the pipeline, of so many: `params` are those it owns, `loops` its
/// functions that run once per microbatch. They say which accumulators there are and in which type
/// the loss scale is used; `labels` are those of a microbatch, with name and role, whichever stage reads
/// them. With `scaled`, backward's seeds are multiplied by a scalar of the step.
pub fn enter(
    mesh: &Mesh,
    (rank, ranks): (usize, usize),
    params: &[&ParamLayout],
    loops: &[&Func],
    labels: Option<&Labels>,
    scaled: bool,
    o: &Options,
) -> Func {
    let mut f = Func::of(FuncKind::StepPrologue, rank, ranks);
    let mut ready = Vec::new();
    for p in params {
        let v = f.arg(p.stored.clone(), p.name.clone(), Some(p.param.clone()));
        ready.push(v);
    }
    let sums = sums(loops);
    let targets = sums.get(COUNTED).and(labels).map(|l| targets(&mut f, l, o));
    let scale = (scaled && seeds(loops).next().is_some()).then(|| scale_of(&mut f));
    for (p, v) in params.iter().zip(&mut ready) {
        let scope = f.scope(&p.scope);
        for s in &p.steps[..p.prepared] {
            let mut name = p.name.clone();
            name.hint = name.hint + "_f";
            let out = f.value(s.ty.clone(), name);
            let note = (s.op.facts().kind == Kind::Conversion)
                .then_some("the weight, of its master copy".into());
            f.nodes.push(Node { note, ..Node::new(s.op.clone(), &[*v], &[out], scope) });
            *v = out;
        }
        let role = Role { kind: RoleKind::Unsharded, name: p.param.name.clone() };
        f.results.push(Port { value: *v, role: Some(role) });
    }
    let mut b = Builder::new(mesh, &mut f);
    b.enter("step");
    if let Some(targets) = targets {
        count(&mut b, targets, seed(loops), scale);
    }
    // What is not summed over labels becomes a mean over microbatches.
    let counts = |name: &str| labels.is_some() && name == COUNTED;
    if sums.keys().any(|name| !counts(name)) {
        let share = Fill { value: 1.0 / o.microbatches() as f64 };
        let inv = b.push_as("inv_microbatches", share, &[], &Type::f32(&[]));
        let role = Role::new(RoleKind::Step, "inv_microbatches");
        b.f.results.push(Port { value: inv, role: Some(role) });
        for (role, ty) in seeds(loops).filter(|s| !counts(&s.0.name)) {
            let v = cotangent(&mut b, "scale", inv, scale, ty);
            b.f.results.push(Port { value: v, role: Some(role.clone()) });
        }
    }
    // Without a backward nothing is summed over microbatches.
    let trains = loops.iter().any(|g| has(g, RoleKind::Grad)) || !sums.is_empty();
    let all = loops.iter().flat_map(|g| g.args.iter().map(move |a| (g, a)));
    let mut cleared: HashSet<&Role> = HashSet::default();
    for (g, a) in all.filter(|_| trains) {
        let Some(role) = a.role.as_ref().filter(|r| r.kind.is_summed()) else { continue };
        if !cleared.insert(role) {
            continue; // two stages of this rank share it
        }
        b.enter(if role.kind == RoleKind::Grad { step_scope(&role.name) } else { "step" });
        let v = b.push_as("zero", Fill { value: 0.0 }, &[], g.ty(a.value));
        let name = g.name(a.value).clone();
        b.f.rename(v, Name { dup: 0, ..name });
        b.f.results.push(Port { value: v, role: Some(role.clone()) });
    }
    f
}

fn has(f: &Func, kind: RoleKind) -> bool {
    f.results.iter().any(|r| r.role.as_ref().is_some_and(|r| r.kind == kind))
}

/// What is summed over microbatches, by name, and its type.
pub(super) fn sums<'a>(loops: &[&'a Func]) -> BTreeMap<&'a str, &'a Type> {
    let all = loops.iter().flat_map(|f| f.args.iter().map(|a| (a.role.as_ref(), f.ty(a.value))));
    all.filter_map(|(r, t)| Some((&*r.filter(|r| r.kind == RoleKind::Sum)?.name, t))).collect()
}

/// The cotangents of sums, as backward takes them: of those that something trained has a part in.
fn seeds<'a>(loops: &[&'a Func]) -> impl Iterator<Item = (&'a Role, &'a Type)> {
    let all = loops.iter().flat_map(|f| f.args.iter().map(|a| (a.role.as_ref(), f.ty(a.value))));
    all.filter_map(|(role, ty)| Some((role.filter(|r| r.kind == RoleKind::Scale)?, ty)))
}

/// The sum that is one over labels, where a model has labels.
pub(super) const COUNTED: &str = "loss";

/// The type in which backward takes the loss's cotangent.
fn seed<'a>(loops: &[&'a Func]) -> Option<&'a Type> {
    seeds(loops).find(|s| &*s.0.name == COUNTED).map(|s| s.1)
}

/// The labels of the whole global batch, as an argument.
fn targets(f: &mut Func, (ty, name, role): &Labels, o: &Options) -> Value {
    let mut ty = ty.clone();
    if role.kind.input().is_some_and(|i| i.batch) {
        ty.dims[0].size = o.global_batch;
    }
    ty.replicated = AtomSet::EMPTY;
    f.arg(ty, name.clone(), Some(role.clone()))
}

/// One over the number of labels: `step inv_tokens` (invariant) and, if backward takes one, `scale loss`
/// (the loss's cotangent).
fn count(b: &mut Builder, targets: Value, seed: Option<&Type>, scale: Option<Value>) {
    let valid = b.push("valid", AtLeast { bound: 0.0 }, &[targets]);
    let rank = b.ty(valid).rank();
    let letters: String = "bscdefgh".chars().take(rank).collect();
    let rule = RuleAttr::new(&format!("{letters}->"), &[rank]);
    let mut n = b.push("tokens", ReduceSum { rule }, &[valid]);
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
    let Some(seed) = seed else { return };
    let seed = cotangent(b, "loss_scale", inv, scale, seed);
    b.f.results.push(Port { value: seed, role: Some(Role::new(RoleKind::Scale, COUNTED)) });
}

/// A cotangent as backward takes it: a share of the step, times the scale of the loss if there is one.
fn cotangent(
    b: &mut Builder,
    hint: &'static str,
    share: Value,
    scale: Option<Value>,
    ty: &Type,
) -> Value {
    let scaled = scale.map(|scale| {
        let scaled = b.push("scaled", Mul::same(), &[share, scale]);
        b.note("gradients are divided by it in the end");
        scaled
    });
    let (own, axes) = (scaled.unwrap_or(share), ty.replicated);
    if axes.is_empty() { own } else { b.push(hint, FanOut { axes }, &[own]) }
}

/// The scale of the loss in this step, as an argument.
pub(super) fn scale_of(f: &mut Func) -> Value {
    let name = Name { grad: false, layer: None, hint: "scale".into(), dup: 0 };
    f.arg(Type::f32(&[]), name, Some(Role::new(RoleKind::Scalar, LOSS_SCALE)))
}
