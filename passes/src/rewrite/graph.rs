//! A segment as an e-graph (Willsey et al., 2021), saturated by rules within limits.

use super::line::{Expr, Id, Line};
use super::segment::{Ref, Segment};
use shardc_ir::maps::HashMap;
use shardc_ir::mesh::Mesh;
use shardc_ir::ops::{NAMES, Op};
use shardc_ir::types::Type;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::mem::Discriminant;

/// Rounds of saturation.
const ROUNDS: usize = 8;
/// Terms of an e-graph, beyond which no rule is applied.
const TERMS: usize = 2_000;

/// What a term is, apart from its operands.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Head {
    /// A value that rules do not look into.
    Leaf(Ref),
    /// An op by its place in [`NAMES`], and its number: what costs the same is ordered by the former.
    Op { name: u8, number: u32 },
}

/// One way to make a value. The number of the result's type is part of it, because ops may have a choice;
/// patterns match any type.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Term {
    pub head: Head,
    pub ins: SmallVec<[Id; 4]>,
    pub ty: u32,
}

/// Ops and types, each with a number for all functions of a module.
#[derive(Default)]
pub(crate) struct Numbers {
    ops: Vec<Op>,
    /// Of all ops of one kind.
    heads: HashMap<Discriminant<Op>, Vec<Head>>,
    types: Vec<Type>,
    by_type: HashMap<Type, u32>,
}

impl Numbers {
    pub(crate) fn head(&mut self, op: &Op) -> Head {
        let alike = self.heads.entry(std::mem::discriminant(op)).or_default();
        let is =
            |h: &&Head| matches!(h, Head::Op { number, .. } if self.ops[*number as usize] == *op);
        if let Some(&head) = alike.iter().find(is) {
            return head;
        }
        let name = NAMES.iter().position(|n| *n == op.mnemonic()).expect("an op's own name") as u8;
        let head = Head::Op { name, number: self.ops.len() as u32 };
        alike.push(head);
        self.ops.push(op.clone());
        head
    }

    pub(crate) fn ty(&mut self, t: &Type) -> u32 {
        if let Some(&n) = self.by_type.get(t) {
            return n;
        }
        self.types.push(t.clone());
        self.by_type.insert(t.clone(), self.types.len() as u32 - 1);
        self.types.len() as u32 - 1
    }
}

/// Classes of values that are equal, with all known ways to make each.
pub(crate) struct EGraph {
    pub mesh: Mesh,
    pub numbers: Numbers,
    /// Of a class that was joined with another: that one, or one on the way to it.
    leaders: Vec<Id>,
    /// By class: its terms, and the number of their type.
    classes: Vec<(Vec<Term>, u32)>,
    known: HashMap<Term, Id>,
    /// Terms that rules made, with the line that made them first.
    pub made: Vec<(Term, &'static str)>,
}

/// Where the nodes of a segment are in its e-graph.
pub(crate) struct Places {
    /// Class and term of every node; `None` for opaque ones.
    pub own: Vec<Option<(Id, Term)>>,
    /// Classes of all operands, node by node.
    pub operands: Vec<SmallVec<[Id; 4]>>,
}

impl EGraph {
    pub(crate) fn new(mesh: &Mesh) -> EGraph {
        EGraph {
            mesh: mesh.clone(),
            numbers: Numbers::default(),
            leaders: vec![],
            classes: vec![],
            known: HashMap::default(),
            made: vec![],
        }
    }

    /// The class that a class is today.
    pub(crate) fn find(&self, mut id: Id) -> Id {
        while self.leaders[id.0 as usize] != id {
            id = self.leaders[id.0 as usize];
        }
        id
    }

    /// All classes, in the order in which they were made.
    pub(crate) fn classes(&self) -> impl Iterator<Item = Id> {
        (0..self.leaders.len() as u32).map(Id).filter(|&id| self.find(id) == id)
    }

    pub(crate) fn terms(&self, id: Id) -> &[Term] {
        &self.classes[self.find(id).0 as usize].0
    }

    pub(crate) fn ty(&self, id: Id) -> &Type {
        &self.numbers.types[self.classes[self.find(id).0 as usize].1 as usize]
    }

    /// The op of a term; `None` for leaves.
    pub(crate) fn op(&self, t: &Term) -> Option<&Op> {
        match t.head {
            Head::Op { number, .. } => Some(&self.numbers.ops[number as usize]),
            Head::Leaf(_) => None,
        }
    }

    /// The term with its operands' classes of today.
    pub(crate) fn canonical(&self, t: &Term) -> Term {
        Term { ins: t.ins.iter().map(|&i| self.find(i)).collect(), ..*t }
    }

