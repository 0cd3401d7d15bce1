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
use crate::ops::{Narrow, Pad, Shifted};
use crate::term::{Node, Store, Term};

impl Store {
    /// A function that shifts a dim as a range that is placed, if it is not yet.
    pub(crate) fn of_shifts(&mut self, f: &Fun, args: &[Term], shape: &[usize]) -> Option<Term> {
        match f {
            Fun::Shifted(Shifted { dim, start }) => {
                Some(self.shifted(args[0], *dim, *start, shape))
            }
            Fun::Pad(Pad(to)) => self.among_zeros(args[0], *to, shape),
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
        let x = match part == of {
            true => x,
            false => self.apply(Narrow(places(taken.start)), &[x], 0, &part),
        };
        if part == shape {
            return x;
        }
        // Where the first element would be, or the first that is taken.
        let at = (taken.start as i64 - start) as usize;
        self.apply(Pad(places(at)), &[x], 0, shape)
    }

    fn among_zeros(&mut self, t: Term, to: Places, shape: &[usize]) -> Option<Term> {
        match self.node(t).clone() {
            Node::Sum(s) => {
                self.lemma("what is placed of a sum is a sum of what is placed");
                let all = self.sums.list(s);
                let one = |&(k, u): &(Coef, Term)| (k, self.apply(Pad(to), &[u], 0, shape));
                let s: Vec<(Coef, Term)> = all.iter().map(one).collect();
                Some(self.sum(&s, shape))
            }
            Node::Apply(Fun::Pad(Pad(own)), of, _)
                if (own.dim, own.step, to.step) == (to.dim, 1, 1) =>
            {
                self.lemma("what is placed in a range that is placed is placed once");
                let both = Places { start: to.start + own.start, ..to };
                Some(self.apply(Pad(both), &of, 0, shape))
            }
            // A range of a range, where it is placed. Elsewhere it stays, as chunks of a range are summed to that.
            Node::Apply(Fun::Chunk(c), of, _) if is_range(c, to.dim) => {
                let Node::Apply(Fun::Chunk(all), whole, _) = self.node(of[0]).clone() else {
                    return None;
                };
                if !is_range(all, to.dim) {
                    return None;
                }
                let both = Chunk { start: c.start + all.start, own: all.own, ..c };
                let part = self.shape(t).to_vec();
                let x = self.apply(both, &whole, 0, &part);
                Some(self.apply(Pad(to), &[x], 0, shape))
            }
            _other => None,
        }
    }

    fn range(&mut self, t: Term, c: Chunk, shape: &[usize]) -> Option<Term> {
        let Node::Apply(Fun::Pad(Pad(own)), of, _) = self.node(t).clone() else { return None };
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::term::Mentions;

    /// Shifts one after the other are one shift; of a sum, that of what is summed; ranges of ranges are as they are
    /// read.
    #[test]
    fn shifts_have_one_form() {
        let mut s = Store::default();
        let x = s.leaf("x", &[12], Mentions::default());
        let y = s.leaf("y", &[12], Mentions::default());
        let shifted = |s: &mut Store, t: Term, start: i64, n: usize| {
            s.apply(Shifted { dim: 0, start }, &[t], 0, &[n])
        };
        for by in [-1, 1] {
            let near = shifted(&mut s, x, by, 12);
            let [chained, direct] =
                [shifted(&mut s, near, 2 * by, 12), shifted(&mut s, x, 3 * by, 12)];
            assert_eq!(chained, direct);
            // As backward adds along a chain.
            let sum = s.add(&[near, y]);
            let all = shifted(&mut s, sum, 2 * by, 12);
            let own = shifted(&mut s, y, 2 * by, 12);
            assert_eq!(all, s.add(&[direct, own]));
        }
        let wide = s.apply(Pad(Places { dim: 0, start: 3, step: 1 }), &[x], 0, &[15]);
        let at = |start| Narrow(Places { dim: 0, start, step: 1 });
        for start in 0..4 {
            let cut = s.apply(at(start), &[wide], 0, &[12]);
            assert_eq!(cut, shifted(&mut s, x, start as i64 - 3, 12));
        }
        // An exchange in the place of a `narrow` of a `narrow`.
        let first = s.apply(at(3), &[x], 0, &[8]);
        let second = s.apply(at(2), &[first], 0, &[4]);
        assert_eq!(second, shifted(&mut s, first, 2, 4));
        // A hole is none of a shift.
        let mid = s.apply(Pad(Places { dim: 0, start: 3, step: 1 }), &[first], 0, &[12]);
        assert_ne!(mid, x);
    }
}
