//! Takes the cheapest program out of a saturated e-graph; the program as it was wins ties.
//!
//! Costs are those of the graph, not of trees: a value that two nodes read is paid once. The search
//! is local, from the original choice and from the best trees: one class after the other takes
//! another term if that makes the whole cheaper.

use super::graph::{EGraph, Head, Places, Term};
use super::line::Id;
use super::segment::{Ref, Segment};
use shardc_ir::hardware::Hardware;
use shardc_ir::ops::Op;
use shardc_ir::price;
use shardc_ir::types::Type;
use std::collections::BTreeMap;

/// A cheaper segment, in terms of the old one, so that it serves all equal segments.
#[derive(Clone, Debug)]
pub(crate) struct Solution {
    pub items: Vec<Item>,
    /// Nodes whose result is now another value.
    pub aliases: Vec<(u32, Ref)>,
}

#[derive(Clone, Debug)]
pub(crate) enum Item {
    /// A node as it was, but for its operands.
    Keep { node: u32, ins: Vec<Ref> },
    /// A new op: for the result of `node`, or a fresh value of this type that `node` needs.
    New { node: u32, op: Op, ins: Vec<Ref>, fresh: Option<Box<Type>>, rule: &'static str },
}

/// Passes over all classes of the local search.
const PASSES: usize = 4;
/// Classes that the local search may visit: it stops where it is, not by the clock.
const VISITS: usize = 2_000_000;

struct Chooser<'a> {
    s: &'a Segment,
    g: &'a EGraph,
    /// Classes in order, and the terms of each.
    classes: Vec<Id>,
    terms: Vec<Vec<Choice>>,
    /// Term of every transparent node: (class, place among its terms).
    own: Vec<Option<(usize, usize)>>,
    /// Operands of every node: places of their classes.
    operands: Vec<Vec<usize>>,
}

struct Choice {
    term: Term,
    cost: u64,
    ins: Vec<usize>,
}

/// The cheapest way to compute the segment; `None` if that is the way it was.
pub(crate) fn choose(s: &Segment, g: &EGraph, places: &Places, hw: &Hardware) -> Option<Solution> {
    let c = Chooser::new(s, g, places, hw);
    let mut distinct: Vec<(usize, usize)> = c.own.iter().flatten().copied().collect();
    distinct.sort_unstable();
    distinct.dedup();
    let before: u64 = distinct.iter().map(|&(k, t)| c.terms[k][t].cost).sum();
    let trees = c.best_trees();
    let mut first = trees.clone();
    for &(k, t) in c.own.iter().flatten().rev() {
        first[k] = t;
    }
    // A class that holds a value from outside is that value.
    for (k, terms) in c.terms.iter().enumerate() {
        if let Some(leaf) = terms.iter().position(|t| matches!(t.term.head, Head::Leaf(_))) {
            first[k] = leaf;
        }
    }
    let starts = [first, trees].map(|start| c.improve(start));
    let best = starts.into_iter().flatten().min_by_key(|(cost, _)| *cost)?;
    if best.0 < before { Some(c.solution(&best.1)) } else { None }
}

impl<'a> Chooser<'a> {
    fn new(s: &'a Segment, g: &'a EGraph, places: &Places, hw: &Hardware) -> Self {
        let classes: Vec<Id> = g.classes().collect();
        let place = |id: Id| classes.binary_search(&g.find(id)).expect("a class");
        let choice = |id: Id, t: &Term| {
            let types: Vec<&Type> = t.ins.iter().map(|&i| g.ty(i)).collect();
            let cost = g.op(t).map_or(0, |op| price::op(hw, &g.mesh, op, &types, g.ty(id)));
            Choice { term: t.clone(), cost, ins: t.ins.iter().map(|&i| place(i)).collect() }
        };
        let of = |&id: &Id| g.terms(id).iter().map(|t| choice(id, t)).collect::<Vec<Choice>>();
        let terms: Vec<Vec<Choice>> = classes.iter().map(of).collect();
        let own = |own: &Option<(Id, Term)>| {
            let (id, term) = own.as_ref()?;
            let (k, term) = (place(*id), g.canonical(term));
            let t = terms[k].iter().position(|c| c.term == term);
            Some((k, t.expect("a node's term is in its class")))
        };
        let own = places.own.iter().map(own).collect();
        let operands = places.operands.iter().map(|ins| ins.iter().map(|&i| place(i)).collect());
        Chooser { s, g, own, operands: operands.collect(), classes, terms }
    }

