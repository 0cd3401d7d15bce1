//! Functions that terms apply: what the normal form does not take apart.
//!
//! Numbers in them are kept as bits, so that functions can be compared and hashed. A rule of letters is
//! written with its letters in the order of their first appearance, so that names do not matter.

use crate::field::functions::Begins;
use crate::field::tensor::Tensor;
use crate::product::Letter;
use shardc_ir::rule::{Dims, Rule};

pub use crate::ops::Fun;

/// Letters of operands and of the result.
pub type Signature = (Vec<Vec<Letter>>, Vec<Letter>);

/// What a function of tensors is, which the file of its op in `ops` says.
pub trait Function {
    /// The word for people, with all that it depends on.
    fn name(&self) -> String;

    /// Results over the field, of the shapes that its operands give; a single result has this
    /// shape.
    ///
    /// # Errors
    /// Names what has no meaning over a field.
    fn results(&self, x: &[&Tensor], shape: &[usize], at: &Begins) -> Result<Vec<Tensor>, String>;

    /// It is linear in its first operand, and has one result.
    fn is_linear(&self) -> bool {
        false
    }

    /// Letters, if it works on each element for itself along letters that the result has.
    fn letters(&self, _args: usize, _rank: usize) -> Option<Signature> {
        None
    }
}

/// A number as its bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Real(u64);

impl Real {
    pub fn new(x: f64) -> Real {
        Real(x.to_bits())
    }
    pub fn get(self) -> f64 {
        f64::from_bits(self.0)
    }
}

impl std::fmt::Debug for Real {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{:?}", self.get())
    }
}

/// A rule of single letters, named `a`, `b`, … in the order of appearance: `ab,bc->ac`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Pattern {
    pub ins: Vec<Vec<u8>>,
    pub out: Vec<u8>,
}

impl Pattern {
    /// Of the first result of a rule; `None` if a dim is made of several letters.
    pub fn of(rule: &Rule) -> Option<Pattern> {
        let mut seen: Vec<u8> = vec![];
        let mut rename = |dims: &Dims| -> Option<Vec<u8>> {
            let one = |g: &shardc_ir::rule::Group| {
                let l = g.single()?.0;
                Some(seen.iter().position(|s| *s == l).unwrap_or_else(|| {
                    seen.push(l);
                    seen.len() - 1
                }) as u8)
            };
            dims.iter().map(one).collect()
        };
        let ins = rule.ins.iter().map(&mut rename).collect::<Option<_>>()?;
        Some(Pattern { ins, out: rename(rule.outs.first()?)? })
    }

    /// Its letters, for products.
    pub fn wide(&self) -> Signature {
        let wide = |l: &Vec<u8>| l.iter().map(|&l| Letter::from(l)).collect::<Vec<_>>();
        (self.ins.iter().map(wide).collect(), wide(&self.out))
    }

    /// The dim of `all` whose letter is in none of the others.
    pub fn own(all: &[u8], others: &[&[u8]]) -> Option<usize> {
        let mut only = (0..all.len()).filter(|&d| others.iter().all(|o| !o.contains(&all[d])));
        only.next().filter(|_| only.next().is_none())
    }
}

impl std::fmt::Display for Pattern {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let word = |l: &[u8]| l.iter().map(|&x| char::from(b'a' + x % 26)).collect::<String>();
        let ins: Vec<String> = self.ins.iter().map(|l| word(l)).collect();
        write!(f, "{}->{}", ins.join(","), word(&self.out))
    }
}

/// A piece of a dim that is cut `of` ways.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Cut {
    pub dim: usize,
    pub of: usize,
    /// [`Cut::ANY`] stands for a piece that is not said.
    pub piece: usize,
}

impl Cut {
    pub const ANY: usize = usize::MAX;
}

impl std::fmt::Display for Cut {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "dim={}; {} of {}", self.dim, self.piece, self.of)
    }
}

/// Of a dim that is `ways` pieces of `own` elements, the same `len` elements of each piece, from `start`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Chunk {
    pub dim: usize,
    pub ways: usize,
    pub own: usize,
    /// [`Chunk::ANY`] stands for one that is not said.
    pub start: usize,
    pub len: usize,
}

impl Chunk {
    pub const ANY: usize = usize::MAX;

    /// Where the element at a place of the chunk is in the whole.
    pub fn of(self, place: usize) -> usize {
        place / self.len * self.own + self.start + place % self.len
    }
}

/// Places of a dim, from `start`, `step` apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Places {
    pub dim: usize,
    pub start: usize,
    pub step: usize,
}

impl Places {
    /// The element that stands at a place, if one does.
    pub fn taken_at(self, place: usize) -> Option<usize> {
        let far = place.checked_sub(self.start)?;
        (far % self.step == 0).then_some(far / self.step)
    }
}

impl std::fmt::Display for Places {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "dim={}; start={}; step={}", self.dim, self.start, self.step)
    }
}

/// Why a function of terms alone has none over a field.
fn no_meaning(f: &dyn Function) -> Result<Vec<Tensor>, String> {
    Err(format!("`{}` has no meaning of its own over a field", f.name()))
}

impl Function for Chunk {
    fn name(&self) -> String {
        let Chunk { dim, ways, own, start, len } = self;
        format!("chunk[dim={dim}; start={start}; len={len} of {ways} times {own}]")
    }
    fn results(&self, x: &[&Tensor], shape: &[usize], _: &Begins) -> Result<Vec<Tensor>, String> {
        if self.start == Chunk::ANY {
            return no_meaning(self);
        }
        Ok(vec![Tensor::from_fn(shape, |i| {
            let mut j = i.to_vec();
            j[self.dim] = self.of(i[self.dim]);
            x[0].at(&j)
        })])
    }
}

/// Functions of terms, which no op is.
macro_rules! of_terms {
    ($($(#[doc = $doc:literal])* $name:ident $fields:tt $words:expr;)*) => {$(
        $(#[doc = $doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        pub struct $name $fields
        impl Function for $name {
            fn name(&self) -> String {
                let words: fn(&$name) -> String = $words;
                words(self)
            }
            fn results(
                &self,
                _: &[&Tensor],
                _: &[usize],
                _: &Begins,
            ) -> Result<Vec<Tensor>, String> {
                no_meaning(self)
            }
        }
    )*};
}

of_terms! {
    /// The sum over the microbatches of a step.
    Microbatches {} |_| "Σ over microbatches ".into();
    /// What a rank around a ring has: the piece of a dim of the rank `shift` places before it.
    Block { pub axes: u32, pub dim: usize, pub of: usize, pub shift: usize }
    |Block { axes: _, dim, of, shift }| format!("block[dim={dim}; of={of}; shift={shift}]");
    /// Ranks' own values as the pieces of a dim.
    Join { pub axes: u32, pub dim: usize } |Join { axes: _, dim }| format!("join[dim={dim}]");
    /// One piece of a dim.
    Piece { pub cut: Cut } |f| format!("piece[{}]", f.cut);
    /// The operand as one piece of a dim, among zeros.
    Place { pub cut: Cut } |f| format!("place[{}]", f.cut);
}
