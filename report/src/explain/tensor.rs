//! `explain tensor:NAME`: how a weight is stored, made ready, how its gradient is reduced, and what
//! the optimizer keeps for it.

use super::trace::Why;
use super::{Answer, facts, price, some, value, words, zero};
use crate::inspect::numbered;
use serde_json::Value as Json;
use shardc_ir::diag::{Diag, Result, count};
use shardc_ir::func::{Func, FuncKind, RoleKind, Value};
use shardc_ir::plan::{Instr, Transfer};
use shardc_ir::text::type_text;
use shardc_ir::weights::{Init, LEAST, Weight};
use std::collections::BTreeMap;

/// Most names suggested for one that is not there.
const MAX_NEAR: usize = 8;

/// True of the name of a parameter, or of a checkpoint's tensor.
pub fn is_one(why: &Why, name: &str) -> bool {
    why.plan.weights.iter().any(|w| w.param == name || w.tensors().any(|t| t == name))
}

/// Explains the parameter of this name, or all that are cut from a checkpoint tensor of this name.
pub fn explain(why: &Why, name: &str) -> Result<Answer> {
    let name = name.trim();
    let all = &why.plan.weights;
    let one = all.iter().find(|w| w.param == name);
    let found: Vec<&Weight> = match one {
        Some(w) => vec![w],
        None => all.iter().filter(|w| w.tensors().any(|t| t == name)).collect(),
    };
    let Some(first) = found.first() else { return Err(unknown(why, name)) };
    if found.len() > 1 {
        let mut a = Answer::new(format!(
            "tensor {name}: {:?}, which is {} parameters",
            first.tensor_shape,
            found.len()
        ));
        let params: Vec<Json> = found.iter().map(|w| facts::of_parameter(why, w).into()).collect();
        a.facts.insert("parameters".into(), params.into());
        let part = |w: &&Weight| {
            format!("{}: {}; shardc explain PLAN tensor:{}", w.param, cut(w), w.param)
        };
        a.part("parts", found.iter().map(part).collect());
        return Ok(a);
    }
    Ok(parameter(why, first))
}

/// Which part of the checkpoint's tensor a parameter is.
fn cut(w: &Weight) -> String {
    match w.part {
        Some(p) => {
            let at = p.place(&(0..p.len)).unwrap_or_default();
            let every = if p.step == 1 { String::new() } else { format!(", 1 in {},", p.step) };
            format!("{}..{}{every} of dim {} of {}", at.start, at.end, p.dim, w.tensor)
        }
        None if w.is_stacked() => {
            let all: Vec<String> = w.tensors().collect();
            format!("{} tensors, one per expert: {} to {}", all.len(), all[0], all[all.len() - 1])
        }
        None => format!("all of {}", w.tensor),
    }
}

fn parameter(why: &Why, w: &Weight) -> Answer {
    let mesh = why.mesh;
    let mut a = Answer::new(format!(
        "parameter {}: {:?}, {} elements",
        w.param,
        w.shape,
        w.shape.iter().product::<usize>()
    ));
    a.facts = facts::of_parameter(why, w);
    let start = match w.init {
        Init::Normal(sd) => format!("normal with standard deviation {sd}"),
        Init::LogOfUniform(bound) => format!("logarithm of uniform from {LEAST} to {bound}"),
        Init::Uniform(bound) => format!("uniform from -{bound} to {bound}"),
        Init::Ones => "ones".into(),
        Init::Zeros => "zeros".into(),
    };
    a.part("from", vec![cut(w), format!("without a checkpoint: {start}")]);
    if let Some((fi, v, t)) = why.stored(&w.param) {
        let whole = t.elements() * t.dtype.bytes();
        let mut l = vec![format!(
            "{}: {} B on a rank of {whole} B",
            type_text(mesh, t),
            t.local_bytes(mesh)
        )];
        l.extend(words::type_lines(mesh, why.func(fi), None, v));
        a.part("stored", l);
        a.part("why", value::reasons(why, fi, v));
        a.part("price", price::of_value(why, fi, v));
        a.part("zero", zero::lines(why, &w.param));
        a.part("ready", ready(why, fi, v, &w.param));
    }
    a.part("gradient", gradient(why, &w.param));
    a.part("optimizer", optimizer(why, &w.param));
    if !zero::cut(why, &w.param).is_empty() {
        a.part("stages", zero::stages(why));
    }
    a
}

