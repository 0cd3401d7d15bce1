//! Sums that lie where what they are added to lay, so that a gradient of several contributions has one place.

use super::{Func, Node, Port, Role, RoleKind, Value};
use crate::maps::{HashMap, HashSet};
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

/// Who makes the values of a function, and how often each is read, as an operand or a result.
struct Uses<'a> {
    f: &'a Func,
    makers: Vec<Option<u32>>,
    reads: Vec<u32>,
}

impl<'a> Uses<'a> {
    fn of(f: &'a Func) -> Uses<'a> {
        let mut reads = vec![0; f.values.len()];
        let read = f.nodes.iter().flat_map(|n| &n.ins).chain(f.results.iter().map(|r| &r.value));
        read.for_each(|v| reads[v.0 as usize] += 1);
        Uses { f, makers: f.makers(), reads }
    }

    fn maker(&self, v: Value) -> Option<&'a Node> {
        self.makers[v.0 as usize].map(|i| &self.f.nodes[i as usize])
    }

    /// The two terms of a sum, of which nothing else reads the first.
    fn terms(&self, sum: Value) -> Option<[Value; 2]> {
        let n = self.maker(sum)?;
        let &[first, second] = &n.ins[..] else { return None };
        let alone = self.reads[first.0 as usize] == 1 && n.op.is_plain_sum();
        (alone && self.f.ty(first) == self.f.ty(sum)).then_some([first, second])
    }

    /// A sum and the sums it was added to, from the last to the one of an argument; none if that is not where
    /// they begin.
    fn chain(&self, total: Value, before: Value) -> Vec<Value> {
        let first = |v: &Value| self.terms(*v).map(|t| t[0]);
        let mut all: Vec<Value> = successors(Some(total), first).collect();
        if all.pop() != Some(before) {
            all.clear();
        }
        all
    }
}

impl Func {
    /// The gradients of which a result is a sum over ranks, where they are added to an argument: only this reads it,
    /// and only the sum what it makes.
    pub fn grad_totals(&self) -> Vec<GradTotal> {
        let is = |r: &&Port| r.role.as_ref().is_some_and(|r| r.kind == RoleKind::GradSum);
        let sums = || self.results.iter().filter(is);
        if sums().next().is_none() {
            return vec![];
        }
        let uses = Uses::of(self);
        let one = |r: &Port| {
            let n = uses.maker(r.value)?;
            let k = n.outs.iter().position(|&o| o == r.value)?;
            let total = *n.ins.get(k)?;
            let name = &r.role.as_ref()?.name;
            let before = self.args.iter().find(|a| a.is(RoleKind::Grad, name))?.value;
            let alone = [before, total].iter().all(|v| uses.reads[v.0 as usize] == 1);
            let is_added_to =
                uses.maker(total)?.ins.contains(&before) || !uses.chain(total, before).is_empty();
            let in_place = n.op.def().in_place(k) == Some(k);
            (alone && is_added_to).then_some(GradTotal { before, total, sum: r.value, in_place })
        };
        sums().filter_map(one).collect()
    }

    /// By value: the first term of the sum that it is, over which it lies. These are the sums that make a gradient
    /// of what it was before and several contributions, and those of a tensor of which nothing else is read and
    /// what is put into rows: of that only these rows are read and written then.
    pub fn sums_in_place(&self) -> Vec<Option<Value>> {
        let mut over = vec![None; self.values.len()];
        let is_grad = |p: &&Port| p.role.as_ref().is_some_and(|r| r.kind == RoleKind::Grad);
        let grads: Vec<&Port> = self.args.iter().filter(is_grad).collect();
        if grads.is_empty() && !self.nodes.iter().any(|n| n.op.adds_to_rows()) {
            return over;
        }
        let uses = Uses::of(self);
        let befores: HashMap<&Role, Value> =
            grads.iter().filter_map(|a| Some((a.role.as_ref()?, a.value))).collect();
        let own =
            self.results.iter().filter_map(|r| Some((r.value, *befores.get(r.role.as_ref()?)?)));
        let of_ranks = self.grad_totals();
        let totals = own.chain(of_ranks.iter().map(|g| (g.total, g.before)));
        for sum in totals.flat_map(|(total, before)| uses.chain(total, before)) {
            over[sum.0 as usize] = uses.terms(sum).map(|t| t[0]);
        }
        // A result with the role of an argument lies over this, which may be read until the sum is made.
        let roots = self.roots();
        let given: HashSet<&Role> = self.args.iter().filter_map(|a| a.role.as_ref()).collect();
        let replaces = |r: &&Port| r.role.as_ref().is_some_and(|r| given.contains(r));
        let replacing: HashSet<Value> =
            self.results.iter().filter(replaces).map(|r| roots[r.value.0 as usize]).collect();
        let free = |n: &&Node| !replacing.contains(&roots[n.outs[0].0 as usize]);
        for n in self.nodes.iter().filter(|n| n.op.is_plain_sum()).filter(free) {
            let is_put = |v: Value| uses.maker(v).is_some_and(|n| n.op.adds_to_rows());
            let Some(&second) = n.ins.get(1).filter(|v| is_put(**v)) else { continue };
            let Some([first, _]) = uses.terms(n.outs[0]) else { continue };
            let is_made = uses.maker(first).is_some_and(|n| !n.op.def().is_view());
            if is_made && uses.reads[second.0 as usize] == 1 {
                over[n.outs[0].0 as usize] = Some(first);
            }
        }
        over
    }
}
