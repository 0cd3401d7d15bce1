//! Lemmas of blocks that go around a ring.
//!
//! A value that varies over ranks is a function of blocks: `block[shift]` of a tensor is, on a rank,
//! the piece of the rank `shift` places before. To pass such a value on is to shift all its blocks,
//! since what a rank computes of its own values it computes of another's too. So a block that went
//! the wrong way is another term.
//!
//! | lemma | side condition |
//! |---|---|
//! | `join(block[0] x) = x` | the same axes and dim |
//! | join of the merge over s of attention(q, k_s, v_s, at_s) = attention(q, k, v, at) | queries have shift 0, keys, values and positions of keys shift s; every s once |
//! | join of Σ_s attention_grad(q, k_s, …) for q = attention_grad(q, k, …) for q | likewise |
//! | join of Σ_s attention_grad(q_s, k, …) for k or v = attention_grad(q, k, …) for k or v | what is of queries has shift s, what is of keys shift 0; every s once |
//!
//! Merging is commutative and associative: outputs weighted by the sums of their exponentials.

use crate::fun::{Block, Fun, Join};
use crate::number::Coef;
use crate::ops::{Attention, AttentionGrad, Merge};
use crate::term::{Mentions, Node, Store, Term};
use std::collections::BTreeMap;

/// Axes as bits, their number of ranks, and the dim that they cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Around {
    pub axes: u32,
    pub of: usize,
    pub dim: usize,
}

/// Operands of attention, and of its gradient, that are of keys; of the others those before the end are of
/// queries.
const KEYS: [&[usize]; 2] = [&[1, 2, 4], &[1, 2, 7]];
/// Those that are positions: their tokens are dim 0, those of others dim 1.
const POSITIONS: [&[usize]; 2] = [&[3, 4], &[6, 7]];
/// From here on they are of no tokens, but for the segments of queries and keys, behind slopes or a bias, and places of
/// queries, the last if weights are dropped.
const BEHIND: [usize; 2] = [5, 8];
/// The dim of queries, keys and values that tokens stand in.
const TOKENS: usize = 1;

/// One call of attention, or of its gradient, on blocks.
struct AttentionCall {
    f: Fun,
    wholes: Vec<Term>,
    /// Of what is of queries, and of what is of keys.
    shifts: [usize; 2],
}

impl Store {
    /// The block that the rank `shift` places before has.
    pub fn block(&mut self, t: Term, a: Around, shift: usize) -> Result<Term, String> {
        let mut shape = self.shape(t).to_vec();
        let n = shape.get_mut(a.dim).ok_or("a block of no dim")?;
        if a.of == 0 || *n % a.of != 0 {
            return Err(format!("{} is not cut {} ways evenly", n, a.of));
        }
        *n /= a.of;
        let f = Block { axes: a.axes, dim: a.dim, of: a.of, shift: shift % a.of };
        Ok(self.apply(f, &[t], 0, &shape))
    }

    /// A value that varies over ranks, passed on by `by` places.
    pub fn turn(&mut self, t: Term, axes: u32, by: usize) -> Result<Term, String> {
        if !self.mentions(t).has(Mentions::BLOCK) {
            return Ok(t);
        }
        let shape = self.shape(t).to_vec();
        match self.node(t).clone() {
            Node::Apply(Fun::Block(Block { axes: own, dim, of, shift }), x, _) => {
                if own != axes {
                    return Err("a block of other axes is passed on".into());
                }
                self.lemma("a ring passes blocks on");
                self.block(x[0], Around { axes, of, dim }, shift + by)
            }
            // A tensor that ranks see as one: what it is made of varies no more.
            Node::Apply(Fun::Join(_), ..) => Ok(t),
            Node::Apply(f, args, out) => {
                let args = args.iter().map(|&u| self.turn(u, axes, by));
                let args = args.collect::<Result<Vec<_>, _>>()?;
                match f {
                    Fun::Merge(_) => Ok(self.merged(args, out, &shape)),
                    f => Ok(self.apply(f, &args, out, &shape)),
                }
            }
            Node::Sum(s) => {
                let s = self.sums.list(s).into_iter();
                let s = s.map(|(c, u)| Ok((c, self.turn(u, axes, by)?)));
                let s = s.collect::<Result<Vec<_>, String>>()?;
                Ok(self.sum(&s, &shape))
            }
            Node::Product(f) => {
                let turned = |(u, l): &(Term, Box<[u8]>)| {
                    Ok((self.turn(*u, axes, by)?, l.iter().map(|&l| u32::from(l)).collect()))
                };
                let f = f.iter().map(turned).collect::<Result<Vec<_>, String>>()?;
                let out: Vec<u32> = (0..shape.len() as u32).collect();
                self.product(&f, &out, &shape)
            }
            Node::Leaf(_) => Ok(t),
        }
    }

    /// Attention over the keys of both: outputs and log-sum-exps, of each pair together.
    pub fn merge(&mut self, pairs: [[Term; 2]; 2]) -> [Term; 2] {
        let mut all = vec![];
        for [out, lse] in pairs {
            match (self.node(out), self.node(lse)) {
                (Node::Apply(Fun::Merge(_), a, 0), Node::Apply(Fun::Merge(_), b, 1)) if a == b => {
                    all.extend(a.iter().copied());
                }
                _one => all.extend([out, lse]),
            }
        }
        let shapes = pairs[0].map(|t| self.shape(t).to_vec());
        [0, 1].map(|k| self.merged(all.clone(), k as u8, &shapes[k]))
    }

