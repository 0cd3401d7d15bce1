//! Distributivity, where two forms differ: products of sums become sums of products. The normal form
//! keeps them as they are written, since all of a model multiplied out has no end.

use crate::fun::Fun;
use crate::number::Coef;
use crate::term::{Node, Store, Term};
use shardc_ir::maps::HashMap;
use std::collections::BTreeSet;

/// Most monomials that are made of a term.
const MONOMIALS: usize = 1 << 14;

/// Multiplies terms out. What it has done it knows.
pub struct Expansion {
    pub microbatches: usize,
    done: HashMap<Term, Term>,
    left: usize,
}

impl Expansion {
    pub fn new(microbatches: usize) -> Expansion {
        Expansion { microbatches, done: HashMap::default(), left: MONOMIALS }
    }

    /// The term with all products of sums multiplied out, in arguments of functions, too; `None` if that
    /// makes too many monomials.
    pub fn of(&mut self, s: &mut Store, t: Term) -> Option<Term> {
        // What a term is made of was made before it.
        let (mut all, mut open) = (BTreeSet::new(), vec![t]);
        while let Some(t) = open.pop() {
            if !self.done.contains_key(&t) && all.insert(t) {
                open.extend(s.made_of(t));
            }
        }
        for t in all {
            let new = self.one(s, t)?;
            self.done.insert(t, new);
        }
        self.done.get(&t).copied()
    }

    /// One whose parts are done.
    fn one(&mut self, s: &mut Store, t: Term) -> Option<Term> {
        let shape = s.shape(t).to_vec();
        let done = |t: &Term| self.done[t];
        Some(match s.node(t).clone() {
            Node::Leaf(_) => t,
            Node::Sum(all) => {
                let all = s.sums.list(all);
                let all: Vec<(Coef, Term)> = all.iter().map(|(c, u)| (*c, done(u))).collect();
                s.sum(&all, &shape)
            }
            Node::Apply(f, args, out) => {
                let new: Vec<Term> = args.iter().map(done).collect();
                match f {
                    f if f.is_linear() => {
                        let all = s.monomials(new[0]);
                        self.left = self.left.checked_sub(all.len())?;
                        let mut of =
                            |u| s.apply(f.clone(), &[&[u], &new[1..]].concat(), out, &shape);
                        let all: Vec<(Coef, Term)> = all.iter().map(|&(c, u)| (c, of(u))).collect();
                        s.lemma("a linear function of a sum is a sum of its values");
                        s.sum(&all, &shape)
                    }
                    _ if new[..] == args[..] => t,
                    Fun::Reshape(_) => s.reshape(new[0], &shape),
                    Fun::Microbatches(_) => s.fold(new[0], self.microbatches),
                    f => s.apply(f, &new, out, &shape),
                }
            }
            Node::Product(factors) => {
                let new: Vec<Term> = factors.iter().map(|f| done(&f.0)).collect();
                let sums: Vec<Vec<(Coef, Term)>> = new.iter().map(|&u| s.monomials(u)).collect();
                let count = sums.iter().fold(1usize, |n, m| n.saturating_mul(m.len()));
                self.left = self.left.checked_sub(count)?;
                let out: Vec<u32> = (0..shape.len() as u32).collect();
                let mut terms = Vec::with_capacity(count);
                for i in 0..count {
                    let (mut rest, mut coef, mut chosen) = (i, Coef::ONE, vec![]);
                    for (all, (_, letters)) in sums.iter().zip(&factors) {
                        let (c, u) = all[rest % all.len()];
                        (rest, coef) = (rest / all.len(), coef.times(c));
                        chosen.push((u, letters.iter().map(|&l| u32::from(l)).collect()));
                    }
                    terms.push((coef, s.product(&chosen, &out, &shape).ok()?));
                }
                s.lemma("a product of sums is a sum of products");
                s.sum(&terms, &shape)
            }
        })
    }
}
