//! The program of an import: what of the draft is used, with names of values, weights, and the residual
//! stream marked.

use super::lower::{Lower, Param};
use super::names;
use super::parts;
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Fill, Func, Module, Name, Node, Port, Role, RoleKind, Value};
use shardc_ir::maps::HashMap;
use shardc_ir::ops::Op;
use shardc_ir::plan::Mode;
use shardc_ir::source::{Source, vocabulary};
use shardc_ir::weights::{Init, Weight};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A loss that is made within a microbatch, of a model that has labels.
const MADE: &str = "made_loss";

/// The program, in a mode: to train it has the loss, if the archive has one.
///
/// # Errors
/// `merged-parameters` for a parameter of two modules that is not tied.
pub(super) fn source(l: &mut Lower, mode: Mode) -> Result<Source> {
    l.params.iter().try_for_each(unmerged)?;
    let mut results = vec![];
    if let Some(value) = l.loss.filter(|_| mode == Mode::Train) {
        // Of a model with labels the loss by that name is divided by their count.
        let name = if l.counted || l.scored.is_none() { "loss" } else { MADE };
        results.push(Port { value, role: Some(Role::new(RoleKind::Sum, name)) });
        let added = l.added.map(|value| Port { value, role: Some(Role::new(RoleKind::Sum, MADE)) });
        results.extend(added);
    }
    if let Some(value) = l.logits {
        results.push(Port { value, role: Some(Role::new(RoleKind::Output, l.shown)) });
    }
    l.draft.results = results;
    l.draft.drop_dead();
    if l.raise.parts {
        parts::cut(l);
    }
    let (f, mut weights) = rebuilt(l);
    let tokens = f.args.iter().find(|a| a.fills(Fill::Tokens)).map(|a| a.value);
    begin(&f, &mut weights);
    names::split_weights(&f, &mut weights, tokens);
    let sequence = stream(&f, tokens);
    let vocab = vocabulary(&f);
    let module = Module { funcs: vec![f], ..Module::default() };
    Ok(Source { module, weights, sequence, vocab, updates: String::new() })
}

/// Refuses a parameter that modules of their own share although nothing ties them: an exporter that merges
/// equal tensors makes such, and training would tie them.
fn unmerged(p: &Param) -> Result<()> {
    let within = |a: &str, b: &str| {
        a == b || a.is_empty() || b.strip_prefix(a).is_some_and(|rest| rest.starts_with('.'))
    };
    let own = |scope: &&Arc<str>| {
        p.names.iter().any(|n| {
            let (module, _) = names::module(n);
            within(module, scope) || within(scope, module)
        })
    };
    let Some(other) = p.scopes.iter().find(|s| !own(s)).filter(|_| p.scopes.len() > 1) else {
        return Ok(());
    };
    let first = p.scopes.iter().find(|s| *s != other);
    Err(Diag::new(
        "merged-parameters",
        format!("`{}` is also the parameter of `{other}`", p.names[0]),
    )
    .at(first.map_or("", |s| s).to_string())
    .rule("a parameter belongs to one module, or is tied under a name in each")
    .why("the archive has one name for it, and training would keep both equal")
    .help("if they are tied: export with strict=False, which keeps a name in each module")
    .help("if not: export with torch.export.export, which merges no equal tensors"))
}

