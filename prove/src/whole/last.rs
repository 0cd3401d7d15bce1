//! What runs for the last microbatch of a stage in place of the function that runs for the others.

use super::Whole;
use crate::number::Coef;
use crate::part::Part;
use crate::term::Term;
use shardc_ir::func::{Port, Role, RoleKind};
use std::collections::BTreeSet;

impl Whole<'_> {
    /// It makes the same of the same: but of some accumulators the sum over ranks, which is the same whole tensor.
    pub(super) fn of_last(&mut self, at: usize, part: Part, made: Vec<Term>) {
        let f = &self.m.funcs[at];
        let plain = self.m.funcs.iter().position(|g| Part::of(g) == Some(part.plain()));
        let several = self.schedule.microbatches > 1;
        self.ledger.must("composition", several && plain.is_some(), || {
            let what = format!("@{} runs for a last microbatch", f.name);
            [what, "nothing runs for others".into(), "one of several".into()]
        });
        let Some(plain) = plain else { return };
        let roles = |ports: &[Port]| -> BTreeSet<Role> {
            ports.iter().filter_map(|p| p.role.clone()).collect()
        };
        let (own, of_plain) = (roles(&f.args), roles(&self.m.funcs[plain].args));
        self.ledger.must("composition", own.is_subset(&of_plain), || {
            let more: Vec<String> = own.difference(&of_plain).map(Role::to_string).collect();
            let what = format!("arguments of @{}", f.name);
            [what, format!("{} more", more.join(", ")), "those for other microbatches".into()]
        });
        let mut left = roles(&self.m.funcs[plain].results);
        for (role, t) in self.with_roles(at, made) {
            self.same(at, (part, plain), role, t, &mut left);
        }
        self.ledger.must("composition", left.is_empty(), || {
            let all: Vec<String> = left.iter().map(Role::to_string).collect();
            let what = format!("results of @{}", f.name);
            [what, format!("{} is not among them", all.join(", ")), "those of each".into()]
        });
    }

    /// A result is that of the other function; of an accumulator what is added to it.
    fn same(
        &mut self,
        at: usize,
        (part, plain): (Part, usize),
        role: Role,
        t: Term,
        left: &mut BTreeSet<Role>,
    ) {
        let rank = part.rank(&self.schedule.owner);
        let of_plain = match role.kind {
            RoleKind::GradSum => Role::new(RoleKind::Grad, role.name.clone()),
            _same => role.clone(),
        };
        let mut share = t;
        let want = match of_plain.kind {
            RoleKind::Grad | RoleKind::Sum | RoleKind::TokensPerExpert => {
                let shape = self.s.shape(t).to_vec();
                let before = self.accumulator(&of_plain, &shape);
                share = self.s.sum(&[(Coef::ONE, t), (Coef::ONE.minus(), before)], &shape);
                self.shares.get(&(plain, of_plain.clone())).copied()
            }
            RoleKind::Edge => self.edges.get(&role).copied(),
            kind if kind.is_shown() => self.outputs.get(&role).and_then(|o| o.last()).copied(),
            _own => self.own.get(&(rank, role.clone())).copied(),
        };
        match want.filter(|_| left.remove(&of_plain)) {
            Some(want) => {
                let what = format!("{role} of the last microbatch");
                self.ledger.equal(&self.s, self.texts, "composition", what, Some(share), want);
            }
            None => self.writes(at, &role, false),
        }
        if role.kind == RoleKind::GradSum {
            self.summed.insert((rank, of_plain));
        }
    }
}
