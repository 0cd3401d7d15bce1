//! A model whose experts and recurrences are laid out for a mesh computes what the model computes.
//!
//! Both functions are read side by side: they have the same nodes, but where tokens become shards or rows again
//! there may be three for one. Every value of the one belongs to one of the other, in one of these ways:
//!
//! - it is the same;
//! - of tokens: element `[z,t]` of the one is that of token `σ(z,t)` of the other, where σ is what the reshapes
//!   and the transpose do to places: a bijection, since they only move elements;
//! - slots, counts, and rows of buffers: every copy of a token that names an expert has a row on both sides, with
//!   the same numbers, and its expert is the same; one that names none (padding) has no row on either. No copy is
//!   dropped, or nothing is claimed (a capacity drops by shard, which is what was asked for; a buffer that lacks
//!   rows ends the run).
//!
//! An op that takes each token, or each row, for itself keeps that; a sum over all tokens makes what is the same.

use crate::Report;
use crate::ledger::Gap;
use crate::ops::{law, sizes, states};
use shardc_ir::func::{Func, Module, Node, Value};
use shardc_ir::ops::{Op, Route};
use shardc_ir::rule::{Group, Letter};
use shardc_ir::text::node_text;
use std::collections::BTreeMap;

/// Factors of a dim, major to minor: how many, and how many elements of a whole tensor one is apart.
type Factors = Vec<(usize, usize)>;

/// How a value of the laid-out function belongs to one of the model.
#[derive(Clone, PartialEq, Debug)]
enum Is {
    Same,
    /// Dims of shards and of tokens; σ, by the factors of both dims in tokens.
    OfTokens {
        at: [usize; 2],
        places: [Factors; 2],
    },
    Slots(usize),
    Counts(usize),
    Rows(usize),
}

/// The two `route` nodes, and the order of their tokens.
struct Routed {
    ops: [Route; 2],
    places: [Factors; 2],
}

/// Shows that `laid` computes what `model` does; what is the same text needs no showing.
pub fn prove(model: &Module, laid: &Module, report: &mut Report) {
    let (joined, recurrences) = states::joined(laid);
    if recurrences > 0 {
        report.shown.insert("recurrences in pieces", recurrences);
        // What nothing reads is left out on both sides.
        let mut own = model.clone();
        own.funcs.iter_mut().for_each(|f| drop(f.drop_dead()));
        return side_by_side(&own, &joined, report);
    }
    side_by_side(model, laid, report);
}

fn side_by_side(model: &Module, laid: &Module, report: &mut Report) {
    let ([f], [g]) = (&model.funcs[..], &laid.funcs[..]) else {
        return report.gaps.push(gap("model", "model.ir".into(), "a model is one function"));
    };
    let same = |(a, b): (&Node, &Node)| a.op == b.op && a.ins == b.ins && a.outs == b.outs;
    if f.nodes.len() == g.nodes.len()
        && f.nodes.iter().zip(&g.nodes).all(same)
        && f.args == g.args
        && f.results == g.results
        && f.values.iter().map(|v| &v.ty).eq(g.values.iter().map(|v| &v.ty))
    {
        return;
    }
    let mut pair = Pair { f, g, is: BTreeMap::new(), routed: vec![] };
    if let Err((node, lemma)) = pair.read() {
        let of = |n: &Node| node_text(&model.mesh, f, n).text;
        let place = node.map_or(String::new(), |i| format!(": {}", of(&f.nodes[i])));
        let op = node.map_or("model", |i| f.nodes[i].op.mnemonic());
        return report.gaps.push(gap(op, format!("@{}{place}", f.name), lemma));
    }
    for r in &pair.routed {
        let kind = match r.ops[1].capacity {
            None => "experts for the mesh",
            Some(_) => "experts for the mesh, where no copy is dropped",
        };
        *report.shown.entry(kind).or_default() += 1;
    }
}

fn gap(op: &str, place: String, lemma: &str) -> Gap {
    Gap { op: op.into(), place, lemma: lemma.into() }
}

const ARGUMENTS: &str = "a model and its laid-out form take and show the same";
const NODES: &str =
    "a model and its laid-out form have the same nodes, but for the reshapes of tokens";
