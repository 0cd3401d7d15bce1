//! Lemmas of products that are made piece by piece on a grid (SUMMA).
//!
//! | lemma | side condition |
//! |---|---|
//! | Σ_k ⟨… piece_k(x) … piece_k(w) …⟩ = ⟨… x … w …⟩ | the letter that is cut is summed over and in no other factor; every piece once |
//! | Σ_k place_k(⟨… piece_k(w) …⟩) = ⟨… w …⟩ | the letter that is cut is the dim of the place, and in no other factor; every piece once |
//!
//! Terms of a sum are the pieces of one whole if they are the same term after every piece's number is
//! forgotten ([`Cut::ANY`]).

use crate::fun::{Cut, Fun, Piece, Place};
use crate::number::Coef;
use crate::term::{Factor, Mentions, Node, Store, Term};
use std::collections::BTreeMap;

/// A monomial as a piece of another term.
struct PieceOf {
    /// The monomial without the number of its piece.
    marked: Term,
    whole: Term,
    cut: Cut,
}

/// A piece of a sum: its number, the place of its summand, and the whole that it is of.
type Placed = (usize, usize, Term);

impl Store {
    /// Piece `cut` of a term.
    pub fn piece(&mut self, t: Term, cut: Cut) -> Result<Term, String> {
        let mut shape = self.shape(t).to_vec();
        let n = shape.get_mut(cut.dim).ok_or("a piece of no dim")?;
        if cut.of == 0 || *n % cut.of != 0 {
            return Err(format!("{} is not cut {} ways evenly", n, cut.of));
        }
        *n /= cut.of;
        Ok(self.apply(Piece { cut }, &[t], 0, &shape))
    }

    /// A term as a piece among zeros; linear.
    pub fn place(&mut self, t: Term, cut: Cut) -> Result<Term, String> {
        let mut shape = self.shape(t).to_vec();
        *shape.get_mut(cut.dim).ok_or("a place in no dim")? *= cut.of;
        let of = self.monomials(t).into_iter();
        let of: Vec<(Coef, Term)> =
            of.map(|(c, u)| (c, self.apply(Place { cut }, &[u], 0, &shape))).collect();
        Ok(self.sum(&of, &shape))
    }

    /// The sum with pieces joined to wholes; `None` if there are none to join.
    pub(crate) fn join_pieces(&mut self, sum: &[(Coef, Term)]) -> Option<Vec<(Coef, Term)>> {
        if sum.len() < 2 || !sum.iter().any(|x| self.mentions(x.1).has(Mentions::PIECE)) {
            return None;
        }
        // By what is the same in all pieces: their wholes and numbers, and where they stand.
        let mut groups: BTreeMap<(Term, Coef, usize), Vec<Placed>> = BTreeMap::new();
        for (i, &(c, t)) in sum.iter().enumerate() {
            for part in self.parts(t) {
                let key = (part.marked, c, part.cut.of);
                groups.entry(key).or_default().push((part.cut.piece, i, part.whole));
            }
        }
        for ((_, c, of), mut parts) in groups {
            parts.sort_unstable();
            let numbers: Vec<usize> = parts.iter().map(|p| p.0).collect();
            if (self.lemmas.pieces)(&numbers, of) {
                self.lemma("the sum over all pieces is the whole");
                let gone: Vec<usize> = parts.iter().map(|p| p.1).collect();
                let rest = sum.iter().enumerate().filter(|(i, _)| !gone.contains(i));
                let whole = std::iter::once((c, parts[0].2));
                return Some(rest.map(|(_, x)| *x).chain(whole).collect());
            }
        }
        None
    }

