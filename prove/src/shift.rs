//! Lemmas of shifts: a range of a dim, placed among zeros.
//!
//! | lemma | side condition |
//! |---|---|
//! | a shift takes the range that has a place, and places it | |
//! | what is placed in a range that is placed is placed once | |
//! | a range of what is placed among zeros is a shift | |
//! | what is placed of a sum is a sum of what is placed | |
//!
//! So any ranges and places of ranges and places are one range, placed once.

use crate::fun::{Chunk, Fun, Places};
use crate::number::Coef;
use crate::term::{Node, Store, Term};

impl Store {
    /// A function that shifts a dim as a range that is placed, if it is not yet.
    pub(crate) fn of_shifts(&mut self, f: &Fun, args: &[Term], shape: &[usize]) -> Option<Term> {
        match f {
            Fun::Shifted { dim, start } => Some(self.shifted(args[0], *dim, *start, shape)),
            Fun::Widen(to) => self.among_zeros(args[0], *to, shape),
            Fun::Chunk(c) if c.ways == 1 && c.start != Chunk::ANY => self.range(args[0], *c, shape),
            _other => None,
        }
    }

    /// Index i of a dim of the result is index i + start of the term, and 0 where there is none.
    fn shifted(&mut self, x: Term, dim: usize, start: i64, shape: &[usize]) -> Term {
        let of = self.shape(x).to_vec();
        let inside = |i: i64| i.clamp(0, of[dim] as i64) as usize;
        let taken = inside(start)..inside(start.saturating_add(shape[dim] as i64));
        if taken.is_empty() {
            return self.fill(Coef::ZERO, shape);
        }
        let mut part = of.clone();
        part[dim] = taken.len();
        let places = |start: usize| Places { dim, start, step: 1 };
        let x = match (part == of, self.node(x).clone()) {
            (true, _) => x,
            // A range of a range.
            (false, Node::Apply(Fun::Chunk(c), all, _)) if is_range(c, dim) => {
                let at = places(c.start + taken.start);
                self.apply(Fun::Narrow(at), &all, 0, &part)
            }
            (false, _) => self.apply(Fun::Narrow(places(taken.start)), &[x], 0, &part),
        };
        if part == shape {
            return x;
        }
        // Where the first element would be, or the first that is taken.
        let at = (taken.start as i64 - start) as usize;
        self.apply(Fun::Widen(places(at)), &[x], 0, shape)
    }

    fn among_zeros(&mut self, t: Term, to: Places, shape: &[usize]) -> Option<Term> {
        match self.node(t).clone() {
            Node::Sum(s) => {
                self.lemma("what is placed of a sum is a sum of what is placed");
                let one = |&(k, u): &(Coef, Term)| (k, self.apply(Fun::Widen(to), &[u], 0, shape));
                let s: Vec<(Coef, Term)> = s.iter().map(one).collect();
                Some(self.sum(&s, shape))
            }
            Node::Apply(Fun::Widen(own), of, _)
                if (own.dim, own.step, to.step) == (to.dim, 1, 1) =>
            {
                self.lemma("what is placed in a range that is placed is placed once");
                let both = Places { start: to.start + own.start, ..to };
                Some(self.apply(Fun::Widen(both), &of, 0, shape))
            }
            _other => None,
        }
    }

    fn range(&mut self, t: Term, c: Chunk, shape: &[usize]) -> Option<Term> {
        let Node::Apply(Fun::Widen(own), of, _) = self.node(t).clone() else { return None };
        if (own.dim, own.step) != (c.dim, 1) {
            return None;
        }
        self.lemma("a range of what is placed among zeros is a shift");
        Some(self.shifted(of[0], c.dim, c.start as i64 - own.start as i64, shape))
    }
}

fn is_range(c: Chunk, dim: usize) -> bool {
    c.dim == dim && c.ways == 1 && c.start != Chunk::ANY
}