    fn merged(&mut self, args: Vec<Term>, out: u8, shape: &[usize]) -> Term {
        let mut pairs: Vec<[Term; 2]> = args.chunks(2).map(|p| [p[0], p[1]]).collect();
        pairs.sort_unstable();
        self.lemma("merging is commutative and associative");
        self.apply(Merge, &pairs.concat(), out, shape)
    }

    /// The ranks' own values as pieces of one tensor of this shape.
    pub fn join(&mut self, t: Term, a: Around, shape: &[usize]) -> Term {
        let own = self.monomials(t);
        let joined = match &own[..] {
            [(c, one)] => self.join_one(*one, a).map(|x| (*c, x)),
            many => self.join_sum(many, a),
        };
        match joined.filter(|(_, x)| self.shape(*x) == shape) {
            Some((c, x)) => {
                self.lemma("a full turn of a ring is the whole");
                self.scale(c, x)
            }
            None => self.apply(Join { axes: a.axes, dim: a.dim }, &[t], 0, shape),
        }
    }

    fn join_one(&mut self, t: Term, a: Around) -> Option<Term> {
        match self.node(t).clone() {
            Node::Apply(Fun::Block(Block { axes, dim, of, shift: 0 }), x, _)
                if (Around { axes, of, dim }) == a =>
            {
                Some(x[0])
            }
            Node::Apply(Fun::Merge(_), args, out) if a.dim == TOKENS => {
                let mut calls = vec![];
                for pair in args.chunks(2) {
                    let (Node::Apply(f, x, 0), Node::Apply(g, y, 1)) =
                        (self.node(pair[0]), self.node(pair[1]))
                    else {
                        return None;
                    };
                    if (f, x) != (g, y) || !matches!(f, Fun::Attention(_)) {
                        return None;
                    }
                    let (f, x) = (f.clone(), x.clone());
                    calls.push(self.call(f, &x, a)?);
                }
                self.full_turn(&calls, 0, out, a)
            }
            Node::Leaf(_) | Node::Apply(..) | Node::Product(_) | Node::Sum(_) => None,
        }
    }

    /// A sum of gradients of attention over all blocks.
    fn join_sum(&mut self, all: &[(Coef, Term)], a: Around) -> Option<(Coef, Term)> {
        let lead = all.first()?.0;
        let mut calls = vec![];
        let mut result = None;
        for (c, t) in all {
            let Node::Apply(f @ Fun::AttentionGrad(_), x, out) = self.node(*t).clone() else {
                return None;
            };
            if *c != lead || result.is_some_and(|r| r != out) {
                return None;
            }
            result = Some(out);
            calls.push(self.call(f, &x, a)?);
        }
        let out = result?;
        let fixed = usize::from(out != 0);
        if a.dim != TOKENS {
            return None;
        }
        Some((lead, self.full_turn(&calls, fixed, out, a)?))
    }

    /// A call on blocks: what is of queries has one shift, and what is of keys.
    fn call(&self, f: Fun, args: &[Term], a: Around) -> Option<AttentionCall> {
        let which = usize::from(matches!(f, Fun::AttentionGrad(_)));
        let mut shifts: BTreeMap<bool, usize> = BTreeMap::new();
        let mut wholes = vec![];
        let (Fun::Attention(Attention(c)) | Fun::AttentionGrad(AttentionGrad(c))) = &f else {
            return None;
        };
        let first = BEHIND[which] + c.numbers();
        let segments = [0, 1].map(|i| c.segments.then_some(first + i));
        let drops = c.kept.is_some();
        for (i, &t) in args.iter().enumerate() {
            let places = drops && i + 1 == args.len();
            if i >= BEHIND[which] && !places && !segments.contains(&Some(i)) {
                if self.mentions(t).has(Mentions::BLOCK) {
                    return None;
                }
                wholes.push(t);
                continue;
            }
            let Node::Apply(Fun::Block(Block { axes, dim, of, shift }), x, _) = self.node(t) else {
                return None;
            };
            let tokens = if POSITIONS[which].contains(&i) { 0 } else { TOKENS };
            if (*axes, *of, *dim) != (a.axes, a.of, tokens) {
                return None;
            }
            let of_keys = KEYS[which].contains(&i) || segments[1] == Some(i);
            if *shifts.entry(of_keys).or_insert(*shift) != *shift {
                return None;
            }
            wholes.push(x[0]);
        }
        Some(AttentionCall { f, wholes, shifts: [*shifts.get(&false)?, *shifts.get(&true)?] })
    }

    /// Calls of the same wholes; side `fixed` has shift 0, and the other every shift once.
    fn full_turn(
        &mut self,
        calls: &[AttentionCall],
        fixed: usize,
        out: u8,
        a: Around,
    ) -> Option<Term> {
        let first = calls.first()?;
        let same = calls.iter().all(|c| c.f == first.f && c.wholes == first.wholes);
        let mut turned: Vec<usize> = calls.iter().map(|c| c.shifts[1 - fixed]).collect();
        turned.sort_unstable();
        let full = (self.lemmas.turn)(&turned, a.of);
        if !same || !full || calls.iter().any(|c| c.shifts[fixed] != 0) {
            return None;
        }
        let shape_of = |i: usize| self.shape(first.wholes[i]).to_vec();
        let shape = match (&first.f, out) {
            (Fun::Attention(_), 0) => {
                let (mut q, v) = (shape_of(0), shape_of(2));
                q[3] = v[3];
                q
            }
            (Fun::Attention(_), _) => shape_of(0)[..3].to_vec(),
            // A bias has a gradient of all keys, which is no sum that comes home.
            (_, 3) => return None,
            (_, k) => shape_of(usize::from(k)),
        };
        Some(self.apply(first.f.clone(), &first.wholes, out, &shape))
    }
}
