//! Whether two terms differ: both, computed over the field on the same inputs.

use super::inputs::Inputs;
use super::ranks::Ranks;
use super::{Data, Values, rows_of_an_owner};
use crate::Subject;
use crate::term::{Factor, Node, Store, Term};
use std::collections::BTreeSet;

/// Most multiplications and elements that are computed for a plan.
const LARGEST: f64 = (1u64 << 27) as f64;
/// Tokens are below this: an index of any table.
const TOKENS: usize = 5;

/// The inputs that terms are computed on.
pub(crate) struct Witness {
    inputs: Inputs,
    own: usize,
}

/// Terms that were computed, and what may still be.
pub(crate) struct Computed<'a> {
    values: Values<'a>,
    seen: BTreeSet<Term>,
    left: f64,
}

impl Witness {
    pub fn new(subject: &Subject) -> Witness {
        let inputs = Inputs::new(subject, Data { vocab: TOKENS });
        let own = rows_of_an_owner(subject.programs, &Ranks::new(&subject.programs.mesh));
        Witness { inputs, own }
    }

    pub fn on<'a>(&'a self, s: &'a Store) -> Computed<'a> {
        Computed {
            values: Values::new(s, &self.inputs, self.own),
            seen: BTreeSet::new(),
            left: LARGEST,
        }
    }
}

impl Computed<'_> {
    /// What both sides cost that is not computed yet, and their terms; more than is left, if it is more.
    pub fn cost(&self, sides: [Term; 2]) -> (f64, BTreeSet<Term>) {
        self.cost_within(&sides, self.left)
    }

    /// What terms cost together that are not computed yet.
    pub fn whole_cost(&self, terms: &[Term]) -> f64 {
        self.cost_within(terms, f64::MAX).0
    }

    fn cost_within(&self, terms: &[Term], most: f64) -> (f64, BTreeSet<Term>) {
        let (mut cost, mut new, mut open) = (0.0, BTreeSet::new(), terms.to_vec());
        while let Some(t) = open.pop() {
            if !self.seen.contains(&t) && new.insert(t) {
                cost += self.one(t);
                if cost > most {
                    return (f64::MAX, new);
                }
                open.extend(self.values.s.made_of(t));
            }
        }
        (cost, new)
    }

    /// `None` if the terms are too large, or mention what has no meaning of its own.
    pub fn differ(&mut self, sides: [Term; 2]) -> Option<bool> {
        let (cost, new) = self.cost(sides);
        if cost > self.left {
            return None;
        }
        self.left -= cost;
        self.seen.extend(new);
        let [a, b] = sides.map(|t| self.values.of(t, Some(0)).ok());
        Some(a? != b?)
    }

    /// Elements of a term and multiplications for it, for all microbatches.
    fn one(&self, t: Term) -> f64 {
        let s = self.values.s;
        let elements: f64 = s.shape(t).iter().map(|&n| n as f64).product();
        let products = match s.node(t) {
            Node::Product(factors) => {
                let sizes = |f: &Factor| -> Vec<(u8, usize)> {
                    f.1.iter().copied().zip(s.shape(f.0).iter().copied()).collect()
                };
                multiplications(factors.iter().map(sizes).collect(), s.shape(t).len())
            }
            _other => 0.0,
        };
        (elements + products) * self.values.inputs.microbatches as f64
    }
}

/// Of an Einstein sum whose first letters are the result's, two factors at a time as [`super::einsum`] takes
/// them.
fn multiplications(mut all: Vec<Vec<(u8, usize)>>, rank: usize) -> f64 {
    let size = |letters: &[(u8, usize)]| letters.iter().map(|x| x.1 as f64).product::<f64>();
    let union = |a: &[(u8, usize)], b: &[(u8, usize)]| {
        let more = b.iter().filter(|x| !a.contains(x));
        a.iter().chain(more).copied().collect::<Vec<_>>()
    };
    let mut total = 0.0;
    while all.len() > 1 {
        let pairs = (0..all.len()).flat_map(|j| (0..j).map(move |i| (i, j)));
        let costs = pairs.map(|(i, j)| (size(&union(&all[i], &all[j])), i, j));
        let least = costs.min_by(|a, b| a.0.total_cmp(&b.0));
        let Some((cost, i, j)) = least else { break };
        total += cost;
        let (b, a) = (all.remove(j), all.remove(i));
        let needed = |l: &u8| usize::from(*l) < rank || all.iter().flatten().any(|x| x.0 == *l);
        let kept = union(&a, &b).into_iter().filter(|x| needed(&x.0)).collect();
        all.push(kept);
    }
    total + all.first().map_or(0.0, |f| size(f))
}