    /// All ways to see a monomial as a piece.
    fn parts(&mut self, t: Term) -> Vec<PieceOf> {
        match self.node(t).clone() {
            Node::Product(f) => {
                let (rank, shape) = (self.shape(t).len(), self.shape(t).to_vec());
                let cuts = self.cuts(&f).into_iter().filter(|x| usize::from(x.0) >= rank);
                let all: Vec<_> = cuts.collect();
                let part = |s: &mut Store, (letter, cut): (u8, Cut)| {
                    let whole = s.without(&f, letter, &shape, None)?;
                    let marked = s.without(&f, letter, &shape, Some(cut))?;
                    Some(PieceOf { marked, whole, cut })
                };
                all.into_iter().filter_map(|x| part(self, x)).collect()
            }
            Node::Apply(Fun::Place(Place { cut }), of, _) if cut.piece != Cut::ANY => {
                self.placed(t, of[0], cut).into_iter().collect()
            }
            Node::Leaf(_) | Node::Apply(..) | Node::Sum(_) => vec![],
        }
    }

    /// A placed piece as a piece of a whole.
    fn placed(&mut self, t: Term, of: Term, cut: Cut) -> Option<PieceOf> {
        let (inner, shape) = (self.shape(of).to_vec(), self.shape(t).to_vec());
        let any = Place { cut: Cut { piece: Cut::ANY, ..cut } };
        let dim = u8::try_from(cut.dim).ok()?;
        let (whole, marked) = match self.node(of).clone() {
            Node::Product(f) => {
                let found = self.cuts(&f).into_iter().find(|x| x.0 == dim)?.1;
                if (found.of, found.piece) != (cut.of, cut.piece) {
                    return None;
                }
                let whole = self.without(&f, dim, &shape, None)?;
                (whole, self.without(&f, dim, &inner, Some(found))?)
            }
            Node::Apply(Fun::Piece(Piece { cut: own }), x, _) if own == cut => {
                let any = Piece { cut: Cut { piece: Cut::ANY, ..own } };
                (x[0], self.apply(any, &x, 0, &inner))
            }
            Node::Leaf(_) | Node::Apply(..) | Node::Sum(_) => return None,
        };
        Some(PieceOf { marked: self.apply(any, &[marked], 0, &shape), whole, cut })
    }

    /// Letters of a product that are only in dims cut to one piece, with that cut.
    fn cuts(&self, f: &[Factor]) -> Vec<(u8, Cut)> {
        let mut found: BTreeMap<u8, Option<Cut>> = BTreeMap::new();
        for (t, letters) in f {
            for (d, &l) in letters.iter().enumerate() {
                let own = match self.node(*t) {
                    Node::Apply(Fun::Piece(Piece { cut: c }), _, _)
                        if c.dim == d && c.piece != Cut::ANY =>
                    {
                        Some(Cut { dim: 0, ..*c })
                    }
                    _whole => None,
                };
                let e = found.entry(l).or_insert(own);
                *e = e.filter(|c| own.is_some_and(|o| (self.lemmas.alike)(*c, o)));
            }
        }
        found.into_iter().filter_map(|(l, c)| Some((l, c?))).collect()
    }

    /// The product with the pieces of a letter replaced by their wholes, or by pieces without a number.
    fn without(
        &mut self,
        f: &[Factor],
        letter: u8,
        shape: &[usize],
        marked: Option<Cut>,
    ) -> Option<Term> {
        let mut factors = Vec::with_capacity(f.len());
        for (t, letters) in f {
            let mut t = *t;
            if letters.contains(&letter) {
                let Node::Apply(Fun::Piece(Piece { cut: own }), of, _) = self.node(t).clone()
                else {
                    return None;
                };
                t = match marked {
                    None => of[0],
                    Some(_) => {
                        let shape = self.shape(t).to_vec();
                        let any = Piece { cut: Cut { piece: Cut::ANY, ..own } };
                        self.apply(any, &of, 0, &shape)
                    }
                };
            }
            factors.push((t, letters.iter().map(|&l| u32::from(l)).collect()));
        }
        let out: Vec<u32> = (0..shape.len() as u32).collect();
        self.product(&factors, &out, shape).ok()
    }
}
