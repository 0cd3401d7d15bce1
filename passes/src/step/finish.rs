//! Makes `@optimizer_step`, which runs once per step after the microbatches: reduces the gradients, takes
//! their norm, clips, and steps the optimizer.
//!
//! The reduction of a gradient is the mirror of what `@step_prologue` did to its parameter. The norm counts
//! every parameter once because types say what is counted twice: a split gradient's square is a sum
//! still to be taken, an invariant one's is not.

use crate::optim::Groups;
use crate::options::Options;
use crate::step::enter::{COUNTED, scale_of, sums};
use crate::step::router_bias::Corrected;
use crate::step::updates::{Scalars, Updates};
use shardc_ir::attr::{Broadcast, RuleAttr};
use shardc_ir::builder::Builder;
use shardc_ir::func::{
    FURTHER, Func, FuncKind, Name, ParamLayout, Port, Role, RoleKind, StateName, Value,
};
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::{AtomSet, Mesh, PIPELINE};
use shardc_ir::ops::cast::in_f32;
use shardc_ir::ops::*;
use shardc_ir::types::Type;
use std::collections::BTreeMap;

/// Added to the norm before dividing, as torch's `clip_grad_norm_` does.
const CLIP_EPS: f64 = 1e-6;

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
    let mut updates = Updates::new(groups);
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
    b.enter("step");
    if let Some(sums) = &args.sums {
        loss(&mut b, sums, true);
    }
    let norm = norm(&mut b, &trained, &grads);
    let by = By::new(&mut b, norm, args.scale, o.clip);
    show(&mut b, by.norm, RoleKind::Metric, "grad_norm");
    let unscale = by.unscale.filter(|_| o.observe);
    let each = [Some(args.lr), Some(args.step), Some(by.factor), by.applies, unscale];
    let mut scalars = Scalars::new(each, by.norm);
    for (i, p) in trained.iter().enumerate() {
        updates.update(&mut b, p, [args.params[i], grads[i]], &args.states[i], &mut scalars);
        if o.observe {
            let [.., unscale] = scalars.over(&mut b, p.stored.sharded());
            let shown = match unscale {
                Some(by) => unscaled(&mut b, p, grads[i], by),
                None => grads[i],
            };
            show(&mut b, shown, RoleKind::GradShown, &p.param.name);
        }
    }
    for c in &corrected {
        c.update(&mut b, o.balance.rate, by.applies);
    }
    // By kind, so that layers look alike.
    f.results.sort_by_key(|r| r.role.as_ref().map(|r| r.kind));
    f
}

/// Makes `@evaluate`, which ends an evaluation: the loss, without those of layers that predict tokens behind the next,
/// which are shown beside it. `None` if the loss is not made by these functions.
pub fn evaluate(
    mesh: &Mesh,
    (rank, ranks): (usize, usize),
    loops: &[&Func],
    counts: bool,
) -> Option<Func> {
    let mut f = Func::of(FuncKind::Evaluate, rank, ranks);
    let sums = Sums::arguments(&mut f, loops, counts)?;
    let trains = |name: &str| name.starts_with(FURTHER);
    if sums.counted.is_none() && sums.others.iter().all(|s| trains(&s.0)) {
        return None;
    }
    let mut b = Builder::new(mesh, &mut f);
    b.enter("step");
    loss(&mut b, &sums, false);
    Some(f)
}

/// What was summed over microbatches, as arguments.
struct Sums {
    /// Over the labels of the batch, and one over their number, if the model has labels.
    counted: Option<(Value, Value)>,
    /// Losses of microbatches by name, and one over the number of microbatches.
    others: Vec<(String, Value)>,
    inv_microbatches: Option<Value>,
}

