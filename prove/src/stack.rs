//! Lemmas of tensors that are put into a stack, worked on together, and taken apart.
//!
//! | lemma | side condition |
//! |---|---|
//! | row i of tensors one behind the other is the i-th of them | along the first dim, each of one row |
//! | row i of f(x, …) is f of rows i | f works on each element for itself |
//! | row i of ⟨… x …⟩ is ⟨… row i of x …⟩ | the letter is in the result, and once in each factor that has it |
//! | row i of a sum is the sum of rows i | |
//!
//! So a letter that is in the result of all that is done to a stack is one that commutes with taking rows.

use crate::fun::Fun;
use crate::number::Coef;
use crate::ops::Concat;
use crate::product::Letter;
use crate::term::{Mentions, Node, Store, Term};

impl Store {
    /// A row of a dim, without that dim, of a term that is made of a stack alone as far as it has the dim.
    pub(crate) fn row(&mut self, t: Term, dim: usize, i: usize) -> Option<Term> {
        if !self.mentions(t).has(Mentions::STACK) {
            return None;
        }
        if let Some(&known) = self.rows.get(&(t, dim, i)) {
            return known;
        }
        let found = self.find_row(t, dim, i);
        self.rows.insert((t, dim, i), found);
        found
    }

    fn find_row(&mut self, t: Term, dim: usize, i: usize) -> Option<Term> {
        let mut shape = self.shape(t).to_vec();
        if i >= shape.remove(dim) {
            return None;
        }
        match self.node(t).clone() {
            Node::Apply(Fun::Concat(Concat(along)), all, _) if along == dim && dim == 0 => {
                let mut at = i;
                for part in all {
                    let n = self.shape(part)[0];
                    match (at < n, n) {
                        (true, 1) => {
                            self.lemma("a row of tensors one behind the other is one of them");
                            return Some(self.reshape(part, &shape));
                        }
                        (true, _) => return self.row(part, dim, at),
                        (false, _) => at -= n,
                    }
                }
                None
            }
            Node::Apply(f, args, out) => {
                let (ins, to) = f.letters(args.len(), shape.len() + 1)?;
                let each = ins.iter().all(|l| *l == to);
                let mut rows = vec![];
                for &x in args.iter().filter(|_| each) {
                    rows.push(self.row(x, dim, i)?);
                }
                self.lemma("a row of a function of elements is the function of rows");
                (!rows.is_empty()).then(|| self.apply(f, &rows, out, &shape))
            }
            Node::Product(factors) => {
                let mut all = vec![];
                for (x, letters) in factors {
                    let mut own: Vec<Letter> = letters.iter().map(|&l| Letter::from(l)).collect();
                    let mut places = (0..own.len()).filter(|&d| usize::from(letters[d]) == dim);
                    let x = match (places.next(), places.next()) {
                        (None, _) => x,
                        (Some(d), None) => {
                            own.remove(d);
                            self.row(x, d, i)?
                        }
                        (Some(_), Some(_)) => return None,
                    };
                    all.push((x, own));
                }
                let rank = shape.len() as Letter + 1;
                let out: Vec<Letter> = (0..rank).filter(|&l| l as usize != dim).collect();
                self.lemma("a row of a product is the product of rows");
                self.product(&all, &out, &shape).ok()
            }
            Node::Sum(s) => {
                let mut all: Vec<(Coef, Term)> = vec![];
                for (k, x) in self.sums.list(s) {
                    all.push((k, self.row(x, dim, i)?));
                }
                (!all.is_empty()).then(|| self.sum(&all, &shape))
            }
            Node::Leaf(_) => None,
        }
    }

    /// What is left of a chunk of one row without its dim, if it is a row of a stack.
    pub(crate) fn row_of_chunk(&mut self, t: Term, to: &[usize]) -> Option<Term> {
        let Node::Apply(Fun::Chunk(c), of, _) = self.node(t) else { return None };
        let (c, whole) = (*c, of[0]);
        let mut rest = self.shape(t).to_vec();
        let one = c.ways == 1 && c.len == 1 && rest.remove(c.dim) == 1 && rest == to;
        if one { self.row(whole, c.dim, c.start) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fun::Places;
    use crate::ops::{Each, Narrow};

    /// What is done to a stack is done to its rows, in their order; not where the letter is summed over.
    #[test]
    fn rows_of_a_stack_are_what_was_stacked() {
        let mut s = Store::default();
        let all: Vec<Term> =
            ["x", "y", "z"].map(|n| s.leaf(n, &[4, 5], Mentions::default())).into();
        let made = |s: &mut Store, x: Term, batch: &[Letter]| {
            let [rank, n] = [batch.len(), s.shape(x)[0]];
            let l = |own: &[Letter]| [batch, own].concat();
            let shape = |own: &[usize]| [&vec![n; rank][..], own].concat();
            let a = s.product(&[(x, l(&[8, 9])), (x, l(&[7, 9]))], &l(&[8, 7]), &shape(&[4, 4]));
            let a = a.expect("a product");
            let twice = s.scale(Coef::whole(2), a);
            let e = s.apply(Each("exp", None), &[twice], 0, &shape(&[4, 4]));
            let sum = s.add(&[e, a]);
            let b = s.product(&[(sum, l(&[8, 7])), (x, l(&[7, 9]))], &l(&[8, 9]), &shape(&[4, 5]));
            b.expect("a product")
        };
        let rows: Vec<Term> = all.iter().map(|&x| s.reshape(x, &[1, 4, 5])).collect();
        let two = s.apply(Concat(0), &rows[..2], 0, &[2, 4, 5]);
        let stack = s.apply(Concat(0), &[two, rows[2]], 0, &[3, 4, 5]);
        let whole = made(&mut s, stack, &[1]);
        for (i, &x) in all.iter().enumerate() {
            let at = Narrow(Places { dim: 0, start: i, step: 1 });
            let row = s.apply(at, &[whole], 0, &[1, 4, 5]);
            let row = s.reshape(row, &[4, 5]);
            let own = made(&mut s, x, &[]);
            assert_eq!(row, own, "row {i}");
            assert_ne!(row, made(&mut s, all[(i + 1) % 3], &[]));
        }
        // Rows that are summed: what is left of that is no row of the stack.
        let mixed = s.product(&[(stack, vec![1, 8, 9]), (stack, vec![2, 8, 9])], &[1, 2], &[3, 3]);
        let mixed = mixed.expect("a product");
        let mixed = s.apply(Narrow(Places { dim: 0, start: 0, step: 1 }), &[mixed], 0, &[1, 3]);
        let row = s.reshape(mixed, &[3]);
        let with_all = s.product(&[(all[0], vec![8, 9]), (stack, vec![2, 8, 9])], &[2], &[3]);
        assert_eq!(row, with_all.expect("a product"));
        let leaf = s.leaf("w", &[3, 4], Mentions::default());
        assert_eq!(s.row(leaf, 0, 1), None);
    }
}
