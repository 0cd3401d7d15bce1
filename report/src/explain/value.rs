//! `explain %value`: its type in words, who asked for it, who makes and uses it, where it lies.

use super::trace::Why;
use super::{Answer, facts, price, some, words};
use shardc_ir::diag::{Diag, Result};
use shardc_ir::func::{Func, FuncKind, Value};
use shardc_ir::text::type_text;
use shardc_ir::types::State;
use std::collections::{BTreeSet, HashSet};

/// Most users that are shown.
const MAX_USERS: usize = 8;
/// Most names suggested for one that is not there.
const MAX_NEAR: usize = 8;

/// Functions in which a name is looked for first.
const FIRST: [FuncKind; 5] = [
    FuncKind::Forward,
    FuncKind::Backward,
    FuncKind::Weight,
    FuncKind::OptimizerStep,
    FuncKind::StepPrologue,
];

fn find(f: &Func, name: &str) -> Option<Value> {
    (0..f.values.len() as u32).map(Value).find(|&v| f.name(v).to_string()[1..] == *name)
}

/// The name that a folded one, as `inspect` prints it for all layers, has in layer `i`: `l{i}.norm` or `l{i-1}.out`.
fn in_layer(name: &str, i: i64) -> Option<String> {
    let (mut out, mut rest) = (String::new(), name);
    while let Some((before, hole)) = rest.split_once("{i") {
        let (offset, after) = hole.split_once('}')?;
        let offset: i64 = if offset.is_empty() { 0 } else { offset.parse().ok()? };
        let layer = i.checked_add(offset).filter(|&n| n >= 0)?;
        out.push_str(&format!("{before}{layer}"));
        rest = after;
    }
    Some(out + rest)
}

/// The name of a value: of a folded one, that of the first layer that has it, and what is said of the others.
fn unfolded(why: &Why, name: &str) -> (String, String) {
    if !name.contains("{i") {
        return (name.into(), String::new());
    }
    let funcs = &why.plan.module.funcs;
    let all: HashSet<String> =
        funcs.iter().flat_map(|f| f.values.iter().map(|v| v.name.to_string())).collect();
    let layers = (0..all.len() as i64).filter_map(|i| Some((i, in_layer(name, i)?)));
    let found: Vec<(i64, String)> = layers.filter(|n| all.contains(&format!("%{}", n.1))).collect();
    let Some(own) = found.first().map(|f| f.1.clone()) else { return (name.into(), String::new()) };
    // Of `{i-1}` that of the value, and not i.
    let digit = |c: &char| c.is_ascii_digit();
    let layer: String = own.chars().skip_while(|c| !digit(c)).take_while(digit).collect();
    // Of every layer, what its value is in the first function that has it.
    let types: HashSet<String> = found
        .iter()
        .filter_map(|(_, n)| {
            let mut of = funcs.iter().filter_map(|f| Some(f.ty(find(f, n)?)));
            of.next().map(|t| type_text(why.mesh, t))
        })
        .collect();
    let same = if types.len() == 1 { "the same in all" } else { "others have other types" };
    (own, format!(" (layer {layer} of {}, {same})", found.len()))
}