    /// Per class the term whose tree is cheapest.
    fn best_trees(&self) -> Vec<usize> {
        let mut best: Vec<(u64, usize)> = vec![(u64::MAX, 0); self.terms.len()];
        loop {
            let mut changed = false;
            for (k, terms) in self.terms.iter().enumerate() {
                for (t, c) in terms.iter().enumerate() {
                    let ins = c.ins.iter().map(|&i| best[i].0);
                    let tree = ins.fold(c.cost.saturating_add(1), u64::saturating_add);
                    if tree < best[k].0 {
                        best[k] = (tree, t);
                        changed = true;
                    }
                }
            }
            if !changed {
                return best.into_iter().map(|b| b.1).collect();
            }
        }
    }

    /// What a choice of one term per class needs; `None` if it is circular, or costs as much as `limit`.
    fn walk<'w>(&'w self, chosen: &'w [usize], limit: u64) -> Option<Walk<'w, 'a>> {
        let (state, opaque) = (vec![0; self.terms.len()], vec![0; self.s.nodes.len()]);
        let mut walk = Walk { c: self, chosen, state, opaque, cost: 0, limit };
        for (n, own) in self.own.iter().enumerate() {
            match *own {
                None => walk.opaque(n)?,
                Some((k, own)) if self.s.nodes[n].live_out => {
                    walk.class(k)?;
                    if self.needs_own(n, chosen) && chosen[k] != own {
                        walk.term(k, own)?;
                    }
                }
                Some(_) => {}
            }
        }
        Some(walk)
    }

    /// True if a node's result is one of the function's and cannot be the class's value.
    fn needs_own(&self, n: usize, chosen: &[usize]) -> bool {
        self.s.nodes[n].port && {
            let k = self.own[n].expect("transparent").0;
            self.owner(k, chosen) != Some(n)
        }
    }

    /// The node whose result is the value of a class: a result of the function, else the first.
    fn owner(&self, k: usize, chosen: &[usize]) -> Option<usize> {
        if matches!(self.terms[k][chosen[k]].term.head, Head::Leaf(_)) {
            return None;
        }
        let mut of = (0..self.own.len()).filter(|&n| self.own[n].is_some_and(|o| o.0 == k));
        let first = of.clone().next();
        of.find(|&n| self.s.nodes[n].port).or(first)
    }

    /// Changes one class at a time while that pays.
    fn improve(&self, mut chosen: Vec<usize>) -> Option<(u64, Vec<usize>)> {
        let mut cost = self.walk(&chosen, u64::MAX)?.cost;
        let mut left = VISITS / self.terms.len().max(1);
        for _ in 0..PASSES {
            let before = cost;
            for k in (0..self.terms.len()).filter(|&k| self.terms[k].len() > 1) {
                for t in 0..self.terms[k].len() {
                    left = left.saturating_sub(1);
                    if left == 0 {
                        return Some((cost, chosen));
                    }
                    let old = std::mem::replace(&mut chosen[k], t);
                    match self.walk(&chosen, cost).map(|w| w.cost) {
                        Some(new) => cost = new,
                        None => chosen[k] = old,
                    }
                }
            }
            if cost == before {
                break;
            }
        }
        Some((cost, chosen))
    }

    fn solution(&self, chosen: &[usize]) -> Solution {
        let mut rules: BTreeMap<Term, &'static str> = BTreeMap::new();
        for (term, rule) in &self.g.made {
            rules.entry(self.g.canonical(term)).or_insert(rule);
        }
        let values = vec![None; self.terms.len()];
        let mut out = Emit {
            c: self,
            chosen,
            rules,
            values,
            opaque: vec![false; self.s.nodes.len()],
            fresh: 0,
            made: Solution { items: vec![], aliases: vec![] },
        };
        let needed = self.walk(chosen, u64::MAX).expect("the choice is not circular").state;
        // Program order: a class stands where the node stood that first needed it.
        for n in 0..self.s.nodes.len() {
            match self.own[n] {
                None => out.opaque(n),
                Some((k, _)) if needed[k] == 2 => {
                    let value = out.class(k, n);
                    let own = Ref::Inner { node: n as u32, out: 0 };
                    if value != own && self.needs_own(n, chosen) {
                        out.keep(n);
                    } else if value != own {
                        out.made.aliases.push((n as u32, value));
                    }
                }
                Some(_) => {}
            }
        }
        out.made
    }
}

