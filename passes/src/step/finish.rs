//! Makes `@optimizer_step`, which runs once per step after the microbatches: reduces the gradients, takes
//! their norm, clips, and steps the optimizer.
//!
//! The reduction of a gradient is the mirror of what `@step_prologue` did to its parameter. The norm counts
//! every parameter once because types say what is counted twice: a split gradient's square is a sum
//! still to be taken, an invariant one's is not.

use crate::optim::Groups;
use crate::options::Options;
use crate::step::enter::scale_of;
use crate::step::losses::{Sums, loss, parts, show};
use crate::step::norm::{By, norm, squares, wholes};
use crate::step::router_bias::Corrected;
use crate::step::updates::{Given, Scalars, Updates};
use shardc_ir::attr::Broadcast;
use shardc_ir::builder::Builder;
use shardc_ir::func::{Func, FuncKind, Name, ParamLayout, Role, RoleKind, StateName, Value};
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::cast::in_f32;
use shardc_ir::ops::*;
use shardc_ir::types::Type;

/// A gradient of a parameter that another rank of the pipeline has made for its owner.
pub struct Foreign {
    /// The parameter.
    pub param: String,
    /// The rank of the pipeline that uses it too.
    pub from: u32,
}

impl Foreign {
    /// The role under which the owner receives it.
    pub fn role(&self) -> Role {
        Role::new(RoleKind::GradFrom(self.from), self.param.as_str())
    }
}

/// What a step is like.
#[derive(Clone, Copy)]
pub struct StepKind {
    /// The loss is a sum over labels.
    pub counts: bool,
    /// Gradients are multiplied by the scale of the loss.
    pub scaled: bool,
}

/// Builds the function for a rank of the pipeline, of so many: `params` are those it owns, `loops` its functions
/// that run once per microbatch, which say what has a gradient, `foreign` what others have made.
#[allow(clippy::too_many_arguments)]
pub fn finish(
    mesh: &Mesh,
    (rank, ranks): (usize, usize),
    params: &[&ParamLayout],
    loops: &[&Func],
    foreign: &[Foreign],
    kind: StepKind,
    groups: &Groups,
    o: &Options,
) -> Func {
    let mut updates = Updates::new(groups, &o.hardware);
    let mut f = Func::of(FuncKind::OptimizerStep, rank, ranks);
    let sums = gradients(loops);
    let has_grad = |p: &&&ParamLayout| p.trainable && sums.contains_key(&*p.param.name);
    let trained: Vec<&ParamLayout> = params.iter().filter(has_grad).copied().collect();
    // Arguments, results, and values between them.
    f.reserve(trained.len() * 8);
    let args = arguments(&mut f, &trained, loops, &sums, foreign, kind, &updates);
    let corrected = match o.balance.rate {
        0.0 => vec![],
        _ => Corrected::arguments(&mut f, params, loops),
    };
    let mut b = Builder::new(mesh, &mut f);
    let mut grads: Vec<Value> = vec![];
    for (i, p) in trained.iter().enumerate() {
        let mut d = args.grads[i];
        let others = foreign.iter().zip(&args.foreign).filter(|(x, _)| *x.param == *p.param.name);
        let others: Vec<Value> = others.map(|(_, &v)| v).collect();
        if !others.is_empty() {
            b.enter(&p.scope);
            let all: Vec<Value> = std::iter::once(d).chain(others).collect();
            d = b.push("all", Add::same(), &all);
            b.f.rename(d, Name { grad: true, ..p.name.clone() });
            b.note("with the gradients of the other stages that use it");
        }
        grads.push(reduce(&mut b, p, d));
    }
    let squares = squares(&mut b, &trained, &grads);
    let losses = args.sums.as_ref().map_or(vec![], parts);
    let all = [&losses[..], &squares.iter().map(|&v| ("squares", v)).collect::<Vec<_>>()].concat();
    let all = wholes(&mut b, &all);
    let (losses, squares) = all.split_at(losses.len());
    if let Some(sums) = &args.sums {
        loss(&mut b, sums, losses);
    }
    let norm = norm(&mut b, squares);
    let by = By::new(&mut b, norm, args.scale, o.clip);
    show(&mut b, by.norm, RoleKind::Metric, "grad_norm");
    let unscale = by.unscale.filter(|_| o.observe);
    let each = [Some(args.lr), Some(args.step), Some(by.factor), by.applies, unscale];
    let mut scalars = Scalars::new(each, by.norm);
    let mut given: Vec<Given> = vec![];
    for (i, &p) in trained.iter().enumerate() {
        given.push(Given { p, param: args.params[i], grad: grads[i], states: &args.states[i] });
    }
    updates.all(&mut b, &given, &mut scalars, |b, i, scalars| {
        if o.observe {
            let p = trained[i];
            let [.., unscale] = scalars.over(b, p.stored.sharded());
            let shown = match unscale {
                Some(by) => unscaled(b, p, grads[i], by),
                None => grads[i],
            };
            show(b, shown, RoleKind::GradShown, &p.param.name);
        }
    });
    for c in &corrected {
        c.update(&mut b, o.balance.rate, by.applies);
    }
    // By kind, so that layers look alike.
    f.results.sort_by_key(|r| r.role.as_ref().map(|r| r.kind));
    f
}

