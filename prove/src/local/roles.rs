//! Types of roles: what one function makes and another takes is held in the same way on both sides.

use crate::Report;
use crate::ledger::Refuted;
use shardc_ir::func::{Func, Module, Port, Role, RoleKind};
use shardc_ir::text::type_text;
use shardc_ir::types::Type;
use std::collections::BTreeMap;

/// All arguments and results of a role have one type. Inputs are given to each function as it wants
/// them; what stages make for a parameter's owner is the gradient that it takes.
pub fn check(m: &Module, report: &mut Report) {
    let mut known: BTreeMap<Role, (&Type, &Func)> = BTreeMap::new();
    let ports = |f: &Func| -> Vec<Port> { f.args.iter().chain(&f.results).cloned().collect() };
    for f in &m.funcs {
        for p in ports(f) {
            let Some(role) = p.role.filter(|r| r.kind.input().is_none()) else { continue };
            let kind = match role.kind {
                RoleKind::GradFrom(_) => RoleKind::Grad,
                kind => kind,
            };
            let role = Role::new(kind, role.name);
            let ty = f.ty(p.value);
            let (first, at) = *known.entry(role.clone()).or_insert((ty, f));
            if first == ty {
                continue;
            }
            report.refuted.push(Refuted {
                what: format!("type of {role}"),
                plan: format!("{} in @{}", type_text(&m.mesh, ty), f.name),
                textbook: format!("{}, as in @{}", type_text(&m.mesh, first), at.name),
                plan_place: None,
                textbook_place: None,
            });
        }
    }
}
