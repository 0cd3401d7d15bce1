//! Whether a model's numbers depend on the places of its tokens, by which tokens may not be dealt out of their order.

use shardc_ir::func::{Func, Node, Value, ValueMap};
use shardc_ir::infer::{Linear, Loops, sizes};
use shardc_ir::maps::HashMap;
use shardc_ir::ops::Kind;
use shardc_ir::rule::{Dims, Letter, Rule};
use smallvec::SmallVec;

/// The tokens of a sequence in a dim or a loop.
#[derive(Clone, Copy, PartialEq, Debug)]
struct TokenDims {
    /// Elements from one token to the next.
    inner: usize,
    /// How many there are: fewer than a sequence has if others are in another dim.
    count: usize,
    /// Each is a sum, or another fold, of some tokens and not of others.
    folded: bool,
}

/// What is known of the dims of a value.
#[derive(Clone, Default)]
struct DimFacts {
    tokens: SmallVec<[Option<TokenDims>; 4]>,
    /// Dims along which all elements are equal.
    uniform: SmallVec<[bool; 4]>,
}

/// The letters of a group with their sizes, from the minor one on, and how many elements each is apart.
fn minor_first<'a>(
    letters: &'a [Letter],
    sizes: &'a Loops,
) -> impl Iterator<Item = (Letter, usize, usize)> + 'a {
    let mut apart = 1;
    letters.iter().rev().map(move |&l| {
        let (at, size) = (apart, sizes.size(l).unwrap_or(1));
        apart *= size;
        (l, at, size)
    })
}

/// The tokens of each letter, by those of the operands' dims.
fn of_letters(rule: &Rule, ins: &[&DimFacts], sizes: &Loops) -> HashMap<Letter, TokenDims> {
    let mut out = HashMap::default();
    for (dims, known) in rule.ins.iter().zip(ins) {
        for (g, t) in dims.iter().zip(&known.tokens) {
            let Some(t) = t else { continue };
            for (l, apart, size) in minor_first(g.letters(), sizes) {
                let (from, to) = (apart.max(t.inner), (apart * size).min(t.inner * t.count));
                if from < to {
                    out.insert(
                        l,
                        TokenDims {
                            inner: from / apart,
                            count: to.div_ceil(from),
                            folded: t.folded,
                        },
                    );
                }
            }
        }
    }
    out
}

/// What is known of a result; `folds` says that the op folds some tokens of sequences of so many.
fn result(
    dims: &Dims,
    tokens: &HashMap<Letter, TokenDims>,
    uniform: &dyn Fn(Letter) -> bool,
    sizes: &Loops,
    (folds, seq): (bool, usize),
) -> DimFacts {
    let mut known = DimFacts::default();
    for g in dims.iter() {
        let mut all: Option<TokenDims> = None;
        for (l, apart, _) in minor_first(g.letters(), sizes) {
            if let Some(t) = tokens.get(&l) {
                let minor =
                    all.unwrap_or(TokenDims { inner: apart * t.inner, count: 1, folded: false });
                let folded = minor.folded || t.folded || folds && t.count != seq;
                all = Some(TokenDims { count: minor.count * t.count, folded, ..minor });
            }
        }
        known.tokens.push(all);
        known.uniform.push(g.letters().iter().all(|&l| uniform(l)));
    }
    known
}

/// The first op for which places of tokens count, in sequences of so many: it needs their dim whole, or shifts it; or
/// has an operand whose elements stand for places, such as a parameter with a row per place; or does more than to add up
/// sums of some tokens of a sequence. Attention goes by their positions, if it has all tokens of a sequence, and experts
/// take each token for itself.
pub(crate) fn by_place(f: &Func, seq: usize) -> Option<&Node> {
    let mut known = f.per_value(DimFacts::default());
    for (v, info) in known.iter_mut().enumerate() {
        let rank = f.ty(Value(v as u32)).rank();
        (info.tokens, info.uniform) =
            (SmallVec::from_elem(None, rank), SmallVec::from_elem(false, rank));
    }
    for a in &f.args {
        if let Some(dim) = a.role.as_ref().and_then(|r| r.kind.input()?.tokens()) {
            let own = &mut known[a.value].tokens[dim];
            *own = Some(TokenDims { inner: 1, count: seq, folded: false });
        }
    }
    for n in &f.nodes {
        let Some(made) = through(f, n, &known, seq) else { return Some(n) };
        for (v, k) in n.outs.iter().zip(made) {
            known[v] = k;
        }
    }
    None
}

/// What is known of a node's results; `None` if places of tokens count in it.
fn through(f: &Func, n: &Node, known: &ValueMap<DimFacts>, seq: usize) -> Option<Vec<DimFacts>> {
    let ranks: SmallVec<[usize; 4]> = n.ins.iter().map(|&v| f.ty(v).rank()).collect();
    let types: SmallVec<[_; 4]> = n.ins.iter().map(|&v| f.ty(v)).collect();
    let rule = n.op.def().rule(&ranks);
    let sizes = sizes(&rule, &types, n.op.def().sizes()).unwrap_or_default();
    let ins: SmallVec<[&DimFacts; 4]> = n.ins.iter().map(|v| &known[v]).collect();
    let tokens = of_letters(&rule, &ins, &sizes);
    // Along a letter: the tokens of each dim that has it, and whether all its elements are equal.
    let along = |l: Letter| {
        let dims = rule.ins.iter().zip(&ins);
        dims.flat_map(move |(dims, k)| {
            let has = dims.iter().enumerate().filter(move |(_, g)| g.letters().contains(&l));
            has.map(move |(d, _)| (k.tokens[d], k.uniform[d]))
        })
    };
    let reduced = |l: Letter| !rule.outs.iter().any(|d| d.iter().any(|g| g.letters().contains(&l)));
    let kind = n.op.facts().kind;
    // Sums of some tokens may only be added up.
    let adds = |l: Letter| {
        let folded = along(l).filter(|x| x.0.is_some_and(|t| t.folded)).count();
        let others = along(l).filter(|x| x.0.is_some_and(|t| !t.folded)).count();
        match n.op.def().linear() {
            _ if folded == 0 => true,
            Linear::No => false,
            Linear::Each(_) => folded == 1 && others == 0,
            Linear::Together(_) => others == 0,
        }
    };
    let placed = |(&l, t): (&Letter, &TokenDims)| match kind {
        kind if kind.of_experts() => false,
        Kind::Attention => t.count != seq || t.folded,
        _other => rule.is_whole(l) || along(l).any(|x| x == (None, false)) || !adds(l),
    };
    if tokens.iter().any(placed) {
        return None;
    }
    let folds = tokens.iter().any(|(&l, t)| reduced(l) && t.count != seq);
    // Experts take each token for itself, in an order of their own.
    let uniform = |l: Letter| {
        let own = kind != Kind::Attention && !rule.is_whole(l) && along(l).all(|x| x.1);
        own || kind.of_experts()
    };
    if n.ins.is_empty() {
        // One number, or a list of them.
        let equal = n.op.facts().fusion.is_some();
        return Some(n.outs.iter().map(|&v| constant(f.ty(v).rank(), equal)).collect());
    }
    let made = |dims| result(dims, &tokens, &uniform, &sizes, (folds, seq));
    Some(rule.outs.iter().map(made).collect())
}

/// A value that is made of nothing.
fn constant(rank: usize, equal: bool) -> DimFacts {
    DimFacts { tokens: SmallVec::from_elem(None, rank), uniform: SmallVec::from_elem(equal, rank) }
}
