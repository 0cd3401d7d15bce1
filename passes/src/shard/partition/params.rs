//! Arguments of the ranks' program: how parameters are stored, and made what their users need.

use super::Partition;
use crate::shard::ways::Stored;
use crate::zero::{Zero, stored_over};
use shardc_ir::func::{LayoutStep, ParamLayout, Role, RoleKind};
use shardc_ir::mesh::AtomSet;
use shardc_ir::ops::Cast;
use shardc_ir::types::{DType, Type};

impl Partition<'_> {
    pub(super) fn arguments(
        &mut self,
        frozen: &dyn Fn(&str) -> bool,
        trained: &dyn Fn(&str) -> bool,
    ) -> Vec<ParamLayout> {
        let mut out = Vec::new();
        for a in &self.src.args {
            let name = self.src.name(a.value).clone();
            let (mut ty, mut role) = (self.chosen.own[a.value].clone(), a.role.clone());
            let asked = self.chosen.stored[a.value].clone();
            if let Some((param, asked)) = a.role.clone().zip(asked) {
                let Stored { ty: stored, zero, over } = asked;
                let needs = &self.needs[a.value];
                let used = common(&stored, needs);
                let (mut stored, mut near) = (stored, used.clone());
                for part in used.replicated.and(self.grid).iter() {
                    (stored, near) = stored_over(self.mesh, &stored, &near, AtomSet::one(part));
                }
                let (stored, piece) = stored_over(self.mesh, &stored, &near, over);
                // First what is done to the piece, so that its mirror too is done to a piece.
                let mut steps = vec![];
                let mut held = stored.clone();
                if held.dtype != DType::F32 && trained(&param.name) {
                    held.dtype = DType::F32;
                    let op = Cast { to: stored.dtype }.into();
                    steps.push(LayoutStep { op, ty: stored.clone() });
                }
                self.walk(&stored, &piece, &mut steps);
                let before = steps.len();
                self.walk(&piece, &near, &mut steps);
                let Zero { gathers_once, reduces_once, .. } = zero;
                let [prepared, mirrored] = [gathers_once, reduces_once]
                    .map(|once| if once { steps.len() } else { before });
                if prepared < mirrored {
                    self.whole[a.value] = Some(near.clone());
                }
                ty = if gathers_once { near } else { piece };
                self.pieces[a.value] = ty != used;
                let scope = step_scope(&param.name).to_string();
                role = Some(Role { kind: RoleKind::Unsharded, name: param.name.clone() });
                out.push(ParamLayout {
                    trainable: !frozen(&param.name),
                    param,
                    stored: held,
                    steps,
                    prepared,
                    mirrored,
                    name: name.clone(),
                    scope,
                });
            }
            let v = self.out.arg(ty, name, role);
            self.now[a.value] = Some(v);
        }
        for a in &self.src.args {
            let scope_free = a.role.as_ref().is_none_or(|r| r.kind != RoleKind::Param);
            if scope_free {
                self.fan_out_early(a.value, None);
            }
        }
        out
    }

    /// Adds the steps from one layout of a parameter to another.
    fn walk(&mut self, from: &Type, to: &Type, steps: &mut Vec<LayoutStep>) {
        let path = self.resharder.path(self.mesh, from, to);
        steps.extend(path.unwrap_or_else(|| panic!("partition: {from:?} to {to:?}")));
    }
}

/// Scope of what is done to a parameter at step scope: its layer, or the module that holds it.
pub(crate) fn step_scope(param: &str) -> &str {
    if !shardc_ir::text::is_path(param) {
        return "step"; // a name is its user's, and a scope stands in the text as it is
    }
    let mut end = 0;
    for part in param.split('.') {
        end += part.len();
        if part.parse::<u32>().is_ok() {
            return &param[..end];
        }
        end += 1;
    }
    param.rsplit_once('.').map_or("step", |s| s.0)
}

/// The layout that serves all uses of a parameter: what they agree on.
fn common(stored: &Type, needs: &[Type]) -> Type {
    let Some(first) = needs.first() else { return stored.clone() };
    let mut t = first.clone();
    if needs.iter().any(|n| n.dims != first.dims) {
        t.dims.clone_from(&stored.dims);
    }
    t.replicated = needs.iter().fold(t.replicated, |s, n| s.and(n.replicated)).minus(t.sharded());
    t
}
