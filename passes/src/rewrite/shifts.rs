//! Ranges of a dim that are cut, padded and cut again become one shift each, and shifts of one value a chain.
//!
//! Before:  `%w = pad[d=14; start=2] %x`, `%p = narrow[p=12; start=0] %w`, `%q = narrow[p=12; start=1] %w`
//! After:   `%q = pad[d=12; start=1] %x`, `%p = pad[d=12; start=1] %q`
//! Assumes: phase Source.  Leaves: phase Source.
//!
//! Ranks that split the dim exchange what crosses from piece to piece: of a shift no more than it shifts by; of a
//! chain together no more than its longest shift. A dim that changes its size is cut elsewhere, and more crosses.
//!
//! What the first of two ops cuts away is 0 only if the second has no place for it. Else both stay.

use shardc_ir::boxes::Halo;
use shardc_ir::func::{Func, Node, Patch, Scope, Value, ValueMap};
use shardc_ir::ops::{Narrow, Op, Pad};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Index i of the `to` indices of a dim is index i + `start` of `from`, and 0 where there is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Shift {
    dim: usize,
    start: i64,
    from: usize,
    to: usize,
}

impl Shift {
    /// What a node does, if it is one.
    fn of(f: &Func, n: &Node) -> Option<Shift> {
        let Halo { dim, start } = n.op.def().halo()?;
        let [from, to] = [n.ins[0], n.outs[0]].map(|v| f.ty(v));
        let dim = dim.of(from.rank())?;
        Some(Shift { dim, start, from: from.dims[dim].size, to: to.dims[dim].size })
    }

    /// This one and then another, if one shift does the same: all that has a place in the end has one between.
    fn then(self, next: Shift) -> Option<Shift> {
        let start = self.start.checked_add(next.start)?;
        let places = (-start).max(0)..(next.to as i64).min(self.from as i64 - start);
        let between = places.start + next.start..places.end + next.start;
        let all = !places.is_empty() && between.start >= 0 && between.end <= next.from as i64;
        let fits = (self.dim, self.to) == (next.dim, next.from);
        (fits && all).then_some(Shift { start, to: next.to, ..self })
    }

    fn changes_nothing(self) -> bool {
        (self.start, self.from) == (0, self.to)
    }

    /// All that it gives is there: nothing is 0.
    fn is_range(self) -> bool {
        self.start >= 0 && self.start + self.to as i64 <= self.from as i64
    }

    fn op(self) -> Op {
        let dim = Narrow::along(self.dim, 0, 1, 1).dim;
        match self.is_range() {
            true => Narrow::along(self.dim, self.start as usize, self.to, 1).into(),
            false => Pad { dim, ..Pad::new(-self.start, self.to) }.into(),
        }
    }

    /// What is left of this one after a nearer one, if it goes the same way.
    fn beyond(self, near: Shift) -> Option<Shift> {
        let same_way = near.start != 0 && near.start.signum() == self.start.signum();
        let rest = Shift { start: self.start - near.start, from: near.to, ..self };
        let nearer = near.start.abs() < self.start.abs();
        let ranges = near.is_range() && self.is_range();
        (same_way && nearer && !ranges && near.then(rest) == Some(self)).then_some(rest)
    }
}

/// Joins shifts of shifts, and chains shifts of one value.
pub fn shifts(f: &mut Func) {
    if !f.nodes.iter().any(|n| Shift::of(f, n).is_some()) {
        return;
    }
    // What is a result, or asked to be split somehow, stays.
    let mut kept = f.per_value(false);
    let asked = f.annotations.keys().copied();
    asked.chain(f.results.iter().map(|r| r.value)).for_each(|v| kept[v] = true);
    drop_identities(f, &kept);
    join(f, &kept);
    chain(f);
}

/// Drops ranges of all of a dim, so that those who read them read what they are of.
fn drop_identities(f: &mut Func, kept: &ValueMap<bool>) {
    let mut patch = Patch::of(f);
    for (i, n) in f.nodes.iter().enumerate() {
        if Shift::of(f, n).is_some_and(Shift::changes_nothing) && !kept[n.outs[0]] {
            patch.replace(n.outs[0], n.ins[0]);
            patch.erase(i);
        }
    }
    patch.apply(f);
}