/// The ops of `@step_prologue` between the stored parameter and what forward and backward use.
fn ready(why: &Why, fi: usize, v: Value, name: &str) -> Vec<String> {
    let f = why.func(fi);
    let is = |r: &&shardc_ir::func::Port| {
        r.role.as_ref().is_some_and(|r| r.kind == RoleKind::Unsharded && *r.name == *name)
    };
    let Some(end) = f.results.iter().find(is) else { return vec![] };
    let mut lines = vec![];
    let mut at = end.value;
    while let Some(n) = why.maker(fi, at).filter(|_| at != v) {
        lines.insert(0, format!("once per step: {}", words::node(why.mesh, f, n)));
        let Some(&x) = n.ins.first() else { break };
        at = x;
    }
    if lines.is_empty() {
        let gathers = why.s.options.zero == 3 && !zero::cut(why, name).is_empty();
        lines.push(match gathers {
            true => "passed on as it is stored: forward and backward gather it".into(),
            false => "used as it is stored".into(),
        });
    }
    for (class, _) in transfers(why, |t, f| {
        f.results.iter().any(|r| r.value == t.value && is(&r)) && t.microbatch.is_none()
    }) {
        lines.push(format!("sent once per step to the ranks with pp={class}, which use it too"));
    }
    lines
}

/// The other ends of the transfers of a step of which something holds, once each.
fn transfers(why: &Why, is: impl Fn(&Transfer, &Func) -> bool) -> BTreeMap<usize, usize> {
    let all = why.plan.classes.iter().flat_map(|c| &c.step);
    let sends = all.filter_map(|i| match i {
        Instr::Send(t) => Some(t),
        Instr::Call(_) | Instr::Sent { .. } | Instr::PostRecv(_) | Instr::Recv(_) => None,
    });
    let found = sends.filter(|t| is(t, why.func(t.func)));
    found.map(|t| (t.with, t.bytes)).collect()
}

/// Argument of a function with this role.
fn arg(f: &Func, kind: RoleKind, name: &str) -> Option<Value> {
    let is = |r: &shardc_ir::func::Role| r.kind == kind && *r.name == *name;
    f.args.iter().find(|a| a.role.as_ref().is_some_and(is)).map(|a| a.value)
}

/// The gradient of a parameter from all microbatches, before it is reduced over ranks: where it is reduced first.
pub(super) fn gradient_of<'a>(why: &'a Why, name: &str) -> Option<(usize, &'a Func, Value)> {
    let funcs = || why.plan.module.funcs.iter().enumerate();
    let finish = || funcs().filter(|(_, f)| f.kind == FuncKind::OptimizerStep);
    let of_step = || finish().find_map(|(i, f)| Some((i, f, arg(f, RoleKind::Grad, name)?)));
    // What the collective sums that makes it.
    let of_backward = |(i, f): (usize, &'a Func)| {
        let sum = f.results.iter().find(|r| r.is(RoleKind::GradSum, name))?.value;
        let n = f.nodes.iter().find(|n| n.outs.contains(&sum))?;
        let at = n.outs.iter().position(|&o| o == sum)?;
        Some((i, f, *n.ins.get(at)?))
    };
    of_step().or_else(|| funcs().find_map(of_backward))
}

/// Where `@optimizer_step` is given a gradient that has been summed over ranks.
fn gradient_end<'a>(why: &'a Why, name: &str) -> Option<(usize, &'a Func, Value)> {
    let mut all = why.plan.module.funcs.iter().enumerate();
    all.find_map(|(i, f)| Some((i, f, arg(f, RoleKind::GradSum, name)?)))
}

