//! Lemmas of work that is done chunk by chunk of a dim.
//!
//! | lemma | side condition |
//! |---|---|
//! | f(chunk(x), …) = chunk(f(x, …)) | f works along the dim on each element for itself; what has the dim is the same chunk |
//! | ⟨… chunk(x) …⟩ = chunk(⟨… x …⟩) | the letter that is cut is in the result; what has it is the same chunk |
//! | Σ_k ⟨… chunk_k(x) …⟩ = ⟨… x …⟩ | the letter is summed over; the chunks are all of it, each element once |
//! | the chunks of x one after the other are x | they are all of it, in order |
//! | a chunk of a sum is a sum of chunks, of its transpose that of the chunks; of what is the same along the dim it is that | |
//! | a range that is all of a dim, or all of what is placed in it, is the tensor | |
//! | a dim cut in pieces whose chunks are taken may be split into pieces and places, or joined | |

use crate::fun::{Chunk, Fun, Places};
use crate::number::Coef;
use crate::ops::{Concat, Narrow};
use crate::product::Letter;
use crate::term::{Factor, Mentions, Node, Store, Term};
use std::collections::BTreeMap;

/// Start and length of a summand's chunk, its place in the sum, and the whole that it is a part of.
type SummandChunk = (usize, usize, usize, Term);

/// Factors or operands with the letters of their dims.
type Lettered = Vec<(Term, Vec<Letter>)>;

impl Store {
    /// Chunk `c` of a term; linear.
    pub fn chunk(&mut self, t: Term, c: Chunk) -> Term {
        let mut shape = self.shape(t).to_vec();
        shape[c.dim] = c.ways * c.len;
        match self.node(t).clone() {
            Node::Sum(s) => {
                let s = self.sums.list(s).into_iter();
                let s: Vec<(Coef, Term)> = s.map(|(k, u)| (k, self.chunk(u, c))).collect();
                self.sum(&s, &shape)
            }
            Node::Product(f) if !has(&f, c.dim) => self.put(Node::Product(f), &shape),
            Node::Product(f) if let Some((sum, dim)) = self.turned(&f, c.dim) => {
                let cut = self.chunk(sum, Chunk { dim, ..c });
                self.put(Node::Product([(cut, f[0].1.clone())].into()), &shape)
            }
            Node::Leaf(_) | Node::Apply(..) | Node::Product(_) => self.apply(c, &[t], 0, &shape),
        }
    }

    /// The sum of which a product is a transpose, and the dim of it that is this one.
    fn turned(&self, f: &[Factor], dim: usize) -> Option<(Term, usize)> {
        let [(t, letters)] = f else { return None };
        let at = |d: usize| letters.iter().position(|&l| usize::from(l) == d);
        let all = (0..letters.len()).all(|d| at(d).is_some());
        (all && matches!(self.node(*t), Node::Sum(_))).then_some((*t, at(dim)?))
    }

    /// The chunk of a dim that a term is.
    fn chunk_of(&self, t: Term, dim: usize) -> Option<Chunk> {
        match self.node(t) {
            Node::Apply(Fun::Chunk(c), _, _) => Some(*c).filter(|c| c.dim == dim),
            Node::Sum(s) => self.sums.list(*s).iter().find_map(|x| self.chunk_of(x.1, dim)),
            Node::Product(f) => {
                let (sum, own) = self.turned(f, dim)?;
                self.chunk_of(sum, own).map(|c| Chunk { dim, ..c })
            }
            Node::Leaf(_) | Node::Apply(..) => None,
        }
    }

    /// The term of which another one is this chunk.
    fn whole(&mut self, t: Term, c: Chunk) -> Option<Term> {
        let mut shape = self.shape(t).to_vec();
        shape[c.dim] = c.ways * c.own;
        match self.node(t).clone() {
            Node::Apply(Fun::Chunk(own), of, _) if own == c => Some(of[0]),
            Node::Product(f) if !has(&f, c.dim) => Some(self.put(Node::Product(f), &shape)),
            Node::Product(f) if let Some((sum, dim)) = self.turned(&f, c.dim) => {
                let all = self.whole(sum, Chunk { dim, ..c })?;
                Some(self.put(Node::Product([(all, f[0].1.clone())].into()), &shape))
            }
            Node::Sum(s) => {
                let all = self.sums.list(s);
                let one = |&(k, u): &(Coef, Term)| Some((k, self.whole(u, c)?));
                let s: Vec<(Coef, Term)> = all.iter().map(one).collect::<Option<_>>()?;
                Some(self.sum(&s, &shape))
            }
            Node::Leaf(_) | Node::Apply(..) | Node::Product(_) => None,
        }
    }