/// The draft's live nodes in a function of their own, so that names have no holes.
fn rebuilt(l: &Lower) -> (Func, Vec<Weight>) {
    let d = &l.draft;
    let mut f = Func::new("model");
    let mut map: HashMap<Value, Value> = HashMap::default();
    let used: BTreeSet<Value> = d
        .nodes
        .iter()
        .flat_map(|n| n.ins.iter().copied())
        .chain(d.results.iter().map(|r| r.value))
        .collect();
    let mut weights = vec![];
    let mut params: Vec<&Param> = l.params.iter().filter(|p| used.contains(&p.value)).collect();
    // Parts stand where their whole does.
    let place = |p: &Param| l.params.iter().position(|q| q.names[0] == p.names[0]);
    params.sort_by_key(|p| (place(p), p.part.map(|x| x.0)));
    for p in params {
        let (module, _) = names::module(&p.names[0]);
        let scope = f.scope(&super::lower::clean(module));
        let layer = f.scope_info(scope).layer;
        let mut hint = names::param_hint(&p.names[0]);
        let ty = d.ty(p.value).clone();
        let mut w = Weight::plain(&p.names[0], &ty.sizes());
        if let Some((i, part)) = p.part {
            hint += &format!("_{i}");
            w.param += &format!(".{i}");
            w.part = Some(part);
            let whole = l.params.iter().find(|q| q.part.is_none() && q.names[0] == p.names[0]);
            w.tensor_shape = whole.map_or(w.tensor_shape, |q| d.ty(q.value).sizes().to_vec());
        }
        let name = Name { grad: false, layer, hint: hint.into(), dup: 0 };
        let role = Some(Role::new(RoleKind::Param, w.param.as_str()));
        map.insert(p.value, f.arg(ty, name, role));
        weights.push(w);
    }
    // As the table of fillings has them: tokens, labels, positions, then columns.
    let mut all: Vec<_> = l.inputs.iter().filter(|i| used.contains(&i.1)).collect();
    all.sort_by_key(|i| i.0.kind.input().map(|own| own.fill));
    for (role, v) in all {
        let hint = super::lower::clean(&role.name).replace(['.', '-'], "_");
        let name = Name { grad: false, layer: None, hint: hint.into(), dup: 0 };
        let arg = f.arg(d.ty(*v).clone(), name, Some(role.clone()));
        map.insert(*v, arg);
    }
    for n in &d.nodes {
        let path = d.scope_info(n.scope).path.clone();
        let scope = f.scope(&path);
        let layer = f.scope_info(scope).layer;
        let outs: Vec<Value> = n
            .outs
            .iter()
            .map(|&o| {
                let hint = hint(&n.op, &path, &d.name(o).hint);
                let name = Name { grad: false, layer, hint: hint.into(), dup: 0 };
                let v = f.value(d.ty(o).clone(), name);
                map.insert(o, v);
                v
            })
            .collect();
        let ins: Vec<Value> = n.ins.iter().map(|v| map[v]).collect();
        let mut made = Node::new(n.op.clone(), &ins, &outs, scope);
        made.note.clone_from(&n.note);
        f.nodes.push(made);
    }
    let result = |r: &Port| Port { value: map[&r.value], role: r.role.clone() };
    f.results = d.results.iter().map(result).collect();
    (f, weights)
}

/// What a value is called: the result of a linear after its module.
fn hint(op: &Op, scope: &str, own: &str) -> String {
    let word = names::word(scope);
    match (op, own) {
        (Op::Dot(_), "linear") if !word.is_empty() => match word.strip_suffix("_proj") {
            Some(short) => short.to_string(),
            None => format!("{word}_out"),
        },
        _ => own.to_string(),
    }
}

/// How parameters begin, by what they are used for, where there are no numbers of them.
fn begin(f: &Func, weights: &mut [Weight]) {
    for (a, w) in f.args.iter().zip(weights).filter(|x| x.1.shape.len() == 1) {
        let adds = |n: &Node| matches!(n.op, Op::Add(_)) && n.ins.contains(&a.value);
        // A factor whose product is added to what it multiplies stands for 1 more.
        let around = f.nodes.windows(2).any(|p| {
            let [m, s] = p else { return false };
            let is = matches!((&m.op, &s.op), (Op::Mul(_), Op::Add(_))) && m.ins.contains(&a.value);
            let both = |v: Value| s.ins.contains(&v);
            is && m.ins.iter().any(|&v| v != a.value && both(v)) && both(m.outs[0])
        });
        w.init = if around || f.nodes.iter().any(adds) { Init::Zeros } else { Init::Ones };
    }
}

/// The residual stream: the embedding of tokens with what is done to it first, and every sum with it.
fn stream(f: &Func, tokens: Option<Value>) -> Vec<(Value, usize)> {
    let takes = |n: &&Node| matches!(n.op, Op::Take(_)) && Some(n.ins[1]) == tokens;
    let Some(first) = f.nodes.iter().find(takes) else { return vec![] };
    let mut at = first.outs[0];
    let ty = f.ty(at).clone();
    if ty.rank() != 3 {
        return vec![];
    }
    // Factors and positions come before the first block.
    loop {
        let mut users = f.nodes.iter().filter(|n| n.ins.contains(&at));
        match (users.next(), users.next()) {
            (Some(n), None)
                if matches!(n.op, Op::Scale(_) | Op::Add(_)) && *f.ty(n.outs[0]) == ty =>
            {
                at = n.outs[0];
            }
            _ => break,
        }
    }
    let mut all = vec![(at, 1)];
    let mut seen = BTreeSet::from([at]);
    for n in &f.nodes {
        let Op::Add(a) = &n.op else { continue };
        let plain = a.rule == shardc_ir::attr::Broadcast::SAME && *f.ty(n.outs[0]) == ty;
        if plain && n.ins.iter().any(|v| seen.contains(v)) {
            seen.insert(n.outs[0]);
            all.push((n.outs[0], 1));
        }
    }
    all
}