/// The sum over microbatches, and the collectives that reduce it over ranks.
fn gradient(why: &Why, name: &str) -> Vec<String> {
    let Some((mut fi, mut f, v)) = gradient_of(why, name) else {
        return vec!["none: it is not trained".into()];
    };
    let t = f.ty(v);
    let how = match why.plan.settings.microbatches {
        1 => "made by one microbatch".to_string(),
        n => format!("summed over {n} microbatches"),
    };
    let mut lines = vec![format!(
        "{how} as {}, {} B on a rank",
        type_text(why.mesh, t),
        t.local_bytes(why.mesh)
    )];
    let all = numbered(why.plan);
    let mut at = v;
    let next = |f: &Func, at: Value| {
        f.nodes.iter().position(|n| n.ins.contains(&at) && n.op.collective().is_some())
    };
    while let Some(i) = next(f, at) {
        let n = &f.nodes[i];
        let number = all.iter().position(|x| *x == (fi, i)).map_or(0, |p| p + 1);
        let j = n.ins.iter().position(|&x| x == at).unwrap_or(0);
        let (c, to) = (n.op.collective(), n.outs[j]);
        let (kind, atoms) = c.map_or(("", Default::default()), |c| (c.kind(), c.atoms()));
        let with = match n.ins.len() {
            1 => String::new(),
            k => format!(" with {}", count(k - 1, "other", "others")),
        };
        lines.push(format!(
            "then once per step {kind} over {}{with} (collective:{number}) to {}",
            why.mesh.names(atoms, "+"),
            type_text(why.mesh, f.ty(to))
        ));
        at = to;
        // What was summed before the end goes on there.
        let ends = f.kind.is_looped();
        if let Some(end) = gradient_end(why, name).filter(|_| ends) {
            (fi, f, at) = end;
        }
    }
    for a in &f.args {
        let Some(role) = a.role.as_ref().filter(|r| *r.name == *name) else { continue };
        if let RoleKind::GradFrom(class) = role.kind {
            let bytes = f.ty(a.value).local_bytes(why.mesh);
            lines.insert(
                1,
                format!("with the gradient of the ranks with pp={class}, {bytes} B received once per step"),
            );
        }
    }
    if lines.len() == 1 {
        lines.push(match &zero::reduced(why, name)[..] {
            [] => "no rank needs another's: no collective".into(),
            all => {
                let all: Vec<String> = all.iter().map(|n| format!("collective:{n}")).collect();
                format!("summed over ranks by {}; no other collective", all.join(", "))
            }
        });
    }
    lines
}

fn optimizer(why: &Why, name: &str) -> Vec<String> {
    let mut lines = vec![];
    let mut sum = 0;
    for f in &why.plan.module.funcs {
        for a in &f.args {
            let Some(r) = a.role.as_ref().filter(|r| *r.name == *name) else { continue };
            let RoleKind::State(state) = r.kind else { continue };
            let t = f.ty(a.value);
            sum += t.local_bytes(why.mesh);
            lines.push(format!(
                "{state}: {}, {} B on a rank",
                type_text(why.mesh, t),
                t.local_bytes(why.mesh)
            ));
        }
    }
    if lines.len() > 1 {
        lines.push(format!("{sum} B in all"));
    }
    if lines.is_empty() { vec!["keeps nothing for it".into()] } else { lines }
}

fn unknown(why: &Why, name: &str) -> Diag {
    let all = &why.plan.weights;
    let stem = name.trim_end_matches(".weight").rsplit('.').next().unwrap_or(name);
    let near: Vec<String> = all
        .iter()
        .map(|w| w.param.clone())
        .filter(|n| !stem.is_empty() && n.contains(stem))
        .collect();
    let shown = if near.is_empty() { all.iter().map(|w| w.param.clone()).collect() } else { near };
    Diag::new("unknown-tensor", format!("no tensor of the plan is called `{name}`"))
        .at(format!("tensor:{name}"))
        .help(format!(
            "the plan has {}, for example {}",
            count(all.len(), "tensor", "tensors"),
            some(shown, MAX_NEAR).join(", ")
        ))
}