const RELATED: &str = "an op takes each token and each row for itself, or sums over all tokens";
const PLACES: &str = "tokens come back to their places";
const ROUTED: &str = "rows, slots and counts are of one `route`, which drops nothing";

type Shown = Result<(), (Option<usize>, &'static str)>;

struct Pair<'a> {
    f: &'a Func,
    g: &'a Func,
    /// By value of the model.
    is: BTreeMap<Value, (Value, Is)>,
    routed: Vec<Routed>,
}

/// Without factors of 1, and with those that are one after the other as one.
fn joined(all: &[(usize, usize)]) -> Factors {
    let mut out: Factors = vec![];
    for &(n, apart) in all.iter().filter(|x| x.0 != 1) {
        match out.last_mut() {
            Some(last) if Some(last.1) == n.checked_mul(apart) => {
                *last = (last.0.saturating_mul(n), apart);
            }
            _other => out.push((n, apart)),
        }
    }
    out
}

/// Factors, in the order of elements, as dims of these sizes.
fn dealt(all: impl IntoIterator<Item = (usize, usize)>, sizes: &[usize]) -> Option<Vec<Factors>> {
    let mut left: Vec<(usize, usize)> = all.into_iter().collect();
    left.reverse();
    let mut out = vec![];
    for &size in sizes {
        let (mut need, mut own) = (size, vec![]);
        while need > 1 {
            let (n, apart) = left.pop()?;
            if need % n.max(1) == 0 {
                need /= n.max(1);
                own.push((n, apart));
            } else if n % need == 0 {
                own.push((need, apart.checked_mul(n / need)?));
                left.push((n / need, apart));
                need = 1;
            } else {
                return None;
            }
        }
        out.push(own);
    }
    left.iter().all(|x| x.0 == 1).then_some(out)
}

/// Dims of a whole tensor of these sizes.
fn whole(sizes: &[usize]) -> Option<Vec<Factors>> {
    let mut apart = 1usize;
    let mut out = vec![];
    for &n in sizes.iter().rev() {
        out.push(vec![(n, apart)]);
        apart = apart.checked_mul(n)?;
    }
    out.reverse();
    Some(out)
}

/// What belongs to tokens in these places: all of them as one shard, in their order, is the same.
fn of_tokens(at: [usize; 2], places: &[Factors; 2]) -> Is {
    let [z, t] = places;
    match z.is_empty() && t[..].iter().all(|x| x.1 == 1) {
        true => Is::Same,
        false => Is::OfTokens { at, places: places.clone() },
    }
}

