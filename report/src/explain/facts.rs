//! What is explained, as data: `facts` of the JSON output.

use super::trace::Why;
use super::words::{self, states};
use crate::report::{Experts, phase_of};
use serde_json::{Map, Value as Json, json};
use shardc_ir::func::{Func, Node, Role, RoleKind, Value};
use shardc_ir::ops::LayoutChange;
use shardc_ir::plan::RankClass;
use shardc_ir::text::type_text;
use shardc_ir::types::Type;
use shardc_ir::weights::Weight;

/// A type: its text, the sizes of the whole and of the largest piece, bytes of a rank, and per axis the state.
fn ty(why: &Why, t: &Type) -> Json {
    let mesh = why.mesh;
    let local: Vec<usize> = (0..t.rank()).map(|d| t.chunk(mesh, d)).collect();
    let over = states(mesh, t).into_iter();
    let over: Vec<Json> = over
        .map(|(atoms, state)| {
            json!({
                "axis": mesh.names(atoms, "*"), "ranks": mesh.ways(atoms), "state": state.to_string(),
            })
        })
        .collect();
    json!({
        "text": type_text(mesh, t), "dtype": t.dtype.name(), "shape": t.sizes().to_vec(), "local_shape": local,
        "local_bytes": t.local_bytes(mesh), "over": over,
    })
}

fn role(r: &Role) -> Json {
    json!({ "kind": r.kind.name(), "of": *r.name })
}

fn node(why: &Why, f: &Func, n: &Node) -> Json {
    json!({
        "op": n.op.mnemonic(), "scope": &*f.scope_info(n.scope).path, "text": words::node(why.mesh, f, n),
        "operands": n.ins.iter().map(|&v| f.name(v).to_string()).collect::<Vec<_>>(),
        "results": n.outs.iter().map(|&v| f.name(v).to_string()).collect::<Vec<_>>(),
    })
}

/// Those of a value of a function.
pub fn of_value(why: &Why, fi: usize, v: Value) -> Map<String, Json> {
    let f = why.func(fi);
    let users = f.nodes.iter().filter(|n| n.ins.contains(&v));
    let results = f.results.iter().filter(|r| r.value == v).filter_map(|r| r.role.as_ref());
    map(json!({
        "value": f.name(v).to_string(), "function": &*f.name, "type": ty(why, f.ty(v)),
        "made_by": why.maker(fi, v).map(|n| node(why, f, n)),
        "argument": why.role(fi, v).map(role),
        "used_by": users.map(|n| node(why, f, n)).collect::<Vec<_>>(),
        "result": results.map(role).collect::<Vec<_>>(),
    }))
}

/// Those of the collective of this number.
pub fn of_collective(
    why: &Why,
    number: usize,
    (fi, n): (usize, &Node),
    c: &dyn LayoutChange,
) -> Map<String, Json> {
    let (mesh, f, atoms) = (why.mesh, why.func(fi), c.atoms());
    let pairs = n.ins.iter().zip(&n.outs);
    let sent: f64 = pairs.map(|(&x, &y)| c.ring_bytes(mesh, f.ty(x), f.ty(y))).sum();
    let calls = why.plan.times(fi);
    let types = |all: &[Value]| all.iter().map(|&v| ty(why, f.ty(v))).collect::<Vec<_>>();
    map(json!({
        "collective": number, "kind": c.kind(), "axis": Experts::of(why.plan).axis(mesh, f, n, atoms),
        "function": &*f.name, "phase": phase_of(f.kind), "node": node(why, f, n), "note": n.note.as_deref(),
        "ranks": mesh.ways(atoms), "groups": mesh.ranks() / mesh.ways(atoms),
        "first_group": mesh.group(atoms, 0),
        "sent_bytes": sent, "calls": calls, "step_bytes": sent * calls as f64,
        "from": types(&n.ins), "to": types(&n.outs), "params": super::zero::params(f, n),
    }))
}

/// Those of a parameter.
pub fn of_parameter(why: &Why, w: &Weight) -> Map<String, Json> {
    let funcs = &why.plan.module.funcs;
    let args = || funcs.iter().flat_map(|f| f.args.iter().map(move |a| (f, a)));
    let own = |a: &shardc_ir::func::Port| a.role.clone().filter(|r| *r.name == *w.param);
    let with = |is: &dyn Fn(RoleKind) -> bool| {
        let all =
            args().filter_map(|(f, a)| own(a).filter(|r| is(r.kind)).map(|r| (r, f.ty(a.value))));
        let mut seen: Vec<(RoleKind, &Type)> = vec![];
        all.for_each(|(r, t)| {
            if !seen.iter().any(|s| s.0 == r.kind) {
                seen.push((r.kind, t));
            }
        });
        seen
    };
    let state: Map<String, Json> = with(&|k| matches!(k, RoleKind::State(_)))
        .into_iter()
        .filter_map(|(k, t)| match k {
            RoleKind::State(name) => Some((name.to_string(), ty(why, t))),
            _ => None,
        })
        .collect();
    let gradient = super::tensor::gradient_of(why, &w.param);
    let gradient = gradient.map(|(_, f, v)| ty(why, f.ty(v)));
    map(json!({
        "parameter": w.param, "shape": w.shape, "tensors": w.tensors().collect::<Vec<_>>(),
        "stored": why.stored(&w.param).map(|s| ty(why, s.2)),
        "zero_cuts_over": why.mesh.names(super::zero::cut(why, &w.param), "*"),
        "gradient": gradient, "optimizer": state,
    }))
}

/// Those of the memory of a rank class.
pub fn of_memory(class: usize, c: &RankClass) -> Json {
    let m = &c.memory;
    let kinds: Map<String, Json> =
        m.at_peak.iter().map(|(k, n)| (k.name().to_string(), (*n).into())).collect();
    let live = m.live_at_peak.iter();
    let live: Vec<Json> =
        live.map(|(v, k, n)| json!({ "value": v, "class": k.name(), "bytes": n })).collect();
    json!({ "class": class, "peak_bytes": m.peak_bytes, "at_peak": kinds, "largest": live })
}

/// The fields of an object.
pub fn map(all: Json) -> Map<String, Json> {
    match all {
        Json::Object(m) => m,
        _ => Map::new(),
    }
}
