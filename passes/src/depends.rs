//! Which values depend on parameters, and so have gradients.

use shardc_ir::func::{Func, RoleKind};
use shardc_ir::ops::Gradient;

/// Values whose gradient is needed: those that depend on a trained parameter.
pub(crate) fn active(f: &Func, frozen: &dyn Fn(&str) -> bool) -> Vec<bool> {
    let mut on = vec![false; f.values.len()];
    for a in &f.args {
        let role = a.role.as_ref();
        on[a.value.0 as usize] = role.is_some_and(|r| {
            matches!(r.kind, RoleKind::Param | RoleKind::Ready) && !frozen(&r.name)
        });
    }
    for n in &f.nodes {
        let stops = n.op.facts().gradient == Gradient::Stops;
        let any = !stops && n.ins.iter().any(|v| on[v.0 as usize]);
        for o in &n.outs {
            on[o.0 as usize] = any && f.ty(*o).dtype.is_float();
        }
    }
    on
}

/// Values that depend on a parameter.
pub(crate) fn weighted(f: &Func) -> Vec<bool> {
    let mut on = vec![false; f.values.len()];
    for a in &f.args {
        let kind = a.role.as_ref().map(|r| r.kind);
        on[a.value.0 as usize] = matches!(kind, Some(RoleKind::Param | RoleKind::Ready));
    }
    for n in &f.nodes {
        let any = n.ins.iter().any(|v| on[v.0 as usize]);
        n.outs.iter().for_each(|o| on[o.0 as usize] = any);
    }
    on
}