/// Type of every gradient, by parameter.
fn gradients<'a>(loops: &[&'a Func]) -> HashMap<&'a str, &'a Type> {
    let all = loops.iter().flat_map(|f| f.results.iter().map(move |r| (*f, r)));
    all.filter_map(|(f, a)| {
        let role = a.role.as_ref().filter(|r| r.kind == RoleKind::Grad)?;
        Some((&*role.name, f.ty(a.value)))
    })
    .collect()
}

struct Args {
    params: Vec<Value>,
    grads: Vec<Value>,
    states: Vec<Vec<Value>>,
    foreign: Vec<Value>,
    sums: Option<Sums>,
    lr: Value,
    step: Value,
    /// By what gradients are too large.
    scale: Option<Value>,
}

fn arguments(
    f: &mut Func,
    trained: &[&ParamLayout],
    loops: &[&Func],
    sums: &HashMap<&str, &Type>,
    foreign: &[Foreign],
    kind: StepKind,
    updates: &Updates,
) -> Args {
    let scalar = Type::f32(&[]);
    let plain = |hint: &'static str| Name { grad: false, layer: None, hint: hint.into(), dup: 0 };
    let params = trained
        .iter()
        .map(|p| f.arg(p.stored.clone(), p.name.clone(), Some(p.param.clone())))
        .collect();
    let grads = trained
        .iter()
        .map(|p| {
            let role = Role { kind: RoleKind::Grad, name: p.param.name.clone() };
            f.arg(sums[&*p.param.name].clone(), Name { grad: true, ..p.name.clone() }, Some(role))
        })
        .collect();
    let states = trained
        .iter()
        .map(|p| {
            let state = |(s, ty): (StateName, Type)| {
                let hint = [&*p.name.hint, "_", s.name()].concat().into();
                let role = Role { kind: RoleKind::State(s), ..p.param.clone() };
                f.arg(ty, Name { hint, ..p.name.clone() }, Some(role))
            };
            updates.states(p).into_iter().map(state).collect()
        })
        .collect();
    let received = foreign
        .iter()
        .map(|x| {
            let ty = sums[&*x.param].clone();
            let owner = trained.iter().find(|p| *p.param.name == *x.param);
            let name = owner.map(|p| p.name.clone()).unwrap_or_else(|| plain("w"));
            let hint = format!("{}_from_{}", name.hint, x.from).into();
            f.arg(ty, Name { grad: true, hint, ..name }, Some(x.role()))
        })
        .collect();
    let sums = Sums::arguments(f, loops, kind.counts);
    let lr = f.arg(scalar.clone(), plain("lr"), Some(Role::new(RoleKind::Scalar, "lr")));
    let step = f.arg(scalar, plain("step"), Some(Role::new(RoleKind::Scalar, "step")));
    let scale = kind.scaled.then(|| scale_of(f));
    Args { params, grads, states, foreign: received, sums, lr, step, scale }
}

/// A gradient without the scale of the loss.
fn unscaled(b: &mut Builder, p: &ParamLayout, g: Value, by: Value) -> Value {
    b.enter(&p.scope);
    let letters: String = ('a'..).take(b.ty(g).rank()).collect();
    let rule = Broadcast::new(&format!("{letters},->{letters}"), &[letters.len(), 0]);
    let g = in_f32(b, g);
    let shown = b.push("shown", Mul { rule }, &[g, by]);
    b.f.rename(shown, Name { grad: true, ..p.name.clone() });
    b.enter("step");
    shown
}

/// The mirror of the parameter's preparation.
fn reduce(b: &mut Builder, p: &ParamLayout, mut d: Value) -> Value {
    b.enter(&p.scope);
    b.grad = true;
    let types: Vec<&Type> =
        std::iter::once(&p.stored).chain(p.steps.iter().map(|s| &s.ty)).collect();
    for (i, s) in p.steps.iter().enumerate().take(p.mirrored).rev() {
        if s.op.facts().kind == Kind::Conversion {
            continue; // the optimizer takes the gradient of a 16-bit weight as it was summed
        }
        // Only the types of the primal values are asked for: nothing reads them here.
        let ends = [types[i], types[i + 1]].map(|t| {
            b.f.value(t.clone(), Name { grad: false, layer: None, hint: "primal".into(), dup: 0 })
        });
        let g = s.op.def().grad(b, &[ends[0]], &[ends[1]], &[Some(d)]);
        d = g[0].expect("preparations are differentiable");
        b.f.rename(d, Name { grad: true, ..p.name.clone() });
        b.note(match matches!(s.op, Op::FanOut(_)) {
            true => "gradients of all microbatches and ranks, once per step",
            false => "the gradient as its parameter is stored, once per step",
        });
    }
    b.grad = false;
    d
}