    fn add(&mut self, term: Term) -> Id {
        if let Some(&id) = self.known.get(&term) {
            return self.find(id);
        }
        let id = Id(self.leaders.len() as u32);
        self.leaders.push(id);
        self.classes.push((vec![term.clone()], term.ty));
        self.known.insert(term, id);
        id
    }

    /// Joins two classes; false if they are one already.
    fn join(&mut self, a: Id, b: Id) -> bool {
        let (a, b) = (self.find(a), self.find(b));
        let (to, from) = (a.min(b), a.max(b));
        if to == from {
            return false;
        }
        let terms = std::mem::take(&mut self.classes[from.0 as usize].0);
        self.classes[to.0 as usize].0.extend(terms);
        self.leaders[from.0 as usize] = to;
        true
    }

    /// Joins the classes of terms that have become equal, until there are none.
    fn rebuild(&mut self) {
        loop {
            self.known.clear();
            let mut equal = vec![];
            for id in self.classes().collect::<Vec<Id>>() {
                let mut terms: Vec<Term> =
                    self.terms(id).iter().map(|t| self.canonical(t)).collect();
                terms.sort_unstable();
                terms.dedup();
                for t in &terms {
                    equal.extend(self.known.insert(t.clone(), id).map(|other| (other, id)));
                }
                self.classes[id.0 as usize].0 = terms;
            }
            if equal.is_empty() {
                return;
            }
            for (a, b) in equal {
                self.join(a, b);
            }
        }
    }

    /// The class of what a rule writes, of the declared type if it has a choice; `None` if some op does not
    /// type.
    fn class(&mut self, e: &Expr, declared: Option<&Type>, rule: &'static str) -> Option<Id> {
        let (op, ins) = match e {
            Expr::Value(id) => return Some(self.find(*id)),
            Expr::Op(op, ins) => (op, ins),
        };
        let ins: SmallVec<[Id; 4]> =
            ins.iter().map(|e| self.class(e, None, rule)).collect::<Option<_>>()?;
        let types: SmallVec<[&Type; 4]> = ins.iter().map(|&i| self.ty(i)).collect();
        let outs = op.check(&self.mesh, &types, &[declared]).ok()?;
        drop(types);
        let [ty] = &outs[..] else { return None };
        let (head, ty) = (self.numbers.head(op), self.numbers.ty(ty));
        let term = Term { head, ins, ty };
        if !self.known.contains_key(&term) {
            self.made.push((term.clone(), rule));
        }
        Some(self.add(term))
    }

    /// Says that a class is what a rule writes; true if that is new.
    fn equate(&mut self, root: Id, e: &Expr, rule: &'static str) -> bool {
        let ty = self.ty(root).clone();
        let made = self.class(e, Some(&ty), rule).filter(|&id| *self.ty(id) == ty);
        made.is_some_and(|id| self.join(root, id))
    }

    /// Becomes the e-graph of a segment.
    pub(crate) fn build(&mut self, s: &Segment) -> Places {
        self.leaders.clear();
        self.classes.clear();
        self.known.clear();
        self.made.clear();
        let mut places = Places { own: vec![], operands: vec![] };
        for node in &s.nodes {
            let ins: SmallVec<[Id; 4]> =
                node.ins.iter().map(|&r| self.value(s, &places, r)).collect();
            places.own.push((!node.opaque).then(|| {
                let term = Term { head: node.head, ins: ins.clone(), ty: node.outs[0] };
                (self.add(term.clone()), term)
            }));
            places.operands.push(ins);
        }
        places
    }

    fn value(&mut self, s: &Segment, places: &Places, r: Ref) -> Id {
        let made = match r {
            Ref::Inner { node, .. } => places.own[node as usize].as_ref(),
            Ref::Outer(_) | Ref::Fresh(_) => None,
        };
        let leaf = || Term { head: Head::Leaf(r), ins: SmallVec::new(), ty: s.ty(r) };
        made.map_or_else(|| self.add(leaf()), |own| own.0)
    }

    /// Applies all lines until nothing is new or a limit is reached; false if no line held.
    pub(crate) fn saturate(
        &mut self,
        rules: &[&'static Line],
        fired: &mut BTreeMap<&'static str, usize>,
    ) -> bool {
        let mut any = false;
        for _ in 0..ROUNDS {
            let mut found = vec![];
            for &line in rules {
                for root in self.classes() {
                    for t in self.terms(root) {
                        (line.find)(self, root, t, &mut |e| found.push((line.name, root, e)));
                    }
                }
            }
            let mut changed = false;
            for (name, root, e) in &found {
                if self.known.len() < TERMS && self.equate(*root, e, name) {
                    *fired.entry(name).or_default() += 1;
                    changed = true;
                }
            }
            if !changed {
                break;
            }
            self.rebuild();
            any = true;
        }
        any
    }
}
