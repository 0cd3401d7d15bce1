//! Gradients that microbatches add up, and their sums over ranks.

use super::{Func, Node, Port, RoleKind, Uses, Value};
use std::iter::successors;

/// A gradient from all microbatches, of which a function makes a sum over ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GradTotal {
    /// The argument in which it was added up before, and over which it is written.
    pub before: Value,
    pub total: Value,
    /// What the first exchange of the sum over ranks makes of it, and whether that may be written over it.
    pub sum: Value,
    pub in_place: bool,
}

impl Func {
    /// The accumulations that a value is made by, from the last to the first.
    pub fn accumulations<'a>(
        &'a self,
        uses: &'a Uses,
        total: Value,
    ) -> impl Iterator<Item = &'a Node> {
        let by = move |v| uses.made_by(&self.nodes, v).filter(|n| n.op.accumulates());
        successors(by(total), move |n| by(n.ins[0]))
    }

    /// The gradients of which a result is a sum over ranks, where they are added to an argument: only
    /// the sum reads what that makes.
    pub fn grad_totals(&self) -> Vec<GradTotal> {
        let is = |r: &&Port| r.role.as_ref().is_some_and(|r| r.kind == RoleKind::GradSum);
        let sums = || self.results.iter().filter(is);
        if sums().next().is_none() {
            return vec![];
        }
        let uses = self.uses();
        let one = |r: &Port| {
            let n = uses.made_by(&self.nodes, r.value)?;
            let k = n.outs.iter().position(|&o| o == r.value)?;
            let total = *n.ins.get(k)?;
            let name = &r.role.as_ref()?.name;
            let before = self.args.iter().find(|a| a.is(RoleKind::Grad, name))?.value;
            let is_added_to = self.accumulations(&uses, total).last()?.ins[0] == before;
            let in_place = n.op.def().in_place(k) == Some(k);
            let alone = uses.count(total) == 1;
            (alone && is_added_to).then_some(GradTotal { before, total, sum: r.value, in_place })
        };
        sums().filter_map(one).collect()
    }
}