    fn is_chunked(&self, mut terms: impl Iterator<Item = Term>) -> bool {
        terms.any(|t| self.mentions(t).has(Mentions::CHUNK))
    }

    /// Factors or operands whole along a letter, and the chunk of it, without its dim; `None` if they are not
    /// all the same chunk.
    fn wholes(&mut self, of: &[(Term, Vec<Letter>)], letter: Letter) -> Option<(Chunk, Lettered)> {
        let place = |l: &[Letter]| l.iter().position(|x| *x == letter);
        let found = of.iter().find_map(|(t, l)| self.chunk_of(*t, place(l)?));
        let c = Chunk { dim: 0, ..found? };
        let mut out = Vec::with_capacity(of.len());
        for (t, l) in of {
            let twice = l.iter().filter(|x| **x == letter).count() > 1;
            let whole = match place(l) {
                Some(dim) => self.whole(*t, Chunk { dim, ..c }).filter(|_| !twice)?,
                None => *t,
            };
            out.push((whole, l.clone()));
        }
        Some((c, out))
    }

    /// A product of chunks as the chunk of a product, along a letter of the result.
    pub(crate) fn product_of_chunks(
        &mut self,
        factors: &[(Term, Vec<Letter>)],
        out: &[Letter],
        shape: &[usize],
    ) -> Result<Option<Term>, String> {
        if !self.is_chunked(factors.iter().map(|f| f.0)) {
            return Ok(None);
        }
        for (dim, &letter) in out.iter().enumerate() {
            let Some((c, wholes)) = self.wholes(factors, letter) else { continue };
            let mut shape = shape.to_vec();
            shape[dim] = c.ways * c.own;
            let whole = self.product(&wholes, out, &shape)?;
            self.lemma("a product of chunks is a chunk of the product");
            return Ok(Some(self.chunk(whole, Chunk { dim, ..c })));
        }
        Ok(None)
    }

    /// Result `out` of a function as a chunk, if it takes one or is made of them.
    pub(crate) fn of_chunks(
        &mut self,
        f: &Fun,
        args: &[Term],
        out: u8,
        shape: &[usize],
    ) -> Option<Term> {
        match f {
            // All of a dim.
            Fun::Narrow(_) | Fun::Pad(_) if self.shape(args[0]) == shape => Some(args[0]),
            Fun::Narrow(Narrow(Places { dim, start, step: 1 })) => {
                let (own, len) = (self.shape(args[0])[*dim], shape[*dim]);
                Some(self.chunk(args[0], Chunk { dim: *dim, ways: 1, own, start: *start, len }))
            }
            _ if !self.is_chunked(args.iter().copied()) => None,
            Fun::Concat(Concat(dim)) => self.in_order(args, *dim),
            _ => self.result_of_chunks(f, args, out, shape),
        }
    }

    fn result_of_chunks(
        &mut self,
        f: &Fun,
        args: &[Term],
        out: u8,
        shape: &[usize],
    ) -> Option<Term> {
        let (ins, to) = f.letters(args.len(), shape.len())?;
        let of: Lettered = args.iter().copied().zip(ins).collect();
        for (dim, &letter) in to.iter().enumerate() {
            let Some((c, wholes)) = self.wholes(&of, letter) else { continue };
            let mut shape = shape.to_vec();
            shape[dim] = c.ways * c.own;
            let wholes: Vec<Term> = wholes.into_iter().map(|x| x.0).collect();
            let whole = self.apply(f.clone(), &wholes, out, &shape);
            self.lemma("a function of chunks is a chunk of the function");
            return Some(self.chunk(whole, Chunk { dim, ..c }));
        }
        None
    }

    /// The whole whose chunks these are, one after the other.
    fn in_order(&mut self, args: &[Term], dim: usize) -> Option<Term> {
        let (mut at, mut all) = (0, None);
        for &t in args {
            let c = self.chunk_of(t, dim).filter(|c| c.ways == 1 && c.start == at)?;
            let whole = self.whole(t, c)?;
            at += c.len;
            if *all.get_or_insert((whole, c.own)) != (whole, c.own) {
                return None;
            }
        }
        let (whole, _) = all.filter(|x| x.1 == at)?;
        self.lemma("all chunks in order are the whole");
        Some(whole)
    }