impl Sums {
    /// `None` if these functions make no loss.
    fn arguments(f: &mut Func, loops: &[&Func], counts: bool) -> Option<Sums> {
        let mut found = sums(loops);
        if found.is_empty() {
            return None;
        }
        let mut arg = |hint: String, ty: &Type, kind, name: &str| {
            let name_of = Name { grad: false, layer: None, hint: hint.into(), dup: 0 };
            f.arg(ty.clone(), name_of, Some(Role::new(kind, name)))
        };
        let (sum, step, scalar) = (RoleKind::Sum, RoleKind::Step, Type::f32(&[]));
        let counted = if counts { found.remove(COUNTED) } else { None };
        let counted = counted.map(|ty| {
            let loss = arg("loss_sum".into(), ty, sum, COUNTED);
            (loss, arg("inv_tokens".into(), &scalar, step, "inv_tokens"))
        });
        let others: Vec<(String, Value)> = found
            .iter()
            .map(|(name, ty)| (name.to_string(), arg(format!("{name}_sum"), ty, sum, name)))
            .collect();
        let inv_microbatches = (!others.is_empty())
            .then(|| arg("inv_microbatches".into(), &scalar, step, "inv_microbatches"));
        Some(Sums { counted, others, inv_microbatches })
    }
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

fn constant(b: &mut Builder, hint: &'static str, value: f64) -> Value {
    b.push_as(hint, Fill { value }, &[], &Type::f32(&[]))
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

fn show(b: &mut Builder, value: Value, kind: RoleKind, name: &str) {
    b.f.results.push(Port { value, role: Some(Role::new(kind, name)) });
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

/// Shows the loss; with or without those that only train.
fn loss(b: &mut Builder, sums: &Sums, trains: bool) {
    let whole = |b: &mut Builder, v: Value| {
        let axes = b.ty(v).sum;
        if axes.is_empty() { v } else { b.push("loss_sum", AllReduce { axes }, &[v]) }
    };
    let mut loss = sums.counted.map(|(sum, inv_tokens)| {
        let sum = whole(b, sum);
        b.push("loss", Mul::same(), &[sum, inv_tokens])
    });
    for (name, v) in &sums.others {
        let sum = whole(b, *v);
        let inv = sums.inv_microbatches.expect("there is another sum");
        let mean = b.push("loss", Mul::same(), &[sum, inv]);
        if name != COUNTED {
            show(b, mean, RoleKind::Mean, name);
        }
        if !trains && name.starts_with(FURTHER) {
            continue;
        }
        loss = Some(match loss {
            Some(others) => b.push("loss", Add::same(), &[others, mean]),
            None => mean,
        });
    }
    show(b, loss.expect("there is a sum"), RoleKind::Metric, "loss");
}

/// What gradients are multiplied by.
struct By {
    /// The norm, of gradients without the scale of the loss.
    norm: Value,
    /// One over the scale of the loss, if there is one.
    unscale: Option<Value>,
    /// 0 if the step must change nothing; `None` if it never must.
    applies: Option<Value>,
    /// So that they are clipped, and not scaled.
    factor: Value,
}

impl By {
    /// Of the norm of gradients as they are, times `scale`.
    fn new(b: &mut Builder, norm: Value, scale: Option<Value>, clip: Option<f64>) -> By {
        let unscale = scale.map(|scale| {
            let one = constant(b, "one", 1.0);
            b.push("unscale", Div::same(), &[one, scale])
        });
        let norm = match unscale {
            Some(by) => b.push("grad_norm", Mul::same(), &[norm, by]),
            None => norm,
        };
        let applies = unscale.map(|_| {
            let bound = constant(b, "largest", f64::from(f32::MAX));
            let applies = b.push("applies", Less::same(), &[norm, bound]);
            b.note("0 if gradients have overflowed: then nothing changes");
            applies
        });
        let clip = clip.map(|max| {
            let shifted = b.push("norm_eps", Shift { by: CLIP_EPS }, &[norm]);
            let top = constant(b, "max_norm", max);
            let ratio = b.push("clip", Div::same(), &[top, shifted]);
            b.push("clip", Clamp { lo: 0.0, hi: 1.0 }, &[ratio])
        });
        let factor = match (clip, unscale) {
            (Some(clip), Some(unscale)) => b.push("g_scale", Mul::same(), &[clip, unscale]),
            (Some(by), None) | (None, Some(by)) => by,
            (None, None) => constant(b, "g_scale", 1.0),
        };
        By { norm, unscale, applies, factor }
    }
}

/// Square root of the sum of squares of all gradients.
fn norm(b: &mut Builder, params: &[&ParamLayout], grads: &[Value]) -> Value {
    let mut groups: BTreeMap<AtomSet, Vec<Value>> = BTreeMap::new();
    for (p, &g) in params.iter().zip(grads) {
        b.enter(&p.scope);
        let letters: String = ('a'..).take(b.ty(g).rank()).collect();
        let rule = RuleAttr::new(&format!("{letters},{letters}->"), &[letters.len(); 2]);
        let g = in_f32(b, g);
        let sq = b.push("sq", Dot { rule }, &[g, g]);
        groups.entry(b.ty(sq).sum).or_default().push(sq);
    }
    b.enter("step");
    let mut sums = Vec::new();
    for (axes, parts) in groups {
        let mut s = b.push("squares", Add::same(), &parts);
        if !axes.is_empty() {
            s = b.push("squares", AllReduce { axes }, &[s]);
            b.note("each piece of a split gradient is counted by the rank that has it");
        }
        sums.push(s);
    }
    let total = match &sums[..] {
        [] => b.push_as("squares", Fill { value: 0.0 }, &[], &Type::f32(&[])),
        [one] => *one,
        many => b.push("squares", Add::same(), many),
    };
    let total = match mesh_pipeline(b) {
        None => total,
        Some(axes) => {
            let own = b.push("squares_own", ToPartial { axes }, &[total]);
            let all = b.push("squares", AllReduce { axes }, &[own]);
            b.note("over all stages");
            all
        }
    };
    b.push("grad_norm", Sqrt {}, &[total])
}

/// The atoms of the pipeline, if there is one.
fn mesh_pipeline(b: &Builder) -> Option<AtomSet> {
    b.mesh.axis(PIPELINE)
}
