//! Linear combinations of terms as tries, of which each is kept once.
//!
//! A residual stream is a sum to which each layer adds. Written out at every layer, the sums of L layers would have L²
//! terms. A trie branches at the first bit in which the numbers of terms differ (Morrison, "PATRICIA", 1968): its form
//! depends on the combination alone, not on the order in which it came to be. So equal combinations are one trie, and
//! one that is another with a term more has all of that but the path to the term.

use crate::number::Coef;
use crate::term::{Mentions, Term};
use shardc_ir::maps::HashMap;
use shardc_ir::steps;

/// A linear combination: an index into the [`Sums`] that made it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Sum(u32);

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Trie {
    Empty,
    One(Coef, Term),
    /// Terms agree in all higher bits than this one, which is 0 in the first and 1 in the second.
    Two(u8, Sum, Sum),
}

/// What is known of a trie beside its form.
#[derive(Clone, Copy)]
struct TrieFacts {
    trie: Trie,
    /// The least of its terms, with its coefficient.
    first: (Coef, Term),
    len: u32,
    mentions: Mentions,
}

/// All combinations.
pub struct Sums {
    all: Vec<TrieFacts>,
    numbers: HashMap<Trie, Sum>,
    scaled: HashMap<(Sum, Coef), Sum>,
}

impl Default for Sums {
    fn default() -> Sums {
        let mut s = Sums { all: vec![], numbers: HashMap::default(), scaled: HashMap::default() };
        let first = (Coef::ZERO, Term(0));
        s.keep(TrieFacts { trie: Trie::Empty, first, len: 0, mentions: Mentions::default() });
        s
    }
}

impl Sums {
    /// Nothing: 0.
    pub const ZERO: Sum = Sum(0);

    fn of(&self, s: Sum) -> TrieFacts {
        self.all[s.0 as usize]
    }

    fn keep(&mut self, known: TrieFacts) -> Sum {
        let next = Sum(u32::try_from(self.all.len()).expect("fewer than 2^32 sums"));
        let number = *self.numbers.entry(known.trie).or_insert(next);
        if number == next {
            self.all.push(known);
        }
        number
    }

    /// How many terms it has.
    pub fn len(&self, s: Sum) -> usize {
        self.of(s).len as usize
    }

    /// Its least term, with its coefficient; `None` of nothing.
    pub fn first(&self, s: Sum) -> Option<(Coef, Term)> {
        (s != Sums::ZERO).then(|| self.of(s).first)
    }

    /// What its terms mention.
    pub fn mentions(&self, s: Sum) -> Mentions {
        self.of(s).mentions
    }

    /// Its terms, in order.
    pub fn list(&self, s: Sum) -> Vec<(Coef, Term)> {
        let (mut out, mut open) = (Vec::with_capacity(self.len(s)), vec![s]);
        while let Some(s) = open.pop() {
            match self.of(s).trie {
                Trie::Empty => {}
                Trie::One(c, t) => out.push((c, t)),
                Trie::Two(_, a, b) => open.extend([b, a]),
            }
        }
        steps::add("sums", out.len());
        out
    }

    /// A term with a coefficient.
    pub fn one(&mut self, c: Coef, t: Term, mentions: Mentions) -> Sum {
        match c == Coef::ZERO {
            true => Sums::ZERO,
            false => {
                self.keep(TrieFacts { trie: Trie::One(c, t), first: (c, t), len: 1, mentions })
            }
        }
    }

    fn two(&mut self, bit: u8, a: Sum, b: Sum) -> Sum {
        if a == Sums::ZERO || b == Sums::ZERO {
            return if a == Sums::ZERO { b } else { a };
        }
        let [x, y] = [a, b].map(|s| self.of(s));
        let (len, mentions) = (x.len + y.len, x.mentions.with(y.mentions));
        self.keep(TrieFacts { trie: Trie::Two(bit, a, b), first: x.first, len, mentions })
    }

