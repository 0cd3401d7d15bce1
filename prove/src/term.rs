//! Tensors as terms in normal form, over the reals: equal terms are equal tensors.
//!
//! A tensor is a linear combination of monomials. A monomial is a leaf, a function of terms, or a
//! product: an Einstein sum of factors. Terms are kept once (hash-consed), so equality is that of
//! numbers, and a model of a hundred layers has some ten thousand terms.
//!
//! What is always applied, each an equality of real tensors:
//!
//! | lemma | where |
//! |---|---|
//! | sums are commutative and associative, like terms join, zeros vanish | [`Store::sum`] |
//! | products are so too, are bilinear in numbers, and a product of products is one product | `product` |
//! | the leading coefficient of a sum leaves a product | `product` |
//! | the sum over a letter that nobody has is a multiplication by its size | `product` |
//! | a / b = a · (1 / b) | `apply` |
//! | a reshape of a reshape is one; a reshape of a sum is a sum of reshapes | [`Store::reshape`] |
//! | a shift of a dim takes a range of it and places it among zeros; shifts of shifts are one | `apply` |
//! | Σ over microbatches is linear; of what does not depend on them it is a multiple | [`Store::fold`] |

use crate::fun::{Fun, Microbatches};
use crate::lemmas::Lemmas;
use crate::number::Coef;
use crate::ops::{Concat, Reciprocal, Reshape};
use crate::sums::{Sum, Sums};
use shardc_ir::func::Role;
use shardc_ir::maps::HashMap;
use std::collections::BTreeMap;

/// A term: an index into the [`Store`] that made it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Term(pub u32);

/// A factor of a product with the letters of its dims.
pub type Factor = (Term, Box<[u8]>);

/// How a term is made of others.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Node {
    Leaf(Box<Leaf>),
    /// A result of a function, by number.
    Apply(Fun, Box<[Term]>, u8),
    /// An Einstein sum: the first letters are the result's dims, the others are summed over. Without
    /// factors it is 1 everywhere.
    Product(Box<[Factor]>),
    /// Of two or more terms, or of one with a coefficient that is not 1; of none it is zero.
    Sum(Sum),
}

/// What a term mentions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mentions(u8);

impl Mentions {
    /// An accumulator, as it was before the call.
    pub const ACCUMULATOR: Mentions = Mentions(1);
    /// Data of the microbatch.
    pub const MICROBATCH: Mentions = Mentions(2);
    /// Blocks that go around a ring.
    pub const BLOCK: Mentions = Mentions(4);
    /// Pieces of a dim, or places of them.
    pub const PIECE: Mentions = Mentions(8);
    /// Chunks of a dim.
    pub const CHUNK: Mentions = Mentions(16);
    /// Tensors one behind the other along a first dim.
    pub const STACK: Mentions = Mentions(32);

    pub fn has(self, o: Mentions) -> bool {
        self.0 & o.0 != 0
    }
    pub(crate) fn with(self, o: Mentions) -> Mentions {
        Mentions(self.0 | o.0)
    }
}

/// Where a term was first made: a node of a function of the plan, or of the model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Origin {
    /// Index of the plan's function; `None`: the model.
    pub func: Option<u32>,
    pub node: u32,
}

/// All terms.
#[derive(Default)]
pub struct Store {
    nodes: Vec<Node>,
    shapes: Vec<Box<[usize]>>,
    mentions: Vec<Mentions>,
    origins: Vec<Option<Origin>>,
    known: HashMap<(Node, Box<[usize]>), Term>,
    pub(crate) sums: Sums,
    /// Rows of terms that were asked for: of a dim, by number.
    pub(crate) rows: HashMap<(Term, usize, usize), Option<Term>>,
    /// What is being read: the origin of terms that are made now.
    pub here: Option<Origin>,
    pub lemmas: Lemmas,
    /// How often which lemma was used.
    pub used: BTreeMap<&'static str, usize>,
}

/// What a leaf is.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Leaf {
    /// The value of a role, the same before and in every step.
    Role(Role),
    /// The microbatch's rows of an input.
    OfMicrobatch(Role),
    /// Anything else of which nothing is known.
    Named(Box<str>),
}

impl From<&str> for Leaf {
    fn from(name: &str) -> Leaf {
        Leaf::Named(name.into())
    }
}