    /// A chunk with its dim as pieces and places, or with these two as one dim.
    pub(crate) fn reshape_chunk(&mut self, c: Chunk, whole: Term, to: &[usize]) -> Option<Term> {
        let mut shape = self.shape(whole).to_vec();
        let own = |dim: usize, n: usize| [&shape[..dim], &[n], &shape[dim + 1..]].concat();
        let apart =
            |shape: &[usize], by: [usize; 2]| [&shape[..c.dim], &by, &shape[c.dim + 1..]].concat();
        let is = own(c.dim, c.ways * c.len);
        let new = if to == apart(&is, [c.ways, c.len]) {
            shape = apart(&shape, [c.ways, c.own]);
            Chunk { dim: c.dim + 1, ways: 1, ..c }
        } else if c.ways == 1 && c.dim > 0 {
            let ways = shape[c.dim - 1];
            let joint = |n: usize| [&shape[..c.dim - 1], &[ways * n], &shape[c.dim + 1..]].concat();
            if to != joint(c.len) {
                return None;
            }
            shape = joint(c.own);
            Chunk { dim: c.dim - 1, ways, ..c }
        } else {
            return None;
        };
        self.lemma("a chunk of pieces is taken of each piece");
        let whole = self.reshape(whole, &shape);
        Some(self.chunk(whole, new))
    }

    /// The sum with parts of products joined, whose chunks are all of a letter; `None` if there are none.
    pub(crate) fn join_chunks(&mut self, sum: &[(Coef, Term)]) -> Option<Vec<(Coef, Term)>> {
        if sum.len() < 2 || !self.is_chunked(sum.iter().map(|x| x.1)) {
            return None;
        }
        // By what is the same in all parts: the product of wholes, and where it is cut.
        let mut groups: BTreeMap<(Term, Coef), (usize, Vec<SummandChunk>)> = BTreeMap::new();
        for (i, &(k, t)) in sum.iter().enumerate() {
            for ((by, marked), whole, c) in self.parts_of_sum(t) {
                let of = groups.entry((marked, k.times(by))).or_insert((c.own, vec![]));
                of.1.push((c.start, c.len, i, whole));
            }
        }
        for ((_, k), (own, mut parts)) in groups {
            parts.sort_unstable();
            let ends = parts.iter().map(|p| p.0 + p.1);
            let begins = parts.iter().map(|p| p.0).chain([own]);
            if parts.len() > 1 && std::iter::once(0).chain(ends).eq(begins) {
                self.lemma("the sum over all chunks is the whole");
                let gone: Vec<usize> = parts.iter().map(|p| p.2).collect();
                let rest = sum.iter().enumerate().filter(|(i, _)| !gone.contains(i));
                let whole = std::iter::once((k, parts[0].3));
                return Some(rest.map(|(_, x)| *x).chain(whole).collect());
            }
        }
        None
    }

    /// All ways to see a product as a part of a sum over a letter: `k` times the product with that letter
    /// marked; the whole, of which `k` times that is a part; and the chunk.
    fn parts_of_sum(&mut self, t: Term) -> Vec<((Coef, Term), Term, Chunk)> {
        let Node::Product(f) = self.node(t).clone() else { return vec![] };
        let shape = self.shape(t).to_vec();
        let rank = shape.len();
        let factors: Lettered =
            f.iter().map(|(t, l)| (*t, l.iter().map(|&l| Letter::from(l)).collect())).collect();
        let mut summed: Vec<Letter> = factors.iter().flat_map(|x| x.1.clone()).collect();
        summed.retain(|l| *l as usize >= rank);
        summed.sort_unstable();
        summed.dedup();
        let out: Vec<Letter> = (0..rank as Letter).collect();
        let mut found = vec![];
        for letter in summed {
            let Some((c, wholes)) = self.wholes(&factors, letter) else { continue };
            let marked: Lettered =
                wholes.iter().map(|(t, l)| (self.marked(*t, l, letter, c), l.clone())).collect();
            let whole = self.product(&wholes, &out, &shape);
            let marked = self.product(&marked, &out, &shape);
            let Some((marked, whole)) = marked.ok().zip(whole.ok()) else { continue };
            // Factors of wholes may have numbers before them; what is marked is compared without.
            if let [(by, marked)] = self.monomials(marked)[..] {
                let whole = self.scale(by.inverse(), whole);
                found.push(((by, marked), whole, c));
            }
        }
        found
    }

    /// A factor with a mark where it is cut, which stands for any chunk.
    fn marked(&mut self, t: Term, letters: &[Letter], letter: Letter, c: Chunk) -> Term {
        let Some(dim) = letters.iter().position(|l| *l == letter) else { return t };
        let any = Chunk { dim, start: Chunk::ANY, len: Chunk::ANY, ..c };
        let shape = self.shape(t).to_vec();
        let lead = self.monomials(t).first().map_or(Coef::ONE, |m| m.0);
        let t = self.scale(lead.inverse(), t);
        let any = self.apply(any, &[t], 0, &shape);
        self.scale(lead, any)
    }
}

/// Whether a product's result depends on the place along a dim.
fn has(f: &[Factor], dim: usize) -> bool {
    f.iter().any(|(_, l)| l.iter().any(|&l| usize::from(l) == dim))
}
