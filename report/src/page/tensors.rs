//! What is alive at the peak, and how each weight is cut.

use crate::pictures::step::gaps;
use crate::report::Experts;
use serde_json::{Value as Json, json};
use shardc_ir::func::{Func, RoleKind};
use shardc_ir::mesh::{AtomSet, Mesh};
use shardc_ir::plan::{Alive, MemoryClass};
use shardc_ir::text::type_text;
use shardc_ir::types::Type;
use shardc_plans::stored::Stored;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Boxes of a treemap; the smallest beyond these are one.
const BOXES: usize = 160;

/// A name without the number of its layer: `model.layers.*.mlp.up_proj.weight`.
fn of_all_layers(name: &str) -> (String, Option<usize>) {
    let mut layer = None;
    let part = |p: &str| match p.parse::<usize>() {
        Ok(n) if layer.is_none() => {
            layer = Some(n);
            "*".to_string()
        }
        _word => p.to_string(),
    };
    let parts: Vec<String> = name.split('.').map(part).collect();
    (parts.join("."), layer)
}

/// What a value is called for people: the parameter it belongs to, or its own name, of all layers.
fn called(f: &Func, a: &Alive) -> String {
    let ports = f.args.iter().chain(&f.results);
    let mut roles = ports.filter(|p| p.value == a.value).filter_map(|p| p.role.as_ref());
    let of_parameter = roles.find_map(|r| {
        let what: Cow<str> = match r.kind {
            // Of bf16 weights the f32 numbers that the optimizer works on.
            RoleKind::Param if a.class == MemoryClass::Optimizer => " master copy".into(),
            RoleKind::Param | RoleKind::Unsharded => "".into(),
            RoleKind::Grad | RoleKind::GradSum | RoleKind::GradFrom(_) => " gradient".into(),
            RoleKind::State(name) => format!(" {name}").into(),
            _other => return None,
        };
        Some(format!("{}{what}", of_all_layers(&r.name).0))
    });
    of_parameter.unwrap_or_else(|| {
        let n = f.name(a.value);
        let layer = if n.layer.is_some() { "l*." } else { "" };
        format!("%{}{layer}{}", if n.grad { "d_" } else { "" }, n.hint)
    })
}

/// All values alive at the peak of a class: equal ones of all layers and microbatches are one row. With the
/// gaps, which are the last row, they sum to the peak.
pub fn alive(s: &Stored, class: usize) -> Json {
    let (mesh, memory) = (&s.plan.module.mesh, &s.plan.classes[class].memory);
    let mut rows: BTreeMap<(usize, String, String), (usize, usize)> = BTreeMap::new();
    for a in &memory.alive {
        let f = &s.plan.module.funcs[a.func];
        let key = (a.class as usize, called(f, a), type_text(mesh, f.ty(a.value)));
        let one = rows.entry(key).or_default();
        *one = (one.0 + a.copies, one.1 + a.bytes);
    }
    let kind = |class: usize| {
        let all = memory.at_peak.iter().map(|x| x.0).chain(memory.alive.iter().map(|a| a.class));
        let found = all.into_iter().find(|k| *k as usize == class);
        found.map_or(Json::Null, |k| json!(k))
    };
    let mut sorted: Vec<_> = rows.into_iter().collect();
    sorted.sort_by(|a, b| b.1.1.cmp(&a.1.1).then_with(|| a.0.cmp(&b.0)));
    let (mut out, mut rest) = (vec![], BTreeMap::<usize, (usize, usize)>::new());
    for (i, ((class, name, ty), (count, bytes))) in sorted.into_iter().enumerate() {
        if i < BOXES {
            out.push(json!({
                "kind": kind(class), "name": name, "type": ty, "count": count, "bytes": bytes,
            }));
        } else {
            let one = rest.entry(class).or_default();
            *one = (one.0 + count, one.1 + bytes);
        }
    }
    for (class, (count, bytes)) in rest {
        let name = "smaller ones";
        out.push(json!({
            "kind": kind(class), "name": name, "type": null, "count": count, "bytes": bytes,
        }));
    }
    let gaps = gaps(memory);
    out.push(json!({
        "kind": "gaps", "name": "gaps between tensors", "type": null, "count": 1, "bytes": gaps,
    }));
    out.into()
}

