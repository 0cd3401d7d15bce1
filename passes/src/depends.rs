//! Which values depend on parameters, and so have gradients.

use shardc_ir::func::{Func, RoleKind, Value, ValueMap};
use shardc_ir::ops::{Gradient, Kind};
use shardc_ir::weights::Weight;
use std::collections::BTreeMap;

/// Values whose gradient is needed: those that depend on a trained parameter.
pub(crate) fn active(f: &Func, frozen: &dyn Fn(&str) -> bool) -> ValueMap<bool> {
    let mut on = f.per_value(false);
    for a in &f.args {
        let role = a.role.as_ref();
        on[a.value] = role.is_some_and(|r| {
            matches!(r.kind, RoleKind::Param | RoleKind::Unsharded) && !frozen(&r.name)
        });
    }
    for n in &f.nodes {
        let stops = n.op.facts().gradient == Gradient::Stops;
        let any = !stops && n.ins.iter().any(|v| on[v]);
        for o in &n.outs {
            on[o] = any && f.ty(*o).dtype.is_float();
        }
    }
    on
}

/// Values that depend on a parameter.
pub(crate) fn weighted(f: &Func) -> ValueMap<bool> {
    let mut on = f.per_value(false);
    for a in &f.args {
        let kind = a.role.as_ref().map(|r| r.kind);
        on[a.value] = matches!(kind, Some(RoleKind::Param | RoleKind::Unsharded));
    }
    for n in &f.nodes {
        let any = n.ins.iter().any(|v| on[v]);
        n.outs.iter().for_each(|o| on[o] = any);
    }
    on
}

/// Shares of the multiplications with weights, and of attention, for which backward computes gradients.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Backward {
    /// Of weights.
    pub weights: f64,
    /// Of what is multiplied by them.
    pub inputs: f64,
    /// Of attention between its products.
    pub attention: f64,
}

/// What backward computes of a model before any pass, of whose experts a token uses this share.
pub fn backward(
    f: &Func,
    weights: &[Weight],
    frozen: &dyn Fn(&str) -> bool,
    used: f64,
) -> Backward {
    let by_name: BTreeMap<&str, &Weight> = weights.iter().map(|w| (&*w.param, w)).collect();
    let on = active(f, frozen);
    // Values made of parameters alone: by how many elements of theirs a token is multiplied.
    let mut made: ValueMap<Option<f64>> = f.per_value(None);
    for a in &f.args {
        let param = a.role.as_ref().filter(|r| r.kind == RoleKind::Param);
        made[a.value] = param.map(|r| {
            let experts = by_name.get(&*r.name).is_some_and(|w| w.experts.is_some());
            if experts { used } else { 1.0 }
        });
    }
    let elements = |v: Value| f.ty(v).dims.iter().map(|d| d.size as f64).product::<f64>();
    let mut out = [(0.0, 0.0); 3];
    let mut count = |i: usize, n: f64, needed: bool| {
        out[i].0 += if needed { n } else { 0.0 };
        out[i].1 += n;
    };
    for n in &f.nodes {
        if n.op.facts().kind == Kind::Attention {
            count(2, 1.0, n.ins.iter().any(|v| on[v]));
        }
        let of_weights = n.ins.iter().filter_map(|&v| Some((v, made[v]?)));
        let heavy = n.op.is_heavy() && n.op.facts().kind != Kind::Attention;
        for (v, part) in of_weights.clone().filter(|_| heavy) {
            let size = part * elements(v);
            count(0, size, on[v]);
            count(1, size, n.ins.iter().any(|x| *x != v && on[x]));
        }
        let all = of_weights.clone().count() == n.ins.len();
        let part = of_weights.map(|w| w.1).reduce(f64::max).filter(|_| all);
        n.outs.iter().for_each(|&o| made[o] = part);
    }
    let [weights, inputs, attention] =
        out.map(|(some, all)| if all > 0.0 { some / all } else { 1.0 });
    Backward { weights, inputs, attention }
}