/// Visits what a choice needs, once each: 0 unseen, 1 under way, 2 done.
struct Walk<'c, 'a> {
    c: &'c Chooser<'a>,
    chosen: &'c [usize],
    state: Vec<u8>,
    opaque: Vec<u8>,
    cost: u64,
    limit: u64,
}

impl Walk<'_, '_> {
    fn class(&mut self, k: usize) -> Option<()> {
        match self.state[k] {
            2 => return Some(()),
            1 => return None,
            _unseen => self.state[k] = 1,
        }
        self.term(k, self.chosen[k])?;
        self.state[k] = 2;
        Some(())
    }

    fn term(&mut self, k: usize, t: usize) -> Option<()> {
        let choice = &self.c.terms[k][t];
        self.cost += choice.cost;
        if self.cost >= self.limit {
            return None;
        }
        if let Head::Leaf(Ref::Inner { node, .. }) = choice.term.head {
            self.opaque(node as usize)?;
        }
        choice.ins.iter().try_for_each(|&i| self.class(i))
    }

    fn opaque(&mut self, n: usize) -> Option<()> {
        match self.opaque[n] {
            2 => return Some(()),
            1 => return None,
            _unseen => self.opaque[n] = 1,
        }
        self.c.operands[n].iter().try_for_each(|&k| self.class(k))?;
        self.opaque[n] = 2;
        Some(())
    }
}

/// Writes a choice down, operands first.
struct Emit<'c, 'a> {
    c: &'c Chooser<'a>,
    chosen: &'c [usize],
    rules: BTreeMap<Term, &'static str>,
    values: Vec<Option<Ref>>,
    opaque: Vec<bool>,
    fresh: u32,
    made: Solution,
}

impl Emit<'_, '_> {
    /// The value of a class, made for node `n` if it is new.
    fn class(&mut self, k: usize, n: usize) -> Ref {
        if let Some(v) = self.values[k] {
            return v;
        }
        let c = self.c;
        let choice = &c.terms[k][self.chosen[k]];
        if let Head::Leaf(r) = choice.term.head {
            if let Ref::Inner { node, .. } = r {
                self.opaque(node as usize);
            }
            self.values[k] = Some(r);
            return r;
        }
        let owner = c.owner(k, self.chosen);
        let ins: Vec<Ref> = choice.ins.iter().map(|&i| self.class(i, n)).collect();
        let value = match owner {
            Some(node) => Ref::Inner { node: node as u32, out: 0 },
            None => {
                self.fresh += 1;
                Ref::Fresh(self.fresh - 1)
            }
        };
        self.values[k] = Some(value);
        let node = owner.unwrap_or(n) as u32;
        if owner.is_some_and(|o| c.own[o] == Some((k, self.chosen[k]))) {
            self.made.items.push(Item::Keep { node, ins });
            return value;
        }
        let op = c.g.op(&choice.term).expect("not a leaf").clone();
        let rule = self.rules.get(&choice.term).copied().unwrap_or("");
        let fresh = owner.is_none().then(|| Box::new(c.g.ty(c.classes[k]).clone()));
        self.made.items.push(Item::New { node, op, ins, fresh, rule });
        value
    }

    /// A node as it was, beside the value of its class.
    fn keep(&mut self, n: usize) {
        let c = self.c;
        let ins = c.operands[n].iter().map(|&k| self.class(k, n)).collect();
        self.made.items.push(Item::Keep { node: n as u32, ins });
    }

    fn opaque(&mut self, n: usize) {
        if !std::mem::replace(&mut self.opaque[n], true) {
            self.keep(n);
        }
    }
}
