//! Takes the cheapest program out of a saturated e-graph; the program as it was wins ties.
//!
//! Costs are those of the graph, not of trees: a value that two nodes read is paid once. The search
//! is local, from the original choice and from the best trees: one class after the other takes
//! another term if that makes the whole cheaper.

use super::graph::{Graph, Head, Saturated, Term, ty_of};
use super::segment::{Ref, Segment};
use egg::Id;
use shardc_ir::func::Func;
use shardc_ir::hardware::Hardware;
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::Mesh;
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
    f: &'a Func,
    s: &'a Segment,
    sat: &'a Saturated,
    /// Canonical classes in order, and the terms of each.
    classes: Vec<Id>,
    at: HashMap<Id, usize>,
    terms: Vec<Vec<Choice>>,
    /// Term of every transparent node: (class, place among its terms).
    own: Vec<Option<(usize, usize)>>,
}

struct Choice {
    term: Term,
    cost: u64,
    ins: Vec<usize>,
}

/// The cheapest way to compute the segment; `None` if that is the way it was.
pub(crate) fn choose(
    mesh: &Mesh,
    f: &Func,
    s: &Segment,
    sat: &Saturated,
    hw: &Hardware,
) -> Option<Solution> {
    let c = Chooser::new(mesh, f, s, sat, hw);
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
    fn new(mesh: &Mesh, f: &'a Func, s: &'a Segment, sat: &'a Saturated, hw: &Hardware) -> Self {
        let g = &sat.graph;
        let is_value = |id: &Id| !matches!(g[*id].nodes[0].head, Head::Attr(_));
        let mut classes: Vec<Id> = g.classes().map(|c| c.id).filter(is_value).collect();
        classes.sort_unstable();
        let at: HashMap<Id, usize> = classes.iter().enumerate().map(|(k, &id)| (id, k)).collect();
        let place = |id: Id| at[&g.find(id)];
        let choice = |id: Id, t: &Term| {
            let ins: Vec<usize> = t.ins().iter().map(|&i| place(i)).collect();
            let cost = t.op(g).map_or(0, |(op, ins)| {
                let types: Vec<&Type> = ins.iter().map(|&i| ty_of(g, i)).collect();
                price::op(hw, mesh, &op, &types, ty_of(g, id))
            });
            Choice { term: t.clone(), cost, ins }
        };
        let of = |&id: &Id| {
            let mut nodes: Vec<Term> = g[id].nodes.iter().map(|t| canonical(g, t)).collect();
            nodes.sort();
            nodes.dedup();
            nodes.iter().map(|t| choice(id, t)).collect::<Vec<Choice>>()
        };
        let terms: Vec<Vec<Choice>> = classes.iter().map(of).collect();
        let mut c = Chooser { f, s, sat, classes, at, terms, own: vec![] };
        c.own = (0..s.nodes.len()).map(|n| c.own_term(n)).collect();
        c
    }

    fn place(&self, id: Id) -> usize {
        self.at[&self.sat.graph.find(id)]
    }

    fn own_term(&self, n: usize) -> Option<(usize, usize)> {
        let k = self.place(self.sat.class[n]?);
        let ins: Vec<usize> = self.sat.operands[n].iter().map(|&i| self.place(i)).collect();
        let op = &self.f.nodes[self.s.run.start + n].op;
        let g = &self.sat.graph;
        let same = |c: &Choice| c.ins == ins && c.term.op(g).is_some_and(|(o, _)| o == *op);
        Some((k, self.terms[k].iter().position(same).expect("a node's term is in its class")))
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

    fn walk<'w>(&'w self, chosen: &'w [usize]) -> Walk<'w, 'a> {
        let (state, opaque) = (vec![0; self.terms.len()], vec![0; self.s.nodes.len()]);
        Walk { c: self, chosen, state, opaque, cost: 0 }
    }

    /// Cost of a choice of one term per class; `None` if it is circular.
    fn cost(&self, chosen: &[usize]) -> Option<u64> {
        let mut walk = self.walk(chosen);
        for n in 0..self.s.nodes.len() {
            let facts = &self.s.nodes[n];
            if facts.opaque {
                walk.opaque(n)?;
            } else if facts.live_out {
                let (k, own) = self.own[n].expect("transparent");
                walk.class(k)?;
                if self.needs_own(n, chosen) && chosen[k] != own {
                    walk.term(k, own)?;
                }
            }
        }
        Some(walk.cost)
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
        let mut cost = self.cost(&chosen)?;
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
                    match self.cost(&chosen).filter(|&new| new < cost) {
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
        let g = &self.sat.graph;
        let mut rules: BTreeMap<Term, &'static str> = BTreeMap::new();
        for (term, rule) in &g.analysis.made {
            rules.entry(canonical(g, term)).or_insert(rule);
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
        // Program order: a class stands where the node stood that first needed it.
        let live = self.live(chosen);
        for n in 0..self.s.nodes.len() {
            match self.own[n] {
                None => out.opaque(n),
                Some((k, _)) if live[k] => {
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

    fn live(&self, chosen: &[usize]) -> Vec<bool> {
        let mut walk = self.walk(chosen);
        for n in 0..self.s.nodes.len() {
            let done = match self.own[n] {
                None => walk.opaque(n),
                Some((k, own)) if self.s.nodes[n].live_out => walk.class(k).and_then(|()| {
                    if self.needs_own(n, chosen) { walk.term(k, own) } else { Some(()) }
                }),
                Some(_) => Some(()),
            };
            done.expect("the choice is not circular");
        }
        walk.state.iter().map(|&s| s == 2).collect()
    }
}

/// Children replaced by their classes' names of today.
fn canonical(g: &Graph, t: &Term) -> Term {
    let mut t = t.clone();
    t.children.iter_mut().for_each(|c| *c = g.find(*c));
    t
}

/// Visits what a choice needs, once each: 0 unseen, 1 under way, 2 done.
struct Walk<'c, 'a> {
    c: &'c Chooser<'a>,
    chosen: &'c [usize],
    state: Vec<u8>,
    opaque: Vec<u8>,
    cost: u64,
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
        for &id in &self.c.sat.operands[n] {
            self.class(self.c.place(id))?;
        }
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
        let g = &c.sat.graph;
        let (op, _) = choice.term.op(g).expect("not a leaf");
        let rule = self.rules.get(&choice.term).copied().unwrap_or("");
        let fresh = owner.is_none().then(|| Box::new(ty_of(g, c.classes[k]).clone()));
        self.made.items.push(Item::New { node, op, ins, fresh, rule });
        value
    }

    /// A node as it was, beside the value of its class.
    fn keep(&mut self, n: usize) {
        let operands = &self.c.sat.operands[n];
        let ins = operands.iter().map(|&id| self.class(self.c.place(id), n)).collect();
        self.made.items.push(Item::Keep { node: n as u32, ins });
    }

    fn opaque(&mut self, n: usize) {
        if !std::mem::replace(&mut self.opaque[n], true) {
            self.keep(n);
        }
    }
}
