//! Which values depend on parameters, and so have gradients.

use shardc_ir::func::{Func, RoleKind, ValueMap};
use shardc_ir::ops::Gradient;

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