    /// The sum of two.
    pub fn plus(&mut self, a: Sum, b: Sum) -> Sum {
        steps::add("sums", 1);
        if a == Sums::ZERO || b == Sums::ZERO {
            return if a == Sums::ZERO { b } else { a };
        }
        let [x, y] = [a, b].map(|s| self.of(s));
        let differ = x.first.1.0 ^ y.first.1.0;
        let apart = differ.checked_ilog2().map(|bit| bit as u8);
        let has = |t: Term, bit: u8| t.0 >> bit & 1 == 1;
        match (x.trie, y.trie) {
            (Trie::One(c, t), Trie::One(d, _)) if apart.is_none() => {
                self.one(c.plus(d), t, x.mentions)
            }
            (Trie::Two(m, a0, a1), Trie::Two(n, b0, b1)) if m == n && apart < Some(m) => {
                let (left, right) = (self.plus(a0, b0), self.plus(a1, b1));
                self.two(m, left, right)
            }
            // All of the other belongs on one side of it.
            (Trie::Two(m, a0, a1), _) if apart <= Some(m) && y.branch() < Some(m) => {
                match has(y.first.1, m) {
                    false => {
                        let left = self.plus(a0, b);
                        self.two(m, left, a1)
                    }
                    true => {
                        let right = self.plus(a1, b);
                        self.two(m, a0, right)
                    }
                }
            }
            (_, Trie::Two(n, ..)) if apart <= Some(n) => self.plus(b, a),
            _ => {
                let bit = apart.expect("of one term there is one coefficient");
                match has(x.first.1, bit) {
                    false => self.two(bit, a, b),
                    true => self.two(bit, b, a),
                }
            }
        }
    }

    /// A combination times a number.
    pub fn times(&mut self, c: Coef, s: Sum) -> Sum {
        if c == Coef::ONE || s == Sums::ZERO {
            return s;
        }
        if let Some(&known) = self.scaled.get(&(s, c)) {
            return known;
        }
        steps::add("sums", 1);
        let TrieFacts { trie, mentions, .. } = self.of(s);
        let made = match trie {
            Trie::Empty => s,
            Trie::One(d, t) => self.one(c.times(d), t, mentions),
            Trie::Two(bit, a, b) => {
                let (left, right) = (self.times(c, a), self.times(c, b));
                self.two(bit, left, right)
            }
        };
        self.scaled.insert((s, c), made);
        made
    }
}

impl TrieFacts {
    fn branch(&self) -> Option<u8> {
        match self.trie {
            Trie::Empty | Trie::One(..) => None,
            Trie::Two(bit, ..) => Some(bit),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Combinations of random terms, made in two orders, beside a map of theirs.
    #[test]
    fn equal_combinations_are_one() {
        let mut state = 1u64;
        let mut roll = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99_991);
            (state >> 33) % n
        };
        for _ in 0..200 {
            let mut s = Sums::default();
            let some: Vec<(Coef, Term)> = (0..roll(40))
                .map(|_| (Coef::whole(roll(5) as usize), Term(roll(70) as u32)))
                .map(|(c, t)| (if t.0 % 3 == 0 { c.minus() } else { c }, t))
                .collect();
            let mut map: BTreeMap<Term, Coef> = BTreeMap::new();
            for &(c, t) in &some {
                let e = map.entry(t).or_insert(Coef::ZERO);
                *e = e.plus(c);
            }
            map.retain(|_, c| *c != Coef::ZERO);
            let want: Vec<(Coef, Term)> = map.into_iter().map(|(t, c)| (c, t)).collect();
            let mut add = |all: &mut dyn Iterator<Item = &(Coef, Term)>| {
                all.fold(Sums::ZERO, |sum, &(c, t)| {
                    let one = s.one(c, t, Mentions::default());
                    s.plus(sum, one)
                })
            };
            let (forth, back) = (add(&mut some.iter()), add(&mut some.iter().rev()));
            let (first, rest) = some.split_at(some.len() / 2);
            let halves = [add(&mut first.iter()), add(&mut rest.iter())];
            let joined = s.plus(halves[0], halves[1]);
            assert_eq!((forth, forth), (back, joined));
            assert_eq!(s.list(forth), want);
            assert_eq!((s.len(forth), s.first(forth)), (want.len(), want.first().copied()));
            let minus = s.times(Coef::ONE.minus(), forth);
            assert_eq!(
                (s.plus(forth, minus), s.times(Coef::ONE.minus(), minus)),
                (Sums::ZERO, forth)
            );
        }
    }

    /// Each layer adds to a stream: all sums together are no longer than the layers, but for the depth of a trie.
    #[test]
    fn a_stream_takes_steps_as_its_layers() {
        let of = |layers: u32| {
            steps::of(|| {
                let mut s = Sums::default();
                (0..layers).fold(Sums::ZERO, |sum, t| {
                    let one = s.one(Coef::ONE, Term(7 * t), Mentions::default());
                    let scaled = s.times(Coef::whole(3), sum);
                    let _ = s.times(Coef::whole(2), scaled);
                    s.plus(sum, one)
                })
            })
            .1["sums"] as f64
        };
        let (few, many) = (of(8192), of(16384));
        assert!(many <= few * 2f64.powf(1.1), "{few} steps, and {many} of twice the layers");
    }
}
