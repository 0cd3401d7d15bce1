//! Functions that terms apply: what the normal form does not take apart.
//!
//! Numbers in them are kept as bits, so that functions can be compared and hashed. A rule of letters is
//! written with its letters in the order of their first appearance, so that names do not matter.

use shardc_ir::rule::{Dims, Rule};
use std::fmt::Write as _;
use std::sync::Arc;

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

/// Constants of attention.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Scores {
    pub scale: Real,
    /// How far before a query keys are seen, and how far behind it; `None`: at any distance.
    pub sides: [Option<usize>; 2],
    /// Keys of other chunks of so many positions are not seen.
    pub chunk: Option<usize>,
    pub softcap: Option<Real>,
    /// An operand behind the others has a slope for each head.
    pub slopes: bool,
    /// The segments of queries and of keys follow: only those of one segment see each other.
    pub segments: bool,
    /// The run and places of queries follow: some probabilities are 0 at random, by this rate and stream.
    pub kept: Option<(Real, Arc<str>)>,
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

/// A function of tensors. Several results are told apart by a number beside it.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Fun {
    /// A function of a number, element by element: `exp`, `log`, `sqrt`, ….
    Each(&'static str),
    Reciprocal,
    /// x · logistic(beta x), for another beta than 1.
    Silu(Real),
    Clamp(Real, Real),
    /// The operand to the power of a constant.
    Pow(Real),
    /// A function of two numbers, element by element: `max`, `min`, `less`, `equal`.
    Both(&'static str),
    /// The second where the first is not 0, else the third.
    Select,
    /// 1 where the operand is at least the bound, else 0.
    AtLeast(Real),
    /// An integer as a number.
    Number,
    /// The numbers, as bits of f32.
    Literal(Arc<[u32]>),
    /// Numbers at random of a stream: by the rule, from what, with its name.
    Draw(Pattern, Arc<str>, Arc<str>),
    Reshape,
    Max(Pattern),
    Min(Pattern),
    /// Sums along a dim up to each element, or from it on.
    Cumsum {
        dim: usize,
        reverse: bool,
    },
    /// With an index of padding, whose elements are 0.
    Take(Pattern, Option<usize>),
    /// With an index of padding, to which nothing is added.
    Put(Pattern, Option<usize>),
    Narrow(Places),
    Chunk(Chunk),
    Widen(Places),
    /// Index i of a dim is index i + `start` of the operand, and 0 where there is none.
    Shifted {
        dim: usize,
        start: i64,
    },
    /// Along a dim.
    Concat(usize),
    /// Pairs are adjacent elements, or else halves.
    Rope {
        adjacent: bool,
    },
    Attention(Scores),
    AttentionGrad(Scores),
    /// Attention over several sets of keys, from attention over each. Operands are outputs, each
    /// followed by its log-sum-exp.
    Merge,
    TopK(Pattern, usize),
    Route {
        /// Groups, and experts of a group.
        groups: [usize; 2],
        rows: usize,
        capacity: Option<usize>,
    },
    Dispatch,
    Combine,
    RowDots,
    GroupedDot,
    GroupedDotT,
    GroupedOuter,
    /// Rows that the counts name; others are 0.
    Defined,
    AdamW {
        beta1: Real,
        beta2: Real,
        eps: Real,
        decay: Real,
    },
    Sgd {
        decay: Real,
    },
    /// The sum over the microbatches of a step.
    Microbatches,
    /// What a rank around a ring has: the piece of a dim of the rank `shift` places before it.
    Block {
        axes: u32,
        dim: usize,
        of: usize,
        shift: usize,
    },
    /// Ranks' own values as the pieces of a dim.
    Join {
        axes: u32,
        dim: usize,
    },
    /// One piece of a dim.
    Piece(Cut),
    /// The operand as one piece of a dim, among zeros.
    Place(Cut),
}

impl Fun {
    /// The word for people, with what it depends on.
    pub fn name(&self) -> String {
        let mut s = String::new();
        let scores = |name: &str, c: &Scores| {
            let side = |n: Option<usize>| n.map(|n| n.to_string()).unwrap_or_default();
            let [before, behind] = c.sides.map(side);
            let mut s = format!("{name}[{:?}; sees={before}..{behind}", c.scale);
            if let Some(n) = c.chunk {
                write!(s, "; chunk={n}").expect("a String takes all text");
            }
            if let Some(c) = c.softcap {
                write!(s, "; softcap={c:?}").expect("a String takes all text");
            }
            s += if c.slopes { "; slopes" } else { "" };
            s += if c.segments { "; segments" } else { "" };
            if let Some((rate, stream)) = &c.kept {
                write!(s, "; kept={rate:?} {stream}").expect("a String takes all text");
            }
            s + "]"
        };
        let but = |padding: Option<usize>| {
            padding.map(|p| format!("; padding {p} is 0")).unwrap_or_default()
        };
        match self {
            Fun::Each(name) => s += name,
            Fun::Reciprocal => s += "1/",
            Fun::Silu(beta) => s += &format!("silu[{beta:?}]"),
            Fun::Clamp(lo, hi) => s += &format!("clamp[{lo:?}; hi={hi:?}]"),
            Fun::Pow(to) => s += &format!("pow[{to:?}]"),
            Fun::Both(name) => s += name,
            Fun::Select => s += "select",
            Fun::AtLeast(bound) => s += &format!("at_least[{bound:?}]"),
            Fun::Number => s += "number",
            Fun::Literal(x) => {
                let first: Vec<String> =
                    x.iter().take(4).map(|b| format!("{:?}", f32::from_bits(*b))).collect();
                s += &format!(
                    "literal[{}{}]",
                    first.join(", "),
                    if x.len() > 4 { ", …" } else { "" }
                );
            }
            Fun::Draw(p, from, stream) => s += &format!("draw[{p}; from={from}; stream={stream}]"),
            Fun::Reshape => s += "reshape",
            Fun::Max(p) => s += &format!("reduce_max[{p}]"),
            Fun::Min(p) => s += &format!("reduce_min[{p}]"),
            Fun::Cumsum { dim, reverse } => s += &format!("cumsum[{dim}; reverse={reverse}]"),
            Fun::Take(p, padding) => s += &format!("take[{p}{}]", but(*padding)),
            Fun::Put(p, padding) => s += &format!("put[{p}{}]", but(*padding)),
            Fun::Narrow(at) => s += &format!("narrow[{at}]"),
            Fun::Chunk(Chunk { dim, ways, own, start, len }) => {
                s += &format!("chunk[dim={dim}; start={start}; len={len} of {ways} times {own}]");
            }
            Fun::Widen(at) => s += &format!("widen[{at}]"),
            Fun::Shifted { dim, start } => s += &format!("shifted[dim={dim}; start={start}]"),
            Fun::Concat(dim) => s += &format!("concat[dim={dim}]"),
            Fun::Rope { adjacent } => s += if *adjacent { "rope[adjacent]" } else { "rope" },
            Fun::Attention(c) => s += &scores("attention", c),
            Fun::AttentionGrad(c) => s += &scores("attention_grad", c),
            Fun::Merge => s += "merge_attention",
            Fun::TopK(p, k) => s += &format!("top_k[{p}; {k}]"),
            Fun::Route { groups: [groups, experts], rows, capacity } => {
                s += &format!("route[g={groups},e={experts}; rows={rows}; capacity={capacity:?}]");
            }
            Fun::Dispatch => s += "dispatch",
            Fun::Combine => s += "combine",
            Fun::RowDots => s += "row_dots",
            Fun::GroupedDot => s += "grouped_dot",
            Fun::GroupedDotT => s += "grouped_dot_t",
            Fun::GroupedOuter => s += "grouped_outer",
            Fun::Defined => s += "defined",
            Fun::AdamW { beta1, beta2, eps, decay } => {
                s += &format!("adamw[{beta1:?}; {beta2:?}; {eps:?}; {decay:?}]");
            }
            Fun::Sgd { decay } => s += &format!("sgd[{decay:?}]"),
            Fun::Microbatches => s += "Σ over microbatches ",
            Fun::Block { dim, of, shift, .. } => {
                s += &format!("block[dim={dim}; of={of}; shift={shift}]");
            }
            Fun::Join { dim, .. } => s += &format!("join[dim={dim}]"),
            Fun::Piece(c) => s += &format!("piece[dim={}; {} of {}]", c.dim, c.piece, c.of),
            Fun::Place(c) => s += &format!("place[dim={}; {} of {}]", c.dim, c.piece, c.of),
        }
        s
    }
}