/// Explains a value; `what` is `%name`, `name` or `@func %name`, folded or not.
pub fn explain(why: &Why, what: &str) -> Result<Answer> {
    let (func, name) = match what.strip_prefix('@') {
        Some(rest) => {
            rest.split_once(|c: char| c == '%' || c.is_whitespace()).unwrap_or((rest, ""))
        }
        None => ("", what),
    };
    let func = func.trim();
    let (name, layers) = unfolded(why, name.trim().trim_start_matches('%'));
    let name = &*name;
    let funcs = &why.plan.module.funcs;
    let order = |f: &&(usize, Value)| {
        FIRST.iter().position(|k| *k == funcs[f.0].kind).unwrap_or(FIRST.len())
    };
    let here = |(fi, f): (usize, &Func)| Some((fi, find(f, name)?));
    let used = |&(fi, v): &(usize, Value)| why.maker(fi, v).is_some() || why.role(fi, v).is_some();
    let all: Vec<(usize, Value)> = funcs.iter().enumerate().filter_map(here).filter(used).collect();
    let asked = all.iter().filter(|x| func.is_empty() || funcs[x.0].name == func);
    // Where it is made says more than where it is handed on.
    let best = asked.min_by_key(|x| (why.maker(x.0, x.1).is_none(), order(x)));
    let &(fi, v) = best.ok_or_else(|| unknown(why, what, name))?;
    let (f, mesh) = (why.func(fi), why.mesh);
    let maker = why.maker(fi, v);
    let ty = type_text(mesh, f.ty(v));
    let mut a = Answer::new(format!("{}{layers} in @{}: {ty}", f.name(v), f.name));
    a.facts = facts::of_value(why, fi, v);
    a.part("type", words::type_lines(mesh, f, maker, v));
    a.part("why", reasons(why, fi, v));
    a.part("price", price::of_value(why, fi, v));
    a.part(
        "made by",
        match maker {
            Some(n) => {
                let scope = &f.scope_info(n.scope).path;
                let mut l = vec![words::node(mesh, f, n)];
                l.extend((!scope.is_empty()).then(|| format!("in {scope}")));
                l.extend(n.note.as_ref().map(|n| format!("note: {n}")));
                l
            }
            None => why
                .role(fi, v)
                .map(|r| format!("an argument: {}", words::role(r.kind, &r.name)))
                .into_iter()
                .collect(),
        },
    );
    a.part("used by", some(users(why, fi, v), MAX_USERS));
    a.part("memory", words::memory(why.plan, fi, maker, v));
    let others = all.iter().filter(|x| x.0 != fi);
    a.part(
        "also in",
        others
            .map(|&(i, o)| {
                let how = why.role(i, o).map(|r| format!(", as {}", words::role(r.kind, &r.name)));
                format!(
                    "@{}{}: shardc explain PLAN '@{} {}'",
                    funcs[i].name,
                    how.unwrap_or_default(),
                    funcs[i].name,
                    f.name(v)
                )
            })
            .collect(),
    );
    Ok(a)
}

/// For every axis over which the value is not simply the same: the chain of causes.
pub fn reasons(why: &Why, fi: usize, v: Value) -> Vec<String> {
    let (f, mesh) = (why.func(fi), why.mesh);
    let mut out = vec![];
    for (atoms, state) in words::states(mesh, f.ty(v)) {
        let Some(atom) = atoms.iter().next().filter(|_| state != State::Invariant) else {
            continue;
        };
        let what = match state {
            State::Sharded(d) => format!("{} over", words::dim_name(f, why.maker(fi, v), v, d)),
            _ => "over".into(),
        };
        out.push(format!("{what} {}:", mesh.names(atoms, "*")));
        let chain = why.chain(fi, v, atom);
        out.extend(chain.into_iter().map(|l| format!("  {l}")));
    }
    if why.s.options.auto {
        out.insert(0, "chosen by price, with all else (--shard auto)".into());
    } else if out.is_empty() {
        out.push("nobody asked for a split of it, and no operand brought one".into());
    }
    out
}

/// Lines that use a value in its function, and what it is handed on as.
pub fn users(why: &Why, fi: usize, v: Value) -> Vec<String> {
    let f = why.func(fi);
    let nodes = f.nodes.iter().filter(|n| n.ins.contains(&v));
    let mut out: Vec<String> = nodes.map(|n| words::node(why.mesh, f, n)).collect();
    for r in f.results.iter().filter(|r| r.value == v) {
        let role = r.role.as_ref().map(|r| words::role(r.kind, &r.name));
        out.push(format!("a result of @{}: {}", f.name, role.unwrap_or_default()));
    }
    out
}

fn unknown(why: &Why, what: &str, name: &str) -> Diag {
    let d = Diag::new("unknown-value", format!("no value is called `%{name}`")).at(what);
    let stem = name.rsplit('.').find(|p| p.parse::<u32>().is_err()).unwrap_or(name);
    let all = why.plan.module.funcs.iter().flat_map(|f| &f.values).map(|v| v.name.to_string());
    let all: BTreeSet<String> = all.collect();
    // The same name of another layer first, then one that begins alike.
    let last = |n: &str| n.rsplit('.').next().unwrap_or(n).trim_start_matches('%').to_string();
    let far = |n: &String| (last(n) != stem, !last(n).starts_with(stem), n.len());
    let mut near: Vec<String> =
        all.into_iter().filter(|n| !stem.is_empty() && n.contains(stem)).collect();
    near.sort_by_key(far);
    near.truncate(MAX_NEAR);
    let funcs: Vec<&str> = why.plan.module.funcs.iter().map(|f| &*f.name).collect();
    let d = match near[..] {
        [] => d,
        _ => d.help(format!("names like it: {}", near.join(", "))),
    };
    let d = match what.parse::<usize>() {
        Ok(n) => d.help(format!("for a collective write collective:{n}")),
        Err(_) => d,
    };
    d.help(format!(
        "use a name as `shardc inspect` prints it; `@{} %name` chooses one of the {} functions",
        funcs.join("|@"),
        funcs.len()
    ))
}