/// Shifts of what only shifts read: each becomes one of the first operand.
fn join(f: &mut Func, kept: &ValueMap<bool>) {
    let (uses, mut patch) = (f.uses(), Patch::of(f));
    // The value that each shifted one is of.
    let mut made: ValueMap<Option<(Value, Shift)>> = f.per_value(None);
    let (mut joined, mut gone) = (f.per_value(false), f.per_value(false));
    for n in &f.nodes {
        let Some(own) = Shift::of(f, n) else { continue };
        let (v, out) = (patch.now(n.ins[0]), n.outs[0]);
        let before = made[v].filter(|&(of, first)| {
            // Ranges of ranges stay: terms do not join them, and such a plan would not be proved.
            let within = made[of].is_some_and(|m| m.1.is_range());
            let apart = |next: &Shift| first.is_range() && (within || next.is_range());
            let alone = |u: usize| {
                let next = Shift::of(f, &f.nodes[u]).filter(|next| !apart(next));
                let both = next.and_then(|next| first.then(next));
                both.is_some_and(|b| !b.changes_nothing() || !kept[f.nodes[u].outs[0]])
            };
            !kept[v] && uses.users(v).all(alone)
        });
        let both = before.and_then(|(of, first)| Some((of, first.then(own)?)));
        let Some((of, both)) = both else {
            made[out] = Some((v, own));
            continue;
        };
        gone[v] = true;
        if both.changes_nothing() {
            gone[out] = true;
            patch.replace(out, of);
            continue;
        }
        made[out] = Some((of, both));
        joined[out] = true;
    }
    for (u, n) in f.nodes.iter_mut().enumerate() {
        let out = n.outs[0];
        if gone[out] {
            patch.erase(u);
        } else if let Some((of, both)) = made[out].filter(|_| joined[out]) {
            let note = Some(Cow::Borrowed("shift of a shift"));
            *n = Node { note, ..Node::new(both.op(), &[of], &[out], n.scope) };
        }
    }
    patch.apply(f);
}

/// Lets each shift of a value begin where a nearer one ends.
fn chain(f: &mut Func) {
    let mut groups: BTreeMap<(Value, usize, Scope), Vec<(usize, Shift)>> = BTreeMap::new();
    for (u, n) in f.nodes.iter().enumerate() {
        if let Some(s) = Shift::of(f, n) {
            groups.entry((n.ins[0], s.dim, n.scope)).or_default().push((u, s));
        }
    }
    // By its first node: the chain.
    let mut chains: BTreeMap<usize, Vec<Node>> = BTreeMap::new();
    let mut moved = vec![false; f.nodes.len()];
    for all in groups.values_mut() {
        all.sort_by_key(|&(u, s)| (s.start.abs(), u));
        let mut nodes: Vec<Node> = vec![];
        let mut places: Vec<usize> = vec![];
        for (i, &(u, s)) in all.iter().enumerate() {
            let near = all[..i].iter().rev().find_map(|&(near, of)| Some((near, s.beyond(of)?)));
            let Some((near, rest)) = near else { continue };
            let (of, n) = (f.nodes[near].outs[0], &f.nodes[u]);
            if !places.contains(&near) {
                nodes.push(f.nodes[near].clone());
                places.push(near);
            }
            nodes.push(Node {
                note: Some(Cow::Borrowed("from a nearer shift")),
                ..Node::new(rest.op(), &[of], &[n.outs[0]], n.scope)
            });
            places.push(u);
        }
        if let Some(&first) = places.iter().min() {
            places.iter().for_each(|&u| moved[u] = true);
            chains.insert(first, nodes);
        }
    }
    let nodes = std::mem::take(&mut f.nodes);
    for (u, n) in nodes.into_iter().enumerate() {
        f.nodes.extend(chains.remove(&u).unwrap_or_default());
        if !moved[u] {
            f.nodes.push(n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a shift does to a dim of numbers from 1 on.
    fn of(s: Shift, x: &[i64]) -> Vec<i64> {
        assert_eq!(x.len(), s.from);
        let at =
            |i: usize| usize::try_from(i as i64 + s.start).ok().and_then(|i| x.get(i)).copied();
        (0..s.to).map(|i| at(i).unwrap_or(0)).collect()
    }

    /// All pairs of small shifts: joined exactly where one shift has the same numbers, and some of them are not 0.
    #[test]
    fn shifts_are_joined_where_one_is_the_same() {
        let (mut joined, mut holes) = (0, 0);
        let x: Vec<i64> = (1..=4).collect();
        for a in -5..=5 {
            for (b, between) in (-6..=6).flat_map(|b| (1..=6).map(move |m| (b, m))) {
                for to in 1..=6 {
                    let first = Shift { dim: 0, start: a, from: 4, to: between };
                    let next = Shift { dim: 0, start: b, from: between, to };
                    let is = of(next, &of(first, &x));
                    let one = of(Shift { start: a + b, to, ..first }, &x);
                    let same = is == one && one.iter().any(|&n| n != 0);
                    assert_eq!(first.then(next).is_some(), same, "{first:?} {next:?}");
                    joined += usize::from(same);
                    holes += usize::from(is != one);
                }
            }
        }
        assert!(joined > 500 && holes > 500, "{joined} {holes}");
    }
}