impl Pair<'_> {
    fn read(&mut self) -> Shown {
        let (f, g) = (self.f, self.g);
        if f.args.len() != g.args.len() || f.results.len() != g.results.len() {
            return Err((None, ARGUMENTS));
        }
        for (a, b) in f.args.iter().zip(&g.args) {
            if a.role != b.role || f.ty(a.value) != g.ty(b.value) {
                return Err((None, ARGUMENTS));
            }
            self.is.insert(a.value, (b.value, Is::Same));
        }
        let mut rest = &g.nodes[..];
        for (i, n) in f.nodes.iter().enumerate() {
            let Some(m) = rest.first() else { return Err((Some(i), NODES)) };
            let moves = |m: Option<&Node>| m.is_some_and(|m| matches!(m.op, Op::Transpose(_)));
            let ends = matches!((&n.op, &m.op), (Op::Reshape(_), Op::Reshape(_))) && n.op != m.op;
            // A transpose of the model's own may stand behind an end that is one reshape.
            let apart = g.ty(m.outs[0]).rank() > f.ty(n.outs[0]).rank();
            let count = if ends && apart && moves(rest.get(1)) { 3 } else { 1 };
            if rest.len() < count {
                return Err((Some(i), NODES));
            }
            let (own, others) = rest.split_at(count);
            match ends {
                true => self.end(n, own).map_err(|lemma| (Some(i), lemma))?,
                false => self.node(n, &own[0]).map_err(|lemma| (Some(i), lemma))?,
            }
            rest = others;
        }
        if !rest.is_empty() {
            return Err((None, NODES));
        }
        for (a, b) in f.results.iter().zip(&g.results) {
            let same = self.is.get(&a.value) == Some(&(b.value, Is::Same));
            if a.role != b.role || !same {
                return Err((None, ARGUMENTS));
            }
        }
        Ok(())
    }

    /// A value of the model with its own, and how that belongs to it.
    fn of(&self, v: Value, w: Value) -> Result<&Is, &'static str> {
        match self.is.get(&v) {
            Some((own, is)) if *own == w => Ok(is),
            _other => Err(NODES),
        }
    }

    fn sizes(f: &Func, v: Value) -> Vec<usize> {
        f.ty(v).sizes().to_vec()
    }

    /// True if the sizes of a value and of its own are those of how it belongs to it.
    fn has_form(&self, v: Value, w: Value, is: &Is) -> bool {
        let (from, to) = (Pair::sizes(self.f, v), Pair::sizes(self.g, w));
        let ways = |p: &Factors| p.iter().map(|x| x.0).product::<usize>();
        let sizes = match is {
            Is::Same => self.f.ty(v) == self.g.ty(w),
            Is::OfTokens { at, places } => {
                let mut want = from.clone();
                for (&d, p) in at.iter().zip(places) {
                    want.get_mut(d).into_iter().for_each(|n| *n = ways(p));
                }
                to == want
            }
            Is::Slots(r) => {
                let [z, t] = &self.routed[*r].places;
                to.len() == 3 && to[..] == [ways(z), ways(t), from[2]]
            }
            Is::Counts(r) => {
                let ([z, _], [g, e]) = (&self.routed[*r].places, self.routed[*r].ops[1].groups());
                to[..] == [g, e, ways(z)]
            }
            Is::Rows(r) => {
                let ([z, _], op) = (&self.routed[*r].places, &self.routed[*r].ops[1]);
                let own = [op.groups()[0], ways(z), op.rows];
                to.get(..3) == Some(&own[..]) && to.get(3..) == from.get(3..)
            }
        };
        sizes && self.f.ty(v).dtype == self.g.ty(w).dtype
    }

    /// Where tokens become shards, or rows again.
    fn end(&mut self, n: &Node, own: &[Node]) -> Result<(), &'static str> {
        let (f, g) = (self.f, self.g);
        let (from, to) = (Pair::sizes(f, n.ins[0]), Pair::sizes(f, n.outs[0]));
        let (first, last) = (own[0].ins[0], own[own.len() - 1].outs[0]);
        let chain = own.windows(2).all(|w| w[0].outs[0] == w[1].ins[0]);
        let is = self.of(n.ins[0], first)?.clone();
        let made = Pair::sizes(g, last);
        if is == Is::Same && own.len() == 1 && made == to && Pair::sizes(g, first) == from {
            self.is.insert(n.outs[0], (last, Is::Same));
            return Ok(());
        }
        // In tokens: what is behind them stays as it is.
        let (tokens, apart, dims) = match &is {
            Is::Same => {
                let [1, tokens, behind @ ..] = &to[..] else { return Err(RELATED) };
                let at = from.len().checked_sub(behind.len()).ok_or(RELATED)?;
                let rows: usize = from[..at].iter().product();
                let same =
                    rows == *tokens && from[at..] == *behind && made.get(2..) == Some(behind);
                let dims = whole(&Pair::sizes(g, first)).filter(|_| same).ok_or(RELATED)?;
                (*tokens, behind.iter().product::<usize>(), dims)
            }
            Is::OfTokens { at: [0, 1], places } => {
                let [1, tokens, behind @ ..] = &from[..] else { return Err(RELATED) };
                let at = to.len().checked_sub(behind.len()).ok_or(RELATED)?;
                let rows: usize = to[..at].iter().product();
                let same = rows == *tokens && to[at..] == *behind && made == to;
                let apart: usize = behind.iter().product();
                let mut dims: Vec<Factors> = places
                    .iter()
                    .map(|p| p.iter().map(|&(n, x)| (n, x * apart)).collect())
                    .collect();
                dims.extend(whole(behind).filter(|_| same).ok_or(RELATED)?);
                (*tokens, apart, dims)
            }
            _other => return Err(RELATED),
        };
        let dims = self.moved(dims, own).filter(|_| chain).ok_or(RELATED)?;
        let is = if is == Is::Same {
            let behind = whole(&made[2..]).ok_or(RELATED)?;
            let still = dims[2..].iter().zip(&behind).all(|(a, b)| joined(a) == joined(b));
            let each = |d: &Factors| -> Option<Factors> {
                joined(d)
                    .into_iter()
                    .map(|(n, x)| (x % apart == 0).then(|| (n, x / apart)))
                    .collect()
            };
            let places = [each(&dims[0]).ok_or(RELATED)?, each(&dims[1]).ok_or(RELATED)?];
            let all: usize = places.iter().flatten().map(|x| x.0).product();
            if !still || all != tokens {
                return Err(RELATED);
            }
            of_tokens([0, 1], &places)
        } else {
            let all: Factors = dims.into_iter().flatten().collect();
            let total: usize = made.iter().product();
            if joined(&all) != joined(&[(total, 1)]) {
                return Err(PLACES);
            }
            Is::Same
        };
        self.is.insert(n.outs[0], (last, is));
        Ok(())
    }

    /// Dims behind reshapes and transposes.
    fn moved(&self, mut dims: Vec<Factors>, own: &[Node]) -> Option<Vec<Factors>> {
        for m in own {
            dims = match &m.op {
                Op::Reshape(_) => {
                    dealt(dims.into_iter().flatten(), &Pair::sizes(self.g, m.outs[0]))?
                }
                Op::Transpose(k) => {
                    let (from, to) = (&k.rule.0.ins[0], &k.rule.0.outs[0]);
                    let at = |g: &Group| from.iter().position(|x| x == g);
                    to.iter().map(|g| Some(dims.get(at(g)?)?.clone())).collect::<Option<_>>()?
                }
                _other => return None,
            };
        }
        Some(dims)
    }

    fn node(&mut self, n: &Node, m: &Node) -> Result<(), &'static str> {
        if n.ins.len() != m.ins.len() || n.outs.len() != m.outs.len() {
            return Err(NODES);
        }
        let pairs = n.ins.iter().zip(&m.ins);
        let ins: Vec<Is> =
            pairs.map(|(&v, &w)| self.of(v, w).cloned()).collect::<Result<_, _>>()?;
        let outs = match (&n.op, &m.op) {
            (a, b) if a == b && ins.iter().all(|is| *is == Is::Same) => {
                vec![Is::Same; n.outs.len()]
            }
            (Op::Route(a), Op::Route(b)) => self.route(&ins, a, b, n)?,
            (Op::Dispatch(a), Op::Dispatch(b)) => {
                let [_, Is::Slots(r), _] = ins[..] else { return Err(ROUTED) };
                let routed = &self.routed[r];
                let fits = [&a.sizes.0, &b.sizes.0].into_iter().zip(&routed.ops).all(|(s, r)| {
                    let size = |c: char| s.iter().find(|x| x.0.name() == c).map(|x| x.1);
                    size('g') == Some(r.groups()[0]) && size('c') == Some(r.rows)
                });
                let own = of_tokens([0, 1], &routed.places);
                if !fits || ins[0] != own || ins[2] != own {
                    return Err(ROUTED);
                }
                vec![Is::Rows(r)]
            }
            (Op::GroupedDot(_) | Op::GroupedDotT(_), own) if *own == n.op => match &ins[..] {
                [Is::Rows(r), Is::Counts(c), Is::Same] if r == c => vec![Is::Rows(*r)],
                _other => return Err(ROUTED),
            },
            (Op::Unpermute(_), Op::Unpermute(_)) => match &ins[..] {
                [Is::Rows(r), Is::Slots(s), gates] if r == s => {
                    let own = of_tokens([0, 1], &self.routed[*r].places);
                    if *gates != own {
                        return Err(ROUTED);
                    }
                    vec![own]
                }
                _other => return Err(ROUTED),
            },
            // A copy has a slot on both sides, or on neither.
            (Op::AtLeast(a), Op::AtLeast(b)) if matches!(ins[..], [Is::Slots(_)]) => {
                let [Is::Slots(r)] = ins[..] else { return Err(ROUTED) };
                if a.bound != 0.0 || b.bound != 0.0 {
                    return Err(ROUTED);
                }
                vec![of_tokens([0, 1], &self.routed[r].places)]
            }
            (a, b) if a == b => self.alike(n, &ins)?,
            _other => return Err(NODES),
        };
        for ((&v, &w), is) in n.outs.iter().zip(&m.outs).zip(outs) {
            if !self.has_form(v, w, &is) {
                return Err(NODES);
            }
            self.is.insert(v, (w, is));
        }
        Ok(())
    }

    fn route(
        &mut self,
        ins: &[Is],
        a: &Route,
        b: &Route,
        n: &Node,
    ) -> Result<Vec<Is>, &'static str> {
        let [1, tokens, k] = Pair::sizes(self.f, n.ins[0])[..] else { return Err(ROUTED) };
        let places = match ins {
            [Is::OfTokens { at: [0, 1], places }] => places.clone(),
            [Is::Same] => [vec![], joined(&[(tokens, 1)])],
            _other => return Err(ROUTED),
        };
        let experts = |r: &Route| r.groups().iter().product::<usize>();
        let own = tokens.checked_mul(k.min(a.groups()[1])).is_some_and(|worst| a.rows >= worst);
        if a.capacity.is_some() || !own || experts(a) != experts(b) {
            return Err(ROUTED);
        }
        self.routed.push(Routed { ops: [a.clone(), b.clone()], places });
        let r = self.routed.len() - 1;
        Ok(vec![Is::Slots(r), Is::Counts(r)])
    }

    /// An op that is the same on both sides.
    fn alike(&self, n: &Node, ins: &[Is]) -> Result<Vec<Is>, &'static str> {
        let law = law(&n.op);
        let typing = law.typing().ok_or(RELATED)?;
        let ranks: Vec<usize> = n.ins.iter().map(|&v| self.f.ty(v).rank()).collect();
        let rule = law.letters(&ranks).ok_or(RELATED)?;
        // The letters of shards and tokens, or of groups, shards and rows.
        let mut found: Option<(Vec<Letter>, &Is)> = None;
        for (is, dims) in ins.iter().zip(&rule.ins).filter(|x| *x.0 != Is::Same) {
            let at: Vec<usize> = match is {
                Is::OfTokens { at, .. } => at.to_vec(),
                Is::Rows(_) => vec![0, 1, 2],
                _places => return Err(ROUTED),
            };
            let own: Option<Vec<Letter>> = at.iter().map(|&d| dims.get(d)?.single()).collect();
            let own = own.ok_or(RELATED)?;
            let alike = |(letters, first): &(Vec<Letter>, &Is)| {
                let places = match (*first, is) {
                    (Is::OfTokens { places: p, .. }, Is::OfTokens { places: q, .. }) => p == q,
                    (Is::Rows(p), Is::Rows(q)) => p == q,
                    _other => false,
                };
                *letters == own && places
            };
            if !found.as_ref().is_none_or(alike) {
                return Err(RELATED);
            }
            found.get_or_insert((own, is));
        }
        let (letters, is) = found.ok_or(RELATED)?;
        let own = |g: &Group| g.letters().iter().any(|l| letters.contains(l));
        let free =
            letters.iter().all(|&l| !rule.is_whole(l) && sizes(&n.op).iter().all(|x| x.0 != l));
        // No other operand has them, and no operand has one twice or as a part of a dim.
        let apart = ins.iter().zip(&rule.ins).all(|(is, dims)| {
            let count = dims.iter().filter(|g| own(g)).count();
            count == if *is == Is::Same { 0 } else { letters.len() }
        });
        if !free || !apart {
            return Err(RELATED);
        }
        let made = |dims: &[Group]| {
            let at = |l: &Letter| dims.iter().position(|g| g.single() == Some(*l));
            let places: Option<Vec<usize>> = letters.iter().map(at).collect();
            match (is, places.as_deref()) {
                _ if dims.iter().filter(|g| own(g)).count() > letters.len() => Err(RELATED),
                (Is::OfTokens { places, .. }, Some(&[z, t])) => Ok(of_tokens([z, t], places)),
                (Is::Rows(r), Some([0, 1, 2])) => Ok(Is::Rows(*r)),
                // What an index names is at a place of its own.
                (Is::OfTokens { .. }, None)
                    if typing.lost.is_some()
                        && !matches!(n.op, Op::Take(_))
                        && !dims.iter().any(own) =>
                {
                    Ok(Is::Same)
                }
                _other => Err(RELATED),
            }
        };
        rule.outs.iter().map(|dims| made(dims)).collect()
    }
}