/// How a parameter, its gradient or its state lies on the ranks: bytes of one, and per dim its size and the
/// axes that cut it, ep among them for a stack of experts.
fn piece(mesh: &Mesh, t: &Type, (param, experts): (&str, &Experts)) -> Json {
    let dim = |(i, d): (usize, &shardc_ir::types::Dim)| {
        let set = d.atoms.set();
        let rest = experts.beside(param, t.dims.len(), i, set);
        let ep = rest.map(|rest| json!(["ep", mesh.ways(set.minus(rest))]));
        let others =
            d.atoms.iter().filter(|a| rest.is_none_or(|rest| AtomSet::one(*a).within(rest)));
        let named = others.map(|a| json!([mesh.names(AtomSet::one(a), "*"), mesh.size(a)]));
        let axes: Vec<Json> = ep.into_iter().chain(named).collect();
        json!({ "size": d.size, "cut": axes })
    };
    json!({
        "dtype": t.dtype.name(),
        "text": type_text(mesh, t),
        "dims": t.dims.iter().enumerate().map(dim).collect::<Vec<_>>(),
        "sum": mesh.names(t.sum, "+"),
        "bytes": t.local_bytes(mesh),
    })
}

/// Every kind of weight of a class: as it is stored, in use, its gradient and state. Those of several layers
/// that are alike are one.
pub fn weights(s: &Stored, class: usize) -> Json {
    let (mesh, c) = (&s.plan.module.mesh, &s.plan.classes[class]);
    let experts = Experts::of(&s.plan);
    let mut all: BTreeMap<&str, [Option<&Type>; 4]> = BTreeMap::new();
    for f in c.funcs.iter().map(|&f| &s.plan.module.funcs[f]) {
        for port in f.args.iter().chain(&f.results) {
            let Some(role) = &port.role else { continue };
            let at = match role.kind {
                RoleKind::Param => 0,
                RoleKind::Unsharded => 1,
                RoleKind::Grad | RoleKind::GradSum => 2,
                RoleKind::State(_) => 3,
                _other => continue,
            };
            let t = f.ty(port.value);
            let known = &mut all.entry(&role.name).or_default()[at];
            // A gradient is a sum still to be taken where backward makes it: that is what lies there.
            let larger = known.is_none_or(|k| k.local_bytes(mesh) < t.local_bytes(mesh));
            if known.is_none() || (at == 2 && larger) {
                *known = Some(t);
            }
        }
    }
    let mut rows: BTreeMap<(String, String), (Json, Vec<usize>)> = BTreeMap::new();
    for (name, [stored, ready, grad, state]) in all {
        let Some(stored) = stored else { continue };
        let weight = s.plan.weights.iter().find(|w| w.param == name);
        let (pattern, layer) = of_all_layers(name);
        let of = (name, &experts);
        let out = json!({
            "name": pattern,
            "shape": weight.map(|w| w.shape.clone()),
            "tp_dim": weight.and_then(|w| w.tp_dim),
            "stored": piece(mesh, stored, of),
            "in_use": ready.map(|t| piece(mesh, t, of)),
            "gradient": grad.map(|t| piece(mesh, t, of)),
            "state": state.map(|t| piece(mesh, t, of)),
        });
        let (_, layers) = rows.entry((pattern, out.to_string())).or_insert((out, vec![]));
        layers.extend(layer);
    }
    let one = |(_, (mut out, layers)): (_, (Json, Vec<usize>))| {
        out["layers"] = layers.into();
        out
    };
    rows.into_iter().map(one).collect::<Vec<_>>().into()
}