impl From<&Role> for Leaf {
    fn from(role: &Role) -> Leaf {
        Leaf::Role(role.clone())
    }
}

impl std::fmt::Display for Leaf {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            Leaf::Role(r) => write!(f, "{r}"),
            Leaf::OfMicrobatch(r) => write!(f, "{r} of the microbatch"),
            Leaf::Named(name) => f.write_str(name),
        }
    }
}

impl Store {
    pub fn len(&self) -> usize {
        self.nodes.len()
    }
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }
    pub fn node(&self, t: Term) -> &Node {
        &self.nodes[t.0 as usize]
    }
    pub fn shape(&self, t: Term) -> &[usize] {
        &self.shapes[t.0 as usize]
    }
    pub fn mentions(&self, t: Term) -> Mentions {
        self.mentions[t.0 as usize]
    }
    pub fn origin(&self, t: Term) -> Option<Origin> {
        self.origins[t.0 as usize]
    }
    pub(crate) fn lemma(&mut self, name: &'static str) {
        *self.used.entry(name).or_default() += 1;
    }

    pub(crate) fn put(&mut self, node: Node, shape: &[usize]) -> Term {
        let mentions = self.mentioned_by(&node);
        self.put_with(node, shape, mentions)
    }

    fn put_with(&mut self, node: Node, shape: &[usize], mentions: Mentions) -> Term {
        let key = (node, shape.into());
        if let Some(&t) = self.known.get(&key) {
            return t;
        }
        let t = Term(u32::try_from(self.nodes.len()).expect("fewer than 2^32 terms"));
        self.nodes.push(key.0.clone());
        self.shapes.push(key.1.clone());
        self.mentions.push(mentions);
        self.origins.push(self.here);
        self.known.insert(key, t);
        t
    }

    fn mentioned_by(&self, node: &Node) -> Mentions {
        let all = |it: &mut dyn Iterator<Item = Term>| {
            it.fold(Mentions::default(), |m, t| m.with(self.mentions(t)))
        };
        match node {
            Node::Leaf(_) => Mentions::default(),
            Node::Product(f) => all(&mut f.iter().map(|f| f.0)),
            Node::Sum(s) => self.sums.mentions(*s),
            Node::Apply(f, args, _) => {
                let of = all(&mut args.iter().copied());
                match f {
                    Fun::Block(_) => of.with(Mentions::BLOCK),
                    Fun::Piece(_) | Fun::Place(_) => of.with(Mentions::PIECE),
                    Fun::Chunk(_) => of.with(Mentions::CHUNK),
                    Fun::Concat(Concat(0)) => of.with(Mentions::STACK),
                    // What is summed is no longer that of one microbatch.
                    Fun::Microbatches(_) => Mentions(of.0 & !Mentions::MICROBATCH.0),
                    _same => of,
                }
            }
        }
    }

    /// A tensor of which only its name is known.
    pub fn leaf(&mut self, name: impl Into<Leaf>, shape: &[usize], mentions: Mentions) -> Term {
        self.put_with(Node::Leaf(Box::new(name.into())), shape, mentions)
    }

    /// Result `out` of a function.
    pub fn apply(&mut self, f: impl Into<Fun>, args: &[Term], out: u8, shape: &[usize]) -> Term {
        let f = f.into();
        if let Some(known) = self.of_shifts(&f, args, shape) {
            return known;
        }
        if let Some(known) = self.of_chunks(&f, args, out, shape) {
            return known;
        }
        self.put(Node::Apply(f, args.into(), out), shape)
    }

    pub fn zero(&mut self, shape: &[usize]) -> Term {
        self.put(Node::Sum(Sums::ZERO), shape)
    }

    /// A number everywhere.
    pub fn fill(&mut self, c: Coef, shape: &[usize]) -> Term {
        let one = self.put(Node::Product([].into()), shape);
        self.sum(&[(c, one)], shape)
    }

    /// What a term is made of, all of which was made before it.
    pub fn made_of(&self, t: Term) -> Vec<Term> {
        match self.node(t) {
            Node::Leaf(_) => vec![],
            Node::Apply(_, args, _) => args.to_vec(),
            Node::Product(all) => all.iter().map(|f| f.0).collect(),
            Node::Sum(all) => self.sums.list(*all).into_iter().map(|x| x.1).collect(),
        }
    }

    /// A term as monomials with coefficients.
    pub fn monomials(&self, t: Term) -> Vec<(Coef, Term)> {
        match self.node(t) {
            Node::Sum(s) => self.sums.list(*s),
            Node::Leaf(_) | Node::Apply(..) | Node::Product(_) => vec![(Coef::ONE, t)],
        }
    }

    /// A linear combination of terms of one shape.
    pub fn sum(&mut self, all: &[(Coef, Term)], shape: &[usize]) -> Term {
        let mut sum = Sums::ZERO;
        for &(c, t) in all {
            assert_eq!(self.shape(t), shape, "terms of a sum have one shape");
            let own = match *self.node(t) {
                Node::Sum(s) => self.sums.times(c, s),
                Node::Leaf(_) | Node::Apply(..) | Node::Product(_) => {
                    let mentions = self.mentions(t);
                    self.sums.one(c, t, mentions)
                }
            };
            sum = self.sums.plus(sum, own);
        }
        let parts = self.sums.mentions(sum);
        if parts.has(Mentions::PIECE) || parts.has(Mentions::CHUNK) {
            let all = self.sums.list(sum);
            let joined = self.join_pieces(&all).or_else(|| self.join_chunks(&all));
            if let Some(joined) = joined {
                return self.sum(&joined, shape);
            }
        }
        match (self.sums.len(sum), self.sums.first(sum)) {
            (1, Some((Coef::ONE, t))) => t,
            _ => self.put(Node::Sum(sum), shape),
        }
    }

    /// The sum of terms of one shape.
    pub fn add(&mut self, all: &[Term]) -> Term {
        let shape = self.shape(all[0]).to_vec();
        let all: Vec<(Coef, Term)> = all.iter().map(|&t| (Coef::ONE, t)).collect();
        self.sum(&all, &shape)
    }

    pub fn scale(&mut self, c: Coef, t: Term) -> Term {
        let shape = self.shape(t).to_vec();
        self.sum(&[(c, t)], &shape)
    }

    /// The same elements in the same order.
    pub fn reshape(&mut self, t: Term, to: &[usize]) -> Term {
        if self.shape(t) == to {
            return t;
        }
        if let Some(row) = self.row_of_chunk(t, to) {
            return row;
        }
        match self.node(t).clone() {
            Node::Apply(Fun::Reshape(_), of, _) => {
                self.lemma("a reshape of a reshape is one");
                self.reshape(of[0], to)
            }
            Node::Sum(s) => {
                self.lemma("a reshape of a sum is a sum of reshapes");
                let s = self.sums.list(s);
                let s: Vec<(Coef, Term)> =
                    s.into_iter().map(|(c, u)| (c, self.reshape(u, to))).collect();
                self.sum(&s, to)
            }
            Node::Product(f) if f.is_empty() => self.fill(Coef::ONE, to),
            Node::Leaf(_) | Node::Apply(..) | Node::Product(_) => {
                let chunk = match self.node(t) {
                    Node::Apply(Fun::Chunk(c), of, _) => Some((*c, of[0])),
                    _whole => None,
                };
                let cut = chunk.and_then(|(c, whole)| self.reshape_chunk(c, whole, to));
                cut.unwrap_or_else(|| self.apply(Reshape, &[t], 0, to))
            }
        }
    }

    /// The sum over `microbatches` microbatches.
    pub fn fold(&mut self, t: Term, microbatches: usize) -> Term {
        let shape = self.shape(t).to_vec();
        let all = self.monomials(t);
        let mut sum = Vec::with_capacity(all.len());
        for (c, u) in all {
            sum.push(match self.mentions(u).has(Mentions::MICROBATCH) {
                true => (c, self.apply(Microbatches {}, &[u], 0, &shape)),
                false => (c.times(Coef::whole(microbatches)), u),
            });
        }
        self.lemma("a sum over microbatches is linear");
        self.sum(&sum, &shape)
    }

    /// 1 / t, element by element.
    pub fn reciprocal(&mut self, t: Term) -> Term {
        let shape = self.shape(t).to_vec();
        self.apply(Reciprocal, &[t], 0, &shape)
    }
}
